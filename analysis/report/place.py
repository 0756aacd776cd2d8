"""The folder that a page is written to, with its tables and figures."""

from __future__ import annotations

from pathlib import Path

from batchscape.record.containment import refuse_links_at

__all__ = ["ENDINGS", "check_place"]

ENDINGS = {"tables": ("csv", "md", "tex"), "figures": ("png", "pdf")}
"""Folders beside the page, and the endings of the files that are written there."""


def check_place(out: Path, page: str) -> None:
    """Refuse a folder where a page, its tables or figures would be written somewhere else.

    Parameters
    ----------
    out : Path
        Folder to write to; need not exist, and may be a link.
    page : str
        Name of the page.

    Raises
    ------
    LaunchError
        If a link is in the place of what is to be written, and leads out of the folder.
    """
    refuse_links_at(out, (page, "macros.tex"), ENDINGS)
