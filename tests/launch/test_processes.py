"""The contract of both ways of starting ranks, with real processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from sweeps_of_fakes import ENTRY, is_alive, pids_in, wait_until

from batchscape.errors import LaunchError
from batchscape.launch import forkserver
from batchscape.launch.child import WORKER, Start, start_interpreter
from batchscape.launch.forkserver import Forked, open_processes
from batchscape.launch.processes import Processes, Spawned
from batchscape.record.files import write_json
from batchscape.record.status import RankExit


@pytest.fixture(scope="module", autouse=True)
def _cold_interpreter() -> Iterator[None]:
    """Start fork servers as a launcher does, in a fresh interpreter each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "start_interpreter", start_interpreter)
        yield


@pytest.fixture(scope="module", params=["fork", "spawn"])
def processes(request: pytest.FixtureRequest) -> Iterator[Processes]:
    made = open_processes(WORKER, lambda: False, method=request.param)
    assert made is not None
    assert made.method == request.param
    yield made
    made.close()


def start(processes: Processes, folder: Path, ranks: int = 1, **environment: str) -> Start:
    folder.mkdir(exist_ok=True)
    launch = {
        "attempt": 0,
        "world_size": ranks,
        "rendezvous": str(folder / "rendezvous"),
        "start_method": processes.method,
    }
    write_json(folder / "launch.json", launch)
    begun = Start(folder.name, str(folder), str(folder / "log.txt"), ranks, ENTRY, environment)
    processes.start(begun)
    return begun


def ends(processes: Processes, count: int) -> list[RankExit]:
    exits: list[RankExit] = []

    def enough() -> bool:
        exits.extend(processes.wait(0.1))
        return len(exits) >= count

    wait_until(enough, "the ranks do not end")
    return sorted(exits, key=lambda ended: ended.rank)


def wait_for_pids(folder: Path, count: int) -> dict[str, int]:
    wait_until(lambda: len(list(folder.glob("pid-*.json"))) >= count, "the ranks do not start")
    return pids_in(folder)


@pytest.mark.parametrize(
    ("name", "code"), [("completes", 0), ("raises", 1), ("exits7", 7), ("killed", -9)]
)
def test_how_a_rank_ends_is_reported(
    processes: Processes, tmp_path: Path, name: str, code: int
) -> None:
    start(processes, tmp_path / name)
    (ended,) = ends(processes, 1)
    assert (ended.run_id, ended.rank, ended.code) == (name, 0, code)


def test_all_that_is_printed_is_in_the_log(processes: Processes, tmp_path: Path) -> None:
    log = tmp_path / "prints" / "log.txt"
    log.parent.mkdir()
    log.write_text("of an earlier attempt\n")
    start(processes, log.parent, ranks=2)
    ends(processes, 2)
    lines = log.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "of an earlier attempt"
    for rank in range(2):
        for text in (f"out of rank {rank} µ", f"err of rank {rank}", f"child of rank {rank}"):
            assert lines.count(text) == 1
    assert lines.count("read ''") == 2


def test_ranks_share_a_group_of_their_own(processes: Processes, tmp_path: Path) -> None:
    start(processes, tmp_path / "stubborn-a", ranks=2)
    start(processes, tmp_path / "stubborn-b", ranks=1)
    a = wait_for_pids(tmp_path / "stubborn-a", 2)
    b = wait_for_pids(tmp_path / "stubborn-b", 1)
    groups = {name: os.getpgid(pid) for name, pid in a.items() if "rank" in name}
    assert len(set(groups.values())) == 1
    assert {*groups.values()} & {os.getpgid(b["pid-rank-0.json"]), os.getpgid(0)} == set()
    processes.signal("stubborn-a", signal.SIGKILL)
    assert [ended.code for ended in ends(processes, 2)] == [-9, -9]
    assert is_alive(b["pid-rank-0.json"])
    processes.signal("stubborn-b", signal.SIGKILL)
    ends(processes, 1)
    # A group that has ended cannot be hit any more.
    processes.signal("stubborn-a", signal.SIGKILL)


