"""Schedules of the global batch: the stages of a run, and the training that it begins as."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import pandas as pd

from batchscape.analysis.cells import RATE, SEEDS, Cells
from batchscape.analysis.comparing.pairs import blocks_of, labels_of

_STAGES = ["ramp", "ramp_samples", "ramp_learning_rate_factors"]
_NEEDED = [*_STAGES, "learning_rate", "global_batch_size", "planned_samples", "final_eval_loss"]


class Schedule(NamedTuple):
    """The stages of a training."""

    batches: tuple[int, ...]
    begins: tuple[int, ...]
    """Samples before each stage."""
    rates: tuple[float, ...]
    """Learning rates, to four digits."""

    def optimizer_steps(self, samples: int) -> int:
        """Return the optimizer steps until so many samples."""
        ends = (*self.begins[1:], samples)
        stages = zip(self.begins, ends, self.batches, strict=True)
        return sum((end - begin) // batch for begin, end, batch in stages)

    @property
    def text(self) -> str:
        """Batches with their begins and rates over the first, as `4, 8 from 1024 (rate x 1.41)`."""
        first, *others = (
            f"{batch} from {begin}" + (f" (rate x {ratio:.3g})" if ratio != 1 else "")
            for batch, begin, ratio in zip(
                self.batches,
                self.begins,
                [rate / self.rates[0] for rate in self.rates],
                strict=True,
            )
        )
        return ", ".join([first.removesuffix(" from 0"), *others])


def varies_on_the_way(name: str) -> bool:
    """Return whether branches of one training may differ in a setting.

    What a rule makes of the learning rate, a stage has; that of the first one is compared.
    """
    return name.startswith(("budget.", "ramp", "scaling.learning", "scaling.reference"))


def with_schedules(cells: Cells) -> pd.DataFrame:
    """Return the runs that ended, with their schedules and the training that they begin as.

    Returns
    -------
    DataFrame
        No row where no batch changes on the way; else the runs, one a trajectory, with `schedule`,
        `settings` (in which trainings differ), `training` (the same, first rate and batch) and
        `block` (equal for equal seeds).
    """
    runs = cells.runs[cells.runs["status"].isin(["completed", "diverged"])]
    runs = runs.reindex(columns=[*dict.fromkeys([*runs, *_NEEDED])])
    if runs["ramp"].isna().all():
        runs = runs.iloc[:0]
    runs = runs.dropna(subset="learning_rate").drop_duplicates("trajectory_id")
    names = [
        n for n in cells.settings if not varies_on_the_way(n) and n not in {RATE, "learning_rate"}
    ]
    schedules = [_schedule_of(run) for run in runs[_NEEDED].to_dict("records")]
    settings = labels_of(cells, runs, names)
    return runs.assign(
        schedule=schedules,
        settings=settings,
        training=[
            (label, schedule.rates[0], schedule.batches[0])
            for label, schedule in zip(settings, schedules, strict=True)
        ],
        block=blocks_of(runs, SEEDS),
    )


def _schedule_of(run: Mapping[Hashable, Any]) -> Schedule:
    texts = [run[name] if isinstance(run[name], str) else "" for name in _STAGES]
    sizes, climbs, factors = (filter(None, re.split("\u2192|, ", text)) for text in texts)
    batches = tuple(map(int, sizes)) or (int(run["global_batch_size"]),)
    ratios = [*map(float, factors)] or [1.0] * len(batches)
    rates = tuple(float(f"{run['learning_rate'] * ratio:.4g}") for ratio in ratios)
    return Schedule(batches, (0, *accumulate(map(int, climbs))), rates)
