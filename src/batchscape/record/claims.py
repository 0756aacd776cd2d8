"""Who runs which run of a sweep: one launcher at a time, from the start of a run to its end.

`RunClaims` and `RunClaim` are all that launchers and readers know of it; `CLAIMS` is what they use,
on one machine as on the nodes of a cluster.

The claims of a run are files `.claim.1`, `.claim.2`, ... in its folder. The last one tells how it
stands: who holds it, or that it was released. Nobody changes a claim or removes one while the run
may be claimed; whoever claims, takes over, or releases a run adds the next one, by a hard link to a
file that is complete. A link is made once, whoever else tries: on NFS as well, where an answer may
be lost, and the file that is there is therefore read to see whose it is.

Why a run that was left is taken over once: two observers that find claim n left both try to add
claim n + 1, and one of them does. No claim is removed and made anew, so that a slow one cannot
remove the claim of a fast one. Whoever has an old view of the folder tries a number that is taken.
The claims of a run that is over are removed, the last one first, by the holder, after it has added
its release; one who comes so late that it adds claim n + 1 to a chain that is gone, finds that the
claim n which it has seen is not there any more, and withdraws.

Whether a holder is gone is judged by a lock (`flock`) on `.lock`, which the ranks inherit, and by
silence. While the lock is seen, somebody lives. On a file system that one machine has for itself
the end of the lock is the end of the holder. On any other a claim is left once it was not touched
for `_SILENT_S`; `_GONE_S` is enough for that of a job which was put back into the queue and asks.

A holder shows that it lives by touching its claim. Observers see whether that changes, by their own
monotonic clock, and count only the time in which they looked: clocks of two nodes are never
compared, and an outage of the file system is nobody's silence. A holder that was taken over, as it
was cut off, sees the next claim, or that its own went with the end of the run, and writes no end.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from batchscape.record.disk import is_of_this_machine
from batchscape.record.files import link_or_copy
from batchscape.record.folder import RunFolder
from batchscape.record.instants import file_age_s
from batchscape.record.locks import Lock, is_held, take

_BEAT_S = 10.0
"""Time between two touches of a claim."""
_GONE_S = 30.0
"""Silence of a job's earlier self, of which something may be left."""
_SILENT_S = 120.0
"""Silence of a holder on a file system of several machines. A server that stands still silences
observers, too: their gaps count as `_GAP_S` at most."""
_GAP_S = 30.0
"""Longest time that counts between two looks, whichever runs they were at."""


@dataclass(frozen=True)
class _Holder:
    """What a claim says."""

    mark: str
    """Of this claim alone."""
    node: str
    pid: int
    has_lock: bool
    """Whether the holder and its ranks have the lock, too."""
    job: str | None = None

    def __str__(self) -> str:
        name = f"process {self.pid} on {self.node}"
        return name if self.job is None else f"{name} (job {self.job})"

    @classmethod
    def here(cls, *, has_lock: bool) -> _Holder:
        """Describe this process."""
        node, job = os.environ.get("SLURMD_NODENAME"), _job()
        return cls(uuid.uuid4().hex, node or platform.node(), os.getpid(), has_lock, job)

    @property
    def is_earlier_self(self) -> bool:
        """Whether it was this job, before it was put back into the queue."""
        return self.job is not None and self.job == _job() and self.pid != os.getpid()


_RELEASED = "released"
_Claimed = _Holder | str | None
"""A holder; `_RELEASED`; None where a claim cannot be read, which somebody may be writing."""


class RunClaim:
    """A run that this launcher holds."""

    def __init__(self, run: RunFolder, number: int, own: _Holder, lock: Lock) -> None:
        self._run, self._number, self._own, self._lock = run, number, own, lock
        self._beat_at = time.monotonic() + _BEAT_S

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Open files that the run's processes inherit: the claim lasts as long as any of them."""
        return (self._lock.descriptor,) if self._lock.keeps_out else ()

    def renew(self, *, at_once: bool = False) -> bool:
        """Show that its holder lives; to be called every few seconds.

        Parameters
        ----------
        at_once : bool
            Whether to look now, however short ago the last look was.

        Returns
        -------
        bool
            False if another launcher has taken the run over: its processes must end.
        """
        now = time.monotonic()
        if now < self._beat_at and not at_once:
            return True
        self._beat_at = now + _BEAT_S
        path = _path(self._run, self._number)
        with suppress(OSError):  # a disk that fails is told by whoever writes the run
            if not path.exists():
                # Whoever ended the run has removed it. A folder that was moved has taken it along.
                return not self._run.status.exists()
            if path.read_text(encoding="utf-8") != _text(self._own):
                return False
            os.utime(path)
            return not _path(self._run, self._number + 1).exists()
        return True

    def release(self, *, is_over: bool = False) -> None:
        """Give the run up, also for the processes that have inherited the claim.

        Parameters
        ----------
        is_over : bool
            Whether nobody will claim the run again.
        """
        # A folder that was moved has taken the claims along: those there now are others'.
        is_there = _read(_path(self._run, self._number)) == self._own
        with suppress(OSError):  # where nothing can be written the lock alone tells of it
            if is_there and _add(self._run, self._number + 1, None) and is_over:
                for number in range(self._number + 1, 0, -1):
                    _path(self._run, number).unlink(missing_ok=True)
        self._lock.release(remove=is_over)


