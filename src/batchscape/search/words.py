"""Descriptions of a search and of its points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchscape.search.space import Space, setting_text
from batchscape.text import count_text


def point_text(point: Mapping[str, Any]) -> str:
    """Write the searched values of a point."""
    return ", ".join(
        f"{key}={f'{value:.4g}' if isinstance(value, float) else setting_text(value)}"
        for key, value in point.items()
    )


def search_text(space: Space) -> str:
    """Describe the searched settings, the trials, the sampler and the objective."""
    sampler = space.sampler
    searched = [
        *(
            f"{i.key} ({i.low:g} to {i.high:g}{', logarithmic' if i.is_log else ''})"
            for i in space.intervals
        ),
        *(
            f"{key} ({', '.join(map(setting_text, values))})"
            for key, values in space.choices.items()
        ),
    ]
    trials = count_text(space.trials, "trial")
    if sampler.seeds > 1:
        trials += f" of {sampler.seeds} runs"
    if axes := list(space.studies[0].values):
        what = "value" if len(axes) == 1 else "combination"
        trials += f" for each of {count_text(len(space.studies), what)} of {', '.join(axes)}"
    return (
        f"Search of {', '.join(searched)}: {trials}, by {sampler.name}, for the least "
        f"{sampler.objective}"
    )
