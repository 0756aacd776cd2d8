"""From axes to cells: every combination of values, as plain nested settings.

Composing a configuration is slow, setting a value is not. An axis that needs the composer (a
choice of a configuration group) is therefore composed once per combination of such axes, and
every other axis is set on the outcome.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchscape.errors import ConfigError
from batchscape.text import suggest

MOST_CELLS = 100_000
"""Cells of a grid at most: each is validated, and has a folder of its own."""

Compose = Callable[[tuple[str, ...]], Callable[[Mapping[str, Any]], dict[str, Any]]]
"""Takes the chosen lines of composed axes, returns a function from values to settings."""


@dataclass(frozen=True)
class SweptSetting:
    """One swept setting and its values."""

    key: str
    """Dotted key, or name of a configuration group."""
    values: tuple[Any, ...]
    lines: tuple[str, ...] | None = None
    """For each value, the line that the composer understands; None: values are simply set."""


@dataclass(frozen=True)
class Cell:
    """One combination of values."""

    settings: dict[str, Any]
    """All settings, nested, as `RunConfig.from_mapping` takes them."""
    value_of_axis: dict[str, Any]
    """The value of each axis, by key."""


@dataclass(frozen=True)
class Interval:
    """A setting that is searched between two ends; whole numbers where both are integers."""

    key: str
    """Dotted key."""
    low: float
    high: float
    is_log: bool
    """Whether equal ratios count alike, not equal differences."""


@dataclass(frozen=True)
class SweepCells:
    """All cells of a sweep, and what tells it from another sweep."""

    cells: list[Cell]
    """In the order of the axes, the last one running fastest."""
    axis_keys: frozenset[str]
    """Keys that this sweep varies, those that the command line fixed to one value included."""
    fixed: dict[str, Any]
    """Settings of the command line that are the same in every cell, axes excluded."""
    sweep_file: str | None
    """The chosen sweep file, by name."""
    intervals: tuple[Interval, ...] = ()
    """What is searched; each cell has their low ends."""


def expand(axes: Sequence[SweptSetting], compose: Compose) -> list[Cell]:
    """Return every combination of the axes."""
    if (count := math.prod(len(axis.values) for axis in axes)) > MOST_CELLS:
        product = " x ".join(f"{len(axis.values):,} of {axis.key}" for axis in axes)
        raise ConfigError(
            f"a sweep has at most {MOST_CELLS:,} cells; given {product} = {count:,}; "
            "take fewer values, or cut it into several sweeps"
        )
    bases: dict[tuple[str, ...], Callable[[Mapping[str, Any]], dict[str, Any]]] = {}
    cells = []
    for indices in itertools.product(*(range(len(axis.values)) for axis in axes)):
        chosen = list(zip(axes, indices, strict=True))
        lines = tuple(axis.lines[index] for axis, index in chosen if axis.lines is not None)
        if lines not in bases:
            bases[lines] = compose(lines)
        values = {axis.key: axis.values[index] for axis, index in chosen if axis.lines is None}
        value_of_axis = {axis.key: axis.values[index] for axis, index in chosen}
        cells.append(Cell(bases[lines](values), value_of_axis))
    return cells


def set_values(settings: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of nested settings with the values set; the original stays as it is."""
    changed = dict(settings)
    copied: dict[tuple[str, ...], dict[str, Any]] = {(): changed}
    for key, value in values.items():
        *parents, last = key.split(".")
        path: tuple[str, ...] = ()
        for part in parents:
            holder, path = copied[path], (*path, part)
            if path not in copied:
                node = holder.get(part)
                copied[path] = holder[part] = dict(node) if isinstance(node, Mapping) else {}
        if last not in copied[path]:
            raise ConfigError(
                f"{key} is no setting, so it cannot be swept{suggest(last, copied[path])}"
            )
        copied[path][last] = value
    return changed
