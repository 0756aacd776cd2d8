"""Jobs at work on what they are ordered, without a Slurm: `tests/slurm` has one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from sweeps_of_fakes import ENTRY, pids_in, spec_named, wait_until

from batchscape.config import Slurm
from batchscape.launch.launcher import Launcher
from batchscape.launch.slurm import job
from batchscape.launch.slurm.order import POOL, QUEUE_AGAIN, JobOrder
from batchscape.record import claims
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import Attempt, RunStatus, Status


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepFolder:
    """A sweep whose jobs do runs of fake workers."""
    monkeypatch.setattr(job, "Launcher", partial(Launcher, entry=ENTRY, method="spawn"))
    return SweepFolder(tmp_path / "sweep")


def order(sweep: SweepFolder, *specs: RunSpec) -> None:
    """Order runs as `batchscape sweep` does, also while jobs are at work."""
    for spec in specs:
        folder = sweep.run(spec.run_id)
        if not folder.config.exists():
            spec.write(folder.config)
            RunStatus(Status.PENDING).write(folder.status)
    names = tuple(spec.run_id for spec in specs)
    JobOrder(names, Slurm(name="slurm", device="cpu"), None).extended(sweep).write(sweep)


def over_nodes(name: str) -> RunSpec:
    """Return a run over two nodes, with a rank on each."""
    spec = spec_named(name, 2)
    (stage,) = spec.stages
    geometry = replace(stage.geometry, nodes=2, devices_per_node=1)
    return replace(spec, stages=(replace(stage, geometry=geometry),))


def status(sweep: SweepFolder, name: str) -> RunStatus:
    return RunStatus.read(sweep.run(name).status)


def test_a_job_waits_for_what_its_earlier_self_has_left(
    sweep: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put back into the queue, as a node failed: that claim is left once it is silent."""
    order(sweep, spec_named("completes-1"))
    monkeypatch.setattr(claims, "is_of_this_machine", lambda _: False)
    monkeypatch.setattr(claims, "_GONE_S", 2.0)
    for name, value in {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "node1"}.items():
        monkeypatch.setenv(name, value)
    run = sweep.run("completes-1")
    claim = claims.CLAIMS.claim(run)
    assert claim is not None
    for descriptor in claim.descriptors:
        os.close(descriptor)
    path = run.path / ".claim.1"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": 1}))
    assert job.main(str(sweep.path), POOL, "", "node2") == 0
    assert status(sweep, "completes-1").status is Status.COMPLETED


def test_a_job_leaves_what_another_is_at_work_on(sweep: SweepFolder) -> None:
    order(sweep, spec_named("completes-1"))
    claim = claims.CLAIMS.claim(sweep.run("completes-1"))
    assert claim is not None
    assert job.main(str(sweep.path), POOL, "", "node2") == 0
    assert status(sweep, "completes-1").status is Status.PENDING
    claim.release()


def test_a_run_that_cannot_be_read_is_left_out_and_told_of(
    sweep: SweepFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["damaged-0", "missing-0", "completes-1"]
    order(sweep, *map(spec_named, names))
    sweep.run(names[0]).config.write_text("{")
    shutil.rmtree(sweep.run(names[1]).path)
    assert job.main(str(sweep.path), POOL, "", "node1") == 0
    assert status(sweep, names[2]).status is Status.COMPLETED
    printed = capsys.readouterr().out
    assert f"damaged-0 is left out: {sweep.run(names[0]).config} is damaged" in printed
    assert f"missing-0 is left out: {sweep.run(names[1]).config} is missing\n" in printed
    assert printed.count("is left out") == 2


def test_a_job_does_runs_that_were_opened_again_meanwhile(sweep: SweepFolder) -> None:
    """One that had failed, for `--retry`; and one of a job that is gone, by the follower."""
    names = ["recovers", "completes-1-later", "gated-1-later"]
    order(sweep, *map(spec_named, names))
    elsewhere = sweep.run("completes-1-later")
    claim = claims.CLAIMS.claim(elsewhere)
    assert claim is not None
    RunStatus(Status.RUNNING, attempts=[Attempt(0.0, 0)]).write(elsewhere.status)

    def open_again() -> None:
        wait_until(
            lambda: status(sweep, "gated-1-later").status is Status.RUNNING, "it does not start"
        )
        assert status(sweep, "recovers").status is Status.OOM
        for run in map(sweep.run, names[:2]):
            record = RunStatus.read(run.status)
            replace(record, status=Status.INTERRUPTED).write(run.status)
        (sweep.path / "go").touch()
        # Its claim goes later: no look during the first pass may do.
        wait_until(
            lambda: status(sweep, "gated-1-later").status is Status.COMPLETED, "it does not end"
        )
        claim.release()

    with ThreadPoolExecutor() as other:
        opened = other.submit(open_again)
        assert job.main(str(sweep.path), POOL, "", "node1") == 0
    opened.result()
    ends = {name: [a.status for a in status(sweep, name).attempts] for name in names}
    assert ends["recovers"] == ["oom", "completed"]
    assert ends["gated-1-later"] == ["completed"]
    assert status(sweep, "completes-1-later").status is Status.COMPLETED


@pytest.mark.slow
def test_a_job_over_nodes_is_queued_again_for_runs_that_were_added(
    sweep: SweepFolder, tmp_path: Path
) -> None:
    meeting, names = tmp_path / "meeting", ("localhost", "127.0.0.1")
    order(sweep, over_nodes("gated-1"))
    command = [sys.executable, "-m", "batchscape.launch.slurm.node", str(meeting)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    started = [
        subprocess.Popen(command, env={**environment, "SLURM_NODEID": str(number)})
        for number in range(2)
    ]

    def add() -> None:
        wait_until(lambda: len(pids_in(sweep.path)) == 2, "the ranks do not start")
        order(sweep, over_nodes("gated-2"))
        (sweep.path / "go").touch()

    with ThreadPoolExecutor() as other:
        added = other.submit(add)
        assert job.main(str(sweep.path), "2x1", str(meeting), *names) == QUEUE_AGAIN
    added.result()
    assert [process.wait() for process in started] == [0, 0]
    assert status(sweep, "gated-1").status is Status.COMPLETED
    assert status(sweep, "gated-2").status is Status.PENDING
