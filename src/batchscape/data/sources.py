"""The text files of a corpus, and the part that each belongs to."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Set
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchscape.config import TextFiles
from batchscape.errors import ConfigError
from batchscape.record.folder import SweepFolder


def draw(content: bytes) -> float:
    """Return a number uniform in [0, 1), the hash of an item."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64


def choose(draws: NDArray[np.float64], held_out_pct: float) -> NDArray[np.bool_]:
    """Choose the items to hold out, so that one more item moves no other."""
    is_held_out = 100 * draws < held_out_pct
    # Each part needs an item.
    if not is_held_out.any():
        is_held_out[np.argmin(draws)] = True
    if is_held_out.all():
        is_held_out[np.argmax(draws)] = False
    return is_held_out


_SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"),
    # Generated tables and one large text: in a part of few files they would outweigh the source.
    *("encodings", "pydoc_data"),
}
_TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".js", ".json", ".csv", ".tex"}


def text_sources(config: TextFiles) -> Iterator[tuple[str, bytes, str]]:
    """Yield (name, content, part) of each source file, in a fixed order."""
    if config.path is None:
        root = Path(sysconfig.get_path("stdlib"))
        names = files_below(root, {".py"}, _SKIPPED_FOLDERS)
        nothing = f"data=stdlib: no Python source in {root}; use data=text data.path=..."
    elif "\0" in config.path:
        raise ConfigError(f"data.path must name a file or a folder; given {config.path!r}")
    else:
        root = Path(config.path).expanduser()
        if root.is_file():
            content = root.read_bytes()
            end = round(len(content) * (1 - config.held_out_pct / 100))
            yield root.name, content[:end], "train"
            yield root.name, content[end:], "held_out"
            return
        names = files_below(root, _TEXT_SUFFIXES)
        nothing = (
            f"data.path={config.path}: no text there; give a file, or a folder with files that end "
            f"in one of {' '.join(sorted(_TEXT_SUFFIXES))} (hidden ones and sweep folders are not "
            "read)"
        )
    if not names:
        raise ConfigError(nothing)
    if len(names) < 2:
        raise ConfigError(
            f"a folder with {len(names)} text file cannot be split by file; give the file itself"
        )
    draws = np.array([draw(name.encode()) for name in names])
    for name, held_out in zip(names, choose(draws, config.held_out_pct), strict=True):
        yield name, (root / name).read_bytes(), "held_out" if held_out else "train"


def files_below(root: Path, suffixes: Set[str], skipped: Set[str] = frozenset()) -> list[str]:
    """Return the sorted names of the files below a folder, but nothing hidden and no sweep folder.

    A sweep folder among the data would change them, and so the names of the next sweep's runs.
    Skipped folders are not walked: installed packages are many times the standard library.
    """
    names = []
    for walked, folders, files in os.walk(root):
        folder = Path(walked)
        sweep = SweepFolder(folder)
        if sweep.runs.is_dir() and sweep.plan.is_file():
            folders.clear()
            continue
        folders[:] = [name for name in folders if name[0] != "." and name not in skipped]
        names += [
            (folder / name).relative_to(root).as_posix()
            for name in files
            if name[0] != "." and Path(name).suffix in suffixes and (folder / name).is_file()
        ]
    return sorted(names)
