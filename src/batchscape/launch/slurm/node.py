"""One node of a job: forks its ranks, and tells the launcher on the first node of their ends.

`srun` starts it once a node; the other end is `batchscape.launch.slurm.nodes`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import closing, suppress
from dataclasses import asdict
from multiprocessing.connection import Client, Connection
from pathlib import Path

from batchscape.errors import LaunchError
from batchscape.launch.child import Start
from batchscape.launch.forked import open_processes
from batchscape.launch.processes import Processes
from batchscape.record.instants import now
from batchscape.record.outcome import RankExit

_MEET_S = 600.0
"""Time for the launcher to leave its address: a job may start its nodes one by one."""
_POLL_S = 0.1
"""Longest time that an order of the launcher waits."""


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
    with channel:
        channel.send_bytes(json.dumps({"node": int(os.environ["SLURM_NODEID"])}).encode())
        try:
            asked = json.loads(channel.recv_bytes())["open"]
            processes = open_processes(
                asked["entry"], lambda: channel.poll(0), asked["also_preload"]
            )
        except LaunchError as error:
            channel.send_bytes(json.dumps({"error": str(error)}).encode())
            return 1
        except EOFError:
            return 0
        if processes is None:
            return 0
        with closing(processes), suppress(EOFError, ConnectionError):
            opened = {"error": None, "method": processes.method, "note": processes.note}
            channel.send_bytes(json.dumps(opened).encode())
            _serve(channel, processes)
    return 0


def _connect(meeting: Path) -> Connection | None:
    deadline = time.monotonic() + _MEET_S
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError):
            told = json.loads(meeting.read_text())
            return Client((told["host"], told["port"]), authkey=bytes.fromhex(told["key"]))
        time.sleep(_POLL_S)
    return None


def _serve(channel: Connection, processes: Processes) -> None:
    """Do what the launcher says until it is gone, or says so."""
    while True:
        ended = []
        while channel.poll(0):
            message = json.loads(channel.recv_bytes())
            if "close" in message:
                return
            if "start" not in message:
                processes.signal(message["run"], message["signal"])
                continue
            start = Start(**message["start"])
            # What Slurm gave to this job is visible as Slurm says, and is all the run's.
            start.environment.pop("CUDA_VISIBLE_DEVICES", None)
            try:
                processes.start(start)
            except LaunchError as error:
                ended += [RankExit(start.run, r, 1, now(), str(error)) for r in start.numbers]
        for one in (*ended, *processes.wait(_POLL_S)):
            channel.send_bytes(json.dumps(asdict(one)).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
