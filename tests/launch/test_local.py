"""Whole sweeps of real processes that complete, fail, hang, die and come back."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sweeps_of_fakes import ENTRY, MACHINE, renamed, spec_named

from batchscape.cuda_devices import CudaDevice
from batchscape.launch import attempt
from batchscape.launch.child import Start
from batchscape.launch.launcher import Launcher
from batchscape.launch.processes import Spawned
from batchscape.launch.result import SweepResult
from batchscape.launch.schedule import launch_order
from batchscape.plan.machine import Machine
from batchscape.record.files import read_json
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import Cause, RunStatus, Status
from batchscape.record.tables import load, read_table, verify_seal


class Sweep:
    """One sweep folder, and what is printed about it."""

    def __init__(self, path: Path) -> None:
        self.folder = SweepFolder(path)
        self.printed = ""

    def run(self, *specs: RunSpec, **options: Any) -> SweepResult:
        output = io.StringIO()
        machine = options.pop("machine", MACHINE)
        options = {"method": "spawn", "entry": ENTRY, **options}
        console = Console(file=output)
        result = Launcher(self.folder, machine, specs, console=console, **options).run()
        self.printed = output.getvalue()
        return result

    def status(self, name: str) -> RunStatus:
        return RunStatus.read(self.folder.run(name).status)

    def launch(self, name: str) -> dict[str, Any]:
        return read_json(self.folder.run(name).launch)


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep(tmp_path / "sweep")


@pytest.fixture
def short_graces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PEER_GRACE_S", "STOP_GRACE_S"):
        monkeypatch.setattr(attempt, name, 0.5)
    # Ranks that have yet to start, on a machine at work, are not taken for ones that hang.
    monkeypatch.setattr(attempt, "END_GRACE_S", 4.0)


@pytest.mark.usefixtures("short_graces")
@pytest.mark.slow
def test_each_run_ends_by_itself(sweep: Sweep) -> None:
    """Law 6: whatever happens to a run, the others are run and every end has its reason."""
    expected = {
        "completes-d2": (Status.COMPLETED, None, None),
        "diverges": (Status.DIVERGED, "not finite", 0),
        "raises": (Status.FAILED, "its log ends: RuntimeError: planted in rank 0", 0),
        "deserted-d2": (Status.FAILED, "planted failure", 1),
        "runsout-d2": (Status.OOM, "out of memory", 0),
        "exits7": (Status.FAILED, "exited with code 7; its log ends: on the way out", 0),
        "killed-d2": (Status.FAILED, "rank 1 was killed by SIGKILL", 1),
        "teardown-d2": (Status.COMPLETED, None, None),
        "lingers-d2": (Status.COMPLETED, None, None),
        "vanishes-d2": (Status.FAILED, "ranks [1] hang", None),
        "silent": (Status.FAILED, "left no outcome and exited with code 0", 0),
        "damaged": (Status.FAILED, "damaged in line 1", None),
        "unnumbered": (Status.FAILED, "a row lacks its attempt or optimizer step", None),
        "leaves-d4": (Status.COMPLETED, None, None),
    }
    result = sweep.run(*(spec_named(name, retries=0) for name in expected), method="fork")
    assert not result.interrupted
    assert {run.run_id: run.status for run in result.runs} == {
        name: status for name, (status, _, _) in expected.items()
    }
    assert {run.run_id for run in result.failed} == {
        name for name, (status, _, _) in expected.items() if status in {"failed", "oom"}
    }
    for name, (status, reason, rank) in expected.items():
        written = sweep.status(name)
        assert (written.status, written.rank) == (status, rank), name
        assert (reason or "") in (written.reason or ""), name
        assert (reason is None) == (written.reason is None), name
        attempt = written.attempts[-1]
        assert (len(written.attempts), attempt.status) == (1, str(status))
        assert attempt.ended_at is not None
        assert attempt.ended_at >= attempt.started_at
        assert f"{name} {status}" in sweep.printed
    assert "14 runs: 4 completed, 1 oom, 1 diverged, 8 failed" in sweep.printed
    assert str(sweep.folder.run("exits7").log) in sweep.printed.replace("\n", "")


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_how_the_first_rank_ends_decides_the_time_of_the_others(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "PEER_GRACE_S", 0.5)
    assert attempt.END_GRACE_S > 100
    names = ("divergesapart-d2", "crashesafter-d2", "savesalone-d2", "slips-d2")
    sweep.run(*(spec_named(name, retries=0) for name in names), method="fork")
    # Divergence is an end like completion: the first rank has yet to write the rows before it.
    assert sweep.status("divergesapart-d2").status is Status.DIVERGED
    steps = read_table(sweep.folder.run("divergesapart-d2"), "steps")
    assert steps["optimizer_step"].tolist() == [1, 2]
    assert sweep.status("crashesafter-d2").status is Status.COMPLETED
    # Ranks that were asked to stop may write a checkpoint; nobody but the launcher killed them.
    assert sweep.status("savesalone-d2").status is Status.INTERRUPTED
    assert (sweep.folder.run("savesalone-d2").path / "saved").exists()
    # Exit code 0 alone does not give the others the time of those that have done all.
    status = sweep.status("slips-d2")
    assert (status.status, status.rank, status.cause) == (Status.FAILED, 1, Cause.EXCEPTION)
    assert "left no outcome and exited with code 0" in (status.reason or "")


def test_sealed_is_what_is_over_for_good(sweep: Sweep) -> None:
    sweep.run(spec_named("completes"), spec_named("diverges"), spec_named("exits7"))
    for name in ("completes", "diverges"):
        folder, status = sweep.folder.run(name), sweep.status(name)
        verify_seal(folder, status)
        assert set(status.seal) == {"steps.parquet", "evals.parquet", "ranks.parquet"}
        assert not folder.lines("steps").exists()
    # 3 steps of 1024 tokens; the loss of step k is 1/k.
    summary = sweep.status("completes").summary
    assert (summary["tokens"], summary["final_loss"]) == (3072, pytest.approx(1 / 3))
    failed = sweep.folder.run("exits7")
    assert sweep.status("exits7").summary["optimizer_steps"] == 2
    assert sweep.status("exits7").seal == {}
    assert failed.lines("steps").exists()
    assert not failed.parquet("steps").exists()
    tables = load(sweep.folder.path)
    assert tables.damaged == {}
    assert dict(tables.steps.groupby("run_id").size()) == {
        "completes": 3,
        "diverges": 2,
        "exits7": 2,
    }


def test_the_same_command_skips_what_is_sealed_and_resumes_the_rest(sweep: Sweep) -> None:
    names = ["completes", "torn-d2", "diverges"]
    specs = [spec_named(name, retry=["failed"]) for name in names]
    sweep.run(*specs)
    before = sweep.folder.run("completes").status.read_bytes()
    assert sweep.status("torn-d2").status is Status.FAILED
    result = sweep.run(*specs)
    assert {run.run_id: run.skipped for run in result.runs} == {
        "completes": True,
        "torn-d2": False,
        "diverges": True,
    }
    assert "2 of 3 runs done already, not run again" in sweep.printed
    assert "torn-d2 started (2 ranks, attempt 2)" in sweep.printed
    assert sweep.folder.run("completes").status.read_bytes() == before
    status = sweep.status("torn-d2")
    assert status.status is Status.COMPLETED
    assert [a.status for a in status.attempts] == ["failed", "completed"]
    assert [a.from_optimizer_step for a in status.attempts] == [0, 2]
    assert sweep.launch("torn-d2")["attempt"] == 1
    steps = load(sweep.folder.path).steps
    assert list(steps[steps["run_id"] == "torn-d2"]["optimizer_step"]) == [1, 2, 3]


def test_a_damaged_run_is_named_and_runs_again_once_its_folder_is_deleted(sweep: Sweep) -> None:
    specs = [spec_named("completes-1"), spec_named("completes-2"), spec_named("completes-3")]
    sweep.run(*specs[:2])
    folders = [sweep.folder.run("completes-1"), sweep.folder.run("completes-2")]
    folders[0].parquet("steps").write_bytes(b"0")
    folders[1].status.write_text("{")
    result = sweep.run(*specs)
    ends = {run.run_id: run for run in result.runs}
    assert ends["completes-3"].status is Status.COMPLETED
    for folder, what in zip(folders, ("steps.parquet", "status.json"), strict=True):
        end = ends[folder.path.name]
        assert end.status is Status.FAILED
        assert f"{folder.path / what} is" in str(end.reason)
        assert str(end.reason).endswith(f"; delete {folder.path} to run it again")
    # Nothing is touched of what there is.
    assert folders[0].parquet("steps").read_bytes() == b"0"
    for folder in folders:
        shutil.rmtree(folder.path)
    assert {run.status for run in sweep.run(*specs).runs} == {Status.COMPLETED}
    for folder in folders:
        verify_seal(folder, RunStatus.read(folder.status))


def test_a_checkpoint_is_not_taken_to_another_device_model(sweep: Sweep) -> None:
    spec = spec_named("exits7", retry=["failed"])
    sweep.run(spec)
    folder = sweep.folder.run("exits7")
    other = Machine(cpu_cores=2, cpu_name="another processor")
    # Without a checkpoint nothing is mixed.
    sweep.run(spec, machine=other)
    assert len(sweep.status("exits7").attempts) == 2
    folder.checkpoints.mkdir()
    (folder.checkpoints / "step-000000001-0123456789abcdef.pt").touch()
    (refused,) = sweep.run(spec).failed
    assert "begun on another processor and cannot go on here, on a processor" in str(refused.reason)
    assert len(sweep.status("exits7").attempts) == 2
    sweep.run(spec, machine=other)
    assert len(sweep.status("exits7").attempts) == 3


def timing(sweep: Sweep, name: str) -> tuple[bool, str | None]:
    record = sweep.launch(name)
    return record["timing_valid"], record["timing_invalid_reason"]


def test_rows_of_spoiled_attempts_stay_spoiled(sweep: Sweep) -> None:
    """The summary pools the rows of all attempts, so one bad attempt is enough."""
    earlier = "an earlier attempt: up to 2 runs share the machine"
    sweep.run(spec_named("halts", concurrent_runs=2))
    assert timing(sweep, "halts") == (False, "up to 2 runs share the machine")
    for _ in range(2):
        sweep.run(spec_named("halts", retry=["failed"]))
        assert timing(sweep, "halts") == (False, earlier)
    assert sweep.status("halts").status is Status.COMPLETED


def test_attempts_on_other_cores_are_not_compared(sweep: Sweep) -> None:
    more = Machine(cpu_cores=4, cpu_name="a processor")
    changed = "usable cores changed from 2 to 4 between attempts"
    sweep.run(spec_named("halts"))
    assert timing(sweep, "halts") == (True, None)
    again = spec_named("halts", retry=["failed"])
    sweep.run(again, machine=more)
    assert timing(sweep, "halts") == (False, changed)
    sweep.run(again, machine=more)
    assert timing(sweep, "halts") == (False, f"an earlier attempt: {changed}")


def test_an_attempt_that_left_no_checkpoint_spoils_nothing(sweep: Sweep) -> None:
    """Its rows are dropped."""
    sweep.run(spec_named("exits7", concurrent_runs=2))
    sweep.run(spec_named("exits7", retry=["failed"]))
    assert timing(sweep, "exits7") == (True, None)


def test_a_run_that_cannot_be_recorded_fails_alone(sweep: Sweep) -> None:
    blocked = sweep.folder.run("completes-blocked")
    blocked.environment.mkdir(parents=True)
    names = ["completes-blocked", "unwritable", "completes-1"]
    result = sweep.run(*map(spec_named, names))
    reasons = {run.run_id: run.reason for run in result.failed}
    assert reasons.keys() == {"completes-blocked", "unwritable"}
    assert "Is a directory" in str(reasons["completes-blocked"])
    assert str(blocked.environment) in str(reasons["completes-blocked"])
    assert "its end cannot be recorded" in str(reasons["unwritable"])
    assert sweep.status("completes-1").status is Status.COMPLETED
    # Nothing has to be deleted where only the disk was in the way.
    blocked.environment.rmdir()
    sweep.run(spec_named("completes-blocked"))
    assert sweep.status("completes-blocked").status is Status.COMPLETED


def test_what_cannot_be_removed_after_the_seal_takes_nothing_from_it(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk begins to fail right after the status was written."""
    unlink = Path.unlink

    def fail(path: Path, *, missing_ok: bool = False) -> None:
        if path.name in {"steps.jsonl", "outcome-0.json"}:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", fail)
    result = sweep.run(spec_named("completes-1", retries=1))
    assert [run.status for run in result.runs] == [Status.COMPLETED]
    folder, status = sweep.folder.run("completes-1"), sweep.status("completes-1")
    assert (status.status, len(status.attempts)) == (Status.COMPLETED, 1)
    assert folder.lines("steps").exists()
    assert folder.outcomes() != []
    verify_seal(folder, status)
    assert len(load(sweep.folder.path).steps) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("short_graces")
