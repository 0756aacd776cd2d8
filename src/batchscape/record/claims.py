"""Who runs which run of a sweep: one launcher at a time, from the start of a run to its end.

Launchers and readers use `CLAIMS`, on one machine as on the nodes of a cluster.

The claims of a run are files `.claim.1`, `.claim.2`, ... in its folder. The last one names the
holder of the run, or says that it was released. No claim is changed or removed while the run may be
claimed: a launcher that claims, takes over, or releases a run adds the next one, by a hard link to
a complete file. Only one of several launchers can make a link. On NFS the answer may be lost, so
that a launcher reads the file that is there to see whose it is.

A run whose holder is gone is taken over once: two observers that find claim n left try to add
claim n + 1, and one succeeds. No claim is removed and made anew, so that a slow observer cannot
remove the claim of a fast one. An observer with an old view of the folder tries a number
that is taken. When a run is over, its holder adds the release and removes the claims, the last one
first. An observer that comes so late that it adds claim n + 1 to a chain that is gone finds that
claim n, which it has read, is not there any more, and withdraws.

A holder is gone by its lock (`flock`) on `.lock`, which the ranks inherit, and by its silence.
While the lock is held, the holder or a rank lives. On a file system that one machine has for itself
the end of the lock is the end of the holder. On any other a claim is left once it was not touched
for `_SILENT_S`; `_GONE_S` is enough for a claim of this job from before it was requeued.

A holder touches its claim to show that it lives. Observers note when the time of the file changes,
by their own monotonic clock, and count only the time in which they looked: clocks of two nodes are
never compared, and an outage of the file system is not the silence of a holder. A holder that was
taken over, as it was cut off, finds the next claim, or that its own was removed with the end of the
run, and writes no end.
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

from batchscape.record.disk import is_of_this_machine
from batchscape.record.files import link_or_copy
from batchscape.record.folder import RunFolder
from batchscape.record.instants import file_age_s
from batchscape.record.locks import Lock, is_held, take

_BEAT_S = 10.0
"""Time between two touches of a claim."""
_GONE_S = 30.0
"""After this silence the launcher of this job from before a requeue is gone; its processes may be
left."""
_SILENT_S = 120.0
"""Silence of a holder on a file system of several machines. A server that hangs stops observers as
well: a gap between their looks counts as `_GAP_S` at most."""
_GAP_S = 30.0
"""Longest time that counts between two looks, at any runs."""


@dataclass(frozen=True)
class _Holder:
    """Content of a claim."""

    mark: str
    """Unique mark of the claim."""
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
        """Whether the holder is this job, before it was put back into the queue."""
        return self.job is not None and self.job == _job() and self.pid != os.getpid()


_RELEASED = "released"
_ClaimState = _Holder | str | None
"""A holder; `_RELEASED`; None where a claim cannot be read, as it may be half written."""


class RunClaim:
    """A run that this launcher holds."""

    def __init__(self, run: RunFolder, number: int, holder: _Holder, lock: Lock) -> None:
        self._run, self._number, self._holder, self._lock = run, number, holder, lock
        self._next_beat_at = time.monotonic() + _BEAT_S

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Open files that the run's processes inherit: the claim lasts as long as any of them."""
        return (self._lock.descriptor,) if self._lock.keeps_out else ()

    def renew(self, *, at_once: bool = False) -> bool:
        """Show that the holder lives; the holder calls this every few seconds.

        Parameters
        ----------
        at_once : bool
            Whether to look now, even if the last look was a moment ago.

        Returns
        -------
        bool
            False if another launcher has taken the run over: the processes here must end.
        """
        now = time.monotonic()
        if now < self._next_beat_at and not at_once:
            return True
        self._next_beat_at = now + _BEAT_S
        path = _path(self._run, self._number)
        with suppress(OSError):  # the writer of the run reports a disk that fails
            if not path.exists():
                # With a status there, another launcher has ended the run and removed the claim.
                # Without one the folder was moved, and the run is still ours.
                return not self._run.status.exists()
            if path.read_text(encoding="utf-8") != _text(self._holder):
                return False
            os.utime(path)
            return not _path(self._run, self._number + 1).exists()
        return True

    def release(self, *, is_over: bool = False) -> None:
        """Release the run, also for the processes that have inherited the claim.

        Parameters
        ----------
        is_over : bool
            Whether no launcher will claim the run again.
        """
        # Where the folder was moved, claims that are there now belong to others.
        is_there = _read(_path(self._run, self._number)) == self._holder
        with suppress(OSError):  # where the release cannot be written, the end of the lock shows it
            if is_there and _add(self._run, self._number + 1, None) and is_over:
                for number in range(self._number + 1, 0, -1):
                    _path(self._run, number).unlink(missing_ok=True)
        self._lock.release(remove=is_over)


