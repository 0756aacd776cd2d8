"""A text that another process appends to, as it is now."""

from __future__ import annotations

import stat
from pathlib import Path

from batchscape.errors import RecordError

__all__ = ["content_of", "drawn_lines_of", "lines_of", "whole_lines"]


def lines_of(content: bytes) -> list[str]:
    """Return the lines of a text that are not empty; a bare carriage return ends one too."""
    return [line for line, _ in drawn_lines_of(content)]


def drawn_lines_of(content: bytes) -> list[tuple[str, bool]]:
    """Return the lines of a text, and whether a carriage return alone goes before each."""
    return [
        (part, number > 0)
        for line in content.decode(errors="replace").split("\n")
        for number, part in enumerate(line.split("\r"))
        if part
    ]


def whole_lines(content: bytes) -> bytes:
    """Return a text without a last line that has no end: its writer may be in the midst of it."""
    return content[: content.rfind(b"\n") + 1]


def content_of(path: Path) -> bytes | None:
    """Return what a file holds; None: it is not there.

    Raises
    ------
    RecordError
        If it is no file, or cannot be read.
    """
    try:
        _refuse_others(path)
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror}"
        raise RecordError(msg) from None


def _refuse_others(path: Path) -> None:
    """Refuse what is no file: to open a pipe waits for its other end, and a device may not end."""
    if not stat.S_ISREG(path.stat().st_mode):
        msg = (
            f"{path} is no regular file: metrics are read while the program writes them and once "
            "more at its end"
        )
        raise RecordError(msg)
