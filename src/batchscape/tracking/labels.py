"""What the runs of a sweep are called in W&B: by geometry, a few settings, a hash and the seed.

All of it follows from the run's own `config.json`, so that no run that is added later moves it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from batchscape.config import tells_apart
from batchscape.errors import DamageError, RecordError
from batchscape.record.files import read_json
from batchscape.record.folder import RunFolder
from batchscape.record.status import RunStatus

_SEEDS = frozenset({"seed", "init_seed", "data_seed"})
_OTHERWISE = ("batch.", "engine.precision", "launcher.device")
"""Settings that count as what became of them: the geometry, the precision, the type of device."""
_SHOWN = ("engine", "model", "optimizer")
"""Groups whose option a name tells."""
_FACTORS = ("data_parallel_size", "micro_batch_size", "gradient_accumulation_steps")
_LONGEST = 128
"""Letters of a name, and of a group, that W&B takes."""


class Label(NamedTuple):
    """What one run is called."""

    name: str
    """Such as `2x8x4 fsdp gpt adamw 0.001 1f3a2b s3`: devices x micro-batch x accumulation, engine,
    model, optimizer and learning rate as far as they were told, a hash of the cell, the seed."""
    group: str
    """Its cell, which is the same for every seed and repeat, and its sweep."""


def label_of(folder: RunFolder, sweep_id: str) -> Label:
    """Return what a run is called.

    Parameters
    ----------
    folder : RunFolder
    sweep_id : str
        As `sweep_id_of` returns it.

    Raises
    ------
    DamageError
        If its `config.json` cannot be read, or says no geometry.
    """
    try:
        content = read_json(folder.config)
        told, resolved = told_settings(content), content["resolved"]
        shown = ["x".join(str(content["geometry"][factor]) for factor in _FACTORS)]
        shown += [told[group]["name"] for group in _SHOWN if "name" in told.get(group, {})]
        rate = told.get("optimizer", {}).get("learning_rate")
        shown += [] if rate is None else [f"{rate:g}"]
        text = json.dumps(_cell(content, told), sort_keys=True)
        cell = " ".join([*shown, hashlib.sha256(text.encode()).hexdigest()[:6]])
        init, data = resolved["init_seed"], resolved["data_seed"]
        parts = [cell]
        if _SEEDS & told.keys():
            parts.append(f"s{init}" if init == data else f"s{init}.{data}")
        if told["timing_repeat"]:
            parts.append(f"repeat {told['timing_repeat']}")
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        msg = f"{folder.config} is damaged"
        raise DamageError(msg) from error
    return Label(" ".join(parts)[:_LONGEST], f"{cell} ({sweep_id})"[:_LONGEST])


def sweep_id_of(folders: Sequence[RunFolder]) -> str:
    """Name a sweep by the run of it that began first; empty where none has begun.

    It is another one on each machine, as the ids of runs are.
    """
    began: list[tuple[float, RunFolder]] = []
    for folder in folders:
        try:
            attempts = RunStatus.read(folder.status).attempts
        except (RecordError, OSError):
            continue
        if attempts:
            began.append((attempts[0].started_at, folder))
    if not began:
        return ""
    at, first = min(began, key=lambda one: (one[0], one[1].path.name))
    try:
        name = str(read_json(first.config)["sweep_name"])
    except (RecordError, OSError, KeyError, TypeError):
        name = first.path.parents[1].name
    return f"{name}-{hashlib.sha256(repr(at).encode()).hexdigest()[:8]}"


def told_settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a `config.json`, nested, without those that a program was never told.

    Parameters
    ----------
    content : mapping
        Of the file.
    """
    lacking = set(content["resolved"].get("not_passed", ()))
    told: dict[str, Any] = {}
    for group, values in content["config"].items():
        if group in lacking:
            continue
        if not isinstance(values, dict):
            told[group] = values
            continue
        kept = {name: value for name, value in values.items() if f"{group}.{name}" not in lacking}
        if kept:
            told[group] = kept
    return told


def _cell(content: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tells a cell apart, flat."""
    resolved = content["resolved"]
    return {
        **{
            key: value
            for key, value in _flat(told)
            if key not in {*_SEEDS, "timing_repeat"}
            and not key.startswith(_OTHERWISE)
            and tells_apart(key)
        },
        "geometry": content["geometry"],
        "stages": [[stage["samples"], stage["geometry"]] for stage in resolved["stages"]],
        "device": resolved["device_type"],
        "precision": resolved["precision"],
        "code": resolved["source_hash"],
        "data.content": content["data"]["manifest_hash"],
    }


def _flat(nested: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
