"""Ranks over the nodes of a job: the launcher on the first node starts them on every node.

`srun` starts `batchscape.launch.slurm.node` once a node. That process connects to the launcher,
forks the ranks of its node from a warm server of its own, and reports their ends. When the
connection closes, each side takes the other for gone: ranks never outlive it. Only heartbeats of
the first node are read: where a rank hangs, all others wait for it.

A node must know a key, which is in a file of the sweep folder that only its owner may read.
"""

from __future__ import annotations

import json
import secrets
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from batchscape.errors import LaunchError
from batchscape.launch.child import Start
from batchscape.launch.forkserver import ServerKilledError
from batchscape.launch.processes import ShouldStop
from batchscape.launch.slurm.node import receive, send
from batchscape.record.instants import now
from batchscape.record.status import RankExit

_CONNECT_S = 300.0
"""Time for all nodes to start Python and connect; a slow file system takes a minute or two."""
_CLOSE_S = 10.0


class Nodes:
    """Ranks on several nodes; those of one run follow each other from node to node.

    Parameters
    ----------
    names : sequence of str
        Names of the nodes, which are their addresses too; this process is on the first.
    channels : sequence of Connection
        Connections to the nodes, in the same order.
    method : str
        Way of starting ranks on the nodes.
    note : str or None
        What the user should know about the method.
    """

    def __init__(
        self, names: Sequence[str], channels: Sequence[Connection], method: str, note: str | None
    ) -> None:
        self.method, self.note = method, note
        self._names = tuple(names)
        self._channels = dict(enumerate(channels))
        self._node_by_rank: dict[tuple[str, int], int] = {}
        """Node of each living rank, by run and rank."""

    def node_entries(self) -> dict[str, Any]:
        """See `Processes`."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return {"nodes": list(self._names), "master": f"tcp://{self._names[0]}:{port}"}

    def start(self, start: Start, keep_open: Sequence[int] = ()) -> None:  # noqa: ARG002
        """See `Processes`; descriptors stay with the launcher, with which the ranks end.

        Raises
        ------
        ServerKilledError
            If a node is lost.
        """
        lost_nodes = set(range(len(self._names))) - set(self._channels)
        if lost_nodes:
            raise ServerKilledError(f"node {self._names[min(lost_nodes)]} of this job is lost")
        # A prediction has one process.
        nodes = len(self._names) if start.ranks > 1 else 1
        ranks_per_node = start.ranks // nodes
        self._node_by_rank |= {
            (start.run_id, rank): rank // ranks_per_node for rank in start.rank_numbers
        }
        for node in range(nodes):
            log = Path(start.log)
            node_start = replace(
                start,
                ranks=ranks_per_node,
                first_rank=node * ranks_per_node,
                # Two machines that append to one file may lose lines: NFS has no atomic append.
                log=str(log if node == 0 else log.with_name(f"log-node{node}.txt")),
                heartbeat_prefix=start.heartbeat_prefix if node == 0 else "",
            )
            self._send(node, start=asdict(node_start))

    def wait(self, timeout_s: float) -> list[RankExit]:
        """See `Processes`."""
        exits: list[RankExit] = []
        deadline = time.monotonic() + timeout_s
        while (
            self._channels
            and not exits
            and (ready := wait([*self._channels.values()], max(0.0, deadline - time.monotonic())))
        ):
            for node in [n for n, channel in self._channels.items() if channel in ready]:
                try:
                    exits.append(RankExit(**receive(self._channels[node])))
                except (OSError, EOFError):
                    exits += self._bury_node(node)
        for rank_exit in exits:
            del self._node_by_rank[rank_exit.run_id, rank_exit.rank]
        if not self._channels and not exits:
            time.sleep(max(0.0, deadline - time.monotonic()))
        return exits

    def signal(self, run_id: str, signal_number: int) -> None:
        """See `Processes`."""
        for node in {node for (run, _), node in self._node_by_rank.items() if run == run_id}:
            self._send(node, signal=int(signal_number), run_id=run_id)

    def close(self) -> None:
        """See `Processes`."""
        for node in list(self._channels):
            self._send(node, close=True)
        deadline = time.monotonic() + _CLOSE_S
        for channel in self._channels.values():
            with suppress(OSError, EOFError):
                while channel.poll(max(0.0, deadline - time.monotonic())):
                    channel.recv_bytes()
            channel.close()
        self._channels.clear()

    def _bury_node(self, node: int) -> list[RankExit]:
        self._channels.pop(node).close()
        outside_cause = f"node {self._names[node]} is lost, and the ranks of the run on it"
        return [
            RankExit(run_id, rank, -signal.SIGKILL, now(), outside_cause)
            for (run_id, rank), rank_node in self._node_by_rank.items()
            if rank_node == node
        ]

    def _send(self, node: int, **message: object) -> None:
        # `wait` notices a node that is gone.
        with suppress(OSError, KeyError):
            send(self._channels[node], **message)


def open_nodes(
    address_file: Path,
    names: Sequence[str],
    preload: str,
    should_stop: ShouldStop,
) -> Nodes | None:
    """Wait for the process that `srun` has started on each node, and prepare it to start ranks.

    Parameters
    ----------
    address_file : Path
        File for the address and the key; removed once all have connected.
    names : sequence of str
        Names of the nodes; this process is on the first.
    preload : str
    should_stop : callable
        As `open_processes` takes them.

    Returns
    -------
    Nodes or None
        None if `should_stop` returned True.

    Raises
    ------
    ServerKilledError
        If a node does not come in time.
    LaunchError
        If one cannot start processes.
    """
    by_node: dict[int, Connection] = {}

    def close() -> None:
        for channel in by_node.values():
            channel.close()

    with ExitStack() as cleanup:
        cleanup.callback(close)
        _connect(address_file, names, by_node, preload, should_stop)
        if len(by_node) < len(names):
            return None
        nodes = _await_boot(names, [by_node[n] for n in range(len(names))], should_stop)
        if nodes is not None:
            cleanup.pop_all()
        return nodes


def _connect(
    address_file: Path,
    names: Sequence[str],
    by_node: dict[int, Connection],
    preload: str,
    should_stop: ShouldStop,
) -> None:
    """Fill in the connections of all nodes; some are missing where `should_stop` says so."""
    key = secrets.token_bytes(32)
    with Listener(("", 0), backlog=len(names), authkey=key) as listener:
        # In a thread, as `accept` has no time limit.
        acceptor = threading.Thread(
            target=_accept, args=(listener, by_node, len(names)), daemon=True
        )
        acceptor.start()
        port = listener.address[1]
        address = {"host": names[0], "port": port, "key": key.hex(), "preload": preload}
        # Only its owner may read the file, from its first byte on.
        hidden = address_file.with_suffix(".new")
        hidden.unlink(missing_ok=True)
        hidden.touch(0o600, exist_ok=False)
        hidden.write_text(json.dumps(address))
        hidden.rename(address_file)
        deadline = time.monotonic() + _CONNECT_S
        try:
            while len(by_node) < len(names) and not should_stop():
                if time.monotonic() > deadline:
                    missing = ", ".join(name for n, name in enumerate(names) if n not in by_node)
                    raise ServerKilledError(
                        f"nodes of this job have not started within {_CONNECT_S:g} s: {missing}"
                    )
                time.sleep(0.05)
        finally:
            address_file.unlink(missing_ok=True)


def _await_boot(
    names: Sequence[str], channels: Sequence[Connection], should_stop: ShouldStop
) -> Nodes | None:
    """Wait for the fork servers of all nodes, which boot at the same time."""
    method, note = "", None
    for name, channel in zip(names, channels, strict=True):
        while not channel.poll(0.1):
            if should_stop():
                return None
        try:
            reply = receive(channel)
        except (OSError, EOFError):
            raise ServerKilledError(f"node {name} of this job is lost") from None
        if reply["error"] is not None:
            raise LaunchError(f"node {name}: {reply['error']}")
        method, note = reply["method"], reply["note"] or note
    return Nodes(names, channels, method, note)


def _accept(listener: Listener, by_node: dict[int, Connection], nodes: int) -> None:
    while len(by_node) < nodes:
        try:
            channel = listener.accept()
            by_node[int(receive(channel)["node"])] = channel
        except (AuthenticationError, EOFError, ConnectionError):
            continue  # a stranger, or a node that has ended
        except OSError:
            return  # closed, as the launcher has stopped waiting
