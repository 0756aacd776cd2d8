"""Who runs which run of a sweep: one launcher at a time, from the start of a run to its end.

`RunClaims` and `RunClaim` are all that launchers and readers know of it; `CLAIMS` is what they use,
on one machine as on the nodes of a cluster.

The claims of a run are files `.claim.1`, `.claim.2`, ... in its folder. The last one tells how it
stands: who holds it, or that it was released. Nobody changes a claim or removes one while the run
may be claimed; whoever claims, takes over, or releases a run adds the next one, by a hard link to a
file that is complete. A link is made once, whoever else tries: on NFS as well, where an answer may
be lost, and the file that is there is therefore read to see whose it is (docs/file_systems.md).

Why a run that was left is taken over once: two observers that find claim n left both try to add
claim n + 1, and one of them does. No claim is removed and made anew, so that a slow one cannot
remove the claim of a fast one. Whoever has an old view of the folder tries a number that is taken.
The claims of a run that is over are removed, the last one first, by the holder, after it has added
its release; one who comes so late that it adds claim n + 1 to a chain that is gone, finds that the
claim n which it has seen is not there any more, and withdraws.

Whether a holder is gone is judged by what can be known, in this order:

* A lock (`flock`) on `.lock`, which the ranks inherit. While it is seen, somebody lives. On the
  machine of the holder, which took it, its end is known at once.
* The file system: claims of before a restart of the only machine that has it are left.
* The scheduler, if the holder is in a job: while the job lives, so does the claim, as long as any
  process of the job may. Of a job that is over nothing should be left; its claim is left once it is
  silent for `_GONE_S`. A node that lost its connection to the scheduler alone still works: it is
  not silent.
* Where nobody can be asked, silence for `_SILENT_S`. Ranks of our own end with their launcher
  within seconds.

A holder shows that it lives by touching its claim. Observers see whether that changes, by their own
monotonic clock, and count only the time in which they looked: clocks of two nodes are never
compared, and an outage of the file system is nobody's silence. A holder that was taken over, as it
was cut off, sees the next claim, or that its own went with the end of the run, and writes no end.
"""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import psutil

from batchscape import scheduler
from batchscape.errors import SchedulerError
from batchscape.record.disk import is_of_this_machine, read_each
from batchscape.record.files import link_or_copy
from batchscape.record.folder import RunFolder
from batchscape.record.locks import Lock, has_no_locks, is_held, take
from batchscape.scheduler import Job, JobState

__all__ = ["CLAIMS", "RunClaim", "RunClaims"]

_BEAT_S = 10.0
"""Time between two touches of a claim."""
_GONE_S = 30.0
"""Silence of a holder whose job is over, or whose process is gone."""
_SILENT_S = 300.0
"""Silence of a holder that nobody can be asked about: network file systems stand still for minutes
when a server is replaced."""
_GAP_S = 30.0
"""Longest time that counts between two looks, whichever runs they were at."""
_ASKED_S, _NEW_S = 15.0, 1.0
"""How old an answer of the scheduler may be, and the time between two questions for jobs that it
was not asked for before."""


class RunClaim(Protocol):
    """A run that this launcher holds."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Open files that the run's processes inherit: the claim lasts as long as any of them."""

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

    def release(self, *, is_over: bool = False) -> None:
        """Give the run up, also for the processes that have inherited the claim.

        Parameters
        ----------
        is_over : bool
            Whether nobody will claim the run again.
        """


class RunClaims(Protocol):
    """The claims of all runs, whoever holds them."""

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

    def holder(self, run: RunFolder) -> str | None:
        """Name who holds a run, or whose processes do; None where nobody does.

        At a glance: one whose job is over does not hold it, even where `claim` still waits.
        """

    def ask_ahead(self, runs: Sequence[RunFolder]) -> None:
        """Have the scheduler asked once for all jobs that hold some of many runs.

        Otherwise it is asked for each as it is met, once a second; until then it seems to live.
        """


@dataclass(frozen=True)
class _Holder:
    """What a claim says."""

    mark: str
    """Of this claim alone."""
    node: str
    boot: str
    """Of the machine, since it was started."""
    pid: int
    has_lock: bool
    """Whether the holder and its ranks have the lock, too."""
    is_local: bool
    """Whether the holder saw a file system that one machine has for itself."""
    nodes: int = 1
    cluster: str | None = None
    job: str | None = None
    restarts: int = 0

    def __str__(self) -> str:
        name = f"process {self.pid} on {self.node}"
        return name if self.job is None else f"{name} (job {self.job})"

    @classmethod
    def here(cls, folder: Path, *, has_lock: bool) -> _Holder:
        """Describe this process."""
        found = os.environ
        # The shell of an allocation, on another machine, outlives it.
        job = found.get("SLURM_JOB_ID") if "SLURMD_NODENAME" in found else None
        return cls(
            mark=uuid.uuid4().hex,
            node=found["SLURMD_NODENAME"] if job else platform.node(),
            boot=_boot(),
            pid=os.getpid(),
            has_lock=has_lock,
            is_local=is_of_this_machine(folder),
            nodes=int(found.get("SLURM_JOB_NUM_NODES", 1)) if job else 1,
            cluster=found.get("SLURM_CLUSTER_NAME") if job else None,
            job=job,
            restarts=int(found.get("SLURM_RESTART_COUNT", 0)) if job else 0,
        )


_RELEASED = "released"
_Claimed = _Holder | str | None
"""A holder; `_RELEASED`; None where a claim cannot be read, which somebody may be writing."""


