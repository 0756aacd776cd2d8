"""One reader per kind of configuration: its keys as a `Statement`.

Defaults are those of the libraries: DeepSpeed 0.19, accelerate 1.15, transformers 5, LitGPT 0.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from typing import TypeVar

from batchscape.errors import ConfigError
from batchscape.interop.statements import Kind, Source, Statement, Value

__all__ = ["DEEPSPEED_FIELDS", "READERS", "read_deepspeed", "read_litgpt", "read_trainer"]

T = TypeVar("T")

DEEPSPEED_FIELDS = frozenset(
    {
        "gradient_accumulation_steps",
        "gradient_clipping",
        "zero_stage",
        "offload_optimizer_device",
        "offload_param_device",
        "offload_param_nvme_path",
        "offload_optimizer_nvme_path",
        "zero3_save_16bit_model",
        "mixed_precision",
    }
)
"""What an accelerate config must leave to the DeepSpeed JSON that it names."""

_DEEPSPEED_KEYS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("gradient_clipping", "gradient_predivide_factor", "gradient_allreduce_op"),
    *("prescale_gradients", "managed_gradient_accumulation", "communication_data_type"),
    *("seq_parallel_communication_data_type", "sequence_parallel_size", "tensor_parallel"),
    *("expert_parallel", "pipeline", "fp16", "bf16", "bfloat16", "amp", "torch_autocast"),
    *("data_types", "zero_optimization", "zero_allow_untested_optimizer"),
    *("zero_force_ds_cpu_optimizer", "optimizer", "scheduler", "compile", "checkpoint", "aio"),
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level"),
    *("dataloader_drop_last", "disable_allgather", "disable_python_gc", "sparse_attention"),
    *("flops_profiler", "activation_checkpointing", "comms_logger", "autotuning", "elasticity"),
    *("data_efficiency", "curriculum_learning", "progressive_layer_drop", "eigenvalue"),
    *("quantize_training", "weight_quantization", "compression_training", "hybrid_engine"),
    *(
        "tensorboard",
        "wandb",
        "csv_monitor",
        "comet",
        "nebula",
        "datastates",
        "timers",
        "vocabulary_size",
    ),
    *("use_data_before_expert_parallelism", "sparse_gradients", "use_node_local_storage"),
)
"""Keys at the top of a DeepSpeed JSON. Source: `deepspeed.runtime.config`, DeepSpeed 0.19.8."""
_NEAR = 0.85
"""Share of letters in common, by `difflib`, from which a key is taken for another's misspelling."""


def read_deepspeed(source: Source) -> Statement:
    """Read a DeepSpeed JSON.

    Raises
    ------
    ConfigError
        A value breaks a rule, or the file cuts models and not only batches.
    """
    _refuse_parallelism(source, source.section("tensor_parallel"), "autotp_size")
    _refuse_parallelism(source, source, "sequence_parallel_size")
    stated = {
        name: enabled.value
        for name in ("fp16", "bf16")
        if (enabled := source.section(name).flag("enabled", auto=True)) is not None
    }
    on = [name for name, enabled in stated.items() if enabled]
    precision: Value[str] | None = None
    if stated:
        name = on[0] if on else next(iter(stated))
        is_auto = not on and None in stated.values()
        precision = Value(None if is_auto else on[0] if on else "no", f"{name}.enabled")
    optimizer = source.section("optimizer").section("params")
    return Statement(
        "deepspeed",
        source.name,
        micro=source.count("train_micro_batch_size_per_gpu", auto=True),
        accumulation=source.count("gradient_accumulation_steps", auto=True),
        total=source.count("train_batch_size", auto=True),
        precision=precision,
        clipping=source.number("gradient_clipping", auto=True),
        others={
            "both_precisions": len(on) == 2,
            "enabled": stated,
            "optimizer_max_grad_norm": optimizer.number("max_grad_norm", auto=True),
            "misspelt": _misspelt(source),
        },
    )


