"""Statements of one file or command line about the batch.

What it does not state stays unknown: no default of a library is filled in. Keys and rules are of
DeepSpeed 0.19, accelerate 1.15, transformers 5, LitGPT 0.5, axolotl 0.18, torchtune 0.7 and
LLaMA-Factory v1 (its older files are TrainingArguments).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import yaml

from batchscape.errors import ConfigError
from batchscape.geometry import is_count
from batchscape.interop.shell import is_unknown, listed_words
from batchscape.text import list_text, near_names

T = TypeVar("T")

SourceKind = Literal[
    "deepspeed",
    "accelerate",
    "trainer",
    "axolotl",
    "llamafactory",
    "torchtune",
    "litgpt",
    "launcher",
    "script",
]

KINDS: dict[SourceKind, str] = {
    "deepspeed": "DeepSpeed JSON",
    "accelerate": "accelerate config",
    "trainer": "TrainingArguments",
    "axolotl": "axolotl config",
    "llamafactory": "LLaMA-Factory v1 config",
    "torchtune": "torchtune config",
    "litgpt": "LitGPT config",
    "launcher": "launcher",
    "script": "script arguments",
}
"""The name of each kind in tables and messages."""

_TRUE, _FALSE = {"true", "yes", "1", "t", "y", ""}, {"false", "no", "0", "f", "n"}
_PRECISIONS = ("no", "fp16", "bf16", "fp8")


@dataclass(frozen=True)
class Value(Generic[T]):
    """One value, and the key that it is written under."""

    value: T | None
    """None where the file says "auto": another file decides."""
    key: str

    @property
    def is_auto(self) -> bool:
        """Whether another file is to decide."""
        return self.value is None

    def __str__(self) -> str:
        return f"{self.key} {'auto' if self.value is None else self.value}"


@dataclass(frozen=True)
class Statement:
    """The values of one source; None where it says nothing."""

    kind: SourceKind
    source: str
    """Name of the file, or the part of the command line."""
    devices: Value[int] | None = None
    """Processes in all, over all nodes."""
    nodes: Value[int] | None = None
    micro: Value[int] | None = None
    accumulation: Value[int] | None = None
    total: Value[int] | None = None
    """Samples per optimizer step."""
    precision: Value[str] | None = None
    """One of no, fp16, bf16, fp8."""
    clipping: Value[float] | None = None
    unused: tuple[Value[str], ...] = ()
    """Numbers whose names speak of the batch, and whose meaning is not known."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Switches that decide the meaning of the values above; names as in the library."""

    @property
    def states_batch(self) -> bool:
        """Whether it states a number of samples or of micro-steps."""
        return any((self.micro, self.accumulation, self.total))

    def is_on(self, switch: str) -> bool:
        """Return whether a switch is set."""
        return bool(self.others.get(switch))

    def quote(self, value: Value[T] | None) -> str:
        """Return `source: key value`, for messages."""
        return f"{self.source}: {value}"


