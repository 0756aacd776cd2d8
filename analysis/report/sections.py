"""A section on the page, in the terminal and in files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.text import Text

from batchscape.analysis.cells import Cells
from batchscape.analysis.commands import split_command
from batchscape.analysis.figures.chart import Chart
from batchscape.analysis.figures.vega import paper_caption, paper_chart
from batchscape.analysis.report.paper import paper_texts
from batchscape.analysis.report.topic import Section
from batchscape.analysis.report.writers import escape_markdown, show, to_markdown, write_csv
from batchscape.drawing import Drawing
from batchscape.errors import AnalysisError
from batchscape.outgoing import make_printable, outgoing
from batchscape.record.files import write_atomically
from batchscape.text import count_text, list_text

_FOLDERS = ("tables", "figures", "paper/tables", "paper/figures")
"""Folders beside the page."""

Content = str | bytes | pd.DataFrame | None
"""What a file holds: text, a table, nothing of ours (a chart, which another process draws), or
bytes, which are written whole, and only where there is no such file."""

WRITTEN = "report_files.txt"
"""The list of the files of a report; while it is written, of those still to be written too."""

_DOCUMENT = "paper/paper.tex"
"""What a paper shows; it is written once, and its author's from then on."""
_SENTENCES = 5
"""Sentences of the first screen."""
FIRST_CHARTS = ("steps_to_target", "pareto", "pareto_0", "heat_map", "cost", "loss")
"""Charts of which the first that exists stands beside these sentences."""


def make_folders(out: Path) -> None:
    """Make the folders of tables and figures."""
    for name in _FOLDERS:
        (out / name).mkdir(parents=True, exist_ok=True)


def announce(out: Path, names: Iterable[str]) -> None:
    """List files before they are written, so that the next report removes those of a killed one."""
    _write_list(out, _read_list(out) | {*names})


def remove_stale(out: Path, names: Collection[str]) -> Path:
    """Remove files that only an earlier report wrote, and no others; return the new list."""
    stale = _read_list(out) - {*names}
    # The folders are searched: a list that came from elsewhere names nothing outside of them.
    for path in [path for folder in _FOLDERS for path in (out / folder).iterdir()]:
        if path.relative_to(out).as_posix() in stale and path.is_file():
            path.unlink()
    for place in (out / WRITTEN, out / _DOCUMENT):
        for torn in place.parent.glob(f".{place.name}.*.tmp"):
            torn.unlink()
    _write_list(out, names)
    return out / WRITTEN


def _read_list(out: Path) -> set[str]:
    listing = out / WRITTEN
    return set(listing.read_text("utf-8", "replace").splitlines()) if listing.exists() else set()


def _write_list(out: Path, names: Iterable[str]) -> None:
    write_atomically(out / WRITTEN, "".join(f"{name}\n" for name in sorted(names)).encode())


def title_and_questions(cells: Cells) -> tuple[str, list[str]]:
    """Name the sweeps, and quote the questions of those that are prepared studies."""
    names = dict.fromkeys(cells.runs["sweep_name"].astype(str))
    return list_text(names, "and"), [*_questions(names)]


def _questions(names: Iterable[str]) -> Iterator[str]:
    """Quote the questions of prepared studies, which their files begin with, by sweep names."""
    for name in names:
        # A hash of fixed settings may follow the name of the study.
        study = re.sub("-[0-9a-f]{8}$", "", name)
        if not study.isidentifier():
            continue
        file = resources.files("batchscape").joinpath("sweeps", f"{study}.yaml")
        if not file.is_file():
            continue
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if "?" in line]
        if lines and lines[0].startswith("#"):
            yield lines[0].lstrip("# ").partition("?")[0] + "?"


def in_short(sections: Iterable[Section]) -> list[str]:
    """Return the first screen: short sentences, with counts of warnings where no command ends."""
    sentences = []
    for section in sections:
        count = len(section.warnings)
        warned = f" ({count_text(count, 'warning')})" if count else ""
        sentences += [text if split_command(text)[1] else text + warned for text in _short(section)]
    return sentences[:_SENTENCES]


def _short(section: Section) -> Sequence[str]:
    return section.first_screen or section.answer[:1]


