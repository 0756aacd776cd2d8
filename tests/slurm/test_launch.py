"""Sweeps on a real Slurm of three nodes: trainings are on CPUs, devices are asked for all the same.

Jobs are real, and so are the ways in which they end.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import Cluster

from batchscape.cli import main
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.status import RunStatus, Status
from batchscape.record.tables import read_table

pytestmark = pytest.mark.systems

SMALL = (
    *("tracker=none", "launcher.device=cpu", "budget=optimizer_steps"),
    *("batch.global_batch_size=16", "batch.micro_batch_size=2"),
)
TINY = (
    *("model.n_layers=1", "model.d_model=32", "model.n_heads=2", "data.sequence_length=32"),
    *("evaluation.samples=16", "evaluation.every_samples=null", "checkpoint.every_s=1"),
    *("measure.noise_scale_every=null", "measure.memory=false"),
)
SLURM = (
    *("launcher=slurm", "cluster.nodes=2", "cluster.devices_per_node=4"),
    "+launcher.sbatch.gpus-per-node=4",
)
STEPS = 80
LONG = (f"budget.optimizer_steps={STEPS}", "batch.micro_batch_size=16")
"""A second a step with `slow_ranks`, and a second for all without."""
PROGRAM = """
import sys, time
from batchscape.recorder import Recorder
recorder = Recorder(world_size=1, micro_batch_size=2, gradient_accumulation_steps=8)
for step in range(1, int(sys.argv[1]) + 1):
    time.sleep(0.25)
    recorder.step(step, loss=1.0, samples=16 * step)
"""


@pytest.fixture
def sweep(tmp_path: Path) -> SweepFolder:
    return SweepFolder(tmp_path / "a sweep")


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Commands in the background, ended with the test."""
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        process.kill()
        process.communicate()


def arguments(sweep: SweepFolder, *settings: str) -> list[str]:
    model = () if "engine=command" in settings else TINY
    return ["sweep", *SMALL, *model, *SLURM, *settings, f"sweep_dir='{sweep.path}'"]