def _number_of(raw: object) -> float | None:
    """Read a finite number of at least 0, which YAML 1.1 takes for text where it is 1e-3."""
    try:
        number = float(raw) if isinstance(raw, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if 0 <= number < math.inf and not isinstance(raw, bool) else None


def _flag_of(raw: object) -> bool | None:
    """Read true or false, as the libraries read texts too."""
    if isinstance(raw, str):
        lower = raw.lower()
        raw = lower in _TRUE if lower in {*_TRUE, *_FALSE} else None
    return raw if isinstance(raw, bool) else None


@dataclass(frozen=True)
class Source:
    """Raw keys of one source; with `is_text` numbers come as text, as on a command line."""

    name: str
    content: Mapping[str, object]
    is_text: bool = False

    def count(self, key: str, *, auto: bool = False) -> Value[int] | None:
        """Return an int of at least 1, or "auto" where the library takes it; None: not given."""

        def count_of(raw: Any) -> int | None:  # noqa: ANN401  (of a file)
            number = as_int(raw) if self.is_text else raw
            return number if is_count(number) else None

        also = ' or "auto"' if auto else ""
        return self._value(key, count_of, f"an int from 1 to 2**63 - 1{also}", auto=auto)

    def number(self, key: str, *, auto: bool = False) -> Value[float] | None:
        """Return a finite number of at least 0; None where it is not given."""
        return self._value(key, _number_of, "a number of at least 0", auto=auto)

    def flag(self, key: str, *, auto: bool = False) -> Value[bool] | None:
        """Return true or false; None where it is not given."""
        return self._value(key, _flag_of, "true or false", auto=auto)

    def _value(
        self, key: str, convert: Callable[[Any], T | None], rule: str, *, auto: bool
    ) -> Value[T] | None:
        """Convert the value of a key; None where there is none, an empty `Value` for "auto"."""
        raw = self.content.get(key)
        if raw is None:
            return None
        if auto and raw == "auto":
            return Value(None, key)
        value = convert(raw)
        if value is None:
            raise self._refusal(key, raw, rule)
        return Value(value, key)

    def precision(self) -> Value[str] | None:
        """Return `mixed_precision`: one of no, fp16, bf16, fp8; None where it is not given."""
        key = "mixed_precision"
        raw = self.content.get(key)
        if raw is None:
            return None
        if raw is False:
            rule = 'one of "no", fp16, bf16, fp8; in YAML no without quotes means false'
            raise self._refusal(key, raw, rule)
        name = raw.lower() if isinstance(raw, str) else raw
        if not isinstance(name, str) or name not in _PRECISIONS:
            raise self._refusal(key, raw, "one of no, fp16, bf16, fp8")
        return Value(name, key)

    def section(self, key: str) -> Source:
        """Return the keys below one key; empty where it is not given."""
        raw = self.content.get(key)
        if raw is None:
            return Source(self.name, {})
        if not isinstance(raw, dict):
            raise self._refusal(key, raw, "a mapping of settings")
        return Source(self.name, raw)

    def _refusal(self, key: str, raw: object, rule: str) -> ConfigError:
        try:
            text = repr(raw)
        except ValueError:
            # Python refuses to print ints of more than 4300 digits, and nobody could read them.
            text = "ints that are too long to print"
        except RecursionError:
            text = "something nested too deeply to print"
        text = text if len(text) <= 60 else f"{text[:57]}..."
        return ConfigError(f"{self.name}: {key} must be {rule}; given {text}")


def as_int(value: object) -> object:
    """Return the int that a text of digits stands for, and any other value as it is."""
    return int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,20}", value) else value


def differ(first: Value[T] | None, second: Value[T] | None) -> bool:
    """Return whether both are values, and not the same one."""
    values = [None if one is None else one.value for one in (first, second)]
    return None not in values and values[0] != values[1]


_STEPS = ("gradient_accumulation_steps",)
BATCH_KEYS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "deepspeed": {
        "micro": ("train_micro_batch_size_per_gpu",),
        "accumulation": _STEPS,
        "total": ("train_batch_size",),
    },
    "trainer": {
        "micro": ("per_device_train_batch_size", "per_gpu_train_batch_size"),
        "accumulation": _STEPS,
    },
    "axolotl": {"micro": ("micro_batch_size",), "accumulation": _STEPS},
    "torchtune": {"micro": ("batch_size",), "accumulation": _STEPS},
    "llamafactory": {"micro": ("micro_batch_size",), "total": ("global_batch_size",)},
    "litgpt": {"micro": ("train.micro_batch_size",), "total": ("train.global_batch_size",)},
    # Names that state what they count in any script.
    "script": {
        "micro": (
            "per_device_train_batch_size",
            "per_device_training_batch_size",
            "per_gpu_train_batch_size",
            "micro_batch_size",
            "train_micro_batch_size_per_gpu",
        ),
        "accumulation": _STEPS,
        "total": ("global_batch_size",),
    },
}
"""Names of micro-batch, accumulation and global batch in samples, for each kind."""
FLAG_WORDS = {
    "micro_batch_size": "micro",
    "gradient_accumulation_steps": "accumulation",
    "global_batch_size": "total",
    "global_batch_tokens": "tokens",
    "sequence_length": "length",
}
"""Quantities that an argument of the user's own script may stand for."""