class _Claim:
    def __init__(self, run: RunFolder, number: int, own: _Holder, lock: Lock | None) -> None:
        self._run, self._number, self._own, self._lock = run, number, own, lock
        self._beat_at = time.monotonic() + _BEAT_S

    @property
    def descriptors(self) -> tuple[int, ...]:
        return () if self._lock is None else (self._lock.descriptor,)

    def renew(self, *, at_once: bool = False) -> bool:
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
        # A folder that was moved has taken the claims along: those there now are others'.
        is_there = _read(_path(self._run, self._number)) == self._own
        with suppress(OSError):  # where nothing can be written the lock alone tells of it
            if is_there and _add(self._run, self._number + 1, None) and is_over:
                for number in range(self._number + 1, 0, -1):
                    _path(self._run, number).unlink(missing_ok=True)
                if self._lock is None:
                    self._run.lock.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.release(remove=is_over)


class _Seen(NamedTuple):
    touched_ns: int
    looked_s: float
    """For how long this process had looked by then, at any claims."""


class _Claims:
    """Claims by files that are added, and by locks where there are any."""

    def __init__(self) -> None:
        self._seen: dict[Path, _Seen] = {}
        self._looked_s = 0.0
        self._looked_at = time.monotonic()
        self._jobs = _Jobs()
        self._lock = threading.Lock()

    def claim(self, run: RunFolder) -> RunClaim | None:
        run.path.mkdir(parents=True, exist_ok=True)
        number, found = _last(run)
        if number and found != _RELEASED and not self._is_left(run, number, found):
            return None
        lock = None
        try:
            lock = take(run.lock)
        except OSError as error:
            if not has_no_locks(error):
                raise
        else:
            if lock is None:
                return None
        claim = None
        try:
            own = _Holder.here(run.path.parent, has_lock=lock is not None)
            if _follows(run, number, found, own):
                claim = _Claim(run, number + 1, own, lock)
        finally:
            if claim is None and lock is not None:
                lock.release()
        return claim

    def holder(self, run: RunFolder) -> str | None:
        number, found = _last(run)
        if not is_held(run.lock):
            if not number or found == _RELEASED:
                return None
            limit_s = self._limit_s(run, found)
            if limit_s <= _GONE_S or self._silent_s(_path(run, number)) >= limit_s:
                return None
        return str(found) if isinstance(found, _Holder) else "an unknown process"

    def _is_left(self, run: RunFolder, number: int, found: _Claimed) -> bool:
        limit_s = self._limit_s(run, found)
        return limit_s == 0 or self._silent_s(_path(run, number)) >= limit_s

    def _limit_s(self, run: RunFolder, found: _Claimed) -> float:
        """Return the silence after which a claim is left, by what is known of its holder."""
        if is_held(run.lock):
            return math.inf
        if not isinstance(found, _Holder):
            return _SILENT_S
        is_here = found.boot == _boot()
        if is_here and found.has_lock:
            # Ranks on other nodes end a little later than their launcher.
            return 0.0 if found.nodes == 1 else _GONE_S
        if not is_here and found.is_local and is_of_this_machine(run.path.parent):
            return 0.0
        if is_here and not psutil.pid_exists(found.pid):  # or it is in a container: not silent then
            return _GONE_S
        is_over = self._jobs.is_over(found)
        limits_s = {None: _SILENT_S, True: _GONE_S, False: math.inf}
        return limits_s[is_over]

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

    def ask_ahead(self, runs: Sequence[RunFolder]) -> None:
        if runs and scheduler.is_available():
            last = read_each(_last, runs, runs[0].path)
            self._jobs.ask_for([found for _, found in last if isinstance(found, _Holder)])


class _Jobs:
    """What the scheduler says of the jobs that hold runs, asked for all of them at once."""

    def __init__(self) -> None:
        self._clusters: dict[str, str | None] = {}
        """Of the jobs that are asked for."""
        self._asked: set[str] = set()
        """Those that were, the last time."""
        self._found: dict[str, Job] = {}
        self._asked_at = -math.inf
        self._is_answered = False
        self._lock = threading.Lock()

    def ask_for(self, holders: Iterable[_Holder]) -> None:
        """Ask for the jobs of holders that were not asked for yet."""
        with self._lock:
            jobs = {holder.job: holder.cluster for holder in holders if holder.job is not None}
            if not jobs.keys() <= self._clusters.keys():
                self._clusters |= jobs
                self._ask()

    def is_over(self, holder: _Holder) -> bool | None:
        """Whether a holder's job has no processes any more; None where nobody can be asked."""
        if holder.job is None or not scheduler.is_available():
            return None
        with self._lock:  # many runs are looked at at once
            self._clusters[holder.job] = holder.cluster
            is_new = self._is_answered and holder.job not in self._asked
            if time.monotonic() - self._asked_at >= (_NEW_S if is_new else _ASKED_S):
                self._ask()
            job = self._found.get(holder.job)
        if job is None:
            return None
        # One that was put back into the queue has left what it did.
        is_another = job.restarts is not None and job.restarts > holder.restarts
        return job.state.is_over or job.state is JobState.PENDING or is_another

    def _ask(self) -> None:
        self._asked, self._found, self._is_answered = set(self._clusters), {}, False
        with suppress(SchedulerError):
            here = {None, _cluster()}
            self._found = scheduler.jobs(
                job for job, cluster in self._clusters.items() if cluster in here
            )
            self._is_answered = True
        # From the answer on: a scheduler that gives none takes a minute for each question.
        self._asked_at = time.monotonic()


@functools.cache
def _cluster() -> str | None:
    """Name the cluster whose scheduler is asked here."""
    return os.environ.get("SLURM_CLUSTER_NAME") or scheduler.settings().get("ClusterName")


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


@functools.cache
def _boot() -> str:
    """Name this machine since it was started, or only this machine where the system does not."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return platform.node()


CLAIMS: RunClaims = _Claims()
