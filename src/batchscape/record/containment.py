"""Nothing is written outside the sweep folder: not through links in it, nor by names in its files.

A folder that was copied or unpacked from somewhere may hold links that lead elsewhere. What it
holds is written to and removed, so a link that leaves the folder is refused before anything is.
The sweep folder itself may be a link: where it lies is its user's choice.

Tens of thousands of runs are looked at before every launch: a listing tells the kind of a file,
and only links are asked where they lead.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from batchscape.errors import LaunchError
from batchscape.record.folder import SweepFolder

__all__ = ["refuse_links", "refuse_links_at"]

_OF_OTHERS = frozenset({"program"})
"""Folders of a run whose content programs write, which may link as they like."""


def refuse_links(sweep: SweepFolder) -> None:
    """Refuse a sweep folder in which something leads out of it, or is no file at all.

    Looked at are the sweep folder, `damaged`, each run with its folders but the content of
    `program`, and `wandb` with each of its folders; W&B makes all below those anew. What lies in
    the folder of a report is looked at by who writes there, see `refuse_links_at`.

    Parameters
    ----------
    sweep : SweepFolder
        Need not exist.

    Raises
    ------
    LaunchError
        If a link leads outside, or there is a pipe or a device, which would block who opens it; or
        if a folder may not be listed, though what is in it can be opened.
    """
    advice = (
        "Remove the link, or put what it leads to in its place; sweep_dir chooses another place "
        "for all of a sweep"
    )
    _refuse(_entries(sweep), sweep.path, "the sweep folder", advice)


def refuse_links_at(
    folder: Path, files: Collection[str], folders: Mapping[str, Collection[str]]
) -> None:
    """Refuse a folder in which something that is about to be written leads out of it.

    Links of other names may be: what else lies there is not ours.

    Parameters
    ----------
    folder : Path
        Need not exist, and may be a link itself.
    files : collection of str
        Names of the files to be written.
    folders : mapping of str to collection of str
        Names of the folders to be written to, and the endings of the files there, without a dot.

    Raises
    ------
    LaunchError
        As `refuse_links` raises it.
    """
    advice = "Remove the link; --out chooses another place for all that is written"
    _refuse(_entries_at(folder, files, folders), folder, str(folder), advice)


def _refuse(entries: Iterable[os.DirEntry[str]], root: Path, what: str, advice: str) -> None:
    resolved = os.path.realpath(root)
    for entry in entries:
        if entry.is_symlink():
            target = os.path.realpath(entry.path)
            if not Path(target).is_relative_to(resolved):
                msg = (
                    f"{entry.path} is a link to {target}, outside of {what}, where nothing is "
                    f"written. {advice}"
                )
                raise LaunchError(msg)
        elif not _is_ordinary(entry):
            msg = f"{entry.path} is neither a file nor a folder; remove it"
            raise LaunchError(msg)


def _entries(sweep: SweepFolder) -> Iterator[os.DirEntry[str]]:
    # Every entry is judged before what it leads to is listed.
    for folder in (sweep.path, sweep.damaged):
        yield from _below(folder)
    for run in _inside(sweep.runs):
        yield run
        # Rows, checkpoints and the like; small folders, one level deep.
        yield from _below(run.path, levels=2, but=_OF_OTHERS)
    yield from _below(sweep.wandb, levels=2)
    # The one folder of W&B's that it goes on with.
    yield from _below(sweep.wandb / "cache", levels=3)


def _entries_at(
    folder: Path, files: Collection[str], folders: Mapping[str, Collection[str]]
) -> Iterator[os.DirEntry[str]]:
    for entry in _inside(folder):
        if entry.name in files or entry.name in folders:
            yield entry
        for inner in _inside(entry.path) if entry.name in folders else ():
            if inner.name.rpartition(".")[2] in folders[entry.name]:
                yield inner


def _below(
    folder: Path | str, *, levels: int = 1, but: Collection[str] = ()
) -> Iterator[os.DirEntry[str]]:
    """List a folder and, as deep as asked, the folders in it; not those of some names."""
    for entry in _inside(folder):
        yield entry
        if levels > 1 and entry.name not in but and entry.is_dir():
            yield from _below(entry.path, levels=levels - 1, but=but)


def _inside(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        return
    except PermissionError:
        # One of another user that is closed altogether: nothing in it can be opened either.
        if os.access(folder, os.X_OK):
            msg = (
                f"{folder} may not be listed, and links in it would not be found; allow to read it"
            )
            raise LaunchError(msg) from None


def _is_ordinary(entry: os.DirEntry[str]) -> bool:
    if entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False):
        return True
    try:
        return stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return True  # gone since: a temporary file of a run beside us