_MARKS: tuple[tuple[SourceKind, frozenset[str]], ...] = (
    ("accelerate", frozenset({"distributed_type"})),
    ("accelerate", frozenset({"compute_environment"})),
    ("trainer", frozenset({"per_device_train_batch_size"})),
    ("axolotl", frozenset({"base_model", "micro_batch_size"})),
    ("axolotl", frozenset({"base_model", "datasets"})),
    ("llamafactory", frozenset({"train_dataset", "micro_batch_size"})),
    ("torchtune", frozenset({"model._component_", "batch_size"})),
    ("litgpt", frozenset({"train.global_batch_size", "devices"})),
    ("litgpt", frozenset({"train.global_batch_size", "train.max_tokens"})),
    ("deepspeed", frozenset({"zero_optimization"})),
    ("deepspeed", frozenset({"train_micro_batch_size_per_gpu"})),
)
"""Keys that together identify a kind; a name that several systems share identifies none."""

_BATCH_WORDS = r"""per each devices? gpu node rank worker local global total effective real train
    training micro mini macro world forward ppo sft dpo grpo grad gradients? steps? of size batches
    """
_BATCH = re.compile(
    rf"(?:(?:{'|'.join(_BATCH_WORDS.split())})_)*"
    r"(?:(?:mini|micro)?batch(?:size)?|bsz?|acc(?:um[a-z]*)?|(?:samples|ims|tokens)_per_(?:gpu|batch))"
    rf"(?:_(?:{'|'.join(_BATCH_WORDS.split())}))*"
    r"|update_freq|ga_steps|gas|iter_size|n(?:um)?_micro_?batch(?:es)?"
)
_CUTS = re.compile(
    r"(?:^|_)(?:tensor|model|pipe|pipeline|context|sequence|sep|ulysses)(?:_model|_sequence)?"
    r"_parallel(?:ism)?(?:_world)?(?:_(?:size|degree|dim))?$|autotp_size$|ring_attn_size$"
    r"|(?:^|_)(?:tp|pp|cp|sp|mp|ulysses)_(?:size|degree|dim)$|^(?:tp|pp|cp|sp|mp)$"
    r"|^num_(?:pipeline_)?stages$"
)
_OTHER_WORK = re.compile(r"vllm|sglang|infer|rollout|generat|eval")
"""Parts of a program that do not train, and have devices of their own."""

DEEPSPEED_FIELDS = listed_words(
    """
    gradient_accumulation_steps gradient_clipping zero_stage offload_optimizer_device
    offload_param_device offload_param_nvme_path offload_optimizer_nvme_path
    zero3_save_16bit_model mixed_precision
    """
)
"""Settings that an accelerate config must leave to the DeepSpeed JSON that it names."""

_DEEPSPEED_KEYS = listed_words(
    """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
    gradient_clipping gradient_predivide_factor gradient_allreduce_op prescale_gradients
    managed_gradient_accumulation communication_data_type
    seq_parallel_communication_data_type sequence_parallel_size tensor_parallel
    expert_parallel pipeline fp16 bf16 bfloat16 amp torch_autocast data_types
    zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer optimizer
    scheduler compile checkpoint aio steps_per_print wall_clock_breakdown memory_breakdown
    dump_state log_level dataloader_drop_last disable_allgather disable_python_gc
    sparse_attention flops_profiler activation_checkpointing comms_logger autotuning
    elasticity data_efficiency curriculum_learning progressive_layer_drop eigenvalue
    quantize_training weight_quantization compression_training hybrid_engine tensorboard
    wandb csv_monitor comet nebula datastates timers vocabulary_size
    use_data_before_expert_parallelism sparse_gradients use_node_local_storage
    """
)
"""Keys at the top of a DeepSpeed JSON. Source: `deepspeed.runtime.config`, DeepSpeed 0.19.8."""
_NEAR = 0.85
"""Share of letters in common from which a key is taken for another's misspelling."""


