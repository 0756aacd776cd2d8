"""What is searched, by whom, and for what."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from batchscape.config.types import STRICT, Affects, Count, NonNegative, Positive, Seed

__all__ = ["NoSearch", "Objective", "Sampler", "Search"]

Objective = Literal[
    "loss",
    "steps_to_target",
    "samples_to_target",
    "time_to_target_s",
    "device_hours_to_target",
    "peak_allocated_gib",
]
"""What a search makes small; `search.objective` says what each is."""


def _loss() -> list[Objective]:
    return ["loss"]


@dataclass(frozen=True, config=STRICT)
class NoSearch:
    """Every combination of the values that are given."""

    name: Annotated[Literal["none"], Affects.NOTHING] = "none"


@dataclass(frozen=True, config=STRICT)
class Sampler:
    """Trials, one after the other, then a small grid around the best."""

    name: Annotated[Literal["tpe", "gp", "random", "grid"], Affects.NOTHING]
    objective: Annotated[list[Objective], Field(min_length=1, max_length=2), Affects.NOTHING] = (
        Field(default_factory=_loss)
    )
    """What is to be small: one, or two at once, of which the front is found."""
    trials: Annotated[Count, Affects.NOTHING] = 8
    """Trials of each study."""
    seeds: Annotated[Count, Affects.NOTHING] = 1
    """Runs of a trial with seeds of their own, from `seed` upwards; their mean counts."""
    over: Annotated[list[str], Affects.NOTHING] = Field(default_factory=list)
    """Keys of axes whose values are searched too, beside all intervals."""
    per: Annotated[list[str] | None, Affects.NOTHING] = None
    """Keys of axes each value of which has a study of its own; the mean over other axes counts.
    Null: all axes that are not searched."""
    pruner: Annotated[Literal["none", "median"], Affects.NOTHING] = "none"
    """`median`: a trial is cut whose held-out loss is above the median of the trials of its study
    at as many samples. Only a rule that is fair: one objective, one seed, a constant schedule."""
    max_memory_gib: Annotated[Positive | None, Affects.NOTHING] = None
    """Peak of allocated memory of a device that the best may have; null: any."""
    storage: Annotated[str | None, Affects.NOTHING] = None
    """URL of a database of Optuna's, such as `sqlite:///trials.db`; null: a journal in the folder
    of the search."""
    sampler_seed: Annotated[Seed, Affects.NOTHING] = 0
    """Seed of what is drawn."""
    grid_points: Annotated[NonNegative, Affects.NOTHING] = 5
    """Values of each interval that are measured around the best of each study, and more where it is
    the last of them; 1: the best alone; 0: no grid."""
    grid_seeds: Annotated[Count, Affects.NOTHING] = 3
    """Runs of each of them, with seeds that no trial had."""
    grid_ratio: Annotated[Annotated[float, Field(gt=1, allow_inf_nan=False)], Affects.NOTHING] = 1.5
    """Between two such values of an interval that is tagged log; those of others are a tenth of
    their interval apart."""


Search = Annotated[NoSearch | Sampler, Field(discriminator="name")]
