"""Ranks over the nodes of a job: a launcher on the first node, and on every node what forks there.

`srun` starts `batchscape.launch.slurm.node` once a node. It connects to the launcher, forks the
ranks of its node from a warm server of its own, and tells of their ends. When the connection
closes, for whatever reason, both sides take the other for gone: ranks never outlive it. Heartbeats
are those of the first node alone: where a rank hangs, all others wait for it.

Who connects must know a key, which is in a file of the sweep folder that only its owner may read.
"""

from __future__ import annotations

import json
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from batchscape.errors import LaunchError
from batchscape.launch.child import Start
from batchscape.launch.forked import ServerKilledError
from batchscape.record.instants import now
from batchscape.record.outcome import RankExit

_CONNECT_S = 300.0
"""Time for all nodes to start Python and connect; a slow file system takes a minute or two."""
_CLOSE_S = 10.0


class Nodes:
    """Ranks on several nodes; those of one run follow each other from node to node.

    Parameters
    ----------
    names : sequence of str
        The nodes by their names, which are their addresses too; this process is on the first.
    channels : sequence of Connection
        To each of them, in the same order.
    method : str
        How they start ranks.
    note : str or None
        What is to be known of it.
    """

    def __init__(
        self, names: Sequence[str], channels: Sequence[Connection], method: str, note: str | None
    ) -> None:
        self.method, self.note = method, note
        self._names = tuple(names)
        self._channels = dict(enumerate(channels))
        self._living: dict[str, dict[int, int]] = {}
        """Of each run the node of each living rank."""

    def place(self) -> dict[str, Any]:
        """See `Processes`."""
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return {"nodes": list(self._names), "master": f"tcp://{self._names[0]}:{port}"}

    def start(self, start: Start, keep_open: Sequence[int] = ()) -> None:  # noqa: ARG002
        """See `Processes`; what is kept open stays with the launcher, whose end is theirs.

        Raises
        ------
        ServerKilledError
            If a node is lost.
        """
        lost = set(range(len(self._names))) - set(self._channels)
        if lost:
            msg = f"node {self._names[min(lost)]} of this job is lost"
            raise ServerKilledError(msg)
        # What is no training, such as a prediction, has one process.
        nodes = len(self._names) if start.ranks > 1 else 1
        each = start.ranks // nodes
        self._living[start.run] = {rank: rank // each for rank in start.numbers}
        for node in range(nodes):
            log = Path(start.log)
            share = replace(
                start,
                ranks=each,
                first_rank=node * each,
                # Two machines that append to one file may lose lines: NFS knows no appending.
                log=str(log if node == 0 else log.with_name(f"log-node{node}.txt")),
                watched=start.watched if node == 0 else "",
            )
            self._send(node, {"start": asdict(share)})

    def wait(self, timeout_s: float) -> list[RankExit]:
        """See `Processes`."""
        exits: list[RankExit] = []
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = 0.0 if exits else max(0.0, deadline - time.monotonic())
            ready = wait(list(self._channels.values()), left_s)
            for node in [n for n, channel in self._channels.items() if channel in ready]:
                exits += self._heard(node)
            if not ready or exits or not self._channels:
                break
        if not self._channels and not exits:
            time.sleep(max(0.0, deadline - time.monotonic()))
        return exits

    def signal(self, run: str, number: int) -> None:
        """See `Processes`."""
        for node in set(self._living.get(run, {}).values()):
            self._send(node, {"signal": int(number), "run": run})

    def close(self) -> None:
        """See `Processes`."""
        for node in list(self._channels):
            self._send(node, {"close": True})
        deadline = time.monotonic() + _CLOSE_S
        for channel in self._channels.values():
            with suppress(OSError, EOFError):
                while channel.poll(max(0.0, deadline - time.monotonic())):
                    channel.recv_bytes()
            channel.close()
        self._channels.clear()

    def _heard(self, node: int) -> list[RankExit]:
        """Take one message of a node; the ends of its ranks where it is gone."""
        try:
            message = json.loads(self._channels[node].recv_bytes())
        except (OSError, EOFError):
            return self._lost(node)
        return [self._noted(RankExit(**message))]

    def _lost(self, node: int) -> list[RankExit]:
        self._channels.pop(node).close()
        lost = f"node {self._names[node]} is lost, and the ranks of the run on it"
        return [
            self._noted(RankExit(run, rank, -signal.SIGKILL, now(), lost))
            for run, living in list(self._living.items())
            for rank, place in list(living.items())
            if place == node
        ]

    def _noted(self, ended: RankExit) -> RankExit:
        living = self._living[ended.run]
        del living[ended.rank]
        if not living:
            del self._living[ended.run]
        return ended

    def _send(self, node: int, message: dict[str, Any]) -> None:
        # A node that is gone is noticed where its next message is awaited.
        with suppress(OSError, KeyError):
            self._channels[node].send_bytes(json.dumps(message).encode())


def open_nodes(
    meeting: Path,
    names: Sequence[str],
    entry: str,
    should_stop: Callable[[], bool],
    also_preload: str,
) -> Nodes | None:
    """Wait for what `srun` has started on each node, and have it ready to start ranks.

    Parameters
    ----------
    meeting : Path
        File to leave the address and the key in; removed once all have connected.
    names : sequence of str
        The nodes; this process is on the first.
    entry : str
        What ranks will call.
    should_stop : callable
    also_preload : str
        As `open_processes` takes them.

    Returns
    -------
    Nodes or None
        None if `should_stop` said so.

    Raises
    ------
    ServerKilledError
        If a node does not come in time.
    LaunchError
        If one cannot start processes.
    """
    channels = _connected(meeting, names, should_stop)
    try:
        opened = channels and _opened(names, channels, entry, should_stop, also_preload)
    except BaseException:
        _close(channels or ())
        raise
    if not channels or not opened:
        _close(channels or ())
        return None
    return opened


def _connected(
    meeting: Path, names: Sequence[str], should_stop: Callable[[], bool]
) -> list[Connection] | None:
    key = secrets.token_bytes(32)
    came: dict[int, Connection] = {}
    with Listener(("", 0), backlog=len(names), authkey=key) as listener:
        # In a thread, as it waits without an end.
        accepts = threading.Thread(target=_accept, args=(listener, came, len(names)), daemon=True)
        accepts.start()
        port = listener.address[1]
        _write_for_its_owner(meeting, {"host": names[0], "port": port, "key": key.hex()})
        try:
            deadline = time.monotonic() + _CONNECT_S
            while len(came) < len(names):
                if should_stop() or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        finally:
            meeting.unlink(missing_ok=True)
    if len(came) == len(names):
        return [came[node] for node in range(len(names))]
    _close(came.values())
    if should_stop():
        return None
    missing = ", ".join(name for node, name in enumerate(names) if node not in came)
    msg = f"nodes of this job have not started within {_CONNECT_S:g} s: {missing}"
    raise ServerKilledError(msg)


def _opened(
    names: Sequence[str],
    channels: Sequence[Connection],
    entry: str,
    should_stop: Callable[[], bool],
    also_preload: str,
) -> Nodes | None:
    """Have every node boot what forks its ranks, all at the same time."""
    for channel in channels:
        opening = {"open": {"entry": entry, "also_preload": also_preload}}
        channel.send_bytes(json.dumps(opening).encode())
    method, note = "", None
    for name, channel in zip(names, channels, strict=True):
        while not channel.poll(0.1):
            if should_stop():
                return None
        try:
            opened = json.loads(channel.recv_bytes())
        except (OSError, EOFError):
            msg = f"node {name} of this job is lost"
            raise ServerKilledError(msg) from None
        if opened["error"] is not None:
            msg = f"node {name}: {opened['error']}"
            raise LaunchError(msg)
        method, note = opened["method"], opened["note"] or note
    return Nodes(names, channels, method, note)


def _close(channels: Iterable[Connection]) -> None:
    for channel in channels:
        channel.close()


def _accept(listener: Listener, came: dict[int, Connection], nodes: int) -> None:
    while len(came) < nodes:
        try:
            channel = listener.accept()
            came[int(json.loads(channel.recv_bytes())["node"])] = channel
        except (AuthenticationError, EOFError, ConnectionError):
            continue  # not one of ours
        except OSError:
            return  # closed: nobody waits any more


def _write_for_its_owner(path: Path, content: dict[str, Any]) -> None:
    hidden = path.with_suffix(".new")
    hidden.unlink(missing_ok=True)
    hidden.touch(0o600, exist_ok=False)
    hidden.write_text(json.dumps(content))
    hidden.rename(path)
