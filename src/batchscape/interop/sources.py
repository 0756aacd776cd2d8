"""What one file, or the arguments of one script, states about the batch.

What it does not state stays unknown: no default of a library is filled in. Keys and rules are of
DeepSpeed 0.19, accelerate 1.15, transformers 5, LitGPT 0.5, axolotl 0.18, torchtune 0.7 and
LLaMA-Factory v1 (its older files are TrainingArguments).
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from batchscape.errors import ConfigError
from batchscape.geometry import is_count
from batchscape.text import list_text, near_names


@dataclass(frozen=True)
class Kind:
    """A kind of source: what identifies its files, and what it calls the numbers of a batch."""

    title: str
    marks: tuple[str, ...] = ()
    """Keys that identify it together; a name that several systems share identifies none."""
    micro: str = ""
    accumulation: str = "gradient_accumulation_steps"
    total: str = ""
    """Samples per optimizer step."""

    def names(self, part: str) -> list[str]:
        """Return what a number is called; the first name that is present counts."""
        return str(getattr(self, part)).split()


KINDS: Mapping[str, Kind] = {
    "accelerate": Kind("accelerate config", ("distributed_type", "compute_environment")),
    "trainer": Kind(
        "TrainingArguments",
        ("per_device_train_batch_size",),
        micro="per_device_train_batch_size per_gpu_train_batch_size",
    ),
    "axolotl": Kind(
        "axolotl config",
        ("base_model micro_batch_size", "base_model datasets"),
        micro="micro_batch_size",
    ),
    "llamafactory": Kind(
        "LLaMA-Factory v1 config",
        ("train_dataset micro_batch_size",),
        micro="micro_batch_size",
        accumulation="",
        total="global_batch_size",
    ),
    "torchtune": Kind("torchtune config", ("model._component_ batch_size",), micro="batch_size"),
    "litgpt": Kind(
        "LitGPT config",
        ("train.global_batch_size devices", "train.global_batch_size train.max_tokens"),
        micro="train.micro_batch_size",
        accumulation="",
        total="train.global_batch_size",
    ),
    "deepspeed": Kind(
        "DeepSpeed JSON",
        ("zero_optimization", "train_micro_batch_size_per_gpu"),
        micro="train_micro_batch_size_per_gpu",
        total="train_batch_size",
    ),
    "launcher": Kind("launcher"),
    # Names that state what they count in any script.
    "script": Kind(
        "script arguments",
        micro="per_device_train_batch_size per_device_training_batch_size "
        "per_gpu_train_batch_size micro_batch_size train_micro_batch_size_per_gpu",
        total="global_batch_size",
    ),
}
FLAG_WORDS = {
    "micro_batch_size": "micro",
    "gradient_accumulation_steps": "accumulation",
    "global_batch_size": "total",
    "global_batch_tokens": "tokens",
    "sequence_length": "length",
}
"""Quantities that an argument of the user's own script may stand for."""


def listed_words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


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

