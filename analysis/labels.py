"""What settings, and the groups of runs that they tell apart, are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pandas as pd

from batchscape.analysis.cells import setting_label, where_they_differ

__all__ = ["group_labels", "group_name", "setting_headers"]


def setting_headers(names: Sequence[str]) -> list[str]:
    """Shorten the keys of settings, but for those that would then be the same."""
    labels = [setting_label(name) for name in names]
    repeated = Counter(labels)
    return [
        name if repeated[label] > 1 else label for name, label in zip(names, labels, strict=True)
    ]


def group_labels(settings: pd.DataFrame) -> pd.Series[str]:
    """Name groups of runs by the settings that tell them apart, as in "width 8, depth 2".

    Parameters
    ----------
    settings : DataFrame
        One row a group, one text column a setting; without columns, names are empty.
    """
    texts = settings.apply(where_they_differ).set_axis(
        setting_headers(list(settings.columns)), axis=1
    )
    rows = texts.to_dict("records")
    labels = [", ".join(f"{name} {value}" for name, value in row.items()) for row in rows]
    return pd.Series(labels, index=settings.index, dtype=str)


def group_name(groups: Mapping[int, str] | None, group: object) -> str:
    """Return the label of a group, or its number where no label is known."""
    number = int(str(group))
    return (groups or {}).get(number, f"group {number}")
