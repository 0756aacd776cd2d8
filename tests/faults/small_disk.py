"""A small disk of one's own: a tmpfs in namespaces of a child, which vanishes with it.

What runs there is a child of the test, with its own mounts; it needs no privilege where the system
allows user namespaces. Where it allows neither those nor mounts to root, the test fails: a disk
that is never full tests nothing.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_REC, _PRIVATE, _RDONLY, _REMOUNT, _BIND = 0x4000, 1 << 18, 1, 32, 4096
_LONGEST_S = 400
_CHILD = """\
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
import small_disk
small_disk.be_child(int(sys.argv[1]))
"""


class ChildFailedError(Exception):
    """What a child raised; the message is its traceback."""


def with_small_disk(place: Path, size: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Call `work(*arguments)` in a child in which `place` is a disk of its own.

    Parameters
    ----------
    place : Path
        Where the disk is mounted; made if it does not exist.
    size : int
        Of the disk, in bytes.
    work : callable
        What it returns is pickled.

    Raises
    ------
    ChildFailedError
        If it raises, or the disk cannot be had.
    """
    place.mkdir(parents=True, exist_ok=True)
    return in_child(_mount_and_call, place, size, work, arguments)


def in_child(work: Callable[..., Any], *arguments: Any) -> Any:
    """Call something in a fresh interpreter, which finds what this one finds; return its result.

    Not in a forked child: threads that Arrow and Polars have started here would be missing there.
    """
    # Test modules can be imported by nobody but pytest.
    cloudpickle.register_pickle_by_value(sys.modules["tests"])
    task = pickle.dumps(sys.path) + cloudpickle.dumps((work, arguments))
    receiver, sender = os.pipe()
    command = [sys.executable, "-c", _CHILD, str(sender)]
    with (
        os.fdopen(receiver, "rb") as pipe,
        subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[sender]) as child,
    ):
        os.close(sender)
        assert child.stdin is not None
        with child.stdin:
            child.stdin.write(task)
        told = pipe.read()
    if not told:
        msg = "the child was killed, or took too long"
        raise ChildFailedError(msg)
    failure, result = pickle.loads(told)  # noqa: S301  (our own child)
    if failure is not None:
        raise ChildFailedError(failure)
    return result


def be_child(sender: int) -> None:
    """Do the task on the standard input, and tell what came of it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_LONGEST_S)
    try:
        work, arguments = pickle.load(sys.stdin.buffer)  # noqa: S301  (our own parent)
        told = None, work(*arguments)
    except BaseException:  # noqa: BLE001  (the parent raises it again)
        told = traceback.format_exc(), None
    with os.fdopen(sender, "wb") as pipe:
        pickle.dump(told, pipe)


def _mount_and_call(
    place: Path, size: int, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    own_mounts()
    _call("mount", b"tmpfs", bytes(place), b"tmpfs", 0, f"size={size}".encode())
    return work(*arguments)


def own_mounts() -> None:
    """Give this process mounts of its own: nobody else sees what it mounts, or loses anything."""
    uid, gid = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    # Root needs no namespace of users, and keeps its files in none.
    if uid != 0 or libc.unshare(_NEWNS) != 0:
        _call("unshare", _NEWNS | _NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _call("mount", b"none", b"/", None, _REC | _PRIVATE, None)


def make_read_only(place: Path) -> None:
    """Mount a folder onto itself, read-only; to be called after `own_mounts`."""
    _call("mount", bytes(place), bytes(place), None, _BIND, None)
    _call("mount", b"none", bytes(place), None, _REMOUNT | _BIND | _RDONLY, None)


def resize(place: Path, size: int) -> None:
    """Give a small disk another size; to be called in the child."""
    _call("mount", b"tmpfs", bytes(place), b"tmpfs", _REMOUNT, f"size={size}".encode())


def fill(place: Path, leave: int = 0) -> Path:
    """Fill a disk, but for some bytes; return the file that does it."""
    path = place / "filler"
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    with path.open("wb") as file:
        file.write(bytes(max(0, free - leave)))
    return path


def _call(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
