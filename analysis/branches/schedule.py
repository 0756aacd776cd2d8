"""Schedules of the global batch: stages of (samples before, global batch, learning rate)."""

from __future__ import annotations

import pandas as pd

from batchscape.analysis.cells import RATE, SEEDS, Cells
from batchscape.analysis.comparing.pairs import blocks_of, labels_of

Stages = tuple[tuple[int, int, float], ...]

TOLERANCE = "measure.equivalence_margin"
_COLUMNS = [
    *("sweep_dir", "run_id", "trajectory_id", "cell", "status", "not_invariant", "task"),
    *("global_batch_size", "stages", "learning_rate", "planned_samples", "schedule.name"),
    *("final_eval_loss", TOLERANCE, *SEEDS),
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


def varies_on_the_way(name: str) -> bool:
    """Return whether branches of one training may differ in a setting.

    What a rule makes of the learning rate, a stage has; that of the first one is compared.
    """
    return name.startswith(("budget.", "ramp", "scaling.learning", "scaling.reference"))


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
    runs = runs[is_ended & runs["stages"].notna()].drop_duplicates("trajectory_id")
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
