"""Beginning a run anew whose folder is damaged."""

from __future__ import annotations

from batchscape.record.claims import CLAIMS
from batchscape.record.damage import damage_of, set_aside
from batchscape.record.folder import SweepFolder
from batchscape.record.locks import exclusively
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus, Status

__all__ = ["begin_anew_if_damaged"]


def begin_anew_if_damaged(spec: RunSpec, sweep: SweepFolder) -> str | None:
    """Set the folder of a run aside if it is damaged, and give the run an empty one.

    Parameters
    ----------
    spec : RunSpec
    sweep : SweepFolder

    Returns
    -------
    str or None
        What was damaged, and where it is now, for the status of the run and for the user.

    Raises
    ------
    RecordError
        If a file cannot be read for another reason than damage.
    OSError
        If the folder cannot be moved, or the new one not be made.
    """
    folder = sweep.run(spec.run_id)
    if damage_of(folder) is None:
        return None
    with exclusively(sweep.writing):
        # Files of a run that is at work, or just sealed by another launcher, are not of one moment.
        claim = CLAIMS.claim(folder)
        if claim is None:
            return None
        try:
            reason = damage_of(folder)
            if reason is None:
                return None
            place = set_aside(sweep, folder, reason)
            note = f"begun anew, since {reason}; what was there is now in {place}"
            spec.write(folder.config)
            RunStatus(Status.PENDING, notes=[note]).write(folder.status)
        finally:
            claim.release(is_over=True)
    return note
