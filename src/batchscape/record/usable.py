"""Whether a sweep can be written to its folder, found out before anything is launched."""

from __future__ import annotations

from batchscape.errors import LaunchError
from batchscape.record.disk import disk_error, disk_trouble
from batchscape.record.folder import SweepFolder

__all__ = ["check_usable"]


def check_usable(sweep: SweepFolder) -> None:
    """Make the folder of a sweep if it is not there, and write to it for a trial.

    Raises
    ------
    LaunchError
        If it cannot be written to, with the reason of the system.
    """
    path = sweep.path.absolute()
    try:
        sweep.runs.mkdir(parents=True, exist_ok=True)
        trouble = disk_trouble(path) or disk_trouble(sweep.runs)
    except OSError as error:
        trouble = str(disk_error(error, path))
    if trouble is not None:
        msg = f"{path} cannot be used: {trouble}; give a sweep_dir that can be written to"
        raise LaunchError(msg)
