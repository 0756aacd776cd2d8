"""Names of files and folders by their content."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from batchscape.errors import ConfigError
from batchscape.record.files import sha256_of

_HIDDEN = re.compile(r"/(\.|__pycache__/)")
_MOST_FILES = 10_000


def hash_of_files(entries: Iterable[str], folder: Path, setting: str) -> str | None:
    """Return the first 16 digits of a SHA-256 over files, and over all files below folders.

    Hidden files below a folder and `__pycache__` do not count.

    Parameters
    ----------
    entries : iterable of str
        Paths as the user wrote them; each counts once, with its text and its content.
    folder : Path
        Folder that the paths are relative to.
    setting : str
        Setting that names the entries, for messages.

    Returns
    -------
    str or None
        None where there are no entries.

    Raises
    ------
    ConfigError
        If an entry does not exist or cannot be read, or a folder has too many files to be code.
    """
    digest = hashlib.sha256()
    distinct = sorted(set(entries))
    for entry in distinct:
        path = folder / Path(entry).expanduser()
        try:
            for file in _files(path, entry, setting):
                name = file.relative_to(path).as_posix()
                digest.update(f"{entry}\0{name}\0{sha256_of(file)}\0".encode())
        except OSError as error:
            raise ConfigError(
                f"{setting}: {entry} cannot be read in {folder}: {error.strerror or error}"
            ) from None
    return digest.hexdigest()[:16] if distinct else None


def _files(path: Path, entry: str, setting: str) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"{setting}: there is no file or folder {entry} in {path.parent}")
    files = (
        file
        for file in path.rglob("*")
        if not _HIDDEN.search(f"/{file.relative_to(path).as_posix()}/") and file.is_file()
    )
    first_files = list(islice(files, _MOST_FILES + 1))
    if len(first_files) > _MOST_FILES:
        raise ConfigError(
            f"{setting}: {entry} has more than {_MOST_FILES} files, each of which would be "
            "read to name the runs; name those that decide the training"
        )
    return sorted(first_files)
