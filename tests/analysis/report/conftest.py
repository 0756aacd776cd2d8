"""Real LaTeX for tests: a document is compiled, and read back as text."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

TOOLS = ("pdflatex", "kpsewhich", "pdftotext", "pdftoppm")


class Paper(NamedTuple):
    """A compiled document."""

    text: str
    """What a reader sees, on lines as set, without the marks of math spacing."""
    log: str
    pdf: Path

    @property
    def too_wide(self) -> list[str]:
        """Lines of the log about boxes that stick out into the margin."""
        return re.findall(r"Overfull \\hbox.*", self.log)


def run_tool(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, check=False
    )
    # The log of LaTeX is in no encoding in particular.
    output = (done.stdout + done.stderr).decode("utf-8", errors="replace")
    assert done.returncode == 0, output[-3000:]
    return output


def compile_document(file: Path) -> Paper:
    """Compile twice, as papers are, and read the pages."""
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", file.name]
    run_tool(*command, cwd=file.parent)
    run_tool(*command, cwd=file.parent)
    pdf = file.with_suffix(".pdf")
    text = run_tool("pdftotext", "-layout", "-enc", "UTF-8", pdf, "-", cwd=file.parent)
    log = file.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
    return Paper(text, log, pdf)


@pytest.fixture
def latex(tmp_path: Path) -> Callable[..., Paper]:
    """Return a compiler of the body of an article at 10 pt; other files by name."""
    require_latex()

    def make(body: str, preamble: str = "", **files: str) -> Paper:
        folder = tmp_path / "latex"
        folder.mkdir(exist_ok=True)
        for name, content in files.items():
            (folder / f"{name}.tex").write_text(content, encoding="utf-8")
        page = folder / "page.tex"
        page.write_text(
            "\\documentclass{article}\\usepackage{booktabs}\n"
            f"{preamble}\n\\begin{{document}}\n{body}\n\\end{{document}}\n",
            encoding="utf-8",
        )
        return compile_document(page)

    return make


def require_latex() -> None:
    """Skip without LaTeX, but where the continuous integration promised to install it."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        reason = f"not installed: {', '.join(missing)}"
        assert "BATCHSCAPE_REQUIRE_TOOLS" not in os.environ, reason
        pytest.skip(reason)


@pytest.fixture
def paper() -> Callable[[Path], Paper]:
    """Return a compiler of a whole document where it lies."""
    require_latex()
    return compile_document