class _Seen(NamedTuple):
    touched_ns: int
    looked_s: float
    """For how long this process had looked by then, at any claims."""


class RunClaims:
    """The claims of all runs, whoever holds them, by files that are added and by locks."""

    def __init__(self) -> None:
        self._seen: dict[Path, _Seen] = {}
        self._looked_s = 0.0
        self._looked_at = time.monotonic()
        self._lock = threading.Lock()

    def claim(self, run: RunFolder) -> RunClaim | None:
        """Claim a run that nobody holds, or take it over from a holder that is gone.

        Returns
        -------
        RunClaim or None
            None while another launcher holds it, or processes that it has left behind.

        Raises
        ------
        OSError
            If its folder cannot be written to.
        """
        run.path.mkdir(parents=True, exist_ok=True)
        number, found = _last(run)
        if number and found != _RELEASED and not self._is_left(run, number, found):
            return None
        lock = take(run.lock, is_needed=False)
        if lock is None:
            return None
        claim = None
        try:
            own = _Holder.here(has_lock=lock.keeps_out)
            if _follows(run, number, found, own):
                claim = RunClaim(run, number + 1, own, lock)
        finally:
            if claim is None:
                lock.release()
        return claim

    def holder(self, run: RunFolder) -> str | None:
        """Name who holds a run, or whose processes do; None where nobody does.

        At a glance, by the clock of this machine: `claim` may have to look for longer.
        """
        number, found = _last(run)
        if not is_held(run.lock):
            if not number or found == _RELEASED:
                return None
            if isinstance(found, _Holder) and found.is_earlier_self:
                return None
            if self._is_left(run, number, found) or file_age_s(_path(run, number)) >= _SILENT_S:
                return None
        return str(found) if isinstance(found, _Holder) else "an unknown process"

    def _is_left(self, run: RunFolder, number: int, found: _Claimed) -> bool:
        """Whether the holder of a claim is gone."""
        if is_held(run.lock):
            return False
        limit_s = _SILENT_S
        if isinstance(found, _Holder):
            if found.has_lock and is_of_this_machine(run.path.parent):
                return True
            if found.is_earlier_self:
                limit_s = _GONE_S
        return self._silent_s(_path(run, number)) >= limit_s

    def _silent_s(self, path: Path) -> float:
        """Return for how long a claim was not touched, as far as this process has looked."""
        try:
            touched_ns = path.stat().st_mtime_ns
        except OSError:
            return 0.0
        with self._lock:
            now = time.monotonic()
            self._looked_s += min(now - self._looked_at, _GAP_S)
            self._looked_at = now
            seen = self._seen.get(path)
            if seen is None or seen.touched_ns != touched_ns:
                seen = self._seen[path] = _Seen(touched_ns, self._looked_s)
            return self._looked_s - seen.looked_s


def _job() -> str | None:
    """Return the job of this process; the shell of an allocation outlives its job, and has none."""
    return os.environ.get("SLURM_JOB_ID") if "SLURMD_NODENAME" in os.environ else None


def _path(run: RunFolder, number: int) -> Path:
    return run.path / f".claim.{number}"


def _last(run: RunFolder) -> tuple[int, _Claimed]:
    """Return the last claim of a run by its number; 0 where there is none."""
    number = 0
    while _path(run, number + 1).exists():
        number += 1
    return number, _read(_path(run, number)) if number else None


def _follows(run: RunFolder, number: int, found: _Claimed, own: _Holder) -> bool:
    """Add a claim after the one that was found; return whether it is the last one now."""
    if not _add(run, number + 1, own):
        return False
    if number == 0 or _read(_path(run, number)) == found:
        return True
    # What was found is gone: the run was over meanwhile.
    _path(run, number + 1).unlink(missing_ok=True)
    return False


def _read(path: Path) -> _Claimed:
    try:
        text = path.read_text(encoding="utf-8")
        return _RELEASED if text.startswith(_RELEASED) else _Holder(**json.loads(text))
    except (OSError, ValueError, TypeError):
        return None


def _text(own: _Holder) -> str:
    return json.dumps(asdict(own))


def _add(run: RunFolder, number: int, own: _Holder | None) -> bool:
    """Add a claim to a run, or a release; return whether it is there, and nobody else's."""
    mark = uuid.uuid4().hex
    text = f"{_RELEASED} {mark}" if own is None else _text(own)
    path = _path(run, number)
    # Named as other files that are not whole: what a process leaves that is killed is removed.
    whole = run.path / f".claim.{mark}.{os.getpid()}.tmp"
    try:
        with whole.open("x", encoding="utf-8") as file:
            file.write(text)
        with suppress(FileExistsError):
            link_or_copy(whole, path)
    finally:
        whole.unlink(missing_ok=True)
    # Not the answer but the file counts: a server may have done what it was asked for twice.
    return path.read_text(encoding="utf-8") == text


CLAIMS = RunClaims()