class RunClaims:
    """The claims of all runs, whoever holds them, by files that are added and by locks."""

    def __init__(self) -> None:
        self._touches: dict[Path, tuple[int, float]] = {}
        """Last touch of each claim, and the seconds that this process had looked at claims when it
        noticed that."""
        self._looked_s = 0.0
        self._looked_at = time.monotonic()
        self._lock = threading.Lock()

    def claim(self, run: RunFolder) -> RunClaim | None:
        """Claim a run that nobody holds, or take it over from a holder that is gone.

        Returns
        -------
        RunClaim or None
            None while another launcher or its processes hold the run.

        Raises
        ------
        OSError
            If its folder cannot be written to.
        """
        run.path.mkdir(parents=True, exist_ok=True)
        number, last = _last_claim(run)
        if number and last != _RELEASED and not self._is_holder_gone(run, number, last):
            return None
        lock = take(run.lock, is_needed=False)
        if lock is None:
            return None
        claim = None
        try:
            holder = _Holder.here(has_lock=lock.keeps_out)
            if _follow(run, number, last, holder):
                claim = RunClaim(run, number + 1, holder, lock)
        finally:
            if claim is None:
                lock.release()
        return claim

    def holder(self, run: RunFolder) -> str | None:
        """Name the launcher that holds a run, itself or by its processes; None where there is none.

        The answer is quick, by the clock of this machine; `claim` may have to look for longer.
        """
        number, last = _last_claim(run)
        if not is_held(run.lock):
            if not number or last == _RELEASED:
                return None
            if isinstance(last, _Holder) and last.is_earlier_self:
                return None
            is_gone = self._is_holder_gone(run, number, last)
            if is_gone or file_age_s(_path(run, number)) >= _SILENT_S:
                return None
        return str(last) if isinstance(last, _Holder) else "an unknown process"

    def _is_holder_gone(self, run: RunFolder, number: int, last: _ClaimState) -> bool:
        if is_held(run.lock):
            return False
        limit_s = _SILENT_S
        if isinstance(last, _Holder):
            if last.has_lock and is_of_this_machine(run.path.parent):
                return True
            if last.is_earlier_self:
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
            earlier_ns, noticed_s = self._touches.get(path, (None, 0.0))
            if earlier_ns != touched_ns:
                noticed_s = self._looked_s
                self._touches[path] = touched_ns, noticed_s
            return self._looked_s - noticed_s


def _job() -> str | None:
    """Return the Slurm job of this process; the shell of an allocation counts as none."""
    return os.environ.get("SLURM_JOB_ID") if "SLURMD_NODENAME" in os.environ else None


def _path(run: RunFolder, number: int) -> Path:
    return run.path / f".claim.{number}"


def _last_claim(run: RunFolder) -> tuple[int, _ClaimState]:
    """Return number and content of the last claim of a run; 0 where there is none."""
    number = 0
    while _path(run, number + 1).exists():
        number += 1
    return number, _read(_path(run, number)) if number else None


def _follow(run: RunFolder, number: int, last: _ClaimState, holder: _Holder) -> bool:
    """Add a claim after the last one; return whether it is the last one now."""
    if not _add(run, number + 1, holder):
        return False
    if number == 0 or _read(_path(run, number)) == last:
        return True
    # The claim before is gone: the run was over meanwhile.
    _path(run, number + 1).unlink(missing_ok=True)
    return False


def _read(path: Path) -> _ClaimState:
    try:
        text = path.read_text(encoding="utf-8")
        return _RELEASED if text.startswith(_RELEASED) else _Holder(**json.loads(text))
    except (OSError, ValueError, TypeError):
        return None


def _text(holder: _Holder) -> str:
    return json.dumps(asdict(holder))


def _add(run: RunFolder, number: int, holder: _Holder | None) -> bool:
    """Add a claim of a holder to a run, or a release; return whether that one is in the file."""
    mark = uuid.uuid4().hex
    text = f"{_RELEASED} {mark}" if holder is None else _text(holder)
    path = _path(run, number)
    # The name is that of unfinished files, which are removed where their writer was killed.
    temporary = run.path / f".claim.{mark}.{os.getpid()}.tmp"
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        with suppress(FileExistsError):
            link_or_copy(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    # The content of the file decides: a server may have executed the link twice.
    return path.read_text(encoding="utf-8") == text


CLAIMS = RunClaims()