def read_content(source: Source, kind: SourceKind) -> Statement:
    """Read a file of a kind."""
    refuse_parallelism(source.name, source.content)
    if kind == "deepspeed":
        return read_deepspeed(source)
    return read_accelerate(source) if kind == "accelerate" else read_program(source, kind)


def kind_of(content: Mapping[str, object], *, is_json: bool) -> SourceKind | None:
    """Return the kind of a configuration by its keys; None where they do not identify it."""
    keys = {key for key, _ in _flat_items(content)} | set(content)
    for kind, marks in _MARKS:
        if marks <= keys:
            return kind
    # A few names are DeepSpeed's where no other is beside them; it reads JSON alone.
    return "deepspeed" if is_json and content and content.keys() <= _DEEPSPEED_KEYS else None


def marks_of_kinds() -> str:
    """Return the keys that identify each kind, for a message."""
    return "; ".join(f"{KINDS[kind]}: {list_text(sorted(marks), 'and')}" for kind, marks in _MARKS)


def count_ids(ids: object) -> int | None:
    """Return how many devices a list of ids names; None where there is no list."""
    text = "" if isinstance(ids, bool) or ids is None else str(ids)
    parts = [part for part in text.split(",") if part.strip()]
    return len(parts) if parts and text != "all" and not is_unknown(text) else None


def is_parallelism(key: str) -> bool:
    """Return whether a key says how many devices share the samples of one rank, or the model."""
    return bool(_CUTS.search(_last_part(key))) and not _OTHER_WORK.search(key)


def refuse_parallelism(name: str, content: Mapping[str, object]) -> None:
    """Refuse a size above 1 that cuts the model or a sample, in a file or a command."""
    cuts = [
        f"{key} {value}"
        for key, value in _flat_items(content)
        if is_parallelism(key) and is_count(size := as_int(value)) and size > 1
    ]
    if cuts:
        msg = (
            f"{name}: {', '.join(sorted(cuts))}: the model or a sample is cut over devices, so "
            "that they are not data-parallel ranks; only data parallelism is covered"
        )
        raise ConfigError(msg)