def test_what_ranks_leave_behind_ends_with_them(processes: Processes, tmp_path: Path) -> None:
    start(processes, tmp_path / "leaves", ranks=2)
    assert [ended.code for ended in ends(processes, 2)] == [0, 0]
    pids = pids_in(tmp_path / "leaves")
    assert len(pids) == (6 if processes.method == "fork" else 4)
    wait_until(lambda: not any(map(is_alive, pids.values())), "processes are left")


def test_the_environment_of_a_rank(processes: Processes, tmp_path: Path) -> None:
    start(processes, tmp_path / "device", CUDA_VISIBLE_DEVICES="GPU-1,GPU-2")
    ends(processes, 1)
    assert '"visible": "GPU-1,GPU-2"' in (tmp_path / "device" / "log.txt").read_text()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_close_leaves_nothing(tmp_path: Path) -> None:
    spawned = Spawned()
    start(spawned, tmp_path / "stubborn", 2)
    pids = wait_for_pids(tmp_path / "stubborn", 4)
    spawned.close()
    wait_until(lambda: not any(map(is_alive, pids.values())), "processes are left")


@pytest.mark.skipif(sys.platform != "linux", reason="the fork server is for Linux")
class TestForked:
    @pytest.mark.slow
    def test_the_server_has_one_thread_and_a_rank_dies_with_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            monkeypatch.delenv(name)
        # With all that our own loop imports, which might start threads.
        forked = Forked(WORKER)
        start(forked, tmp_path / "stubborn", 2)
        pids = wait_for_pids(tmp_path / "stubborn", 6)
        server = psutil.Process(psutil.Process(pids["pid-rank-0.json"]).ppid())
        assert server.num_threads() == 1
        assert os.getsid(server.pid) != os.getsid(0)
        server.kill()
        assert [ended.code for ended in ends(forked, 2)] == [-9, -9]
        in_group = [pid for name, pid in pids.items() if "detached" not in name]
        wait_until(lambda: not any(map(is_alive, in_group)), "ranks outlive the server")
        for name, pid in pids.items():
            if "detached" in name:
                os.kill(pid, signal.SIGKILL)
        # The next run gets a new server.
        start(forked, tmp_path / "completes")
        assert [ended.code for ended in ends(forked, 1)] == [0]
        start(forked, tmp_path / "stubborn-at-close")
        pids = wait_for_pids(tmp_path / "stubborn-at-close", 3)
        forked.close()
        assert not any(map(is_alive, pids.values()))

    @pytest.mark.slow
    def test_what_cannot_be_handed_over_is_not_waited_for(self, tmp_path: Path) -> None:
        processes = Forked(ENTRY)
        try:
            wait_until(lambda: processes.is_ready(0.1), "the server does not boot")
            refused = Start("refused", str(tmp_path), str(tmp_path / "log.txt"), 1, ENTRY, {})
            with pytest.raises(LaunchError, match="refused cannot be handed to the fork server"):
                processes.start(refused, keep_open=(1 << 20,))
            start(processes, tmp_path / "completes")
            assert [ended.run_id for ended in ends(processes, 1)] == ["completes"]
            processes._server.kill()
            assert processes.wait(5.0) == []
        finally:
            processes.close()

    @pytest.mark.slow
    def test_threads_make_forking_unsafe(self) -> None:
        instead = open_processes("threads_at_import:main", lambda: False)
        assert isinstance(instead, Spawned)
        assert "1 more native threads" in str(instead.note)
        instead.close()

    def test_a_server_that_cannot_boot_says_why(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "numpy.py").write_text("raise ImportError('planted')")
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(LaunchError, match="planted"):
            open_processes(WORKER, lambda: False, method="fork")

    def test_booting_can_be_stopped(self) -> None:
        assert open_processes(ENTRY, lambda: True, method="fork") is None
