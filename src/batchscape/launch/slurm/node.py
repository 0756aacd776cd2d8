"""One node of a job: forks its ranks, and tells the launcher on the first node of them.

`srun` starts it once a node; the other end is `batchscape.launch.slurm.nodes`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from batchscape.errors import LaunchError
from batchscape.launch.child import Start
from batchscape.launch.forked import open_processes
from batchscape.launch.processes import Processes
from batchscape.launch.scratch import scratch_folder
from batchscape.record.heartbeat import Beat, Heartbeat, beats_path, stacks_path
from batchscape.record.instants import now
from batchscape.record.outcome import RankExit

__all__ = ["main"]

_MEET_S = 600.0
"""Time for the launcher to leave its address: a job may start its nodes one by one."""
_POLL_S = 0.1
"""Longest time that an order of the launcher waits."""
_BEATS_S = 0.5
"""Time between two reports of heartbeats."""


def main(meeting: str) -> int:
    """Serve the launcher that has left its address in a file, until it closes the connection.

    Parameters
    ----------
    meeting : str
        The file.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The launcher decides what they mean.
        signal.signal(number, signal.SIG_IGN)
    channel = _connect(Path(meeting))
    if channel is None:
        sys.stderr.write(f"no launcher has left its address in {meeting}\n")
        return 1
    with channel, ExitStack() as stack:
        channel.send_bytes(json.dumps({"node": int(os.environ["SLURM_NODEID"])}).encode())
        try:
            asked = json.loads(channel.recv_bytes())["open"]
            processes = open_processes(
                asked["entry"], lambda: channel.poll(0), None, asked["also_preload"]
            )
        except LaunchError as error:
            channel.send_bytes(json.dumps({"error": str(error)}).encode())
            return 1
        except EOFError:
            return 0
        if processes is None:
            return 0
        stack.callback(processes.close)
        scratch = stack.enter_context(scratch_folder())
        opened = {"error": None, "method": processes.method, "note": processes.note}
        channel.send_bytes(json.dumps(opened).encode())
        with suppress(EOFError, ConnectionError):
            _Node(channel, processes, scratch).serve()
    return 0


def _connect(meeting: Path) -> Connection | None:
    deadline = time.monotonic() + _MEET_S
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError):
            told = json.loads(meeting.read_text())
            return Client((told["host"], told["port"]), authkey=bytes.fromhex(told["key"]))
        time.sleep(_POLL_S)
    return None


class _Node:
    def __init__(self, channel: Connection, processes: Processes, scratch: Path) -> None:
        self._channel, self._processes, self._scratch = channel, processes, scratch
        self._hearts: dict[tuple[str, int], Heartbeat] = {}
        self._told: dict[tuple[str, int], Beat] = {}
        self._stacks: dict[tuple[str, int], int] = {}

    def serve(self) -> None:
        """Do what the launcher says until it is gone, or says so."""
        told_at = time.monotonic()
        while True:
            while self._channel.poll(0):
                message = json.loads(self._channel.recv_bytes())
                if "close" in message:
                    return
                if "start" in message:
                    self._start(Start(**message["start"]))
                else:
                    self._processes.signal(message["run"], message["signal"])
            for ended in self._processes.wait(_POLL_S):
                self._end(ended)
            if time.monotonic() - told_at >= _BEATS_S:
                told_at = time.monotonic()
                self._tell_of_beats()

    def _start(self, start: Start) -> None:
        place = str(self._scratch / start.run)
        if start.watched:
            for rank in start.numbers:
                self._hearts[start.run, rank] = Heartbeat(beats_path(place, rank), create=True)
        # What Slurm gave to this job is visible as Slurm says, and is all the run's.
        environment = {k: v for k, v in start.environment.items() if k != "CUDA_VISIBLE_DEVICES"}
        watched = place if start.watched else ""
        try:
            self._processes.start(replace(start, environment=environment, watched=watched))
        except LaunchError as error:
            for rank in start.numbers:
                self._end(RankExit(start.run, rank, 1, now(), str(error)))

    def _end(self, ended: RankExit) -> None:
        """Tell of the end of a rank, after what it said last."""
        self._tell_of_beats()
        key = ended.run, ended.rank
        if (heart := self._hearts.pop(key, None)) is not None:
            heart.close()
            place = str(self._scratch / ended.run)
            for path in (beats_path(place, ended.rank), stacks_path(place, ended.rank)):
                path.unlink(missing_ok=True)
        for told in (self._told, self._stacks):
            told.pop(key, None)
        self._send({"run": ended.run, "exits": [asdict(ended)]})

    def _tell_of_beats(self) -> None:
        changed: dict[str, dict[int, Beat]] = {}
        for (run, rank), heart in self._hearts.items():
            beat = heart.read()
            if beat != self._told.get((run, rank)) and beat.beats:
                self._told[run, rank] = beat
                changed.setdefault(run, {})[rank] = beat
            self._tell_of_stacks(run, rank)
        for run, beats in changed.items():
            self._send({"run": run, "beats": beats})

    def _tell_of_stacks(self, run: str, rank: int) -> None:
        path = stacks_path(str(self._scratch / run), rank)
        with suppress(OSError):
            size = path.stat().st_size
            if size > self._stacks.get((run, rank), 0):
                self._stacks[run, rank] = size
                text = path.read_text(errors="replace")
                self._send({"run": run, "stacks": {rank: text}})

    def _send(self, message: dict[str, Any]) -> None:
        self._channel.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