def in_background(
    started: list[subprocess.Popen[str]], sweep: SweepFolder, *settings: str
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "batchscape", *arguments(sweep, *settings)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    started.append(process)
    return process


def until(is_so: Callable[[], Any], timeout_s: float = 90.0) -> None:
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end, "it has not come to that"
        time.sleep(0.1)


def statuses(sweep: SweepFolder) -> dict[str, RunStatus]:
    found = {run.path.name: run.status for run in sweep.run_folders()}
    return {name: RunStatus.read(path) for name, path in found.items() if path.exists()}


def at_work(sweep: SweepFolder) -> dict[str, str]:
    """The job of each run that has done optimizer steps and is still at work."""
    found = {}
    for name, status in statuses(sweep).items():
        folder = sweep.run(name)
        if status.status is Status.RUNNING and steps(folder):
            found[name] = json.loads(folder.launch.read_text())["slurm_job_id"]
    return found


def steps(folder: RunFolder) -> int:
    path = folder.lines("steps")
    return path.read_text().count("\n") if path.exists() else 0


def jobs(cluster: Cluster, form: str = "%i") -> list[str]:
    """All jobs that there were since, live ones and others."""
    told = cluster.run("squeue", "--noheader", "--states=all", f"--format={form}")
    return sorted(set(told.split("\n")) - {""})


def losses(sweep: SweepFolder) -> dict[tuple[int, int], list[float]]:
    """Loss curves by nodes and ranks; rejected cells have none."""
    found = {}
    for run in (run for run in sweep.run_folders() if run.parquet("steps").exists()):
        geometry = json.loads(run.config.read_text())["geometry"]
        table = read_table(run, "steps")
        found[geometry["nodes"], geometry["data_parallel_size"]] = table["loss"].tolist()
    return found


@pytest.mark.usefixtures("cluster")
def test_runs_that_begin_alike_share_it_in_a_job(
    sweep: SweepFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ladder = ("schedule=constant", "budget.optimizer_steps=30,60", "batch.data_parallel_size=1")
    wide = ("batch.micro_batch_size=16", "seed=0,1", "measure.warmup_optimizer_steps=1")
    command = arguments(sweep, *ladder, *wide, "launcher.share_beginnings=true")
    assert main(command) == 0, capfd.readouterr()
    assert "Runs that begin as another one" in " ".join(capfd.readouterr().out.split())
    alone = SweepFolder(tmp_path / "alone")
    off = ("launcher.share_beginnings=false", f"sweep_dir={alone.path}")
    assert main(["sweep", *SMALL, *TINY, *ladder, *wide, *off]) == 0
    begun = 0
    for run in alone.run_folders():
        ours, theirs = (read_table(f, "steps") for f in (sweep.run(run.path.name), run))
        assert ours["loss"].tolist() == theirs["loss"].tolist(), "bit for bit"
        begun += RunStatus.read(sweep.run(run.path.name).status).attempts[0].from_optimizer_step > 0
    assert begun == 2
    assert not list(sweep.path.glob("runs/*/branches"))


def test_one_sweep_with_runs_on_one_node_and_on_two(
    cluster: Cluster, sweep: SweepFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = set(jobs(cluster))
    short = ("budget.optimizer_steps=6", "batch.data_parallel_size=4")
    setup = "launcher.setup=['echo devices=$CUDA_VISIBLE_DEVICES.']"
    assert main(arguments(sweep, *short, "batch.nodes=1,2,4", setup)) == 0, capfd.readouterr()
    local = SweepFolder(tmp_path / "local")
    here = ["sweep", *SMALL, *TINY, *short]
    assert main([*here, f"sweep_dir={local.path}"]) == 0

    curves, (expected,) = losses(sweep), losses(local).values()
    # Four nodes are rejected: there are two.
    assert set(curves) == {(1, 4), (2, 4)}
    assert curves[1, 4] == curves[2, 4] == expected, "bit for bit"
    assert len(expected) == 6
    (name,) = (run.path.name for run in local.run_folders())
    assert name in {run.path.name for run in sweep.run_folders()}

    asked = {}
    for line in jobs(cluster, "%i|%j|%D|%b|%C|%T"):
        job, name, *rest = line.split("|")
        if job not in before:
            asked[name.split("-")[1]] = rest
    assert asked == {
        "pool": ["1", "gres:gpu:4", "4", "COMPLETED"],
        "2x2": ["2", "gres:gpu:2", "8", "COMPLETED"],
    }
    logs = [path.read_text() for path in sweep.slurm.glob("job-*.txt")]
    visible = sorted(log.split("devices=")[1].split(".")[0].count(",") + 1 for log in logs)
    assert visible == [2, 4]

    launches = [r for r in sweep.run_folders() if r.launch.exists()]
    (wide,) = (r for r in launches if json.loads(r.config.read_text())["geometry"]["nodes"] == 2)
    ranks = read_table(wide, "ranks").sort_values("rank")
    assert ranks["node"].tolist() == [0] * 2 + [1] * 2
    nodes = json.loads(wide.launch.read_text())["nodes"]
    assert ranks["node_name"].tolist() == [nodes[0]] * 2 + [nodes[1]] * 2
    assert len(set(nodes)) == 2


@pytest.mark.usefixtures("heeded_signals")
def test_the_same_command_goes_on_and_jobs_are_added(
    cluster: Cluster,
    sweep: SweepFolder,
    started: list[subprocess.Popen[str]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = set(jobs(cluster))
    # Jobs begin no run before the gate is open: however long a command takes, they are there.
    gate = tmp_path / "gate"
    held = f"launcher.setup=['until [ -e {gate} ]; do sleep 0.1; done']"
    (tmp_path / "train.py").write_text(PROGRAM)
    settings = (
        *("engine=command", "budget.optimizer_steps=20", "batch.data_parallel_size=1", held),
        f"engine.argv=['{{python}}','{tmp_path / 'train.py'}','{{optimizer_steps}}','{{seed}}']",
    )
    killed = in_background(started, sweep, *settings, "seed=0,1,2,3")
    until(lambda: set(jobs(cluster)) - before)
    (job,) = set(jobs(cluster)) - before
    until(lambda: f"{job} RUNNING" in jobs(cluster, "%i %T"))
    killed.kill()
    detached = in_background(started, sweep, *settings, "seed=0,1,2,3")
    assert detached.stdout is not None
    until(lambda: "there already" in detached.stdout.readline())
    detached.send_signal(signal.SIGINT)
    told = detached.communicate(timeout=60)[0]
    assert detached.returncode == 130, told
    assert "Detached: the jobs go on." in told
    assert len(set(jobs(cluster)) - before) == 1, "nothing was submitted twice"

    assert main(["status", str(sweep.path)]) == 0
    assert "Jobs: 1 running" in capfd.readouterr().out
    # One more job, and one more run, which those at work see too.
    adding = in_background(started, sweep, *settings, "seed=0,1,2,3,4", "launcher.jobs=2")
    until(lambda: len(set(jobs(cluster)) - before) == 2)
    gate.touch()
    told = adding.communicate(timeout=240)[0]
    assert adding.returncode == 0, told
    assert "1 there already; submitted" in told
    found = statuses(sweep)
    assert [status.status for status in found.values()] == [Status.COMPLETED] * 5
    assert [len(status.attempts) for status in found.values()] == [1] * 5, "none was done twice"
    done_by = {json.loads(r.launch.read_text())["slurm_job_id"] for r in sweep.run_folders()}
    assert len(done_by) == 2


def test_a_cancelled_job_leaves_its_runs_to_the_others_and_cancel_ends_all(
    cluster: Cluster,
    sweep: SweepFolder,
    started: list[subprocess.Popen[str]],
    slow_ranks: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings = (*LONG, "seed=0,1", "launcher.jobs=2")
    follower = in_background(started, sweep, *settings)
    until(lambda: len(set(at_work(sweep).values())) == 2)
    (run, job), *_ = at_work(sweep).items()
    cluster.run("scancel", job)
    until(lambda: statuses(sweep)[run].status is Status.INTERRUPTED)
    assert sweep.run(run).checkpoint_step, "it was asked for a checkpoint"
    cluster.wait_for(job, "CANCELLED")

    assert main(["cancel", str(sweep.path)]) == 0
    assert "Jobs cancelled: 1" in capfd.readouterr().out
    told = follower.communicate(timeout=90)[0]
    assert follower.returncode == 1
    assert "2 runs are not done" in told
    assert "CANCELLED" in told or "cancelled" in told
    found = statuses(sweep)
    assert {status.status for status in found.values()} == {Status.INTERRUPTED}
    slow_ranks.unlink()
    assert main(arguments(sweep, *LONG, "seed=0,1")) == 0, capfd.readouterr()
    assert {status.status for status in statuses(sweep).values()} == {Status.COMPLETED}
    assert [len(s.attempts) for s in statuses(sweep).values()] == [2, 2], "it went on"
    for folder in sweep.run_folders():
        done = read_table(folder, "steps")["optimizer_step"].tolist()
        assert done == list(range(1, STEPS + 1))


@pytest.mark.usefixtures("cluster")
def test_what_slurm_refuses_is_said_with_what_there_is(
    sweep: SweepFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(sweep, *LONG, "+launcher.sbatch.partition=none_such")) == 2
    told = capfd.readouterr().err
    assert "invalid partition specified: none_such" in told
    assert "main (3 nodes, cores [16], GPUs [4] each)" in told
    assert main(arguments(sweep, *LONG, "++launcher.sbatch.gpus-per-node=64")) == 2
    assert "Requested node configuration is not available" in capfd.readouterr().err
    assert {status.status for status in statuses(sweep).values()} == {Status.PENDING}


def test_a_job_at_its_time_limit_or_preempted_is_queued_again_and_goes_on(
    cluster: Cluster, sweep: SweepFolder, started: list[subprocess.Popen[str]], slow_ranks: Path
) -> None:
    """The limit comes near when there is a checkpoint, however long the start has taken."""
    limits = ("launcher.timeout_min=120", "launcher.signal_delay_s=3600")
    # Three minutes at work, were they not made fast in the end; Slurm looks at limits every 30 s.
    long = (*LONG, *limits, "budget.optimizer_steps=200", "+launcher.sbatch.partition=low")
    follower = in_background(started, sweep, *long)
    until(lambda: at_work(sweep))
    ((name, job),) = at_work(sweep).items()
    run = sweep.run(name)
    until(lambda: run.checkpoint_step)
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=61")
    until(lambda: statuses(sweep)[name].status is not Status.RUNNING, timeout_s=180)
    (first,) = statuses(sweep)[name].attempts
    assert (first.status, first.reason) == ("interrupted", "stopped by SIGTERM")
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=120")
    done = steps(run)
    until(lambda: at_work(sweep) == {name: job} and steps(run) > done, timeout_s=240)

    node = cluster.run("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip()
    others = [f"--nodelist={node}", "--partition=main", "--exclusive"]
    higher = cluster.submit("sleep 3", *others)
    cluster.wait_for(higher, "COMPLETED")
    slow_ranks.unlink()
    told = follower.communicate(timeout=240)[0]
    assert follower.returncode == 0, told
    _, second, *_, last = statuses(sweep)[name].attempts
    assert second.from_optimizer_step == done, "from its checkpoint"
    assert (second.reason, last.status) == ("stopped by SIGTERM", "completed")
    assert last.from_optimizer_step > done, "from its checkpoint"
    assert read_table(run, "steps")["optimizer_step"].tolist() == list(range(1, 201))
    assert len(list(sweep.slurm.glob("job-*.txt"))) == 1, "the same job"


@pytest.mark.usefixtures("slow_ranks")
def test_a_job_that_dies_without_a_word_is_found(
    cluster: Cluster, sweep: SweepFolder, started: list[subprocess.Popen[str]]
) -> None:
    follower = in_background(started, sweep, *LONG)
    until(lambda: at_work(sweep))
    ((run, job),) = at_work(sweep).items()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("SLURM_JOB_ID") == job:
                process.kill()
    cluster.wait_for(job, "FAILED")
    at = time.monotonic()
    until(lambda: statuses(sweep)[run].status is not Status.RUNNING)
    assert time.monotonic() - at < 60
    status = statuses(sweep)[run]
    assert status.status is Status.INTERRUPTED
    assert status.reason is not None
    assert status.reason.startswith(f"job {job} ended without a word")
    assert "the same command goes on" in status.reason
    assert status.attempts[-1].ended_at == pytest.approx(sweep.run(run).written_at, abs=0.01)
    told = follower.communicate(timeout=60)[0]
    assert follower.returncode == 1
    assert status.reason in told


def test_a_run_over_nodes_goes_on_after_its_job_was_cancelled(
    cluster: Cluster, sweep: SweepFolder, started: list[subprocess.Popen[str]], slow_ranks: Path
) -> None:
    wide = (*LONG, "batch.nodes=2", "batch.data_parallel_size=2", "batch.micro_batch_size=8")
    follower = in_background(started, sweep, *wide)
    until(lambda: at_work(sweep))
    ((run, job),) = at_work(sweep).items()
    cluster.run("scancel", job)
    told = follower.communicate(timeout=90)[0]
    assert follower.returncode == 1, told
    assert statuses(sweep)[run].status is Status.INTERRUPTED
    assert sweep.run(run).checkpoint_step, "all its ranks agreed on a step"
    slow_ranks.unlink()
    assert main(arguments(sweep, *wide)) == 0
    _, last = statuses(sweep)[run].attempts
    assert last.from_optimizer_step
    steps_done = read_table(sweep.run(run), "steps")["optimizer_step"].tolist()
    assert steps_done == list(range(1, STEPS + 1))
