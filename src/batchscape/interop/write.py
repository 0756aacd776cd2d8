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


_MIXED = {"float32": "no", "bfloat16": "bf16"}


def accelerate_config(
    geometry: BatchGeometry, *, precision: str = "float32", deepspeed_json: str | None = None
) -> dict[str, Any]:
    """Return the content of the YAML for `accelerate launch --config_file`.

    Without DeepSpeed it has no key for the accumulation: the script passes it to `Accelerator`. A
    DeepSpeed JSON holds precision and clipping too; its path is relative to the folder of the
    command.

    Source: `accelerate.commands.config.config_args.ClusterConfig`, accelerate 1.15.
    """
    distributed = "MULTI_GPU" if geometry.data_parallel_size > 1 else "NO"
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED" if deepspeed_json else distributed,
        "num_machines": geometry.nodes,
        # Of all machines together.
        "num_processes": geometry.data_parallel_size,
    }
    if deepspeed_json:
        content["deepspeed_config"] = {"deepspeed_config_file": deepspeed_json}
    else:
        content["mixed_precision"] = _MIXED[precision]
    return content


def trainer_arguments(
    geometry: BatchGeometry,
    *,
    precision: str = "float32",
    gradient_clip_norm: float | None = None,
) -> dict[str, Any]:
    """Return keyword arguments of `transformers.TrainingArguments`; no clipping is a norm of 0."""
    return {
        "per_device_train_batch_size": geometry.micro_batch_size,
        "gradient_accumulation_steps": geometry.gradient_accumulation_steps,
        "max_grad_norm": gradient_clip_norm or 0.0,
        "bf16": precision == "bfloat16",
        "fp16": False,
    }


def litgpt_config(geometry: BatchGeometry) -> dict[str, Any]:
    """Return the keys of a LitGPT YAML that cut the batch.

    LitGPT has no key for the accumulation: it is the global batch // devices // micro-batch, which
    divides here by construction. Source: `litgpt.args.TrainArgs`, LitGPT 0.5.
    """
    return {
        "devices": geometry.devices_per_node,
        "num_nodes": geometry.nodes,
        "train": {
            "global_batch_size": geometry.global_batch_size,
            "micro_batch_size": geometry.micro_batch_size,
        },
    }


def torchrun_arguments(geometry: BatchGeometry) -> list[str]:
    """Return the arguments of `torchrun` that start one process per device."""
    arguments = ["--nnodes", str(geometry.nodes)]
    arguments += ["--nproc_per_node", str(geometry.devices_per_node)]
    return ["--standalone", *arguments[2:]] if geometry.nodes == 1 else arguments


def write_configs(
    geometry: BatchGeometry,
    out: Path,
    *,
    precision: str = "float32",
    gradient_clip_norm: float | None = 1.0,
    zero_stage: int = 1,
) -> list[Path]:
    """Write the files of every system for one geometry to a folder; return their paths."""
    if gradient_clip_norm is not None and not 0 < gradient_clip_norm < math.inf:
        raise ConfigError(
            f"gradient_clip_norm must be above 0 and finite, or None; given {gradient_clip_norm}"
        )
    json_file = out / "deepspeed.json"
    deepspeed = deepspeed_config(
        geometry,
        zero_stage=zero_stage,
        precision=precision,
        gradient_clip_norm=gradient_clip_norm,
    )
    if precision == "bfloat16":
        # As the switches of the Trainer and accelerate have it; our engine uses autocast.
        del deepspeed["torch_autocast"]
        deepspeed["bf16"] = {"enabled": True}
    trainer = trainer_arguments(
        geometry, precision=precision, gradient_clip_norm=gradient_clip_norm
    )
    # accelerate looks for a relative path in the folder that it is called in.
    with_deepspeed = accelerate_config(geometry, deepspeed_json=str(json_file.absolute()))
    launch = " ".join(torchrun_arguments(geometry))
    if geometry.nodes > 1:
        launch += ' --rdzv_backend c10d --rdzv_endpoint "$MASTER_ADDR:29500"'
    contents = {
        "deepspeed.json": json.dumps(deepspeed, indent=2) + "\n",
        "accelerate.yaml": _yaml(
            geometry, accelerate_config(geometry, precision=precision), _ACCELERATE
        ),
        "accelerate_deepspeed.yaml": _yaml(geometry, with_deepspeed, _WITH_DEEPSPEED),
        # Read by transformers' own parser, which takes no comments in JSON.
        "training_arguments.yaml": _yaml(geometry, trainer, _TRAINER),
        "litgpt.yaml": _yaml(geometry, litgpt_config(geometry), _LITGPT),
        "torchrun.sh": f"#!/bin/sh\n{_identity(geometry)}# sh FILE SCRIPT [ARGUMENTS]: with "
        "TrainingArguments behind them\n"
        f'exec torchrun {launch} "$@" {" ".join(command_line(trainer))}\n',
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


_ACCELERATE = "accelerate launch --config_file FILE SCRIPT; the script says the micro-batch"
_WITH_DEEPSPEED = f"{_ACCELERATE}\n# deepspeed_config_file is absolute: change it with the folder"
_TRAINER = "SCRIPT FILE, for scripts with transformers.HfArgumentParser; add what else they need"
_LITGPT = "litgpt pretrain MODEL --config FILE; add what else it needs"


def _identity(geometry: BatchGeometry) -> str:
    return (
        f"# global batch {geometry.global_batch_size} = devices {geometry.data_parallel_size} x "
        f"micro-batch {geometry.micro_batch_size} x accumulation "
        f"{geometry.gradient_accumulation_steps}\n"
    )


def _yaml(geometry: BatchGeometry, content: Mapping[str, Any], use: str) -> str:
    return f"{_identity(geometry)}# {use}\n{yaml.safe_dump(dict(content), sort_keys=False)}"


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments as words of a command, without switches that are off."""
    words: list[str] = []
    for key, value in arguments.items():
        if value is not False:
            words += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    return words
