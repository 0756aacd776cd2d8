"""Ranks over several nodes, which are processes of this machine: `srun` would start them."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchscape.launch.child import Start
from batchscape.launch.forkserver import ServerKilledError
from batchscape.launch.slurm.nodes import Nodes, open_nodes
from batchscape.record.heartbeat import Heartbeat, Phase, beats_path
from batchscape.record.status import RankExit

WORKERS = """
import os, signal, sys, time
from pathlib import Path
from batchscape.record.heartbeat import Phase, beat

def main(run_dir, rank):
    beat(Phase.FORWARD, 3)
    print("rank", rank, os.environ["SLURM_NODEID"], os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
    if Path(run_dir, "wait").exists():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(40 + rank))
        Path(run_dir, f"here-{rank}").touch()
        time.sleep(60)
    return rank
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Nodes, list[subprocess.Popen[bytes]]]]:
    (tmp_path / "workers_of_nodes.py").write_text(WORKERS)
    meeting = tmp_path / "meeting"
    started = []
    for number in range(2):
        environment = {
            **os.environ,
            "SLURM_NODEID": str(number),
            "CUDA_VISIBLE_DEVICES": f"as Slurm set it on {number}",
            "PYTHONPATH": str(tmp_path),
        }
        command = [sys.executable, "-m", "batchscape.launch.slurm.node", str(meeting)]
        started.append(subprocess.Popen(command, env=environment))
    opened = open_nodes(meeting, ("localhost", "127.0.0.1"), "workers_of_nodes:main", lambda: False)
    assert opened is not None
    yield opened, started
    opened.close()
    assert [process.wait() for process in started] == [0, 0], "they end with their launcher"


def start_of(tmp_path: Path, ranks: int = 4) -> Start:
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    return Start(
        run_id="run",
        run_dir=str(run),
        log=str(run / "log.txt"),
        ranks=ranks,
        entry="workers_of_nodes:main",
        environment={"CUDA_VISIBLE_DEVICES": "as found on the first node"},
        heartbeat_prefix=str(tmp_path / "watched"),
    )


def ends(nodes: Nodes, count: int) -> list[RankExit]:
    exits: list[RankExit] = []
    deadline = time.monotonic() + 60
    while len(exits) < count and time.monotonic() < deadline:
        exits += nodes.wait(0.5)
    assert nodes.wait(0.5) == [], "each is told once"
    return sorted(exits, key=lambda ended: ended.rank)


@pytest.mark.slow
def test_ranks_follow_each_other_signals_reach_all_and_a_lost_node_is_told(
    nodes, tmp_path: Path
) -> None:
    opened, started = nodes
    hearts = [Heartbeat(beats_path(str(tmp_path / "watched"), r), create=True) for r in range(2)]
    opened.start(start_of(tmp_path))
    assert [(e.rank, e.code) for e in ends(opened, 4)] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    logs = [tmp_path / "run" / name for name in ("log.txt", "log-node1.txt")]
    printed = [sorted(log.read_text().splitlines()) for log in logs]
    assert printed == [
        [f"rank {rank} {node} as Slurm set it on {node}" for rank in (2 * node, 2 * node + 1)]
        for node in range(2)
    ]
    beats = [heart.read() for heart in hearts]
    assert [(b.phase, b.optimizer_step) for b in beats] == [(Phase.FORWARD, 3)] * 2
    # One process, such as a prediction, is on the first node; the run may be tried again.
    opened.start(start_of(tmp_path, ranks=1))
    assert [(e.rank, e.code) for e in ends(opened, 1)] == [(0, 0)]
    place = opened.node_entries()
    assert place["nodes"] == ["localhost", "127.0.0.1"]
    assert place["master"].startswith("tcp://localhost:")

    (tmp_path / "run" / "wait").touch()
    for lose in (False, True):
        for path in (tmp_path / "run").glob("here-*"):
            path.unlink()
        opened.start(start_of(tmp_path))
        while len(list((tmp_path / "run").glob("here-*"))) < 4:
            assert opened.wait(0.1) == []
        if not lose:
            opened.signal("run", signal.SIGTERM)
            assert [e.code for e in ends(opened, 4)] == [40, 41, 42, 43]
    started[1].kill()
    lost = ends(opened, 2)
    assert [(e.rank, e.code) for e in lost] == [(2, -9), (3, -9)]
    assert lost[0].outside_cause == "node 127.0.0.1 is lost, and the ranks of the run on it"
    opened.signal("run", signal.SIGKILL)
    assert [e.rank for e in ends(opened, 2)] == [0, 1]
    with pytest.raises(ServerKilledError, match=r"node 127.0.0.1 of this job is lost"):
        opened.start(start_of(tmp_path))
    started[1].wait()
    started[1].returncode = 0  # of the fixture's concern is the other one


def test_the_key_is_its_owners_and_nobody_is_waited_for_in_vain(tmp_path: Path) -> None:
    meeting, modes = tmp_path / "meeting", []

    def should_stop() -> bool:
        if meeting.exists():
            modes.append(stat.S_IMODE(meeting.stat().st_mode))
        return True

    assert open_nodes(meeting, ("localhost", "localhost"), "a:b", should_stop) is None
    assert modes == [0o600]
    assert not meeting.exists()