def _flat_items(content: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the values at the ends of a nested mapping with their dotted keys."""
    queue: list[tuple[str, object]] = list(content.items())
    while queue:
        key, value = queue.pop(0)
        if isinstance(value, dict):
            queue += ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            yield str(key), value


def _batch_numbers(
    source: Source, kind: SourceKind, flags: Mapping[str, str], *, auto: bool = False
) -> dict[str, Any]:
    """Read the numbers of a batch: the user's own names go before those of the kind."""
    keys = {FLAG_WORDS[word]: name for word, name in flags.items()}
    for part, names in BATCH_KEYS[kind].items():
        present = [key for key in names if key in source.content and key not in flags.values()]
        if part not in keys and present:
            keys[part] = present[0]
    numbers: dict[str, Any] = {part: source.count(key, auto=auto) for part, key in keys.items()}
    if "tokens" in numbers:
        tokens, length = numbers.pop("tokens"), numbers.pop("length")
        if tokens.value % length.value:
            msg = f"{source.name}: {tokens} tokens are no multiple of {length}: no whole samples"
            raise ConfigError(msg)
        samples = tokens.value // length.value
        numbers["total"] = Value(samples, f"{tokens} tokens / {length} = samples")
    unused = (
        Value(str(value), str(key))
        for key, value in source.content.items()
        if key not in keys.values() and is_of_batch(str(key)) and re.search(r"[1-9]", str(value))
    )
    return {**numbers, "unused": () if kind == "deepspeed" else tuple(unused)}


def is_of_batch(key: str) -> bool:
    """Return whether a name speaks of the batch of training, and of nothing else."""
    return bool(_BATCH.fullmatch(_last_part(key).lower()))


def _last_part(key: str) -> str:
    """Return the last part of a dotted key, dashes as underscores."""
    return key.rpartition(".")[2].replace("-", "_")


def read_deepspeed(source: Source) -> Statement:
    """Read a DeepSpeed JSON."""
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
    unknown = [key for key in map(str, source.content) if key not in _DEEPSPEED_KEYS]
    return Statement(
        "deepspeed",
        source.name,
        **_batch_numbers(source, "deepspeed", {}, auto=True),
        precision=precision,
        clipping=source.number("gradient_clipping", auto=True),
        others={
            "both_precisions": len(on) == 2,
            "enabled": stated,
            "enabled_precision": bool(on),
            "optimizer_max_grad_norm": optimizer.number("max_grad_norm", auto=True),
            # DeepSpeed passes over keys that it does not know: each with the nearest known one.
            "misspelt": {
                key: near
                for key in unknown
                for near in near_names(key, _DEEPSPEED_KEYS, share=_NEAR)
            },
        },
    )


def read_accelerate(source: Source) -> Statement:
    """Read the YAML or JSON of `accelerate config`."""
    # Unquoted, NO is false in YAML.
    kind = source.content.get("distributed_type")
    distributed = "NO" if kind is None or kind is False else str(kind).upper()
    if distributed == "MEGATRON_LM":
        msg = (
            f"{source.name}: distributed_type MEGATRON_LM cuts the model over devices, so that "
            "devices are not data-parallel ranks; only data parallelism is covered"
        )
        raise ConfigError(msg)
    plugin = source.section("deepspeed_config")
    json_file = plugin.content.get("deepspeed_config_file")
    if not isinstance(json_file, str) or json_file.lower() == "none":
        json_file = None
    fields = sorted(DEEPSPEED_FIELDS & {str(key) for key in plugin.content})
    if source.content.get("mixed_precision") is not None:
        fields.append("mixed_precision")
    accumulation = plugin.count("gradient_accumulation_steps", auto=True)
    clipping = plugin.number("gradient_clipping", auto=True)
    return Statement(
        "accelerate",
        source.name,
        devices=source.count("num_processes"),
        nodes=source.count("num_machines"),
        accumulation=_below("deepspeed_config", accumulation),
        precision=source.precision(),
        clipping=_below("deepspeed_config", clipping),
        others={
            "distributed_type": distributed,
            "gpu_ids": count_ids(source.content.get("gpu_ids")),
            "mpirun": bool(source.section("mpirun_config").content.get("mpirun_hostfile")),
            "deepspeed_config_file": json_file,
            "deepspeed_fields": tuple(fields),
        },
    )


def read_program(
    source: Source, kind: SourceKind, flags: Mapping[str, str] | None = None
) -> Statement:
    """Read the file of a training program that cuts the batch itself, or its arguments."""
    strategy = str(source.content.get("batching_strategy"))
    if kind == "llamafactory" and strategy.startswith("dynamic"):
        msg = f"{source.name}: batching_strategy {strategy} fills a batch by tokens, not by samples"
        raise ConfigError(msg)
    if kind in {"trainer", "axolotl"}:
        numbers = _batch_numbers(source, kind, flags or {}) | _trainer_fields(source, kind)
    else:
        flat = replace(source, content=dict(_flat_items(source.content)))
        numbers = _batch_numbers(flat, kind, flags or {})
    if kind == "litgpt":
        # LitGPT's `devices` are those of one node.
        numbers["nodes"] = source.count("num_nodes")
        if source.content.get("devices") != "auto":
            numbers["devices"] = source.count("devices")
    elif "precision" not in numbers:
        numbers["precision"] = source.precision()
    return Statement(kind, source.name, clipping=source.number("max_grad_norm"), **numbers)


def _trainer_fields(source: Source, kind: SourceKind) -> dict[str, Any]:
    """Return precision, switches and the DeepSpeed JSON of `TrainingArguments`."""
    # axolotl asks the device; its "full" has no autocast.
    is_axolotl = kind == "axolotl"
    content = {
        key: value for key, value in source.content.items() if not (is_axolotl and value == "full")
    }
    stated = replace(source, content=content)
    switches = {name: stated.flag(name, auto=is_axolotl) for name in ("fp16", "bf16")}
    on = [name for name, switch in switches.items() if switch is not None and switch.value]
    is_auto = any(switch is not None and switch.is_auto for switch in switches.values())
    config = source.content.get("accelerator_config")
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError:
            msg = (
                f"{source.name}: accelerator_config {config} is not read, and its split_batches "
                "decides what a batch is: write the JSON itself in its place"
            )
            raise ConfigError(msg) from None
    place = Source(source.name, config) if isinstance(config, dict) else source
    return {
        "precision": Value(on[0], on[0]) if on else Value(None, "bf16") if is_auto else None,
        "others": {
            "both_precisions": len(on) == 2,
            "split_batches": _is_on(place, "split_batches"),
            "auto_find_batch_size": _is_on(source, "auto_find_batch_size"),
            "deepspeed": source.content.get("deepspeed"),
        },
    }


def _below(section: str, value: Value[T] | None) -> Value[T] | None:
    return None if value is None else replace(value, key=f"{section}.{value.key}")


def _is_on(source: Source, key: str) -> bool:
    switch = source.flag(key)
    return switch is not None and bool(switch.value)


_LARGEST_BYTES = 2**20
"""A larger file is refused unread, such as a checkpoint that is given by mistake."""


def is_configuration(path: Path | str) -> bool:
    """Return whether a file is a mapping of settings; any other is read as commands of a shell."""
    return Path(path).suffix.lower() in {".json", ".yaml", ".yml"}


def read_file(path: Path, kind: SourceKind | None = None) -> Statement:
    """Read a .json, .yaml or .yml file; its keys identify its kind where none is given."""
    content = _parse(path, read_text(path))
    kind = kind or kind_of(content, is_json=path.suffix.lower() == ".json")
    if kind is None:
        msg = f"{path}: cannot tell what file this is; keys that would tell: {marks_of_kinds()}"
        raise ConfigError(msg)
    return read_content(Source(str(path), content), kind)


def read_text(path: Path) -> str:
    """Return the text of a file, which is UTF-8 and not too large for a configuration."""
    try:
        size = path.stat().st_size
        if size > _LARGEST_BYTES:
            msg = f"{path}: a configuration has at most {_LARGEST_BYTES} bytes; this has {size}"
            raise ConfigError(msg)
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        msg = f"{path}: a configuration is text in UTF-8, and this is not"
        raise ConfigError(msg) from None
    except OSError as error:
        msg = f"{path}: cannot be read ({error.strerror or error})"
        raise ConfigError(msg) from None
    except ValueError as error:
        # A path with a null character.
        msg = f"{str(path)!r}: cannot be read ({error})"
        raise ConfigError(msg) from None


def _parse(path: Path, text: str) -> Mapping[str, object]:
    is_json = path.suffix.lower() == ".json"
    try:
        if is_json:
            content = json.loads(text, object_pairs_hook=_mapping_of)
        else:
            content = yaml.safe_load(text)
    except json.JSONDecodeError as error:
        msg = f"{path}: no valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        raise ConfigError(msg) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        msg = f"{path}: no valid YAML: {error.problem or error.context}{where}"
        raise ConfigError(msg) from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        # Impossible dates, ints of thousands of digits, keys that are given twice.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        msg = f"{path}: no valid {'JSON' if is_json else 'YAML'}: {reason}"
        raise ConfigError(msg) from None
    except RecursionError:
        msg = f"{path}: nested too deeply for a configuration"
        raise ConfigError(msg) from None
    if not isinstance(content, dict):
        msg = f"{path}: a configuration is a mapping of keys to values, and this is not"
        raise ConfigError(msg)
    return content


def _mapping_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Refuse a repeated key, as DeepSpeed does; else the last one would win."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        msg = f"key {twice!r} is given twice"
        raise ValueError(msg)
    return content
