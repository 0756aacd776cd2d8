"""Workers that behave, or misbehave, as the first word of their run's name says."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from batchscape.record.files import JsonLines, read_json, write_json
from batchscape.record.folder import RunFolder


class Rank:
    """One fake rank and what it can do."""

    def __init__(self, run_dir: str, rank: int) -> None:
        self.folder = RunFolder(Path(run_dir))
        self.rank = rank
        self.launch = read_json(self.folder.launch)
        self.attempt: int = self.launch["attempt"]

    def rows(self, first: int, last: int) -> None:
        """Write optimizer steps, with a loss of 1/step."""
        if self.rank:
            return
        lines = JsonLines(self.folder.lines("steps"))
        lines.append(
            {
                "optimizer_step": k,
                "samples": 32 * k,
                "tokens": 1024 * k,
                "train_time_s": 0.5 * k,
                "attempt": self.attempt,
                "loss": 1 / k,
                "step_time_s": 0.5,
                "warmup": False,
            }
            for k in range(first, last + 1)
        )
        lines.close()

    def outcome(self, status: str, reason: str | None = None, cause: str | None = None) -> int:
        """Leave an outcome; return the exit code."""
        content: dict[str, Any] = {
            "status": status,
            "stop_reason": "budget" if status == "completed" else None,
            "reason": reason,
            "cause": cause,
            "at": time.time(),
            "optimizer_step": 3,
            "phase": "steady",
        }
        write_json(self.folder.outcome(self.rank), content)
        return 0 if status in {"completed", "diverged"} else 1

    def complete(self) -> int:
        """Do a run of three steps."""
        self.rows(1, 3)
        return self.outcome("completed")


def sleep_for_ever() -> NoReturn:
    while True:
        time.sleep(60)


def completes(rank: Rank) -> int:
    return rank.complete()


def diverges(rank: Rank) -> int:
    rank.rows(1, 2)
    return rank.outcome("diverged", "the loss of optimizer step 2 is not finite")


def raises(rank: Rank) -> int:
    msg = f"planted in rank {rank.rank}"
    raise RuntimeError(msg)


def deserted(rank: Rank) -> int:
    """One rank fails, the others wait for it."""
    if rank.rank == rank.launch["world_size"] - 1:
        return rank.outcome("failed", "planted failure")
    sleep_for_ever()


def runsout(rank: Rank) -> int:
    if rank.rank == 0:
        return rank.outcome("oom", "out of memory")
    # However late the other one starts.
    while not rank.folder.outcome(0).exists():
        time.sleep(0.2)
    return rank.outcome("failed", "a peer closed its connection")


def recovers(rank: Rank) -> int:
    """Run out of memory in the first attempt; complete in the second."""
    return rank.complete() if rank.attempt else rank.outcome("oom", "out of memory")


def exits7(rank: Rank) -> int:
    rank.rows(1, 2)
    print("on the way out", flush=True)
    os._exit(7)


def exits9(rank: Rank) -> int:
    rank.rows(1, 2)
    print("on the way out", flush=True)
    os._exit(9)


def killed(rank: Rank) -> int:
    if rank.rank == rank.launch["world_size"] - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    sleep_for_ever()


def prints(rank: Rank) -> int:
    print(f"out of rank {rank.rank} µ")
    print(f"err of rank {rank.rank}", file=sys.stderr)
    subprocess.run(["/bin/sh", "-c", f"echo child of rank {rank.rank}"], check=True)
    print(f"read {sys.stdin.read()!r}")
    return rank.complete()


def torn(rank: Rank) -> int:
    """Tear a line and die in the first attempt; complete in the second."""
    if rank.attempt == 0:
        rank.rows(1, 2)
        if rank.rank == 0:
            with rank.folder.lines("steps").open("a") as file:
                file.write('{"optimizer_step": 3, "lo')
        os._exit(1)
    rank.rows(3, 3)
    return rank.outcome("completed")


def damaged(rank: Rank) -> int:
    rank.folder.lines("steps").write_text("not a row\n")
    return rank.outcome("completed")


def stubborn(rank: Rank) -> int:
    """Ignore requests to stop, and leave processes of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    leave_processes(rank)
    sleep_for_ever()


def polite(rank: Rank) -> int:
    """Stop when asked to; complete in the second attempt."""
    if rank.attempt:
        return rank.complete()

    def stop(*_: object) -> NoReturn:
        os._exit(rank.outcome("interrupted", "asked to stop"))

    signal.signal(signal.SIGTERM, stop)
    sleep_for_ever()


def teardown(rank: Rank) -> int:
    """Complete, but hang at the end in one rank."""
    code = rank.complete()
    if rank.rank == 0:
        sleep_for_ever()
    return code


def crashesafter(rank: Rank) -> int:
    """Complete, but crash at the end in one rank, while the other is not done yet."""
    if rank.rank == 1:
        rank.outcome("completed")
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(1.5)
    return rank.complete()


def savesalone(rank: Rank) -> int:
    """End as ranks do that somebody has sent SIGTERM: one writes the checkpoint, nobody waits."""
    if rank.rank == 0:
        time.sleep(1.5)
        (rank.folder.path / "saved").touch()
    return rank.outcome("interrupted", "asked to stop")


def lingers(rank: Rank) -> int:
    """Complete in every rank, and end in none."""
    rank.complete()
    sleep_for_ever()


def unwritable(rank: Rank) -> int:
    """Put a folder where the launcher wants to write."""
    code = rank.complete()
    rank.folder.status.unlink()
    rank.folder.status.mkdir()
    return code


