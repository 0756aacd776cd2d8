"""Names of runs in W&B: geometry, a few settings, a hash and the seed.

A name follows from the `config.json` of its run alone, so that no later run changes it.
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
_RESOLVED = ("batch.", "engine.precision", "launcher.device")
"""Settings that count by their resolved values: geometry, precision and type of device."""
_NAMED_GROUPS = ("engine", "model", "optimizer")
"""Groups whose options are in a name."""
_FACTORS = ("data_parallel_size", "micro_batch_size", "gradient_accumulation_steps")
_MAX_LETTERS = 128
"""Longest name or group that W&B takes, in letters."""


class Label(NamedTuple):
    """Name and group of one run."""

    name: str
    """Such as `2x8x4 fsdp gpt adamw 0.001 1f3a2b s3`: devices x micro-batch x accumulation; engine,
    model, optimizer and learning rate, if the program got them; a hash of the cell; the seed."""
    group: str
    """Cell, which is the same for every seed and repeat, and sweep of the run."""


def label_of(folder: RunFolder, sweep_id: str) -> Label:
    """Return name and group of a run.

    Parameters
    ----------
    folder : RunFolder
    sweep_id : str
        As `sweep_id_of` returns it.

    Raises
    ------
    DamageError
        If its `config.json` cannot be read, or has no geometry.
    """
    try:
        content = read_json(folder.config)
        settings, resolved = passed_settings(content), content["resolved"]
        cell_parts = ["x".join(str(content["geometry"][factor]) for factor in _FACTORS)]
        cell_parts += [
            settings[group]["name"] for group in _NAMED_GROUPS if "name" in settings.get(group, {})
        ]
        rate = settings.get("optimizer", {}).get("learning_rate")
        cell_parts += [] if rate is None else [f"{rate:g}"]
        cell_json = json.dumps(_cell(content, settings), sort_keys=True)
        cell = " ".join([*cell_parts, hashlib.sha256(cell_json.encode()).hexdigest()[:6]])
        init_seed, data_seed = resolved["init_seed"], resolved["data_seed"]
        name_parts = [cell]
        if _SEEDS & settings.keys():
            seed_text = f"s{init_seed}" if init_seed == data_seed else f"s{init_seed}.{data_seed}"
            name_parts.append(seed_text)
        if settings["timing_repeat"]:
            name_parts.append(f"repeat {settings['timing_repeat']}")
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamageError(f"{folder.config} is damaged") from error
    return Label(" ".join(name_parts)[:_MAX_LETTERS], f"{cell} ({sweep_id})"[:_MAX_LETTERS])


def sweep_id_of(folders: Sequence[RunFolder]) -> str:
    """Return the id of a sweep, by its first run that began; empty where none has begun.

    Ids of sweeps differ between machines, as those of runs do.
    """
    starts: list[tuple[float, RunFolder]] = []
    for folder in folders:
        try:
            attempts = RunStatus.read(folder.status).attempts
        except (RecordError, OSError):
            continue
        if attempts:
            starts.append((attempts[0].started_at, folder))
    if not starts:
        return ""
    first_start, first_folder = min(starts, key=lambda pair: (pair[0], pair[1].path.name))
    try:
        name = str(read_json(first_folder.config)["sweep_name"])
    except (RecordError, OSError, KeyError, TypeError):
        name = first_folder.path.parents[1].name
    return f"{name}-{hashlib.sha256(repr(first_start).encode()).hexdigest()[:8]}"


def passed_settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a `config.json`, nested, without those that a program did not get.

    Parameters
    ----------
    content : mapping
        Content of the file.
    """
    unpassed_keys = set(content["resolved"].get("not_passed", ()))
    settings: dict[str, Any] = {}
    for group, values in content["config"].items():
        if group in unpassed_keys:
            continue
        if not isinstance(values, dict):
            settings[group] = values
            continue
        passed = {
            name: value for name, value in values.items() if f"{group}.{name}" not in unpassed_keys
        }
        if passed:
            settings[group] = passed
    return settings


def _cell(content: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that distinguish cells, flat."""
    resolved = content["resolved"]
    return {
        **{
            key: value
            for key, value in _flat(settings)
            if key not in {*_SEEDS, "timing_repeat"}
            and not key.startswith(_RESOLVED)
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
