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
    channel = _connect(Path(address_file))
    if channel is None:
        sys.stderr.write(f"no launcher has left its address in {address_file}\n")
        return 1
    with channel:
        channel.send_bytes(json.dumps({"node": int(os.environ["SLURM_NODEID"])}).encode())
        try:
            request = json.loads(channel.recv_bytes())["open"]
            processes = open_processes(
                request["entry"], lambda: channel.poll(0), request["also_preload"]
            )
        except LaunchError as error:
            channel.send_bytes(json.dumps({"error": str(error)}).encode())
            return 1
        except EOFError:
            return 0
        if processes is None:
            return 0
        with closing(processes), suppress(EOFError, ConnectionError):
            reply = {"error": None, "method": processes.method, "note": processes.note}
            channel.send_bytes(json.dumps(reply).encode())
            _serve(channel, processes)
    return 0


def _connect(address_file: Path) -> Connection | None:
    deadline = time.monotonic() + _MEET_S
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError):
            address = json.loads(address_file.read_text())
            key = bytes.fromhex(address["key"])
            return Client((address["host"], address["port"]), authkey=key)
        time.sleep(_POLL_S)
    return None


def _serve(channel: Connection, processes: Processes) -> None:
    """Obey the launcher until it closes or is gone."""
    while True:
        failed_exits = []
        while channel.poll(0):
            message = json.loads(channel.recv_bytes())
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
                failed_exits += [
                    RankExit(start.run_id, r, 1, now(), str(error)) for r in start.rank_numbers
                ]
        for rank_exit in (*failed_exits, *processes.wait(_POLL_S)):
            channel.send_bytes(json.dumps(asdict(rank_exit)).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
