"""The process above a program of the user's own: no process of it outlives this one.

It starts the program in a session of its own, adopts whatever the program leaves behind, and ends
all of it when told, when the program has ended, or when its own standard input closes: that is,
whenever the process that watches the run is gone, however it went. It imports
next to nothing, so that it is there in a blink.

Standard input takes one letter a message: `t` asks the program to end (SIGTERM to its process
group), `k` kills everything. Standard output gives one JSON object a line: `{"pid": ...}` once the
program runs or `{"error": ...}` if it cannot be started, then `{"code": ..., "left": ...}`: its
exit code (negative: a signal) and how many processes it left that had to be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time

import psutil

from batchscape.system import adopt_orphans, end_with_parent

_POLL_S = 0.05
_END_GRACE_S = 2.0
"""Time for other processes of the program after its end: some flush to a disk."""
_KILL_LIMIT_S = 10.0
"""Longest time to wait for killed processes; one that waits for a device may not die at all."""


def _tell(**message: object) -> None:
    # `_watch` notices a watcher that is gone.
    with contextlib.suppress(OSError):
        os.write(1, (json.dumps(message) + "\n").encode())


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _reap() -> None:
    """Bury adopted processes, so that their numbers and memory are free."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _kill_all() -> int:
    """Kill every process below this one, until none is left; return how many there were."""
    killed_pids = set()
    deadline = time.monotonic() + _KILL_LIMIT_S
    while (descendants := _descendants()) and time.monotonic() < deadline:
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    killed_pids.add(process.pid)
                    process.kill()
        _reap()
        time.sleep(_POLL_S / 5)
    return len(killed_pids)


def _exit_code(pid: int) -> int | None:
    """Return the exit code of the program; None while it runs."""
    waited_pid, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if waited_pid else None


def _watch(pid: int) -> int:
    """Wait for the program's end, and do what the watcher asks for."""
    while (code := _exit_code(pid)) is None:
        if select.select([0], [], [], _POLL_S)[0]:
            # `k`, or the end of standard input: whoever watches the run is gone.
            is_to_die = os.read(0, 1) != b"t"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL if is_to_die else signal.SIGTERM)
            if is_to_die:
                time.sleep(_POLL_S / 5)
    return code


def _wait_for_rest() -> int:
    """Wait a little for the rest of the program, then kill it; return the number of killed ones."""
    deadline = time.monotonic() + _END_GRACE_S
    while time.monotonic() < deadline:
        _reap()
        if not _descendants():
            return 0
        if select.select([0], [], [], _POLL_S)[0]:
            break
    return _kill_all()


def main(argv: list[str]) -> int:
    """Run `argv` to its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # On a system that lets no process adopt others, only the program's process group can be ended.
    adopt_orphans()
    try:
        program = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=2,
            restore_signals=True,
            start_new_session=True,
            preexec_fn=_start_child,  # noqa: PLW1509  (this process has one thread)
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _tell(error=str(error))
        return 1
    _tell(pid=program.pid)
    code = _watch(program.pid)
    program.returncode = code  # it was waited for here
    _tell(code=code, left=_wait_for_rest())
    return 0


def _start_child() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    end_with_parent()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