_FIELDS_OF_THE_JSON = listed_words(
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


@dataclass(frozen=True)
class Fact:
    """One value, and where it stands."""

    value: Any
    """An int; of clipping a float, of precision fp16 or bf16. None where the file says "auto":
    another one decides."""
    key: str
    """What it is written under, or why it is so."""
    source: str = ""
    """File and line, or the part of the command line; empty for what nobody wrote."""

    @property
    def stated(self) -> str:
        """Key and value, as they are written."""
        return f"{self.key} {'auto' if self.value is None else self.value}"

    @property
    def origin(self) -> str:
        """Source, key and value; of what nobody wrote the reason alone."""
        return f"{self.source}: {self.stated}" if self.source else self.key

    def __str__(self) -> str:
        return f"{self.value} ({self.origin})"


@dataclass(frozen=True)
class Statement:
    """What one source states; false where there is no such source."""

    kind: str = ""
    """One of `KINDS`."""
    source: str = ""
    """Name of the file, or the part of the command line."""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """By devices (in all, over all nodes), nodes, micro, accumulation, total (samples per
    optimizer step), precision, clipping."""
    unused: tuple[Fact, ...] = ()
    """Numbers whose names speak of the batch, and whose meaning is not known."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Switches that decide the meaning of the facts; names as in the library."""

    def __bool__(self) -> bool:
        return bool(self.kind)

    def states(self, *names: str) -> bool:
        """Return whether it states one of these quantities; "auto" counts."""
        return not self.facts.keys().isdisjoint(names)


NOTHING = Statement()


def first_fact(name: str, *statements: Statement) -> Fact | None:
    """Return the first value that is stated, in the order of precedence; "auto" is none."""
    facts = (statement.facts.get(name) for statement in statements)
    return next((fact for fact in facts if fact and fact.value is not None), None)


def facts_of(**facts: Fact | None) -> dict[str, Fact]:
    """Return the facts that are stated."""
    return {name: fact for name, fact in facts.items() if fact}


def as_int(value: object) -> object:
    """Return the int that a text of digits stands for, and any other value as it is."""
    return int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,20}", value) else value


def count_of_ids(ids: object) -> int | None:
    """Return how many devices `0` or `0,1` names; None where it is no such list."""
    return str(ids).count(",") + 1 if re.fullmatch(r"\d+(,\s*\d+)*", str(ids)) else None


def _number_of(raw: object) -> float | None:
    # YAML 1.1 takes 1e-3 for text.
    is_number = re.fullmatch(r"\d+(\.\d*)?([eE][-+]?\d{1,2})?", str(raw))
    return float(str(raw)) if is_number else None


_CONVERSIONS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "count": (lambda raw: raw if is_count(raw) else None, "an int from 1 to 2**63 - 1"),
    "number": (_number_of, "a number of at least 0"),
    "flag": (
        # Texts too, as the libraries read them; a switch of a command has an empty one.
        lambda raw: {"true": True, "": True, "false": False}.get(str(raw).lower()),
        "true or false",
    ),
}


@dataclass(frozen=True)
class Source:
    """Raw values of one source; with `is_text` numbers come as text, as on a command line."""

    name: str
    content: Mapping[str, object]
    """By dotted keys."""
    is_text: bool = False

    def fact(self, key: str, form: str, *, auto: bool = False) -> Fact | None:
        """Return the value of a key as a count (an int of at least 1), a number or a flag.

        None where it is not given; a fact without a value for "auto", where the library takes it.
        """
        raw = as_int(self.content.get(key)) if self.is_text else self.content.get(key)
        is_auto = auto and raw == "auto"
        convert, rule = _CONVERSIONS[form]
        value = None if is_auto or raw is None else convert(raw)
        if value is None and raw is not None and not is_auto:
            also = ' or "auto"' if auto else ""
            raise ConfigError(f"{self.name}: {key} must be {rule}{also}; given {reprlib.repr(raw)}")
        return None if raw is None else Fact(value, key, self.name)

    def flags(self, *keys: str, auto: bool = False) -> dict[str, bool | None]:
        """Return the flags that are given; None stands for "auto"."""
        facts = [self.fact(key, "flag", auto=auto) for key in keys]
        return {fact.key: fact.value for fact in facts if fact}


