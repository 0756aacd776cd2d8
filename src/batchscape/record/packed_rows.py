"""Rows of thousands of runs as JSON: most values of most runs are those of another one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["packed_rows", "unpacked_rows"]


def packed_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Write rows down by column, each different value once.

    Parameters
    ----------
    rows : sequence of mapping
        Of values that JSON can carry, NaN included; none is empty.

    Returns
    -------
    dict
        That JSON can carry; `unpacked_rows` gives the rows back, with their order of keys.
    """
    shapes: dict[tuple[str, ...], list[int]] = {}
    for number, row in enumerate(rows):
        shapes.setdefault(tuple(row), []).append(number)
    parts = []
    for names, numbers in shapes.items():
        columns = []
        for name in names:
            # 1, 1.0 and True are equal, and are not the same.
            seen: dict[str, int] = {}
            texts = (json.dumps(rows[number][name]) for number in numbers)
            codes = [seen.setdefault(text, len(seen)) for text in texts]
            columns.append([[json.loads(text) for text in seen], codes])
        parts.append({"names": names, "numbers": numbers, "columns": columns})
    return {"size": len(rows), "parts": parts}


def unpacked_rows(packed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what `packed_rows` was given.

    Raises
    ------
    LookupError, TypeError, ValueError
        If it is something else.
    """
    rows: list[dict[str, Any]] = [{}] * packed["size"]
    for part in packed["parts"]:
        columns = [[values[code] for code in codes] for values, codes in part["columns"]]
        for number, values in zip(part["numbers"], zip(*columns, strict=True), strict=True):
            rows[number] = dict(zip(part["names"], values, strict=True))
    return rows
