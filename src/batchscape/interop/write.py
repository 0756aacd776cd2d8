"""Configuration files of other systems, written from one geometry, so that they agree."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from batchscape.errors import ConfigError
from batchscape.geometry import BatchGeometry

_BUCKET_ELEMENTS = 25 * 2**20 // 4
"""Gradients exchanged at a time: 25 MiB of float32, as DDP does. DeepSpeed's own 5 x 10^8 keep a
buffer of 2 GB beside the smallest model."""


def deepspeed_config(
    geometry: BatchGeometry,
    *,
    zero_stage: int,
    precision: str,
    gradient_clip_norm: float | None,
) -> dict[str, Any]:
    """Return the content of DeepSpeed's JSON file for one geometry.

    All three batch numbers are written, and DeepSpeed checks their product. It would derive a
    missing one: from train_batch_size alone it takes one micro-step of the whole batch. `bfloat16`
    is autocast over float32 parameters, whose gradients are exchanged in float32 too.

    Source: https://www.deepspeed.ai/docs/config-json/, DeepSpeed 0.19.8.
    """
    if zero_stage not in range(4):
        raise ConfigError(f"zero_stage is 0, 1, 2 or 3; given {zero_stage=}")
    if precision not in {"float32", "bfloat16"}:
        raise ConfigError(
            f"DeepSpeed is configured for float32 or bfloat16, given {precision=}: ZeRO keeps its "
            "weights in float32, so float64 would be lost, and float16 is not offered"
        )
    return {
        "train_batch_size": geometry.global_batch_size,
        "train_micro_batch_size_per_gpu": geometry.micro_batch_size,
        "gradient_accumulation_steps": geometry.gradient_accumulation_steps,
        "gradient_clipping": gradient_clip_norm or 0.0,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "communication_data_type": "fp32",
        "torch_autocast": {
            "enabled": precision == "bfloat16",
            "dtype": "bfloat16",
            # Of the modules named here DeepSpeed exchanges gradients in the lower precision.
            "lower_precision_safe_modules": [],
        },
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": zero_stage,
            "reduce_bucket_size": _BUCKET_ELEMENTS,
            "overlap_comm": zero_stage == 3,
        },
        "wall_clock_breakdown": False,
    }


def write_configs(
    geometry: BatchGeometry,
    out: Path,
    *,
    precision: str = "float32",
    gradient_clip_norm: float | None = 1.0,
    zero_stage: int = 1,
) -> list[Path]:
    """Write the files of every system for one geometry to a folder; return their paths.

    Sources: `accelerate.commands.config.config_args.ClusterConfig` of accelerate 1.15,
    `litgpt.args.TrainArgs` of LitGPT 0.5.
    """
    if gradient_clip_norm is not None and not 0 < gradient_clip_norm < math.inf:
        raise ConfigError(
            f"gradient_clip_norm must be above 0 and finite, or None; given {gradient_clip_norm}"
        )
    is_half = precision == "bfloat16"
    deepspeed = deepspeed_config(
        geometry,
        zero_stage=zero_stage,
        precision=precision,
        gradient_clip_norm=gradient_clip_norm,
    )
    if is_half:
        # As the switches of the Trainer and accelerate have it; our engine uses autocast.
        del deepspeed["torch_autocast"]
        deepspeed["bf16"] = {"enabled": True}
    machines = {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": geometry.nodes,
        # Of all machines together.
        "num_processes": geometry.data_parallel_size,
    }
    # Without DeepSpeed it has no key for the accumulation: the script passes it to `Accelerator`.
    accelerate = machines | {
        "distributed_type": "MULTI_GPU" if geometry.data_parallel_size > 1 else "NO",
        "mixed_precision": "bf16" if is_half else "no",
    }
    # The JSON holds precision and clipping too. accelerate looks for a relative path in the folder
    # that it is called in.
    json_file = str((out / "deepspeed.json").absolute())
    with_deepspeed = machines | {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": json_file},
    }
    trainer = {
        "per_device_train_batch_size": geometry.micro_batch_size,
        "gradient_accumulation_steps": geometry.gradient_accumulation_steps,
        # Not clipped is a norm of 0.
        "max_grad_norm": gradient_clip_norm or 0.0,
        "bf16": is_half,
        "fp16": False,
    }
    # LitGPT has no key for the accumulation: it is the global batch // devices // micro-batch.
    litgpt = {
        "devices": geometry.devices_per_node,
        "num_nodes": geometry.nodes,
        "train": {
            "global_batch_size": geometry.global_batch_size,
            "micro_batch_size": geometry.micro_batch_size,
        },
    }
    several = f'--nnodes {geometry.nodes} --rdzv_backend c10d --rdzv_endpoint "$MASTER_ADDR:29500"'
    nodes = "--standalone" if geometry.nodes == 1 else several
    arguments = " ".join(f"--{key} {value}" for key, value in trainer.items())
    identity = (
        f"# global batch {geometry.global_batch_size} = devices {geometry.data_parallel_size} x "
        f"micro-batch {geometry.micro_batch_size} x accumulation "
        f"{geometry.gradient_accumulation_steps}\n"
    )

    def as_yaml(content: Mapping[str, object], use: str) -> str:
        return f"{identity}# {use}\n{yaml.safe_dump(content, sort_keys=False)}"

    launch = "accelerate launch --config_file FILE SCRIPT; the script says the micro-batch"
    contents = {
        "deepspeed.json": json.dumps(deepspeed, indent=2) + "\n",
        "accelerate.yaml": as_yaml(accelerate, launch),
        "accelerate_deepspeed.yaml": as_yaml(
            with_deepspeed,
            f"{launch}\n# deepspeed_config_file is absolute: change it with the folder",
        ),
        # Read by transformers' own parser, which takes no comments in JSON.
        "training_arguments.yaml": as_yaml(
            trainer,
            "SCRIPT FILE, for scripts with transformers.HfArgumentParser; add what else they need",
        ),
        "litgpt.yaml": as_yaml(litgpt, "litgpt pretrain MODEL --config FILE; add what it needs"),
        "torchrun.sh": f"#!/bin/sh\n{identity}# sh FILE SCRIPT [ARGUMENTS]: with "
        "TrainingArguments behind them\n"
        f"exec torchrun {nodes} --nproc_per_node {geometry.devices_per_node} "
        f'"$@" {arguments}\n',
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written to ({error.strerror}); give another folder with --out"
        ) from None
    return [out / name for name in contents]
