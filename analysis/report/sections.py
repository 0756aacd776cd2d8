"""A section on the page, in the terminal and in files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from batchscape.analysis.commands import part_command
from batchscape.analysis.figures.vega import paper_caption, paper_chart
from batchscape.analysis.report.paper import DOCUMENT, PARTS, write_paper
from batchscape.analysis.report.topic import Section
from batchscape.analysis.report.writers import escape_markdown, show, to_markdown, write_csv
from batchscape.drawing import Drawing
from batchscape.errors import AnalysisError
from batchscape.record.files import write_atomically
from batchscape.text import count_text

__all__ = [
    "WRITTEN",
    "announce",
    "begin_figures",
    "in_short",
    "make_folders",
    "remove_stale",
    "section_files",
    "section_lines",
    "sentence_markdown",
    "show_section",
    "write_sections",
]

_FOLDERS = ("tables", "figures")
"""Folders beside the page."""
_PAPER = "paper"
_OF_PAPER = ("tables", "figures")
"""Likewise in the folder of the paper."""

WRITTEN = "report_files.txt"
"""The list of the files of a report: of those it is about to write too, while it writes them."""

_SENTENCES = 5
"""Sentences of the first screen."""


def make_folders(out: Path) -> list[Path]:
    """Make the folders beside a page, and return them."""
    folders = [out / name for name in _FOLDERS] + [out / _PAPER / name for name in _OF_PAPER]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    return folders


def announce(out: Path, files: Iterable[Path]) -> None:
    """List what is about to be written beside what was, so that none of it is taken for another's.

    However this report ends, the next one knows all files of it.
    """
    _list(out, _listed(out) | _names(out, files))


def remove_stale(out: Path, files: Iterable[Path]) -> Path:
    """Remove what an earlier report wrote and this one did not; all else there is its owner's.

    Parameters
    ----------
    out : Path
        Folder of the page.
    files : iterable of Path
        What this report wrote.

    Returns
    -------
    Path
        The list of them, for the next report.
    """
    written = _names(out, files)
    stale = _listed(out) - written
    # The folders are searched: a list that came from elsewhere names nothing outside of them.
    for path in [path for folder in make_folders(out) for path in folder.iterdir()]:
        if path.relative_to(out).as_posix() in stale and path.is_file():
            path.unlink()
    for name in (WRITTEN, f"{_PAPER}/{DOCUMENT}"):
        place = out / name
        for torn in place.parent.glob(f".{place.name}.*.tmp"):
            torn.unlink()
    _list(out, written)
    return out / WRITTEN


def _names(out: Path, files: Iterable[Path]) -> set[str]:
    return {file.relative_to(out).as_posix() for file in files}


def _listed(out: Path) -> set[str]:
    listing = out / WRITTEN
    return set(listing.read_text("utf-8", "replace").splitlines()) if listing.exists() else set()


def _list(out: Path, names: Iterable[str]) -> None:
    write_atomically(out / WRITTEN, "".join(f"{name}\n" for name in sorted(names)).encode())


def in_short(sections: Iterable[Section]) -> list[str]:
    """Return the sentences of the first screen: what the topics say in short, in their order.

    Each sentence of a topic says how many warnings weaken it, but one that ends in a command.
    """
    said = []
    for section in sections:
        count = len(section.warnings)
        warned = f" ({count_text(count, 'warning')})" if count else ""
        said += [text if part_command(text)[1] else text + warned for text in _short(section)]
    return said[:_SENTENCES]


def _short(section: Section) -> Sequence[str]:
    return section.short or section.answer[:1]


def section_lines(section: Section, *, figures: bool = True) -> list[str]:
    """Write a section as paragraphs of Markdown.

    Parameters
    ----------
    figures : bool
        Show its pictures too.

    Returns
    -------
    list of str
        Paths are relative to the folder of the page.
    """
    lines = [f"## {escape_markdown(section.title)}"]
    lines += [sentence_markdown(sentence) for sentence in (*section.answer, *section.settle)]
    lines += [sentence_markdown(warning, "**") for warning in section.warnings]
    for view in section.tables:
        # One table needs no title beside the section's.
        if len(section.tables) > 1:
            lines.append(f"### {escape_markdown(view.title)}")
        files = f"[csv](tables/{view.name}.csv), [tex]({_PAPER}/tables/{view.name}.tex)"
        lines += [to_markdown(view), f"Files: {files}."]
    for picture in section.pictures if figures else ():
        lines.append(f"![{picture.name}](figures/{picture.name}.png)")
        lines.append(escape_markdown(paper_caption(picture)))
    if section.curves:
        links = ", ".join(f"[{name}.csv](tables/{name}.csv)" for name in section.curves)
        lines.append(f"Behind the charts: {links}.")
    return lines


def sentence_markdown(sentence: str, mark: str = "") -> str:
    """Write a sentence in Markdown; the command at its end can be copied as it stands.

    Parameters
    ----------
    mark : str
        Set on both sides of the text, such as for bold.
    """
    text, command = part_command(sentence)
    if not command or "`" in command:
        return f"{mark}{escape_markdown(sentence)}{mark}"
    return f"{mark}{escape_markdown(text.rstrip())}{mark} `{command}`" if text else f"`{command}`"


def show_section(console: Console, section: Section, *, tables: bool) -> None:
    """Print a section in a terminal.

    Parameters
    ----------
    tables : bool
        Print its tables too, not only answers and warnings.
    """
    console.print(Text(f"\n{section.title}"), style="bold", highlight=False)
    for sentence in (*section.answer, *section.settle):
        # A command is copied in one piece: the terminal breaks its line, not we.
        console.print(Text(sentence), highlight=False, soft_wrap=bool(part_command(sentence)[1]))
    for warning in section.warnings:
        has_command = bool(part_command(warning)[1])
        console.print(Text(f"! {warning}"), style="bold", highlight=False, soft_wrap=has_command)
    for view in section.tables if tables else ():
        console.print()
        show(console, view)


def section_files(sections: Iterable[Section], out: Path, *, figures: bool = True) -> list[Path]:
    """Name the files that `write_sections` and `begin_figures` write."""
    tables, paper = out / "tables", out / _PAPER
    files: list[Path] = []
    for section in sections:
        for view in section.tables:
            files += [tables / f"{view.name}.csv", paper / "tables" / f"{view.name}.tex"]
        files += [tables / f"{name}.csv" for name in section.curves]
        for picture in section.pictures if figures else ():
            files.append(out / "figures" / f"{picture.name}.png")
            files.append(paper / "figures" / f"{picture.name}.pdf")
    return [*files, *(paper / name for name in (*PARTS, DOCUMENT))]


def write_sections(
    sections: Sequence[Section],
    out: Path,
    *,
    methods: Mapping[str, Sequence[str]],
    figures: bool = True,
) -> None:
    """Write the tables of sections, and the paper that is made of them.

    Parameters
    ----------
    out : Path
        Folder of the page, as `make_folders` makes it.
    methods : mapping of str to sequence of str
        How the numbers were made: sentences by title.
    figures : bool
        Whether `begin_figures` draws the figures, which the paper shows.

    Raises
    ------
    AnalysisError
        If two sections use one name for a table, a figure or a headline.
    """
    named = [[*(view.name for view in of.tables), *of.curves] for of in sections]
    _no_repeats("table", (name for names in named for name in names))
    _no_repeats("figure", (picture.name for section in sections for picture in section.pictures))
    _no_repeats("headline", (name for section in sections for name in section.headlines))
    for section in sections:
        for view in section.tables:
            write_csv(out / "tables" / f"{view.name}.csv", view.csv)
        for name, curve in section.curves.items():
            write_csv(out / "tables" / f"{name}.csv", curve)
    # A paper counts no warnings: they stand on the page, beside what they weaken.
    said = [text for section in sections for text in _short(section)][:_SENTENCES]
    write_paper(out / _PAPER, sections, said=said, methods=methods, figures=figures)


def begin_figures(section: Section, out: Path, drawing: Drawing) -> None:
    """Begin to draw what a section shows, while others are computed; its folders are there."""
    for picture in section.pictures:
        name = picture.name
        files = [out / "figures" / f"{name}.png", out / _PAPER / "figures" / f"{name}.pdf"]
        drawing.begin(paper_chart(picture), files)


def _no_repeats(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            msg = f"every {what} of a report has a name of its own, and two are called {name!r}"
            raise AnalysisError(msg)
        seen.add(name)
