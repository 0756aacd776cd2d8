"""Which run folders are copies of others, or links to them: each run counts once, everywhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from batchscape.record.status import RunStatus, Status

__all__ = ["Content", "content_of_run", "copies_among"]

Content = tuple[str, ...]
"""Names what a run holds, its name first: equal for copies only, since no two trainings take equal
times."""


def content_of_run(run_id: str, status: RunStatus) -> Content | None:
    """Name what a run holds; None where it is open, and may go on differently.

    Parameters
    ----------
    run_id : str
        As its configuration says, whatever its folder is called.
    status : RunStatus
    """
    if not status.seal and status.status is not Status.REJECTED:
        return None
    digests = [sealed["sha256"] for _, sealed in sorted(status.seal.items())]
    return run_id, str(status.status), str(status.reason), *digests


def copies_among(contents: Mapping[str, Content | None]) -> dict[str, str]:
    """Find the folders that hold the same run as another one.

    Parameters
    ----------
    contents : mapping of str to tuple or None
        By path of the run folder.

    Returns
    -------
    dict of str to str
        The original of each copy: the first folder that has the name of its run, else the first.
    """
    originals: dict[Content, str] = {}
    copies: dict[str, str] = {}
    # Where nothing is sealed, only a link is known to be the same run.
    keys = {folder: content or (os.path.realpath(folder),) for folder, content in contents.items()}
    is_renamed = {f: Path(f).name != Path(key[0]).name for f, key in keys.items()}
    for folder in sorted(keys, key=is_renamed.__getitem__):
        key = keys[folder]
        original = originals.setdefault(key, folder)
        if original != folder:
            copies[folder] = original
    return {folder: copies[folder] for folder in contents if folder in copies}