def read_file(path: Path, kind: str = "") -> Statement:
    """Read a .json, .yaml or .yml file; its keys identify its kind where none is given."""
    is_json = path.suffix.lower() == ".json"
    text = read_text(path)
    try:
        content = json.loads(text) if is_json else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        # Impossible dates and deep nesting too.
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: no valid {'JSON' if is_json else 'YAML'}: {reason}") from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: a configuration is a mapping of keys to values, and this is not"
        )
    source = Source(str(path), dict(_flat_items(content)))
    marks = {mark: kind for kind, each in KINDS.items() for mark in each.marks}
    keys = {*source.content, *content}
    kinds = [kind for mark, kind in marks.items() if keys.issuperset(mark.split())]
    # A few names are DeepSpeed's where no other is beside them; it reads JSON alone.
    kinds += ["deepspeed"] * (is_json and bool(content) and content.keys() <= _DEEPSPEED_KEYS)
    kind = next(iter([kind, *kinds] if kind else kinds), "")
    if not kind:
        tell = "; ".join(
            f"{KINDS[kind].title}: {list_text(sorted(mark.split()), 'and')}"
            for mark, kind in marks.items()
        )
        raise ConfigError(f"{path}: cannot tell what file this is; keys that would tell: {tell}")
    refuse_parallelism(source)
    if kind == "deepspeed":
        return _read_deepspeed(source, map(str, content))
    return _read_accelerate(source) if kind == "accelerate" else read_program(source, kind)


_LARGEST_BYTES = 2**20
"""A larger file is refused unread, such as a checkpoint that is given by mistake."""


def read_text(path: Path) -> str:
    """Return the text of a file, which is UTF-8 and not too large for a configuration."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_BYTES + 1)
        text = content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read as text in UTF-8 ({reason})") from None
    if len(content) > _LARGEST_BYTES:
        raise ConfigError(f"{path}: a configuration has at most {_LARGEST_BYTES} bytes")
    return text


def is_configuration(path: Path | str) -> bool:
    """Return whether a file is a mapping of settings; any other is read as commands of a shell."""
    return Path(path).suffix.lower() in {".json", ".yaml", ".yml"}


def _flat_items(content: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the values at the ends of a nested mapping with their dotted keys."""
    queue: list[tuple[str, object]] = list(content.items())
    for key, value in queue:
        if isinstance(value, dict):
            queue += ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            yield str(key), value


def is_of_batch(key: str) -> bool:
    """Return whether a name speaks of the batch of training, and of nothing else."""
    return bool(_BATCH.fullmatch(_last_part(key).lower()))


def is_parallelism(key: str) -> bool:
    """Return whether a key says how many devices share the samples of one rank, or the model."""
    return bool(_CUTS.search(_last_part(key))) and not _OTHER_WORK.search(key)


def _last_part(key: str) -> str:
    """Return the last part of a dotted key, dashes as underscores."""
    return key.rpartition(".")[2].replace("-", "_")


def refuse_parallelism(source: Source) -> None:
    """Refuse a size above 1 that cuts the model or a sample."""
    cuts = [
        f"{key} {value}"
        for key, value in source.content.items()
        if is_parallelism(key) and is_count(size := as_int(value)) and size > 1
    ]
    if cuts:
        raise ConfigError(
            f"{source.name}: {', '.join(sorted(cuts))}: the model or a sample is cut over devices, "
            "so that they are not data-parallel ranks; only data parallelism is covered"
        )


