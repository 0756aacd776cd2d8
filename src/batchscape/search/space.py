"""The space of a search and its studies, from a grid with intervals; the cells of a trial."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from batchscape.config import Constant, RunConfig, Sampler, affects_of
from batchscape.errors import ConfigError
from batchscape.plan.expand import Cell, Interval, SweepCells, set_values

UNJUDGED_SHARE = 0.25
"""Share of the samples before which no run is cut: early losses do not predict late ones."""

T = TypeVar("T")
_SEEDS = ("seed", "init_seed", "data_seed", "timing_repeat")
_FIXED_GROUPS = {"budget", "data", "evaluation"}
"""Groups whose settings are equal in all trials of a study."""
_TIMES = {"time_to_target_s", "device_hours_to_target"}


@dataclass(frozen=True)
class StudyCells:
    """Cells of one study."""

    name: str
    """Values of the axes that are not searched, such as `batch.global_batch_size=8`; `all` where
    there are none."""
    values: dict[str, Any]
    """Values of the axes that are not searched, by key."""
    cells: tuple[Cell, ...]
    """Every combination of the other axes, the searched ones included."""

    def at(self, point: Mapping[str, Any], seed: int) -> Cell:
        """Return the cell of one point with one seed."""
        cell = next(
            cell
            for cell in self.cells
            if all(cell.value_of_axis.get(key, value) == value for key, value in point.items())
        )
        values = {**point, "seed": seed}
        new = {key: value for key, value in values.items() if key not in cell.value_of_axis}
        return Cell(set_values(cell.settings, new), {**cell.value_of_axis, **values})


@dataclass(frozen=True)
class Space:
    """Intervals and choices that are searched, the same in every study."""

    sampler: Sampler
    intervals: tuple[Interval, ...]
    choices: dict[str, tuple[Any, ...]]
    """Values of the axes that are searched, by key."""
    studies: tuple[StudyCells, ...]
    first_seed: int
    """First seed of the trials; the seeds of the grid follow theirs."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Searched keys: intervals, then choices."""
        return (*(interval.key for interval in self.intervals), *self.choices)

    @cached_property
    def listed_points(self) -> list[dict[str, Any]]:
        """Points of a grid, or of a space with at most as many points as trials; else none.

        A grid has equal distances and both ends, or the middles of two halves, or one middle.
        """
        combinations = math.prod(map(len, self.choices.values()))
        if self.sampler.name == "grid":
            root = 1 / max(1, len(self.intervals))
            each = max(1, int((self.sampler.trials / combinations) ** root + 1e-9))
            shares = np.linspace(0, 1, each) if each > 2 else (np.arange(each) + 0.5) / each
            axes = [list(dict.fromkeys(_at(i, s) for s in shares.tolist())) for i in self.intervals]
        else:
            axes = [
                list(range(i.low, i.high + 1))
                for i in self.intervals
                if isinstance(i.low, int) and isinstance(i.high, int)
            ]
            of_axes = math.prod(map(len, axes))
            if len(axes) < len(self.intervals) or combinations * of_axes > self.sampler.trials:
                return []
        points = itertools.product(*axes, *self.choices.values())
        return [dict(zip(self.keys, point, strict=True)) for point in points]

    @property
    def trials(self) -> int:
        """Number of trials of a study."""
        return len(self.listed_points) or self.sampler.trials

    @property
    def grid_points(self) -> int:
        """Number of points that are measured around each best, unless the grid grows."""
        points = self.sampler.grid_points
        return len(self.intervals) * (points - 1) + 1 if points else 0

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that make trials comparable, by key; they may not change in a folder."""
        first = self.studies[0].cells[0]
        free = {
            *_SEEDS,
            *self.keys,
            *first.value_of_axis,
            *(key for cells in self.studies for key in cells.values),
        }
        settings = _flat(first.settings)
        return {
            **{key: value for key, value in settings if affects_of(key) and key not in free},
            **{i.key: [i.low, i.high, "log" if i.is_log else "linear"] for i in self.intervals},
            **{key: list(values) for key, values in self.choices.items()},
            "search.objective": self.sampler.objective,
            "search.seeds": [self.first_seed, self.sampler.seeds],
        }


def space_of(grid: SweepCells) -> Space:
    """Return the space that a command line searches.

    Parameters
    ----------
    grid : SweepCells
        Each cell with the low ends of its intervals.

    Raises
    ------
    ConfigError
        If there is nothing to search, or these runs cannot have the objective.
    """
    _refuse_batches(grid.intervals)
    _, configs = at_first_corner(
        grid, lambda cells: [RunConfig.from_mapping(cell.settings) for cell in cells]
    )
    sampler = configs[0].search
    if not isinstance(sampler, Sampler):
        keys = ", ".join(interval.key for interval in grid.intervals)
        raise ConfigError(
            f"{keys}: an interval is searched, not listed: add search=gp, or list values"
        )
    axes: dict[str, list[Any]] = {}
    for cell in grid.cells:
        for key, value in cell.value_of_axis.items():
            if value not in (values := axes.setdefault(key, [])):
                values.append(value)
    for interval in grid.intervals:
        del axes[interval.key]
    _check_keys(sampler, grid.intervals, axes)
    for config in configs:
        _check_objective(sampler, config)
        if sampler.pruner != "none":
            _check_fair(sampler, config)
    choices = {key: _choices(key, axes[key]) for key in sampler.over}
    per = [key for key in axes if key not in choices]
    groups: dict[str, list[Cell]] = {}
    for cell in grid.cells:
        plain = {k: v for k, v in cell.value_of_axis.items() if k in axes}
        name = ", ".join(f"{key}={setting_text(plain[key])}" for key in per) or "all"
        groups.setdefault(name, []).append(Cell(cell.settings, plain))
    points = math.prod(len(values) for values in choices.values())
    if sampler.name == "grid" and sampler.trials < points:
        raise ConfigError(
            f"search=grid tries every combination of {', '.join(choices)}, {points} in all, and "
            f"search.trials={sampler.trials} are fewer: use search.trials={points}, or another "
            "sampler, such as search=gp, which chooses among them"
        )
    return Space(
        sampler,
        grid.intervals,
        choices,
        tuple(
            StudyCells(name, {key: cells[0].value_of_axis[key] for key in per}, tuple(cells))
            for name, cells in groups.items()
        ),
        configs[0].seed,
    )


def _choices(key: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """Refuse values that Optuna cannot keep as choices."""
    if not all(value is None or isinstance(value, int | float | str) for value in values):
        raise ConfigError(
            f"search.over={[key]}: values of {key} must be numbers or texts, given {values}"
        )
    return tuple(values)


def at_first_corner(
    grid: SweepCells, attempt: Callable[[list[Cell]], T]
) -> tuple[dict[str, float], T]:
    """Try the cells of a search in the middle of its intervals, then at their ends.

    A trial at another point may break a rule; then it is rejected, with the reason.

    Parameters
    ----------
    grid : SweepCells
    attempt : callable
        Takes the cells at one point, and raises `ConfigError` where they break a rule.

    Returns
    -------
    point : dict of str to float
        The first point where no rule is broken.
    result
        Result of the attempt there.

    Raises
    ------
    ConfigError
        The error of the middle, if a rule is broken at all points; or how to search whole numbers,
        if those would break no rule.
    """

    def attempt_at(point: Mapping[str, float]) -> T:
        return attempt(
            [replace(cell, settings=set_values(cell.settings, point)) for cell in grid.cells]
        )

    problems = []
    for share in (0.5, 0.0, 1.0):
        point = {interval.key: _at(interval, share) for interval in grid.intervals}
        try:
            return point, attempt_at(point)
        except ConfigError as error:
            problems.append(error)
    integers = [i for i in grid.intervals if i.low % 1 == 0 and i.high % 1 == 0]
    try:
        attempt_at(point | {interval.key: int(interval.high) for interval in integers})
    except ConfigError:
        raise problems[0] from None
    example = " ".join(f"'{i.key}=int(interval({i.low:g},{i.high:g}))'" for i in integers)
    raise ConfigError(f"a search between whole numbers is written so: {example}")


def _at(interval: Interval, share: float) -> float:
    """Return the number at a share of an interval."""
    low, high = interval.low, interval.high
    value = low * (high / low) ** share if interval.is_log else low + share * (high - low)
    return round(value) if isinstance(low, int) else min(max(value, low), high)


def _refuse_batches(intervals: Sequence[Interval]) -> None:
    for interval in intervals:
        if interval.key.split(".")[0] == "batch":
            raise ConfigError(
                f"{interval.key} cannot be searched in an interval: budgets and evaluations are "
                "multiples of every global batch, which most numbers of an interval do not divide; "
                f"list values that do, with search.over=[{interval.key}]"
            )


def _check_keys(
    sampler: Sampler, intervals: tuple[Interval, ...], axes: Mapping[str, list[Any]]
) -> None:
    axes_text, over = ", ".join(axes) or "none", sampler.over
    searched = [*(interval.key for interval in intervals), *over]
    seeds = [key for key in _SEEDS if key in axes]
    absent = [key for key in over if key not in axes]
    fixed = [key for key in searched if key.split(".")[0] in _FIXED_GROUPS]
    sizes = [key for key in searched if key.split(".")[0] == "batch"]
    _refuse(
        (
            seeds,
            f"{', '.join(seeds)} cannot be an axis of a search: search.seeds gives each trial as "
            "many runs, from `seed` upwards, and search.grid_seeds those of the grid",
        ),
        (
            absent,
            f"search.over={over}: {', '.join(absent)} is no axis of this command line (axes with "
            f"lists of values: {axes_text})",
        ),
        (
            not searched,
            f"search={sampler.name} has nothing to search: give an interval, as in "
            "optimizer.learning_rate='tag(log, interval(1e-4, 1e-2))', or name axes with "
            f"search.over=[KEY] (axes: {axes_text})",
        ),
        (
            fixed,
            f"{', '.join(fixed)} cannot be searched: it decides what the results of trials mean",
        ),
        (
            sizes and sampler.pruner != "none",
            f"search.pruner={sampler.pruner} compares trials of one global batch and cut, and "
            f"{', '.join(sizes)} is searched; use search.pruner=none",
        ),
    )


def _check_objective(sampler: Sampler, config: RunConfig) -> None:
    objective, target = sampler.objective, config.budget.target_loss
    at_once = config.launcher.concurrent_runs
    _refuse(
        (
            "to_target" in objective and target is None,
            f"search.objective={objective} needs a budget.target_loss, as budget=target gives",
        ),
        (
            at_once > 1 and objective in _TIMES,
            f"search.objective={objective} is measured with the machine for one run alone; given "
            f"launcher.concurrent_runs={at_once}, use 1",
        ),
        (
            objective == "loss" and target is not None,
            "search.objective=loss compares losses at equal samples, and runs with a "
            "budget.target_loss stop at the target; use search.objective=samples_to_target, or "
            "budget.target_loss=null",
        ),
        (
            objective == "peak_allocated_gib" and not config.measure.memory,
            "a search for memory needs measure.memory=true",
        ),
        (
            config.init_seed is not None and config.data_seed is not None,
            "a search draws fresh seeds: leave init_seed or data_seed null",
        ),
    )


def _check_fair(sampler: Sampler, config: RunConfig) -> None:
    """Refuse a pruner where losses during training cannot be compared."""
    setting, samples = f"search.pruner={sampler.pruner}", config.budget.samples
    warmup = config.schedule.warmup_samples
    _refuse(
        (
            sampler.objective == "peak_allocated_gib",
            f"{setting} cuts by held-out losses, and search.objective={sampler.objective} is "
            "not judged by them; use search.pruner=none",
        ),
        (
            sampler.seeds > 1,
            f"{setting} cuts single runs, and a trial has {sampler.seeds}; use search.seeds=1",
        ),
        (
            not isinstance(config.schedule, Constant) or config.batch.ramp,
            f"{setting} compares trials on their way, and with schedule={config.schedule.name} "
            "or a ramp ranks change later; use search.pruner=none",
        ),
        (
            samples and warmup > UNJUDGED_SHARE * samples,
            f"{setting} compares trials from {UNJUDGED_SHARE:g} of budget.samples={samples} on, "
            f"and schedule.warmup_samples={warmup} lasts longer",
        ),
        (
            config.evaluation.every_samples is None,
            f"{setting} needs evaluations on the way: give evaluation.every_samples",
        ),
    )


def _refuse(*problems: tuple[object, str]) -> None:
    """Raise the first problem whose condition holds."""
    for holds, message in problems:
        if holds:
            raise ConfigError(message)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def setting_text(value: object) -> str:
    """Write a value as on a command line."""
    return value if isinstance(value, str) else json.dumps(value)
