"""What the runs of a sweep are called in W&B: by their geometry, by what was swept, by their seed.

What was swept is what differs between the run folders of the sweep. Names may change when cells are
added to it, and follow then; the id of a W&B run never does.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchscape.config import tells_apart
from batchscape.errors import RecordError
from batchscape.record.files import read_json
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.status import RunStatus

__all__ = ["Label", "Labels", "told_settings"]

_SEEDS = frozenset({"seed", "init_seed", "data_seed"})
_OTHERWISE = ("batch.", "engine.precision", "launcher.device")
"""Settings that count as what became of them: the geometry, the precision, the type of device."""
_LONG = 40
"""Letters of a value that a name has room for."""
_LONGEST = 128
"""Letters of a name, and of a group, that W&B takes."""

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Label:
    """What one run is called."""

    name: str
    """Such as `2x8x4 fsdp learning_rate=0.001 s3`: devices x micro-batch x accumulation, what was
    swept, the seed."""
    group: str
    """Its cell, which is the same for every seed and repeat, and its sweep."""


class Labels:
    """The labels of all runs of a sweep; each `config.json` is read once.

    Parameters
    ----------
    sweep : SweepFolder
    """

    def __init__(self, sweep: SweepFolder) -> None:
        self._sweep = sweep
        self._cells: dict[str, Settings | None] = {}
        self._labels: dict[str, Label] = {}
        self.sweep_id = ""
        """Names the sweep in W&B: another one on each machine, as ids of runs are."""

    def refresh(self, sweep_id: str | None) -> None:
        """Take in run folders that are new.

        Parameters
        ----------
        sweep_id : str or None
            As noted; None: follows from the run that began first.
        """
        folders = [f for f in self._sweep.run_folders() if f.config.exists()]
        before = self.sweep_id
        self.sweep_id = before or sweep_id or _sweep_id(folders)
        new = [folder for folder in folders if folder.path.name not in self._cells]
        if not new and self.sweep_id == before:
            return
        for folder in new:
            self._cells[folder.path.name] = _settings(folder)
        cells = {run: cell for run, cell in self._cells.items() if cell is not None}
        shown = _swept(list(cells.values()))
        said = {run: _said(cell, shown) for run, cell in cells.items()}
        keys = {run: _key_of(cell) for run, cell in cells.items()}
        ambiguous = Counter(said[run] for run in {keys[run]: run for run in keys}.values())
        for run, cell in cells.items():
            cell_name = said[run]
            if ambiguous[cell_name] > 1:  # long values, of which the name has the beginning
                cell_name += f" {keys[run]}"
            parts = [cell_name, *([f"s{cell['seeds']}"] if cell["seeds"] else [])]
            if cell["timing_repeat"]:
                parts.append(f"repeat {cell['timing_repeat']}")
            name, group = " ".join(parts), f"{cell_name} ({self.sweep_id})"
            if max(len(name), len(group)) > _LONGEST:
                name = f"{cell['geometry']} {keys[run]} {' '.join(parts[1:])}"
                group = f"{cell['geometry']} {keys[run]} ({self.sweep_id})"
            self._labels[run] = Label(name[:_LONGEST], group[:_LONGEST])

    def of(self, folder: RunFolder) -> Label | None:
        """Return what a run is called; None where its `config.json` cannot be read."""
        return self._labels.get(folder.path.name)


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


def _settings(folder: RunFolder) -> Settings | None:
    """Return what tells a run apart, flat; None of one that has no geometry, or cannot be read."""
    try:
        content = read_json(folder.config)
        if content["geometry"] is None:
            return None
        told, resolved = told_settings(content), content["resolved"]
        flat = {
            key: value
            for key, value in _flat(told)
            if key not in _SEEDS and not key.startswith(_OTHERWISE) and tells_apart(key)
        }
        geometry = content["geometry"]
        stages = resolved["stages"]
        batches = [stage["geometry"]["global_batch_size"] for stage in stages]
        init, data = resolved["init_seed"], resolved["data_seed"]
        seeds = str(init) if init == data else f"{init}.{data}"
        return {
            **flat,
            "nodes": geometry["nodes"],
            "ramp": batches if len(stages) > 1 else None,
            "ramp.stage_samples": [s["samples"] for s in stages] if len(stages) > 1 else None,
            "device": resolved["device_type"],
            "precision": resolved["precision"],
            "code": resolved["source_hash"],
            "data.content": content["data"]["manifest_hash"],
            "geometry": "x".join(
                str(geometry[factor])
                for factor in (
                    "data_parallel_size",
                    "micro_batch_size",
                    "gradient_accumulation_steps",
                )
            ),
            "seeds": seeds if _SEEDS & told.keys() else None,
            "timing_repeat": told["timing_repeat"],
        }
    except (RecordError, OSError, AttributeError, KeyError, TypeError):
        return None  # whoever mirrors the run meets it there, and tells


def _flat(nested: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _cell_keys(cell: Settings) -> list[str]:
    return [key for key in cell if key not in {"seeds", "timing_repeat"}]


def _key_of(cell: Settings) -> str:
    text = json.dumps({key: cell[key] for key in _cell_keys(cell)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def _swept(cells: Sequence[Settings]) -> list[str]:
    """Return the settings that differ, without those that follow from others of their group."""
    keys = dict.fromkeys(key for cell in cells for key in _cell_keys(cell) if key != "geometry")
    texts = {key: [json.dumps(cell.get(key)) for cell in cells] for key in keys}
    kept: dict[str, list[str]] = {}
    # A group's name says more than the settings that come with it, and a hash says least.
    for key in sorted(keys, key=lambda key: (key == "data.content", not key.endswith(".name"))):
        if len(set(texts[key])) < 2:
            continue
        group = kept.setdefault(key.partition(".")[0], [])
        given = list(zip(*(texts[one] for one in group), strict=True)) if group else [()]
        if not group or len(set(given)) < len(set(zip(given, texts[key], strict=True))):
            group.append(key)
    swept = {key for group in kept.values() for key in group}
    return sorted((key for key in keys if key in swept), key=lambda key: not key.endswith(".name"))


def _said(cell: Settings, shown: Sequence[str]) -> str:
    parts = [cell["geometry"]]
    for key in shown:
        if (value := cell.get(key)) is None:
            continue
        leaf = key.rpartition(".")[2]
        parts.append(_text(value) if leaf == "name" else f"{leaf}={_text(value)}")
    return " ".join(parts)


def _text(value: Any) -> str:  # noqa: ANN401  (anything that JSON carries)
    if isinstance(value, float):
        return f"{value:g}"
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."


def _sweep_id(folders: Sequence[RunFolder]) -> str:
    """Name the sweep by the run of it that began first; empty where none has begun."""
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