def _batch_of(source: Source, kind: str, flags: Mapping[str, str]) -> dict[str, Fact]:
    """Read the numbers of a batch: the user's own names go before those of the kind."""
    keys = {FLAG_WORDS[word]: name for word, name in flags.items()}
    for part in ("micro", "accumulation", "total"):
        for name in KINDS[kind].names(part):
            if name in source.content and name not in flags.values():
                keys.setdefault(part, name)
    auto = kind == "deepspeed"
    facts = facts_of(**{part: source.fact(key, "count", auto=auto) for part, key in keys.items()})
    if "tokens" in facts:
        tokens, length = facts.pop("tokens"), facts.pop("length")
        if tokens.value % length.value:
            raise ConfigError(
                f"{source.name}: {tokens.stated} tokens are no multiple of {length.stated}: no "
                "whole samples"
            )
        key = f"{tokens.stated} tokens / {length.stated} = samples"
        facts["total"] = Fact(tokens.value // length.value, key, source.name)
    return facts


def _read_deepspeed(source: Source, keys: Iterable[str]) -> Statement:
    facts = _batch_of(source, "deepspeed", {})
    facts |= facts_of(clipping=source.fact("gradient_clipping", "number", auto=True))
    half_precision_flags = source.flags("fp16.enabled", "bf16.enabled", auto=True)
    # DeepSpeed passes over keys that it does not know: each with the nearest known one.
    near_by_key = {key: near_names(key, _DEEPSPEED_KEYS, share=_NEAR) for key in keys}
    misspelt = {key: near[0] for key, near in near_by_key.items() if near and near[0] != key}
    other_facts = {"halves": half_precision_flags, "misspelt": misspelt}
    return Statement("deepspeed", source.name, facts, others=other_facts)


def _read_accelerate(source: Source) -> Statement:
    # Unquoted, NO is false in YAML.
    distributed = str(source.content.get("distributed_type") or "NO").upper()
    if distributed == "MEGATRON_LM" or source.content.get("mpirun_config.mpirun_hostfile"):
        raise ConfigError(
            f"{source.name}: distributed_type MEGATRON_LM and mpirun_hostfile are not read; only "
            "data parallelism is covered"
        )
    plugin = "deepspeed_config."
    fields = {key.removeprefix(plugin) for key in source.content if key.startswith(plugin)}
    fields |= {"mixed_precision"} & source.content.keys()
    return Statement(
        "accelerate",
        source.name,
        facts_of(
            devices=source.fact("num_processes", "count"),
            nodes=source.fact("num_machines", "count"),
            accumulation=source.fact(f"{plugin}gradient_accumulation_steps", "count", auto=True),
        ),
        others={
            "distributed_type": distributed,
            "deepspeed": source.content.get(f"{plugin}deepspeed_config_file"),
            "gpu_ids": source.content.get("gpu_ids"),
            "fields_of_the_json": fields & _FIELDS_OF_THE_JSON,
        },
    )


def read_program(source: Source, kind: str, flags: Mapping[str, str] | None = None) -> Statement:
    """Read the file of a training program that cuts the batch itself, or its arguments."""
    strategy = str(source.content.get("batching_strategy"))
    if kind == "llamafactory" and strategy.startswith("dynamic"):
        raise ConfigError(
            f"{source.name}: batching_strategy {strategy} fills a batch by tokens, not by samples"
        )
    facts = _batch_of(source, kind, flags or {})
    if kind == "litgpt":
        # LitGPT's `devices` are those of one node.
        is_counted = source.content.get("devices") != "auto"
        devices = source.fact("devices", "count") if is_counted else None
        facts |= facts_of(devices=devices, nodes=source.fact("num_nodes", "count"))
    read = {key for fact in facts.values() for key in fact.key.split()}
    unused = (
        Fact(value, key, source.name)
        for key, value in source.content.items()
        if is_of_batch(key) and key not in read and re.search("[1-9]", str(value))
    )
    facts |= facts_of(clipping=source.fact("max_grad_norm", "number"))
    others = _switches_of(source, kind) if kind in {"trainer", "axolotl"} else {}
    return Statement(kind, source.name, facts, tuple(unused), others)


def _switches_of(source: Source, kind: str) -> dict[str, Any]:
    """Return what changes the meaning of `TrainingArguments`, and their DeepSpeed JSON."""
    has_json = any(key.startswith("deepspeed.") for key in source.content)
    if has_json or source.content.get("accelerator_config"):
        raise ConfigError(
            f"{source.name}: a DeepSpeed JSON within, and the name of an accelerator_config, are "
            "not read, and may decide what a batch is; write the one into a file, and the other "
            "into the file of arguments"
        )
    split = source.flags("split_batches", "accelerator_config.split_batches")
    return {
        # axolotl asks the device.
        "halves": source.flags("fp16", "bf16", auto=kind == "axolotl"),
        "split_batches": any(split.values()),
        "auto_find_batch_size": any(source.flags("auto_find_batch_size").values()),
        "deepspeed": source.content.get("deepspeed"),
    }
