"""Ramps of the global batch: the one that follows the critical batch, and how ramps compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from batchscape.analysis.branches.critical import (
    TRAINING,
    critical_batches,
    estimate_of,
)
from batchscape.analysis.branches.schedule import (
    branches_of,
    optimizer_steps,
    rate_exponent,
    schedule_text,
    with_schedules,
)
from batchscape.analysis.cells import Cells
from batchscape.analysis.commands import cut_command
from batchscape.analysis.comparing.pairs import Contrast, contrasts_of
from batchscape.analysis.estimates import FEWEST, too_few
from batchscape.errors import AnalysisError


@dataclass(frozen=True)
class Ramp:
    """A ramp that stays below the critical batch, and what is known of it."""

    schedule: str
    batches: tuple[int, ...]
    begins: tuple[int, ...]
    samples: int
    """Samples until the end of the last window, in whole optimizer steps."""
    optimizer_steps: int
    steps_of_first_batch: int
    """Optimizer steps of the same samples with the first batch throughout."""
    critical_batches: tuple[str, ...]
    command: str | None
    """Command that compares both; None where none launched the branches."""

    @property
    def lines(self) -> list[str]:
        """What to do, what it should save, and what that rests on, as sentences."""
        return [
            f"Train with batches of {self.schedule}.",
            f"Over {self.samples} samples that takes {self.optimizer_steps} optimizer steps in "
            f"place of {self.steps_of_first_batch}. From each age on it is the largest doubling of "
            f"{self.batches[0]} up to the low end of the critical batch's interval: "
            f"{'; '.join(self.critical_batches)}.",
            f"Whether it loses nothing: {self.command or 'train both, with equal seeds'}",
        ]


def find_ramp(cells: Cells, steps: pd.DataFrame) -> Ramp:
    """Find the stages that follow the critical batch, at the low ends of its intervals.

    Raises
    ------
    AnalysisError
        Where the critical batch is not identified.
    """
    table = critical_batches(cells, steps)
    if table.empty or len(table[[*TRAINING]].drop_duplicates()) > 1:
        raise AnalysisError(
            "a ramp follows the critical batch of one training, by runs that go on from it with "
            "larger batches, as in: batchscape sweep sweeps=critical_batch_by_branches"
        )
    rows = table.sort_values("age_samples").to_dict("records")
    texts = tuple(f"{estimate_of(row).text()} after {row['age_samples']}" for row in rows)
    last, fewest = rows[-1], int(table["n"].min())
    small, rate, power = (last[name] for name in TRAINING[1:])
    stages = [(0, small, rate)]
    for row in rows if fewest >= FEWEST else []:
        # An age without a low end says nothing of larger batches.
        batch = small * 2 ** int(math.log2(max(row["low"], small) / small) + 1e-9)
        begin, before, _ = stages[-1]
        if batch > before:
            # After whole optimizer steps of the stage before.
            begin += -(-(row["age_samples"] - begin) // before) * before
            stages.append((begin, batch, rate * (batch / small) ** power))
    if len(stages) == 1:
        few = f"; {too_few(fewest, 'seeds')}" if fewest < FEWEST else ""
        raise AnalysisError(
            f"not identified: at no age a batch of {2 * small} is surely within the tolerance "
            f"({'; '.join(texts)}{few}). More seeds, later ages or a smaller first batch would tell"
        )
    begins, batches, _ = zip(*stages, strict=True)
    end = last["age_samples"] + last["window_samples"]
    samples = end - (end - begins[-1]) % batches[-1]
    runs = cells.runs[cells.runs["run_id"].isin(last["run_ids"].split())]
    # Where no rule makes the rates, each stage states its own.
    states = runs["scaling.learning_rate"].iloc[0] == "none"
    ramp = ",".join(
        f"{{samples:{end - begin},global_batch_size:{batch}"
        f"{f',learning_rate_factor:{stage_rate / rate:.6g}' * states}}}"
        for (begin, batch, stage_rate), end in zip(stages, (*begins[1:], samples), strict=True)
    )
    settings = {
        "batch.ramp": f"[],[{ramp}]",
        "batch.global_batch_size": str(small),
        "budget.samples": str(samples),
    }
    if states:
        settings["optimizer.learning_rate"] = f"{runs['stages'].iloc[0][0][2]:g}"
    return Ramp(
        schedule_text(tuple(stages)),
        batches,
        begins,
        samples,
        optimizer_steps(tuple(stages), samples),
        samples // small,
        texts,
        cut_command(runs, settings),
    )


def compared_ramps(cells: Cells) -> pd.DataFrame:
    """Return the runs that are compared at equal samples.

    Branches, by which a critical batch is measured, are left out.

    Returns
    -------
    DataFrame
        As `with_schedules` has them, with `value` (final held-out loss), `batches` (the schedule as
        a text), `optimizer_steps`, `sizes` (batches and rates), `begins` and `at` (samples and
        settings).
    """
    runs = with_schedules(cells)
    runs = runs.drop(branches_of(runs).index)
    losses = pd.to_numeric(runs["final_eval_loss"]).astype(float)
    samples, settings, stages = (
        runs[name].tolist() for name in ("planned_samples", "settings", "stages")
    )
    return runs.assign(
        value=losses.mask(runs["status"].eq("diverged"), math.inf),
        batches=[schedule_text(each) for each in stages],
        optimizer_steps=[*map(optimizer_steps, stages, map(int, samples))],
        sizes=[", ".join(f"{b} ({rate:.3g})" for _, b, rate in each) for each in stages],
        begins=runs["stages"].map(lambda each: tuple(begin for begin, *_ in each)),
        at=[
            f"{n} samples{name and ', ' + name}" for n, name in zip(samples, settings, strict=True)
        ],
    )


def against_first_batch(rows: pd.DataFrame) -> list[Contrast]:
    """Compare the final losses of `compared_ramps` with the first batch throughout, by seeds."""

    def to_first(texts: Sequence[str]) -> list[tuple[str, str]]:
        bases = [text for text in texts if any(each.startswith(f"{text}, ") for each in texts)]
        return [(text, base) for base in bases for text in texts if text != base]

    return contrasts_of(rows, "batches", ["at"], "block", to_first)


def late_against_early(rows: pd.DataFrame) -> list[Contrast]:
    """Compare `compared_ramps` of equal batches and rates: the latest with the earliest."""

    def latest_to_earliest(begins: Sequence[tuple[int, ...]]) -> list[tuple[Any, Any]]:
        early, late = begins[0], begins[-1]
        is_later = all(a < b for a, b in zip(early[1:], late[1:], strict=True))
        return [(late, early)] if len(begins) > 1 and is_later else []

    grows = rows["stages"].map(lambda stages: stages[-1][1] > stages[0][1]).astype(bool)
    return contrasts_of(rows[grows], "begins", ["sizes", "at"], "block", latest_to_earliest)


def follows(run: pd.Series[Any], ages: pd.DataFrame) -> bool:
    """Return whether a run's batch grows, by the rule of branches, to their critical batch at most.

    Parameters
    ----------
    run : Series
        Of `compared_ramps`.
    ages : DataFrame
        As `critical_batches` returns it.
    """
    (_, small, rate), *others = run["stages"]
    if ages.empty or not others or others[-1][1] <= small:
        return False
    training = [run["settings"], small, rate, rate_exponent(run["stages"])]
    same = ages[ages[[*TRAINING]].eq(training).all(axis=1)]
    # Of several windows the strictest.
    limits = same.groupby("age_samples")["estimate"].min(skipna=False)
    return all(batch <= limits.loc[:begin].iloc[-1:].max() for begin, batch, _ in others)
