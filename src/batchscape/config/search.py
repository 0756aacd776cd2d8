"""The search over settings: its sampler and its objective."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from batchscape.config.types import Count, NonNegative, settings

Objective = Literal[
    "loss",
    "steps_to_target",
    "samples_to_target",
    "time_to_target_s",
    "device_hours_to_target",
    "peak_allocated_gib",
]
"""Results that a search minimises."""


def _refuse_list(objective: object) -> object:
    if isinstance(objective, list):
        raise ValueError(
            "a search has one objective, which is written as one name, such as "
            f"search.objective=loss; given the list {objective}. Two quantities are compared by a "
            "grid of plain runs: list the values, without search="
        )
    return objective


@settings
class NoSearch:
    """Every combination of the values that are given."""

    name: Literal["none"] = "none"


@settings
class Sampler:
    """Trials, one after the other, then a small grid around the best."""

    name: Literal["tpe", "gp", "random", "grid"]
    objective: Annotated[Objective, BeforeValidator(_refuse_list)] = "loss"
    """What is to be small, of each study by itself."""
    trials: Count = 8
    """Trials of each study."""
    seeds: Count = 1
    """Runs of a trial with seeds of their own, from `seed` upwards; their mean counts."""
    over: list[str] = Field(default_factory=list)
    """Keys of axes whose values are searched too, beside all intervals; every combination of the
    other axes has a study of its own."""
    pruner: Literal["none", "median"] = "none"
    """`median`: a trial is cut whose least held-out loss is above the median of the trials of its
    study at as many samples. Only a rule that is fair: one seed, a constant schedule."""
    grid_points: NonNegative = 5
    """Values of each interval that are measured around the best of each study, and more where it is
    the last of them; 1: the best alone; 0: no grid."""
    grid_seeds: Count = 3
    """Runs of each of them, with seeds that no trial had."""


Search = Annotated[NoSearch | Sampler, Field(discriminator="name")]
