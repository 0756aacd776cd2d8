"""From a grid with intervals to studies: what is searched in each, and the cells of a trial."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from batchscape.config import RunConfig, Sampler, affects_of
from batchscape.errors import ConfigError
from batchscape.plan.expand import Cell, Interval, SweepCells, set_values
from batchscape.search.points import corners_of
from batchscape.search.pruning import check_fair

__all__ = ["Space", "StudyCells", "setting_text", "space_of"]

_SEEDS = ("seed", "init_seed", "data_seed", "timing_repeat")
_ALIKE = {"budget", "data", "evaluation"}
"""Groups whose settings are alike in all trials of a study."""
_TIMES = {"time_to_target_s", "device_hours_to_target"}


@dataclass(frozen=True)
class StudyCells:
    """What one study is about."""

    name: str
    """Its values of the axes that have studies of their own, such as
    `batch.global_batch_size=8`; `all` where there are none."""
    values: dict[str, Any]
    """The same, by key."""
    cells: tuple[Cell, ...]
    """Every combination of the other axes, those that are searched included."""

    def at(self, point: Mapping[str, Any], seed: int) -> Cell:
        """Return the cell of one point with one seed."""
        cell = next(
            cell
            for cell in self.cells
            if all(cell.swept.get(key, value) == value for key, value in point.items())
        )
        values = {**point, "seed": seed}
        own = {key: value for key, value in values.items() if key not in cell.swept}
        return Cell(set_values(cell.settings, own), {**cell.swept, **values})


@dataclass(frozen=True)
class Space:
    """What is searched, the same in every study."""

    sampler: Sampler
    intervals: tuple[Interval, ...]
    choices: dict[str, tuple[Any, ...]]
    """Values of the axes that are searched, by key."""
    studies: tuple[StudyCells, ...]
    first_seed: int
    """Of the trials; the grid begins behind them."""

    @property
    def keys(self) -> tuple[str, ...]:
        """What is searched: intervals, then choices."""
        return (*(interval.key for interval in self.intervals), *self.choices)

    def as_json(self) -> dict[str, Any]:
        """Return what makes trials comparable: it may not change while a folder is used."""
        ends = {i.key: [i.low, i.high, "log" if i.is_log else "linear"] for i in self.intervals}
        settings = dict(_flat(self.studies[0].cells[0].settings, ""))
        free = {*_SEEDS, *self.keys, *itertools.chain(*(study.values for study in self.studies))}
        axes = {key for cell in self.studies[0].cells for key in cell.swept}
        return {
            "searched": ends | {key: list(values) for key, values in self.choices.items()},
            "objective": list(self.sampler.objective),
            "seeds": [self.first_seed, self.sampler.seeds],
            "settings": {
                key: value
                for key, value in settings.items()
                if affects_of(key) and key not in free | axes
            },
        }


def space_of(grid: SweepCells) -> Space:
    """Read what a command line asks to search.

    Parameters
    ----------
    grid : SweepCells
        Each cell with the low ends of its intervals.

    Raises
    ------
    ConfigError
        If there is nothing to search, or the objective cannot be had of these runs.
    """
    _refuse_batches(grid.intervals)
    configs = _configs_of(grid)
    sampler = configs[0].search
    if not isinstance(sampler, Sampler):
        keys = ", ".join(interval.key for interval in grid.intervals)
        msg = f"{keys}: an interval is searched, not listed: add search=gp, or list values"
        raise ConfigError(msg)
    axes: dict[str, list[Any]] = {}
    for cell in grid.cells:
        for key, value in cell.swept.items():
            if value not in (known := axes.setdefault(key, [])):
                known.append(value)
    for interval in grid.intervals:
        del axes[interval.key]
    _check_keys(sampler, grid.intervals, axes)
    for config in configs:
        _check_objective(sampler, config)
    choices = {key: tuple(axes[key]) for key in sampler.over}
    per = [key for key in axes if key not in choices]
    groups: dict[str, list[Cell]] = {}
    for cell in grid.cells:
        plain = {k: v for k, v in cell.swept.items() if k in axes}
        name = ", ".join(f"{key}={setting_text(plain[key])}" for key in per) or "all"
        groups.setdefault(name, []).append(Cell(cell.settings, plain))
    points = math.prod(len(values) for values in choices.values())
    if sampler.name == "grid" and sampler.trials < points:
        msg = (
            f"search=grid tries every combination of {', '.join(choices)}, {points} in all, and "
            f"search.trials={sampler.trials} are fewer: use search.trials={points}, or another "
            "sampler, such as search=gp, which chooses among them"
        )
        raise ConfigError(msg)
    check_fair(sampler, configs)
    return Space(
        sampler,
        grid.intervals,
        choices,
        tuple(
            StudyCells(name, {key: cells[0].swept[key] for key in per}, tuple(cells))
            for name, cells in groups.items()
        ),
        configs[0].seed,
    )


def _configs_of(grid: SweepCells) -> list[RunConfig]:
    """Return the settings of each cell, at values of the intervals that break no rule.

    Elsewhere they may: a trial there is rejected, with the reason.
    """

    def at(point: Mapping[str, float]) -> list[RunConfig]:
        return [RunConfig.from_mapping(set_values(cell.settings, point)) for cell in grid.cells]

    problems = []
    for point in (corners := corners_of(grid.intervals)):
        try:
            return at(point)
        except ConfigError as error:
            problems.append(error)
    ends = corners[1] | corners[2]
    whole = [i for i in grid.intervals if float(i.low).is_integer() and float(i.high).is_integer()]
    with suppress(ConfigError):
        at(ends | {interval.key: int(interval.high) for interval in whole})
        wanted = " ".join(f"'{i.key}=int(interval({i.low:g},{i.high:g}))'" for i in whole)
        msg = f"a search between whole numbers is written so: {wanted}"
        problems = [ConfigError(msg)]
    raise problems[0]


def _refuse_batches(intervals: Sequence[Interval]) -> None:
    for interval in intervals:
        if interval.key.split(".")[0] == "batch":
            low, high = math.ceil(interval.low), int(interval.high)
            values = [str(low << n) for n in range(high.bit_length()) if 0 < low << n <= high]
            msg = (
                f"{interval.key} cannot be searched in an interval: budgets and evaluations are "
                "multiples of every global batch, which most numbers of an interval do not divide; "
                f"list values that do, as {interval.key}={','.join(values)} with "
                f"search.over=[{interval.key}]"
            )
            raise ConfigError(msg)


def _check_keys(
    sampler: Sampler, intervals: tuple[Interval, ...], axes: Mapping[str, list[Any]]
) -> None:
    if seeds := [key for key in _SEEDS if key in axes]:
        msg = (
            f"{seeds[0]} cannot be an axis of a search: search.seeds={len(axes[seeds[0]])} gives "
            f"each trial that many runs, from `seed` upwards, and search.grid_seeds those of the "
            f"grid; add {seeds[0]}=0"
        )
        raise ConfigError(msg)
    known = ", ".join(axes) or "none"
    if absent := [key for key in sampler.over if key not in axes]:
        msg = (
            f"search.over={sampler.over}: {absent[0]} is no axis of this command line (axes with "
            f"lists of values: {known})"
        )
        raise ConfigError(msg)
    if not intervals and not sampler.over:
        msg = (
            f"search={sampler.name} has nothing to search: give an interval, as in "
            "optimizer.learning_rate='tag(log, interval(1e-4, 1e-2))', or name axes with "
            f"search.over=[KEY] (axes: {known})"
        )
        raise ConfigError(msg)
    searched = [*(interval.key for interval in intervals), *sampler.over]
    if unlike := [key for key in searched if key.split(".")[0] in _ALIKE]:
        msg = f"{unlike[0]} cannot be searched: it decides what the results of trials mean"
        raise ConfigError(msg)
    sizes = [key for key in searched if key.split(".")[0] == "batch"]
    if sizes and sampler.pruner != "none":
        msg = (
            f"search.pruner={sampler.pruner} compares trials of one global batch and cut, and "
            f"{sizes[0]} is searched; use search.pruner=none"
        )
        raise ConfigError(msg)
    for key in sampler.over:
        if not all(value is None or isinstance(value, int | float | str) for value in axes[key]):
            msg = f"search.over={sampler.over}: values of {key} are no numbers or texts"
            raise ConfigError(msg)


def _check_objective(sampler: Sampler, config: RunConfig) -> None:
    asked = set(sampler.objective)
    if len(asked) < len(sampler.objective):
        msg = f"search.objective={sampler.objective} names one thing twice"
        raise ConfigError(msg)
    targets = sorted(name for name in asked if "to_target" in name)
    if targets and config.budget.target_loss is None:
        msg = f"search.objective={targets[0]} needs a budget.target_loss, as budget=target gives"
        raise ConfigError(msg)
    timed = sorted(asked & _TIMES)
    if timed and config.launcher.concurrent_runs > 1:
        msg = (
            f"search.objective={timed[0]} is measured with the machine for one run alone; given "
            f"launcher.concurrent_runs={config.launcher.concurrent_runs}, use 1"
        )
        raise ConfigError(msg)
    if "loss" in asked and config.budget.target_loss is not None:
        msg = (
            "search.objective=loss compares losses at equal samples, and runs with a "
            "budget.target_loss stop at the target; use search.objective=[samples_to_target], or "
            "budget.target_loss=null"
        )
        raise ConfigError(msg)
    if "peak_allocated_gib" in asked and not config.measure.memory:
        msg = "a search for memory needs measure.memory=true"
        raise ConfigError(msg)
    if config.init_seed is not None and config.data_seed is not None:
        msg = "a search draws fresh seeds: leave init_seed or data_seed null"
        raise ConfigError(msg)


def _flat(settings: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def setting_text(value: object) -> str:
    """Write a value as a command line has it."""
    return value if isinstance(value, str) else json.dumps(value)
