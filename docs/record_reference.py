"""Writes the tables of `docs/record.md` from `src/batchscape/record/figures.py`.

Run it after a change of a column or a figure: `python docs/record_reference.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from batchscape.record.figures import COLUMNS, FIGURES

PAGE = Path(__file__).with_name("record.md")
_BEGIN = "## Columns\n"


def page() -> str:
    """Return the page with its tables as they are now."""
    return PAGE.read_text().partition(_BEGIN)[0] + _BEGIN + "\n".join(_tables()) + "\n"


def _tables() -> Iterator[str]:
    for table, columns in COLUMNS.items():
        yield f"\n`{table}`:\n\n| column | type | meaning |\n| --- | --- | --- |"
        for name, column in columns.items():
            yield f"| `{name}` | {column.dtype} | {column.meaning} |"
    yield "\n`status.json`, `summary` (one figure a run):\n\n| figure | meaning |\n| --- | --- |"
    for name, figure in FIGURES.items():
        yield f"| `{name}` | {figure.meaning} |"


if __name__ == "__main__":
    PAGE.write_text(page())
