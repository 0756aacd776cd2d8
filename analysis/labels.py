"""Labels of settings, and of the groups of runs that they distinguish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pandas as pd

from batchscape.analysis.cells import setting_label, shorten_values


def setting_headers(names: Sequence[str]) -> list[str]:
    """Shorten the keys of settings, unless two would become equal."""
    labels = [setting_label(name) for name in names]
    repeated = Counter(labels)
    return [
        name if repeated[label] > 1 else label for name, label in zip(names, labels, strict=True)
    ]


def group_labels(settings: pd.DataFrame) -> pd.Series[str]:
    """Name groups, a row each, by the settings that distinguish them, as in "width 8, depth 2"."""
    texts = settings.apply(shorten_values).set_axis(setting_headers(list(settings.columns)), axis=1)
    rows = texts.to_dict("records")
    labels = [", ".join(f"{name} {value}" for name, value in row.items()) for row in rows]
    return pd.Series(labels, index=settings.index, dtype=str)


def group_name(groups: Mapping[int, str] | None, group: object) -> str:
    """Return the label of a group, or its number where it has none."""
    number = int(str(group))
    return (groups or {}).get(number, f"group {number}")
