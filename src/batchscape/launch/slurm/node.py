"""One node of a job: forks its ranks, and reports their ends to the launcher on the first node.

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
from typing import Any

from batchscape.errors import LaunchError
from batchscape.launch.child import Start
from batchscape.launch.forkserver import open_processes
from batchscape.launch.processes import Processes
from batchscape.record.instants import now
from batchscape.record.status import RankExit

_MEET_S = 600.0
"""Time for the launcher to write its address: a job may start its nodes one by one."""
_POLL_S = 0.1
"""Longest time that an order of the launcher waits."""


def main(address_file: str) -> int:
    """Serve the launcher that has written its address to a file, until it closes the connection.

    Parameters
    ----------
    address_file : str
        The file.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The launcher obeys the signals.
        signal.signal(number, signal.SIG_IGN)
    met = _connect(Path(address_file))
    if met is None:
        sys.stderr.write(f"no launcher has left its address in {address_file}\n")
        return 1
    channel, address = met
    with channel:
        send(channel, node=int(os.environ["SLURM_NODEID"]))
        try:
            processes = open_processes(address["preload"], lambda: channel.poll(0))
        except LaunchError as error:
            send(channel, error=str(error))
            return 1
        if processes is not None:
            with closing(processes), suppress(EOFError, ConnectionError):
                send(channel, error=None, method=processes.method, note=processes.note)
                _serve(channel, processes)
    return 0


def send(channel: Connection, **message: object) -> None:
    """Send a message to the other end."""
    channel.send_bytes(json.dumps(message).encode())


def receive(channel: Connection) -> dict[str, Any]:
    """Return the next message of the other end."""
    message: dict[str, Any] = json.loads(channel.recv_bytes())
    return message


def _connect(address_file: Path) -> tuple[Connection, dict[str, Any]] | None:
    """Return the connection to the launcher, and the content of its file."""
    deadline = time.monotonic() + _MEET_S
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError):
            address = json.loads(address_file.read_text())
            key = bytes.fromhex(address["key"])
            return Client((address["host"], address["port"]), authkey=key), address
        time.sleep(_POLL_S)
    return None


def _serve(channel: Connection, processes: Processes) -> None:
    """Obey the launcher until it closes or is gone."""
    while True:
        while channel.poll(0):
            message = receive(channel)
            if "close" in message:
                return
            if "start" not in message:
                processes.signal(message["run_id"], message["signal"])
                continue
            start = Start(**message["start"])
            # Slurm has made the devices of this job visible, and the run takes all of them.
            start.environment.pop("CUDA_VISIBLE_DEVICES", None)
            try:
                processes.start(start)
            except LaunchError as error:
                for rank in start.rank_numbers:
                    send(channel, **asdict(RankExit(start.run_id, rank, 1, now(), str(error))))
        for rank_exit in processes.wait(_POLL_S):
            send(channel, **asdict(rank_exit))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
