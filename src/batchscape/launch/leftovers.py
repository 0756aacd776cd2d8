"""What writers that were killed have left in a sweep folder: files that were never whole."""

from __future__ import annotations

from contextlib import suppress

from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.instants import file_age_s

__all__ = ["remove_dead_writes", "remove_dead_writes_of_run"]

_UNFINISHED = "*.tmp"
"""What `record.files.write_atomically` and others call a file until it is whole."""
_DAY_S = 86400.0
"""More than a file takes to be written, and than clocks differ by."""


def remove_dead_writes(sweep: SweepFolder) -> None:
    """Remove unfinished files beside the runs, which other launchers may be writing: old ones."""
    with suppress(OSError):
        for path in sweep.path.glob(_UNFINISHED):
            if file_age_s(path) > _DAY_S:
                path.unlink(missing_ok=True)


def remove_dead_writes_of_run(run: RunFolder) -> None:
    """Remove the unfinished files of a run that is claimed and has no process.

    Those of a mirror stay, which notes what it has sent.
    """
    with suppress(OSError):
        for folder in (run.path, run.checkpoints):
            for path in folder.glob(_UNFINISHED):
                if not path.name.startswith(f".{run.mirror.name}."):
                    path.unlink(missing_ok=True)