def read_accelerate(source: Source) -> Statement:
    """Read the YAML or JSON of `accelerate config`.

    Raises
    ------
    ConfigError
        A value breaks a rule, or the file cuts models and not only batches.
    """
    # Unquoted, NO is false in YAML.
    kind = source.content.get("distributed_type")
    distributed = "NO" if kind is None or kind is False else str(kind).upper()
    if distributed == "MEGATRON_LM":
        msg = (
            f"{source.name}: distributed_type MEGATRON_LM cuts the model over devices, so that "
            "devices are not data-parallel ranks; only data parallelism is covered"
        )
        raise ConfigError(msg)
    parallelism = source.section("parallelism_config")
    for name in ("tp_size", "cp_size", "sp_size"):
        for key in (name, f"parallelism_config_{name}"):
            _refuse_parallelism(source, parallelism, key)
    plugin = source.section("deepspeed_config")
    devices = source.count("num_processes")
    if devices is None and distributed == "NO":
        devices = Value(1, "num_processes", is_default=True)
    accumulation = plugin.count("gradient_accumulation_steps", auto=True)
    clipping = plugin.number("gradient_clipping", auto=True)
    return Statement(
        "accelerate",
        source.name,
        devices=devices,
        nodes=source.count("num_machines"),
        accumulation=_below("deepspeed_config", accumulation),
        precision=source.precision("mixed_precision"),
        clipping=_below("deepspeed_config", clipping),
        others={
            "distributed_type": distributed,
            "use_cpu": _is_on(source, "use_cpu"),
            "gpu_ids": source.content.get("gpu_ids"),
            "mpirun": bool(source.section("mpirun_config").content.get("mpirun_hostfile")),
            "deepspeed_config_file": _text(plugin, "deepspeed_config_file"),
            "deepspeed_fields": tuple(
                sorted(DEEPSPEED_FIELDS & {str(key) for key in plugin.content})
            )
            + (("mixed_precision",) if source.content.get("mixed_precision") is not None else ()),
        },
    )


def read_trainer(source: Source) -> Statement:
    """Read `TrainingArguments`, from a file or from the arguments of a command.

    Raises
    ------
    ConfigError
        A value breaks a rule.
    """
    both = [name for name in ("fp16", "bf16") if _is_on(source, name)]
    micro = source.count("per_device_train_batch_size")
    config = source.content.get("accelerator_config")
    split = isinstance(config, dict) and _is_on(Source(source.name, config), "split_batches")
    deepspeed = source.content.get("deepspeed")
    return Statement(
        "trainer",
        source.name,
        micro=micro or Value(8, "per_device_train_batch_size", is_default=True),
        accumulation=source.count("gradient_accumulation_steps")
        or Value(1, "gradient_accumulation_steps", is_default=True),
        precision=Value(both[0], both[0]) if both else None,
        clipping=source.number("max_grad_norm") or Value(1.0, "max_grad_norm", is_default=True),
        others={
            "both_precisions": len(both) == 2,
            "split_batches": split,
            "auto_find_batch_size": _is_on(source, "auto_find_batch_size"),
            "deepspeed": deepspeed if isinstance(deepspeed, str) and deepspeed else None,
            "deepspeed_inline": deepspeed if isinstance(deepspeed, dict) else None,
        },
    )


def read_litgpt(source: Source) -> Statement:
    """Read a LitGPT YAML, or the same keys from a command line.

    Raises
    ------
    ConfigError
        A value breaks a rule.
    """
    train = source.section("train")
    train = Source(source.name, train.content, source.is_text)
    per_node = None
    if source.content.get("devices") != "auto":
        per_node = source.count("devices")
    nodes = source.count("num_nodes")
    devices = None
    if per_node is not None and per_node.value is not None:
        count = nodes.value if nodes is not None and nodes.value is not None else 1
        key = "devices" if count == 1 else "devices x num_nodes"
        devices = Value(per_node.value * count, key)
    return Statement(
        "litgpt",
        source.name,
        devices=devices,
        nodes=nodes,
        micro=train.count("micro_batch_size", shown="train.micro_batch_size"),
        total=train.count("global_batch_size", shown="train.global_batch_size"),
    )


def _misspelt(source: Source) -> dict[str, str]:
    """Return keys that DeepSpeed does not know and passes over, each with the nearest known."""
    found: dict[str, str] = {}
    for key in map(str, source.content):
        if key not in _DEEPSPEED_KEYS:
            near = get_close_matches(key, _DEEPSPEED_KEYS, n=1, cutoff=_NEAR)
            found |= dict.fromkeys([key] if near else [], "".join(near))
    return found


def _refuse_parallelism(source: Source, section: Source, key: str) -> None:
    size = section.count(key)
    if size is not None and size.value != 1:
        msg = (
            f"{source.name}: {key} {size.value} cuts samples or the model over devices, so that "
            "devices are not data-parallel ranks; only data parallelism is covered"
        )
        raise ConfigError(msg)


def _below(section: str, value: Value[T] | None) -> Value[T] | None:
    return None if value is None else replace(value, key=f"{section}.{value.key}")


def _is_on(source: Source, key: str) -> bool:
    found = source.flag(key)
    return found is not None and bool(found.value)


def _text(source: Source, key: str) -> str | None:
    found = source.content.get(key)
    return found if isinstance(found, str) and found.lower() != "none" else None


READERS: dict[Kind, Callable[[Source], Statement]] = {
    "deepspeed": read_deepspeed,
    "accelerate": read_accelerate,
    "trainer": read_trainer,
    "litgpt": read_litgpt,
}
