"""Devices of this machine are one launcher's at a time, whatever folders launchers work in.

Each device has a file in one folder for all users, named by the UUID of a CUDA device or by the
number of a core, and whoever holds the lock on it holds the device. The ranks of a run inherit the
lock, so that ranks which outlive a killed launcher still hold their devices; a crash of them all
releases it. The files stay: removing one would let two launchers lock two files of one name.

A launcher decides what to start while it holds the turn, a lock of its own, so that two of them
never take halves of what each needs. One whose next run needs devices that others hold keeps the
turn: nobody else starts anything until that run has started, so that a wide run does not wait for
ever because others take single devices. It keeps it for ten minutes at a time (`placement.py`):
what it waits for may never end.

The folder is in the temporary folder, which `TMPDIR` names: launchers that see different ones (in
containers, or with a temporary folder each) do not see each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

__all__ = ["DeviceLocks"]

_PATIENCE_S = 0.05
"""How long to wait for the turn: another launcher starts its runs in that time."""
_POLL_S = 0.005


class DeviceLocks:
    """Locks on the devices of one kind. Where the folder cannot be used, nobody is kept away.

    Parameters
    ----------
    kind : str
        `cpu` or `cuda`.
    names : mapping
        What a device is called on the whole machine, by its number here.
    warn : callable
        Told once, in words, when there can be no locks.
    """

    def __init__(self, kind: str, names: Mapping[int, str], warn: Callable[[str], None]) -> None:
        self.folder = Path(tempfile.gettempdir()) / "batchscape-devices"
        self._kind, self._names, self._warn = kind, names, warn
        self._held: dict[int, int] = {}
        self._turn = -1
        self._usable = True

    def take_turn(self) -> bool:
        """Take the turn to start runs, or keep it; False while another launcher has it."""
        if self._turn >= 0 or not self._usable:
            return True
        descriptor = self._open(f"{self._kind}-turn")
        if descriptor is None:
            return True
        deadline = time.monotonic() + _PATIENCE_S
        while not self._try(descriptor):
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return False
            time.sleep(_POLL_S)
        self._turn = descriptor
        return True

    def end_turn(self) -> None:
        """Let other launchers start runs."""
        if self._turn >= 0:
            _release(self._turn)
            self._turn = -1

    def take(self, device: int) -> bool:
        """See `Locks`."""
        descriptor = self._open(f"{self._kind}-{self._names[device]}") if self._usable else None
        if descriptor is None:
            return True
        if not self._try(descriptor):
            os.close(descriptor)
            return False
        self._held[device] = descriptor
        return True

    def give_back(self, device: int) -> None:
        """See `Locks`."""
        descriptor = self._held.pop(device, None)
        if descriptor is not None:
            _release(descriptor)

    def holders(self) -> str:
        """Say who holds what this launcher waits for: the users, and their processes.

        The system tells which process took a lock; one that only inherited it is not named.
        """
        with contextlib.suppress(OSError):
            ours = {_place(path.stat()) for path in self.folder.glob(f"{self._kind}-*")}
            lines = _LOCKED.finditer(_PROC_LOCKS.read_text(encoding="utf-8", errors="replace"))
            found = {int(line["pid"]) for line in lines if line["place"] in ours}
            names = [_named(pid) for pid in sorted(found - {os.getpid()})]
            return ", ".join(name for name in names if name) or _UNKNOWN
        return _UNKNOWN

    def descriptors(self, devices: Iterable[int]) -> tuple[int, ...]:
        """See `Locks`."""
        return tuple(self._held[device] for device in devices if device in self._held)

    def _try(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            self._give_up(error)
        return True

    def _open(self, name: str) -> int | None:
        path = self.folder / name
        try:
            with contextlib.suppress(FileNotFoundError):
                # Reading is enough to lock, and is all that other users may do with it. Links are
                # not followed, and a pipe must not block.
                return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir()
                # As the folder above it: everybody may add files, nobody may remove another's.
                self.folder.chmod(0o1777)
            with contextlib.suppress(FileExistsError):
                descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o644)
                os.fchmod(descriptor, 0o644)
                return descriptor
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            self._give_up(error)
            return None

    def _give_up(self, error: OSError) -> None:
        if self._usable:
            self._usable = False
            self._warn(
                f"devices cannot be locked in {self.folder} ({error}): "
                "launchers on this machine may take the same ones"
            )


_UNKNOWN = "the system does not tell who"
_PROC_LOCKS = Path("/proc/locks")
_LOCKED = re.compile(
    r"^\d+: *(?:-> *)?FLOCK +\S+ +\S+ +(?P<pid>\d+) (?P<place>[0-9a-f]+:[0-9a-f]+:\d+) ", re.M
)
"""A line of `/proc/locks`: `1: FLOCK  ADVISORY  WRITE 4711 fe:01:262146 0 EOF`; `->` waits.

Source: https://man7.org/linux/man-pages/man5/proc_locks.5.html.
"""


def _place(file: os.stat_result) -> str:
    """Say where a file lies as `/proc/locks` does: by the numbers of its device and of itself."""
    return f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"


def _named(pid: int) -> str | None:
    """Name the user of a process, and the process; None where it is gone."""
    try:
        return f"user {psutil.Process(pid).username()}, process {pid}"
    except (psutil.Error, ValueError):
        return None


def _release(descriptor: int) -> None:
    # Not only closed: a process that a rank left behind may have inherited it.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