def section_lines(section: Section, *, with_charts: bool = True) -> list[str]:
    """Write a section as paragraphs of Markdown; paths are relative to the folder of the page."""
    lines = [f"## {escape_markdown(section.title)}"]
    lines += [sentence_markdown(sentence) for sentence in (*section.answer, *section.settling_runs)]
    lines += [sentence_markdown(warning, "**") for warning in section.warnings]
    for table in section.tables:
        # One table needs no title beside the section's.
        if len(section.tables) > 1:
            lines.append(f"### {escape_markdown(table.title)}")
        files = f"[csv](tables/{table.name}.csv), [tex](paper/tables/{table.name}.tex)"
        lines += [to_markdown(table), f"Files: {files}."]
    for picture in section.pictures if with_charts else ():
        lines.append(f"![{picture.name}](figures/{picture.name}.png)")
        lines.append(escape_markdown(paper_caption(picture)))
    if section.chart_data:
        links = ", ".join(f"[{name}.csv](tables/{name}.csv)" for name in section.chart_data)
        lines.append(f"Behind the charts: {links}.")
    return lines


def joined(lines: Iterable[str]) -> str:
    """Set paragraphs of Markdown, without control characters."""
    return make_printable("\n\n".join(line.strip("\n") for line in lines) + "\n")


def sentence_markdown(sentence: str, mark: str = "") -> str:
    """Write a sentence in Markdown between two marks, and the command at its end as code."""
    text, command = split_command(sentence)
    if not command or "`" in command:
        return f"{mark}{escape_markdown(sentence)}{mark}"
    return f"{mark}{escape_markdown(text.rstrip())}{mark} `{command}`" if text else f"`{command}`"


def say(console: Console, sentence: str, style: str = "", *, in_one_piece: bool = False) -> None:
    """Print a sentence in a terminal, which alone breaks the line of a command: it is copied."""
    in_one_piece = in_one_piece or bool(split_command(sentence)[1])
    console.print(Text(sentence), style=style, highlight=False, soft_wrap=in_one_piece)


def show_section(console: Console, section: Section) -> None:
    """Print the answers, warnings and tables of a section in a terminal."""
    say(console, f"\n{section.title}", "bold")
    for sentence in (*section.answer, *section.settling_runs):
        say(console, sentence)
    for warning in section.warnings:
        say(console, f"! {warning}", "bold")
    for table in section.tables:
        console.print()
        show(console, table)


def section_contents(
    sections: Sequence[Section], *, methods: Mapping[str, Sequence[str]], with_charts: bool = True
) -> dict[str, Content]:
    """Return tables, names of charts, and a paper with both, by file; `methods` is by title."""
    tables = [table for section in sections for table in section.tables]
    charts = [chart for section in sections for chart in section.pictures]
    curves = [item for section in sections for item in section.chart_data.items()]
    names = {
        "table": [*(table.name for table in tables), *(name for name, _ in curves)],
        "figure": [chart.name for chart in charts],
        "headline": [name for section in sections for name in section.headlines],
    }
    for kind, kind_names in names.items():
        if repeated := [name for name, count in Counter(kind_names).items() if count > 1]:
            raise AnalysisError(
                f"every {kind} of a report has a name of its own, but not {list_text(repeated)}"
            )
    # A paper counts no warnings: they stand on the page, beside what they weaken.
    answers = [text for section in sections for text in _short(section)][:_SENTENCES]
    texts = paper_texts(sections, answers=answers, methods=methods, with_charts=with_charts)
    frames = [(table.name, table.frame.drop(columns=list(table.hidden))) for table in tables]
    files = [file for chart in charts if with_charts for file in _chart_files(chart)]
    return {
        **{f"tables/{name}.csv": frame for name, frame in (*frames, *curves)},
        **dict.fromkeys(files),
        **{f"paper/{name}": outgoing(text) for name, text in texts.items()},
        _DOCUMENT: resources.files("batchscape.analysis.report").joinpath("paper.tex").read_bytes(),
    }


def write_contents(out: Path, contents: Mapping[str, Content]) -> None:
    """Write files into folders that are there."""
    for name, content in contents.items():
        file = out / name
        if isinstance(content, pd.DataFrame):
            write_csv(file, content)
        elif isinstance(content, str):
            file.write_text(content, encoding="utf-8")
        elif content is not None and not file.exists():
            # Half of it would be taken for its author's.
            write_atomically(file, content)


def _chart_files(chart: Chart) -> list[str]:
    return [f"figures/{chart.name}.png", f"paper/figures/{chart.name}.pdf"]


def begin_charts(section: Section, out: Path, drawing: Drawing) -> None:
    """Begin to draw the charts of a section; other sections are computed meanwhile."""
    for chart in section.pictures:
        drawing.begin(paper_chart(chart), [out / name for name in _chart_files(chart)])


def method_lines(methods: Mapping[str, Sequence[str]]) -> list[str]:
    """Write sentences on methods, which are by title, as paragraphs of Markdown."""
    paragraphs = [
        f"**{title}.** {escape_markdown(' '.join(sentences))}"
        for title, sentences in methods.items()
    ]
    return ["## Methods", *paragraphs]
