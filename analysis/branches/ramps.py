"""Ramps of the global batch: the one that follows the critical batch, and how ramps compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from batchscape.analysis.branches.critical import critical_batches, estimate_of, rate_exponent
from batchscape.analysis.branches.schedule import Schedule, with_schedules
from batchscape.analysis.cells import Cells
from batchscape.analysis.commands import cut_command
from batchscape.analysis.comparing.pairs import Contrast, Level, contrasts_of
from batchscape.analysis.estimates import FEWEST, too_few
from batchscape.errors import AnalysisError

_PLACE = ["settings", "planned_samples"]


@dataclass(frozen=True)
class Ramp:
    """A ramp that stays below the critical batch, and what is known of it."""

    schedule: Schedule
    samples: int
    """Samples until the end of the last window, in whole optimizer steps."""
    ages: tuple[str, ...]
    """The critical batch at each age."""
    command: str | None
    """Command that compares it with the smallest batch; None where none launched the branches."""

    def as_mapping(self) -> dict[str, Any]:
        """Return values for JSON."""
        return {
            **self.schedule._asdict(),
            "samples": self.samples,
            "optimizer_steps": self.schedule.optimizer_steps(self.samples),
            "critical_batches": self.ages,
            "command": self.command,
        }

    @property
    def lines(self) -> list[str]:
        """The ramp, the steps that it should save, and what it rests on, as sentences."""
        small = self.schedule.batches[0]
        steps, base = self.schedule.optimizer_steps(self.samples), self.samples // small
        return [
            f"Train with batches of {self.schedule.text} samples.",
            f"Over {self.samples} samples that takes {steps} optimizer steps in place of {base}, "
            f"{1 - steps / base:.0%} fewer.",
            f"From each age on it is the largest of {small}, {2 * small}, {4 * small}, ... up to "
            f"the low end of the critical batch's interval: {'; '.join(self.ages)}.",
            *([f"Whether it loses nothing: {self.command}"] if self.command else []),
        ]


def find_ramp(cells: Cells, steps: pd.DataFrame) -> Ramp:
    """Find the stages that follow the critical batch, at the low ends of its intervals.

    Raises
    ------
    AnalysisError
        Where the critical batch is not identified.
    """
    table = critical_batches(cells, steps)
    if table.empty:
        msg = (
            "no run goes on from another one's training with a larger batch; what a ramp follows "
            "is measured by: batchscape sweep sweeps=critical_batch_by_branches"
        )
        raise AnalysisError(msg)
    if len(table[["training", "rate_exponent"]].drop_duplicates()) > 1:
        msg = "branches of several trainings are in these folders, and a ramp is that of one"
        raise AnalysisError(msg)
    rows = table.sort_values("age_samples").to_dict("records")
    ages = tuple(f"{estimate_of(row).text()} after {row['age_samples']}" for row in rows)
    fewest = int(table["n"].min())
    (_, rate, small), power = rows[0]["training"], float(rows[0]["rate_exponent"])
    batches, begins = [small], [0]
    for row in rows:
        # An age without a low end says nothing of larger batches.
        batch = (
            small * 2 ** int(math.log2(max(row["low"], small) / small)) if fewest >= FEWEST else 0
        )
        if batch > batches[-1]:
            batches.append(batch)
            begins.append(int(row["age_samples"]))
    if len(batches) == 1:
        few = f"; {too_few(fewest, 'seeds')}" if fewest < FEWEST else ""
        msg = (
            f"not identified: at no age a batch of {2 * small} is surely within the tolerance "
            f"({'; '.join(ages)}{few}). More seeds, later ages or a smaller first batch would tell"
        )
        raise AnalysisError(msg)
    last = rows[-1]
    rest = int(last["age_samples"] + last["window_samples"]) - begins[-1]
    samples = begins[-1] + rest // batches[-1] * batches[-1]
    rates = tuple(rate * (batch / small) ** power for batch in batches)
    schedule = Schedule(tuple(batches), tuple(begins), rates)
    runs = cells.runs[cells.runs["run_id"].isin(last["run_ids"].split())]
    states_rates = runs["scaling.learning_rate"].eq("none").all()
    stages = [
        f"{{samples:{end - begin},global_batch_size:{batch}"
        + (f",learning_rate_factor:{stage_rate / rate:.6g}}}" if states_rates else "}")
        for batch, begin, stage_rate, end in zip(*schedule, (*begins[1:], samples), strict=True)
    ]
    settings = {
        "batch.ramp": f"[],[{','.join(stages)}]",
        "batch.global_batch_size": str(small),
        "budget.samples": str(samples),
    }
    return Ramp(schedule, samples, ages, cut_command(runs, settings))


def against_constant(cells: Cells) -> list[Contrast]:
    """Compare the final held-out loss of ramps with that of their first batch throughout.

    Returns
    -------
    list of Contrast
        By pairs of seeds, at equal samples; `level` and `base` are schedules, `place` has settings
        and samples. Where all runs change their batch at one age, they are branches, and no ramps.
    """
    rows = _ramps(cells)

    def to_first(schedules: Sequence[Level]) -> list[tuple[Level, Level]]:
        firsts = {(each.batches[:1], (0,), each.rates[:1]) for each in schedules if each.begins[1:]}
        (base,) = [each for each in schedules if each in firsts] or [None]
        return [] if base is None else [(each, base) for each in schedules if each != base]

    contrasts = contrasts_of(rows, "schedule", _PLACE, "block", to_first)
    return [replace(each, name=f"{each.level.text} against {each.base.text}") for each in contrasts]


def late_against_early(cells: Cells) -> list[Contrast]:
    """Compare ramps of equal batches and rates: the one that climbs last with the first one."""
    rows = _ramps(cells)
    rows = rows.assign(
        begins=[each.begins for each in rows["schedule"]],
        stages=[(each.batches, each.rates) for each in rows["schedule"]],
    )
    within = [*_PLACE, "stages"]
    contrasts = contrasts_of(
        rows,
        "begins",
        within,
        "block",
        lambda levels: [(levels[-1], levels[0])] * (len(levels) > 1),
    )
    return [
        replace(
            each,
            name=f"{Schedule(each.place[-1][0], each.level, each.place[-1][1]).text} against the "
            f"same from {', '.join(map(str, each.base[1:]))}",
        )
        for each in contrasts
    ]


def follows(schedule: Schedule, settings: str, ages: pd.DataFrame) -> bool:
    """Return whether a schedule grows, by the rule of branches, up to their critical batch at most.

    Parameters
    ----------
    settings : str
        As `with_schedules` has them.
    ages : DataFrame
        As `critical_batches` returns it.
    """
    if ages.empty or schedule.batches[-1] <= schedule.batches[0]:
        return False
    training, power = (settings, schedule.rates[0], schedule.batches[0]), rate_exponent(schedule)
    is_same = ages["training"].map(training.__eq__) & ages["rate_exponent"].sub(power).abs().le(
        0.01
    )
    known = ages[is_same].sort_values("age_samples")
    limits = [
        known.loc[known["age_samples"].le(begin), "estimate"].tail(1).max()
        for begin in schedule.begins[1:]
    ]
    return all(batch <= limit for batch, limit in zip(schedule.batches[1:], limits, strict=True))


def _ramps(cells: Cells) -> pd.DataFrame:
    """Return runs that are compared at equal samples, with `value`, their final held-out loss."""
    runs = with_schedules(cells)
    climbs = runs["schedule"].map(lambda schedule: schedule.begins)
    places = climbs[climbs.map(len).gt(1)].groupby([runs[name] for name in _PLACE]).nunique()
    kept = runs[_PLACE].merge(places[places.gt(1)].rename("climbs").reset_index(), how="left")
    losses = pd.to_numeric(runs["final_eval_loss"]).astype(float)
    losses = losses.mask(runs["status"].eq("diverged"), math.inf)
    return runs.assign(value=losses)[kept["climbs"].notna().to_numpy()]
