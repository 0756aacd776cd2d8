"""Real trainings that die in the middle of a step: status, cause, words, and the other runs."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sweeps_of_fakes import MACHINE, is_alive

from batchscape.launch import attempt, hangs
from batchscape.launch.launcher import Launcher
from batchscape.launch.result import SweepResult
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import Cause, RunStatus, Status
from batchscape.record.tables import load, verify_seal

FAULTS = str(Path(__file__).parents[1] / "faults")


class Swept:
    """A sweep that has ended, of trainings of 8 optimizer steps; names say how each ends."""

    def __init__(self, folder: SweepFolder, result: SweepResult) -> None:
        self.folder = folder
        self.result = result

    def status(self, name: str) -> RunStatus:
        return RunStatus.read(self.folder.run(name).status)

    def log(self, name: str) -> str:
        return self.folder.run(name).log.read_text()


EXPECTED = {
    "limited-d2": ("oom", "out_of_memory", "out of memory in forward of optimizer step 5: "),
    "killed-d2": ("failed", "killed", "killed, probably out of memory: rank 1 was killed by"),
    "sleeps-d2": ("failed", "hang", "rank 1 hangs in forward of optimizer step 5: "),
    "segfaults-d2": ("failed", "signal", "rank 1 was killed by SIGSEGV"),
    "wrapped-d1": ("oom", "out_of_memory", "ValueError: no batch can be made"),
    "loader-d1": ("oom", "out_of_memory", "MemoryError: Caught MemoryError in DataLoader"),
    "robbed-d1": ("failed", "killed", "DataLoader worker (pid"),
    "speaks-d1": ("failed", "exception", "ValueError: a configuration that runs out of memory"),
    "explodes-d1": ("diverged", "divergence", "the loss exploded: "),
    "unplugged-d2": ("failed", "lost_connection", ""),
    "trains-d2": ("completed", None, None),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "sleeps-d2": {"launcher": {"hang_s": 3.0}},
    "loader-d1": {"loader": {"workers": 1}},
    "robbed-d1": {"loader": {"workers": 1}},
    "explodes-d1": {
        "optimizer": {"name": "sgd", "learning_rate": 1000.0, "gradient_clip_norm": 1.0},
        "schedule": {"name": "constant"},
        "budget__optimizer_steps": 60,
    },
}


@pytest.fixture(scope="module")
def swept(spec_of: Callable[..., RunSpec], tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """All of them in one sweep, whose server is booted once; what it leaves is read only."""
    folder = SweepFolder(tmp_path_factory.mktemp("causes") / "sweep")
    specs = []
    for name in EXPECTED:
        ranks = int(name.rpartition("-d")[2])
        more = dict(SETTINGS.get(name, {}))
        launcher = {"name": "local", "device": "cpu", "retries": 0, **more.pop("launcher", {})}
        settings = {"budget__optimizer_steps": 8, "launcher": launcher, **more}
        spec = spec_of((ranks, 16 // ranks, 2), **settings)
        specs.append(dataclasses.replace(spec, run_id=name))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FAULTS)
        patch.setattr(attempt, "PEER_GRACE_S", 0.5)
        patch.setattr(hangs, "HANG_STEPS", 3.0)
        result = Launcher(
            folder,
            MACHINE,
            specs,
            entry="dying_workers:main",
            console=Console(file=io.StringIO()),
            method="fork",
        ).run()
    return Swept(folder, result)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_way_to_die_has_its_status_and_cause(swept: Swept) -> None:
    """Out of memory by itself, behind other exceptions, in a loader; signals, words, a network."""
    for name, (status, cause, reason) in EXPECTED.items():
        written = swept.status(name)
        assert (written.status, written.cause) == (status, cause), (name, written.reason)
        assert (reason or "") in str(written.reason), name
    assert {run.run_id: str(run.status) for run in swept.result.runs} == {
        name: status for name, (status, _, _) in EXPECTED.items()
    }
    runs = load(swept.folder.path).runs.set_index("run_id")
    assert runs["cause"].fillna("").to_dict() == {
        name: cause or "" for name, (_, cause, _) in EXPECTED.items()
    }


@pytest.mark.slow
def test_the_other_runs_are_as_if_nothing_had_happened(swept: Swept) -> None:
    folder = swept.folder.run("trains-d2")
    status = RunStatus.read(folder.status)
    assert (status.cause, status.reason, status.phase) == (None, None, None)
    verify_seal(folder, status)
    assert status.summary["optimizer_steps"] == 8
    # Divergence is an end like any other: sealed, and skipped from now on.
    verify_seal(swept.folder.run("explodes-d1"), swept.status("explodes-d1"))


@pytest.mark.slow
def test_memory_that_is_out_and_a_rank_that_is_killed(swept: Swept) -> None:
    oom = swept.status("limited-d2")
    assert (oom.rank, oom.phase) == (1, "forward")
    assert oom.peak_memory_method == "resident"
    assert oom.peak_memory_gib is not None
    assert 0.1 < oom.peak_memory_gib < 2
    assert str(oom.reason).startswith(
        "out of memory in forward of optimizer step 5: RuntimeError: [enforce fail at "
    )
    assert "DefaultCPUAllocator: can't allocate memory" in str(oom.reason)
    assert f"peak until then: {oom.peak_memory_gib:.3g} GiB resident" in str(oom.reason)
    assert [attempt.cause for attempt in oom.attempts] == ["out_of_memory"]

    killed = swept.status("killed-d2")
    assert (killed.rank, killed.phase) == (1, "forward")
    assert killed.reason == (
        "killed, probably out of memory: rank 1 was killed by SIGKILL, which the launcher did not "
        "send"
    )

    # The loader's process asked, and its rank was waiting for samples.
    assert swept.status("loader-d1").phase == "data"
    # The system tells the rank at once of its death, whatever the rank is doing.
    assert swept.status("robbed-d1").rank == 0
    # torch says one or the other, as its signal handler or its queue is first to know.
    assert re.match(
        r"killed, probably out of memory: RuntimeError: DataLoader worker "
        r"(\(pid \d+\) is killed by signal: Killed|\(pid\(s\) \d+\) exited unexpectedly)",
        str(swept.status("robbed-d1").reason),
    )


@pytest.mark.slow
def test_a_rank_that_sleeps_within_a_step_hangs_and_a_crash_ends_its_group(swept: Swept) -> None:
    """Rank 0 waits for rank 1 in the exchange, in native code: both show their stacks."""
    hung = swept.status("sleeps-d2")
    assert (hung.rank, hung.phase) == (1, "forward")
    reason = str(hung.reason)
    assert reason.startswith("rank 1 hangs in forward of optimizer step 5: no heartbeat for ")
    assert " s (3 x step time " in reason
    assert "at least hang_s = 3 s)" in reason
    first, second = swept.log("sleeps-d2").split("batchscape: stack of rank ")[1:]
    assert first.startswith("0, which is in backward of optimizer step 5")
    assert "backward" in first.partition("\n")[2]
    assert second.startswith("1, which is in forward of optimizer step 5")
    assert "in sleeps" in second

    crashed = swept.status("segfaults-d2")
    assert (crashed.rank, crashed.phase) == (1, "forward")
    assert "in segfaults" in swept.log("segfaults-d2")


IN_CGROUP = """
import json, sys
sys.path[:0] = sys.argv[1:3]
from memory_cgroup import join
join(sys.argv[3])
from pathlib import Path
from sweeps_of_fakes import MACHINE, ENTRY, spec_named
from batchscape.launch.launcher import Launcher
from batchscape.record.folder import SweepFolder
names = ("hungry", "killed", "completes", "completes-later")
specs = [spec_named(name, retries=0) for name in names]
Launcher(SweepFolder(Path(sys.argv[4])), MACHINE, specs, entry=ENTRY, method="spawn").run()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
def test_a_rank_that_the_system_kills_for_memory_is_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher and its ranks in a cgroup of 700 MiB: one rank takes 2 GiB, one kills itself."""
    monkeypatch.syspath_prepend(FAULTS)
    from memory_cgroup import memory_cgroup

    with memory_cgroup(700 << 20) as procs:
        here = str(Path(__file__).parent)
        arguments = [FAULTS, here, str(procs), str(tmp_path / "sweep")]
        done = subprocess.run(
            [sys.executable, "-c", IN_CGROUP, *arguments],
            check=False,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    sweep = SweepFolder(tmp_path / "sweep")
    statuses = {folder.path.name: RunStatus.read(folder.status) for folder in sweep.run_folders()}
    hungry = statuses["hungry"]
    assert (hungry.status, hungry.cause, hungry.rank) == (Status.OOM, Cause.OUT_OF_MEMORY, 0)
    assert hungry.reason == (
        "rank 0 was killed by SIGKILL, which the launcher did not send; its cgroup counted 1 kill "
        "by the out-of-memory killer meanwhile"
    )
    # The count of before says nothing of this one.
    killed = statuses["killed"]
    assert (killed.status, killed.cause) == (Status.FAILED, Cause.KILLED)
    assert str(killed.reason).startswith("killed, probably out of memory: ")
    assert statuses["completes"].status is statuses["completes-later"].status is Status.COMPLETED
    pids = [json.loads(p.read_text())["pid"] for p in sweep.path.rglob("pid-*.json")]
    assert not any(map(is_alive, pids))