def test_a_run_that_takes_too_long_is_a_timeout(sweep: Sweep) -> None:
    names = ("polite-d2", "stubborn-d2", "completes")
    result = sweep.run(*(spec_named(name, timeout_s=1.0) for name in names))
    assert {run.run_id for run in result.failed} == {"polite-d2", "stubborn-d2"}
    for name in names[:2]:
        status = sweep.status(name)
        assert (status.status, status.rank) == (Status.TIMEOUT, None)
        assert status.cause is Cause.TIME_LIMIT
        assert status.reason == "not done after timeout_s = 1 s"
    # The polite one had time to write its checkpoint, and goes on.
    sweep.run(spec_named("polite-d2", retry=["timeout"]))
    assert sweep.status("polite-d2").status is Status.COMPLETED


def test_launch_records(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    sweep.run(spec_named("completes-d1"), spec_named("completes-d2"), spec_named("completes-d4"))
    records = {n: sweep.launch(f"completes-d{n}") for n in (1, 2, 4)}
    rendezvous = [record.pop("rendezvous") for record in records.values()]
    assert len(set(rendezvous)) == 3
    assert not any(Path(path).parent.exists() for path in rendezvous)
    assert records[1] == {
        "attempt": 0,
        "world_size": 1,
        "device_type": "cpu",
        "device_model": "a processor",
        "devices": [0],
        "usable_cores": 2,
        "threads_per_rank": 1,
        "concurrent_runs": 1,
        "runs_per_device": 1,
        "oversubscribed": False,
        "timing_valid": True,
        "timing_invalid_reason": None,
        "start_method": "spawn",
        "command": None,
    }
    assert records[2]["devices"] == records[4]["devices"] == [0, 1]
    assert records[2]["timing_valid"]
    assert records[4]["oversubscribed"]
    assert not records[4]["timing_valid"]
    assert records[4]["timing_invalid_reason"] == "4 ranks share 2 cores"
    environment = read_json(sweep.folder.run("completes-d1").environment)
    assert environment["threads"]["OMP_NUM_THREADS"] == "1"
    assert environment["cpu"]["usable_cores"] == 2
    assert RunSpec.read(sweep.folder.run("completes-d2").config) == spec_named("completes-d2")


def test_cuda_devices_are_leased_by_uuid(sweep: Sweep) -> None:
    devices = tuple(CudaDevice(i, f"GPU model {i % 2}", (9, 0), f"GPU-{i}") for i in (0, 2))
    machine = Machine(cpu_cores=8, cpu_name="x", cuda_devices=devices)
    specs = [spec_named(f"device-d{n}", device_type="cuda") for n in (1, 2)]
    sweep.run(*specs, machine=machine)
    record = sweep.launch("device-d2")
    assert (record["devices"], record["device_model"]) == ([0, 2], "GPU model 0")
    for name, visible in {"device-d1": "GPU-0", "device-d2": "GPU-0,GPU-2"}.items():
        line = sweep.folder.run(name).log.read_text().splitlines()[0]
        assert json.loads(line)["visible"] == visible


def test_the_order_is_seeded_and_balanced(sweep: Sweep) -> None:
    specs = [
        renamed(spec_named("completes", seed=seed), f"completes-{geometry}-s{seed}")
        for geometry in "abcdefgh"
        for seed in (0, 1, 2)
    ]
    order = [spec.run_id for spec in launch_order(specs)]
    assert [spec.run_id for spec in launch_order(specs[::-1])] == order
    # Every geometry once before any comes twice, and not in the same order each time.
    blocks = [order[i : i + 8] for i in (0, 8, 16)]
    assert [{name[-1] for name in block} for block in blocks] == [{"0"}, {"1"}, {"2"}]
    assert len({"".join(name.split("-")[1] for name in block) for block in blocks}) == 3
    # What is added changes nothing for the others.
    assert [s.run_id for s in launch_order(specs[:-5])] == [
        name for name in order if name in {s.run_id for s in specs[:-5]}
    ]
    few = specs[:2]
    result = sweep.run(*few)
    assert [run.run_id for run in result.runs] == [s.run_id for s in launch_order(few)]
    started = [sweep.status(run.run_id).attempts[0].started_at for run in result.runs]
    assert started == sorted(started)


def test_a_launch_of_no_runs_is_over(sweep: Sweep) -> None:
    assert sweep.run() == SweepResult((), interrupted=False)


def test_a_rejected_cell_that_fits_now_is_run(sweep: Sweep) -> None:
    folder = sweep.folder.run("completes")
    RunStatus(Status.REJECTED, reason="no room").write(folder.status)
    folder.config.write_text('{"format_version": 4, "geometry": null}')
    sweep.run(spec_named("completes"))
    assert sweep.status("completes").status is Status.COMPLETED


def test_what_a_later_start_notes_is_told_once(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that dies after the first start is replaced by a later one, which says so."""
    start = Spawned.start

    def noting(self: Spawned, begun: Start, keep_open: Sequence[int] = ()) -> None:
        self.note = "started again" if begun.run_id == "completes-a" else self.note
        start(self, begun, keep_open)

    monkeypatch.setattr(Spawned, "start", noting)
    sweep.run(spec_named("completes-a"), spec_named("completes-b"))
    assert sweep.printed.count("started again") == 1
