"""Which runs of a launch are tried again, by what ended them.

A run that the machine may have ended is tried again, at most `launcher.retries` times a launch: a
hang, a rank that was killed, crashed or lost its connection, a fork server that died. It goes on
from its checkpoint. What the same run would meet again is not tried again: an exception, memory
that is out, divergence, a time limit, damaged records; nor is a run that met a full disk, which the
next launch goes on with.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from batchscape.record.folder import RunFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus, Status

__all__ = ["Retries"]


class Retries:
    """The retries of one launch."""

    def __init__(self) -> None:
        self._done: Counter[str] = Counter()

    def wants(self, spec: RunSpec, status: RunStatus) -> bool:
        """Return whether a run that has just ended is to be tried again.

        Parameters
        ----------
        spec : RunSpec
        status : RunStatus
            How it ended.
        """
        if status.status is not Status.FAILED or status.cause is None:
            return False
        most = spec.config.launcher.retries
        return status.cause.is_of_the_machine and self._done[spec.run_id] < most

    def open_again(self, spec: RunSpec, folder: RunFolder, status: RunStatus) -> str:
        """Count a retry, and note in the folder that the run is not over.

        Returns
        -------
        str
            Why it is tried again, for the user.

        Raises
        ------
        OSError
            If the folder cannot be written to.
        """
        self._done[spec.run_id] += 1
        most = spec.config.launcher.retries
        again = f"retry {self._done[spec.run_id]} of {most}"
        reason = f"{again} follows: {status.reason}"
        # Whatever becomes of this launcher, the same command goes on with the run. Where that
        # cannot be written there is no retry, and the run stands as it ended.
        replace(status, status=Status.INTERRUPTED, reason=reason).write(folder.status)
        return reason