def unnumbered(rank: Rank) -> int:
    rank.folder.lines("steps").write_text('{"loss": 1.0}\n')
    return rank.outcome("completed")


def halts(rank: Rank) -> int:
    """Leave a checkpoint and fail; complete in the third attempt."""
    if rank.attempt == 2:
        rank.rows(3, 3)
        return rank.outcome("completed")
    rank.folder.checkpoints.mkdir(exist_ok=True)
    (rank.folder.checkpoints / "step-000000001-0123456789abcdef.pt").touch()
    rank.rows(rank.attempt + 1, rank.attempt + 1)
    return 1


def meets(rank: Rank) -> int:
    """Complete once another launcher has been noticed, or its time is up."""
    deadline = time.monotonic() + 30
    while read_json(rank.folder.launch)["timing_valid"] and time.monotonic() < deadline:
        time.sleep(0.05)
    return rank.complete()


def gated(rank: Rank) -> int:
    """Complete once the sweep folder has a file `go`, or its time is up."""
    deadline = time.monotonic() + 60
    while not (rank.folder.path.parents[1] / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return rank.complete()


def outlasts(rank: Rank) -> int:
    """Complete once the run `exits7` has failed, or the time is up."""
    status = RunFolder(rank.folder.path.with_name("exits7")).status
    deadline = time.monotonic() + 60
    while read_json(status)["status"] != "failed" and time.monotonic() < deadline:
        time.sleep(0.02)
    return rank.complete()


def together(rank: Rank) -> int:
    """Complete once all runs of the sweep are at work."""
    deadline = time.monotonic() + 60
    runs = rank.folder.path.parent
    while len(list(runs.glob("*/pid-rank-0.json"))) < len(list(runs.iterdir())):
        if time.monotonic() > deadline:
            return rank.outcome("failed", "alone")
        time.sleep(0.02)
    return rank.complete()


def blocks(rank: Rank) -> int:
    """Complete, and have the launcher wait for a writer when it reads the evaluations."""
    os.mkfifo(rank.folder.lines("evals"))
    return rank.complete()


def vanishes(rank: Rank) -> int:
    """End well in one rank only."""
    if rank.rank == 0:
        return rank.outcome("completed")
    sleep_for_ever()


def silent(_rank: Rank) -> int:
    return 0


def divergesapart(rank: Rank) -> int:
    """All ranks diverge, and the first has more to do before it says so."""
    if rank.rank == 0:
        time.sleep(3)
    return diverges(rank)


def slips(rank: Rank) -> int:
    """Rank 1 leaves without a word, as by `sys.exit(0)`; the other waits for it."""
    if rank.rank == 0:
        time.sleep(600)
    return 0


def leaves(rank: Rank) -> int:
    """End well, with processes left behind."""
    leave_processes(rank)
    return rank.complete()


def outlived(rank: Rank) -> NoReturn:
    """Leave a copy of itself in a session of its own, with all that it inherited."""
    if os.fork() == 0:
        os.setsid()
        write_pid(rank, "copy", os.getpid())
    sleep_for_ever()


def device(rank: Rank) -> int:
    print(json.dumps({"visible": os.environ["CUDA_VISIBLE_DEVICES"], "rank": rank.rank}))
    return rank.complete()


def hungry(_rank: Rank) -> int:
    """Touch more memory than the test's cgroup has."""
    held = bytearray(b"x") * (2 << 30)
    return len(held)


def segfaults(_rank: Rank) -> int:
    """Read what is not there, as native code does."""
    ctypes.string_at(0)
    return 0


def crashesonce(rank: Rank) -> int:
    """Do two steps, leave a checkpoint and crash; complete in the second attempt."""
    if rank.attempt == 0:
        rank.rows(1, 2)
        rank.folder.checkpoints.mkdir()
        (rank.folder.checkpoints / "step-000000002-0123456789abcdef.pt").touch()
        os.kill(os.getpid(), signal.SIGABRT)
    rank.rows(3, 3)
    return rank.outcome("completed")


def loses(rank: Rank) -> int:
    """Lose the connection to the others, for no fault of theirs, in every attempt."""
    if rank.rank == 0:
        return rank.outcome("failed", "connection reset", cause="lost_connection")
    sleep_for_ever()


def killsserver(rank: Rank) -> int:
    """Kill the server that forked this rank, once the test says so; complete in the second."""
    if rank.attempt == 0:
        deadline = time.monotonic() + 60
        while not (rank.folder.path / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getppid(), signal.SIGKILL)
        sleep_for_ever()
    return rank.complete()


def leave_processes(rank: Rank) -> None:
    """Start one process in the group of the run, and one that has left it."""
    kinds = {"grandchild": False}
    if rank.launch["start_method"] == "fork":
        # Only Linux can find it again.
        kinds["detached"] = True
    for name, detached in kinds.items():
        process = subprocess.Popen(["/bin/sleep", "600"], start_new_session=detached)
        write_pid(rank, name, process.pid)


def write_pid(rank: Rank, name: str, pid: int) -> None:
    write_json(rank.folder.path / f"pid-{name}-{rank.rank}.json", {"pid": pid})


def main(run_dir: str, rank: int) -> int:
    """Behave as the run's name says."""
    this = Rank(run_dir, rank)
    write_pid(this, "rank", os.getpid())
    behaviour: Callable[[Rank], int] = globals()[this.folder.path.name.split("-")[0]]
    return behaviour(this)
