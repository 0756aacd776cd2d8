"""Tables and texts as Markdown, in a terminal and as CSV; `latex` writes them for a paper."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segments
from rich.table import Table as RichTable
from rich.text import Text

from batchscape.analysis.numbers import TIMES
from batchscape.analysis.report.table import Table
from batchscape.outgoing import outgoing, outgoing_cell
from batchscape.text import count_text


def to_markdown(table: Table) -> str:
    """Write a table as GitHub does, with its notes underneath."""
    texts = table.shortened().texts
    n_left = texts.n_left
    rules = [":---" if i < n_left else "---:" for i in range(len(texts.headers))]
    lines = [[_escaped(header) for header in texts.headers], rules]
    for index, (row, marks) in enumerate(zip(texts.rows, texts.marks, strict=True)):
        cells = [_escaped(text) for text in row]
        cells = [
            f"**{text}**" if (index, c) in texts.bold else text for c, text in enumerate(cells)
        ]
        if marks:
            cells[n_left - 1] += f" <sup>{','.join(marks)}</sup>"
        lines.append(cells)
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    feet = [f"<sup>{mark}</sup> {_escaped(text)}" for mark, text in texts.footnotes.items()]
    # Two trailing spaces break the line without starting a paragraph.
    notes = "".join(f"\n{line}  " for line in [*feet, *map(_escaped, texts.notes)])
    return f"{rows}\n{notes}\n" if notes else f"{rows}\n"


def show(console: Console, table: Table, max_rows: int = 50) -> None:
    """Print a table in a terminal; a line breaks between words, and else is longer than it."""
    texts = table.texts
    # Only the gaps stay where a narrow terminal may break a number.
    rows = [
        [
            *row[: texts.n_left],
            *(
                number.replace("± ", "±").replace(f" {TIMES} ", TIMES).replace("n = ", "n=")
                for number in row[texts.n_left :]
            ),
        ]
        for row in texts.rows[:max_rows]
    ]
    for row, marks in zip(rows, texts.marks, strict=False):
        row[texts.n_left - 1] += f" ({','.join(marks)})" if marks else ""
    grid = RichTable(box=SIMPLE_HEAD, show_edge=False, padding=0)
    least = 0
    for index, header in enumerate(texts.headers):
        column = [row[index] for row in rows]
        width = max(map(cell_len, " ".join([header, *column]).split()), default=1)
        least += width + 1
        grid.add_column(
            Text(header),
            justify="left" if index < texts.n_left else "right",
            min_width=width,
            max_width=max([width, *map(cell_len, column)]),
        )
    for number, row in enumerate(rows):
        styles = ["bold" if (number, c) in texts.bold else "" for c in range(len(row))]
        grid.add_row(*(Text(text, style) for text, style in zip(row, styles, strict=True)))
    console.print(Text(texts.title), highlight=False)
    # A console never prints wider than it is, so the table is rendered at its own width.
    options = console.options.update(width=max(console.width, least))
    console.print(Segments(console.render(grid, options)), crop=False, soft_wrap=True, end="")
    if more := len(texts.rows) - len(rows):
        console.print(f"... and {count_text(more, 'more row')} in the files")
    marks_in_rows = {mark for marks in texts.marks[:max_rows] for mark in marks}
    for mark, text in texts.footnotes.items():
        if mark in marks_in_rows:
            console.print(Text(f"({mark}) {text}"), highlight=False)
    console.print()


def escape_markdown(text: str) -> str:
    """Write text so that Markdown shows it as it is, on one line."""
    return _escaped(outgoing(text))


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|~#&])", r"\\\1", " ".join(text.split()))


def write_csv(path: Path, table: pd.DataFrame) -> None:
    """Write a table as CSV; numbers as they are, texts as `outgoing_cell` makes them."""
    texts = table.copy(deep=False)
    texts.columns = pd.Index([outgoing_cell(str(name)) for name in table.columns])
    for index, dtype in enumerate(table.dtypes):
        if pd.api.types.is_numeric_dtype(dtype):
            continue
        cells = table.iloc[:, index].tolist()
        clean = {text: outgoing_cell(text) for text in set(filter(_is_text, cells))}
        if any(text != cleaned for text, cleaned in clean.items()):
            texts.isetitem(index, [clean[cell] if _is_text(cell) else cell for cell in cells])
    texts.to_csv(path, index=False)


def _is_text(cell: object) -> bool:
    return isinstance(cell, str)
