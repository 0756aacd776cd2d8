"""Schedules of the global batch: stages of (samples before, global batch, learning rate)."""

from __future__ import annotations

import math

import pandas as pd

from batchscape.analysis.cells import RATE, SEEDS, Cells
from batchscape.analysis.comparing.pairs import blocks_of, labels_of
from batchscape.analysis.equivalence.paired import stated_margin
from batchscape.analysis.hardware import is_timed_alone

Stages = tuple[tuple[int, int, float], ...]

TOLERANCE = "measure.equivalence_margin"
_COLUMNS = [
    *("sweep_dir", "run_id", "trajectory_id", "cell", "status", "not_invariant", "task"),
    *("global_batch_size", "stages", "learning_rate", "planned_samples", "schedule.name"),
    *("final_eval_loss", "timed_steps", TOLERANCE, *SEEDS),
]


def optimizer_steps(stages: Stages, samples: int) -> int:
    """Return the optimizer steps until so many samples."""
    ends = (*(begin for begin, *_ in stages[1:]), samples)
    return sum((end - begin) // batch for (begin, batch, _), end in zip(stages, ends, strict=True))


def schedule_text(stages: Stages) -> str:
    """Write stages, as in `4 (rate 0.004), 8 from 1024 (rate 0.00566)`."""
    return ", ".join(
        f"{batch}{f' from {begin}' * (begin > 0)} (rate {rate:.3g})"
        for begin, batch, rate in stages
    )


def tolerance_of(runs: pd.DataFrame, quantity: str) -> float:
    """Return the margin that runs state for a quantity; NaN where they state several."""
    margins = pd.to_numeric(runs[TOLERANCE]).to_numpy(dtype=float)
    margin, conflict = stated_margin(margins, quantity)
    return math.nan if conflict else margin


def varies_on_the_way(name: str) -> bool:
    """Return whether branches of one training may differ in a setting.

    What a rule makes of the learning rate, a stage has; that of the first one is compared.
    """
    return name.startswith(("budget.", "ramp", "scaling.learning", "scaling.reference"))


def rate_exponent(stages: Stages) -> float:
    """Return the exponent in the batch by which the learning rate grows until the last stage."""
    (_, small, first), (_, batch, last) = stages[0], stages[-1]
    return round(math.log(last / first) / math.log(batch / small), 2)


def branches_of(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that grow once, to several batches at one place: those of `with_schedules`.

    A single larger batch there is a ramp.

    Returns
    -------
    DataFrame
        The runs with `age` (samples before the batch grows) and `power` (`rate_exponent`).
    """
    small = runs["stages"].map(lambda stages: stages[0][1]).astype(float)
    grown = runs[runs["stages"].str.len().eq(2) & runs["global_batch_size"].gt(small)]
    first = grown["stages"].str[0]
    powers = grown["stages"].map(rate_exponent)
    grown = grown.assign(age=grown["stages"].str[1].str[0], power=powers)
    places = grown.groupby(["settings", first, "age", "planned_samples", "power"])
    return grown[places["global_batch_size"].transform("nunique").gt(1)]


def with_schedules(cells: Cells) -> pd.DataFrame:
    """Return the runs that ended with their schedules; none where no batch changes on the way.

    Returns
    -------
    DataFrame
        The runs, one a trajectory, with what is needed of their columns: `stages` (rates to four
        digits), `settings` (in which trainings differ), `block` (equal for equal seeds) and others.
    """
    runs = cells.runs.reindex(columns=_COLUMNS)
    is_ended = runs["status"].isin(["completed", "diverged"]) & runs["learning_rate"].notna()
    is_whole = runs["stages"].notna() & ~is_timed_alone(runs)
    runs = runs[is_ended & is_whole].drop_duplicates("trajectory_id")
    if all(len(stages) == 1 for stages in runs["stages"]):
        runs = runs.iloc[:0]
    kept = [
        n for n in cells.settings if not varies_on_the_way(n) and n not in {RATE, "learning_rate"}
    ]
    return runs.assign(
        stages=runs["stages"]
        .astype(object)
        .map(lambda stages: tuple((at, batch, float(f"{rate:.4g}")) for at, batch, rate in stages)),
        settings=labels_of(cells, runs, kept),
        block=blocks_of(runs, SEEDS),
    )
