"""Real programs, swept for real: they train, crash, diverge, hang, and leave processes behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from batchscape.launch import attempt
from batchscape.record.files import read_json
from batchscape.record.status import RunStatus, Status
from batchscape.record.tables import load, read_table

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from small_disk import in_child

# Writes JSON lines by itself: what it logs is its own word, and no import slows it down.
SCRIPT = """
import json, os, signal, subprocess, sys, time, traceback
how, out, ranks, micro, accumulation, steps = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7])
lines = open(os.path.join(out, "metrics.jsonl"), "a", buffering=1)
def log(step, loss, **more):
    batch = {"ranks": ranks, "micro": micro, "accumulation": accumulation}
    samples = step * ranks * micro * accumulation
    row = {"step": step, "loss": loss, "seconds": 0.25, "samples": samples}
    lines.write(json.dumps({**row, **batch, **more}) + "\\n")
def sleeper(*more, **options):
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    child = subprocess.Popen([sys.executable, "-c", code], **options)
    open(os.path.join(out, "pid"), "w").write(str(child.pid))
def main():
    print("how:", how)
    if how == "silent":
        return
    last = steps - 1 if how == "short" else steps
    for step in range(1, last + 1):
        if how == "late" and step == 1:
            continue
        if how == "halved":
            log(step, 1 / step, accumulation=accumulation // 2)
        elif how == "nan" and step == 2:
            log(step, float("nan"))
            time.sleep(300)
        elif how == "crash" and step == 3:
            raise ValueError("planted")
        elif how == "oom" and step == 3:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        elif how == "killed" and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "handled" and step == 3:
            try:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            except RuntimeError:
                traceback.print_exc()
            print("going on with half of it")
            raise KeyError("planted")
        elif how == "stalls" and step == 3:
            time.sleep(300)
        elif how == "garbage" and step == 3:
            lines.write("no json at all\\n")
        else:
            log(step, 1 / step)
    if how == "orphan":
        sleeper(start_new_session=True)
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sleeper(start_new_session=True)
        time.sleep(300)
main()
"""
COLUMNS = {
    "optimizer_step": "step",
    "loss": "loss",
    "step_time_s": "seconds",
    "samples": "samples",
    "world_size": "ranks",
    "micro_batch_size": "micro",
    "gradient_accumulation_steps": "accumulation",
}
METRICS = {
    "kind": "jsonl",
    "path": "metrics.jsonl",
    "columns": COLUMNS,
    "units": {"step_time_s": "s"},
    "loss_of": "global_batch",
}
ARGUMENTS = (
    *("{how}", "{run_dir}", "{devices}", "{micro_batch_size}"),
    *("{gradient_accumulation_steps}", "{optimizer_steps}"),
)


def cell(sweep, how: str, **overrides):
    sweep.script(SCRIPT)
    mapping = sweep.settings(*ARGUMENTS, **overrides)
    mapping["engine"] |= {"values": {"how": how}, "metrics": METRICS}
    return mapping


def by_behaviour(sweep) -> dict[str, RunStatus]:
    statuses = {}
    for folder in sweep.folder.run_folders():
        how = read_json(folder.config)["config"]["engine"]["values"]["how"]
        statuses[how] = RunStatus.read(folder.status)
    return statuses


def folder_of(sweep, how: str):
    for folder in sweep.folder.run_folders():
        if read_json(folder.config)["config"]["engine"]["values"]["how"] == how:
            return folder
    pytest.fail(how)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.slow
def test_each_program_ends_by_itself(sweep):
    expected = {
        "trains": (Status.COMPLETED, None, None),
        "halved": (Status.FAILED, "contradiction", "gradient_accumulation_steps=2"),
        "nan": (Status.DIVERGED, "divergence", "the loss of optimizer step 2 is not finite"),
        "crash": (
            Status.FAILED,
            "exception",
            "exited with code 1; its log ends: ValueError: planted",
        ),
        "oom": (Status.OOM, "out_of_memory", "out of memory"),
        "handled": (Status.FAILED, "exception", "its log ends: KeyError: 'planted'"),
        "killed": (
            Status.FAILED,
            "killed",
            "killed, probably out of memory: the program was killed by SIGKILL",
        ),
        "garbage": (Status.FAILED, "contradiction", "metrics cannot be read"),
        "short": (Status.FAILED, "contradiction", "did 3 optimizer steps, the plan says 4"),
        "silent": (Status.FAILED, "contradiction", "metrics"),
        "stalls": (
            Status.FAILED,
            "hang",
            "the program hangs after optimizer step 2: neither its log nor its metrics grew",
        ),
        "orphan": (Status.COMPLETED, None, None),
        "late": (
            Status.COMPLETED,
            None,
            "begin with optimizer step 2: a target that was reached before counts as reached later",
        ),
    }
    others = [how for how in expected if how != "stalls"]
    runs = [cell(sweep, how, launcher__retries=0) for how in others]
    assert len(sweep.run(*runs, method="fork").runs) == len(others)
    # Only here may silence be short: a slow machine is silent too.
    sweep.run(cell(sweep, "stalls", launcher__retries=0, launcher__hang_s=1.5), method="spawn")
    for how, (status, cause, reason) in expected.items():
        status_of_run = by_behaviour(sweep)[how]
        assert (status_of_run.status, status_of_run.cause) == (status, cause), (
            how,
            status_of_run.reason,
        )
        assert (reason or "") in (status_of_run.reason or ""), how
        assert (reason is None) == (status_of_run.reason is None), how
        assert "how: " + how in folder_of(sweep, how).log.read_text()

    # The completed one: every figure as the program logged it.
    folder = folder_of(sweep, "trains")
    steps = read_table(folder, "steps")
    text = (folder.program / "metrics.jsonl").read_text()
    logged = [json.loads(line) for line in text.splitlines()]
    assert steps["loss"].tolist() == [row["loss"] for row in logged] == [1, 1 / 2, 1 / 3, 1 / 4]
    assert steps["samples"].tolist() == [row["samples"] for row in logged] == [8, 16, 24, 32]
    assert steps["warmup"].tolist() == [True, False, False, False]
    assert steps["tokens"].isna().all(), "no sequence length was given: nothing to count"
    summary = by_behaviour(sweep)["trains"].summary
    assert (summary["step_time_s"], summary["samples_per_s"]) == (0.25, 32.0)
    assert summary["tokens"] is None
    assert summary["tokens_per_s"] is None
    assert summary["final_loss"] == 0.25

    # The one with another batch: nothing of it is in a table.
    assert read_table(folder_of(sweep, "halved"), "steps").empty
    assert len(read_table(folder_of(sweep, "crash"), "steps")) == 2
    # The orphan: completed, and gone.
    folder = folder_of(sweep, "orphan")
    assert read_json(folder.command)["processes_killed"] == 1
    assert "killed 1 processes that the program left" in folder.log.read_text()
    assert not is_alive(int((folder.program / "pid").read_text()))

    tables = load(sweep.folder.path)
    row = tables.runs.set_index("run_id").loc[folder_of(sweep, "trains").path.name]
    assert row["observed.world_size"] == 1
    assert row["observed.gradient_accumulation_steps"] == 4
    assert row["observed.tokens_per_optimizer_step_source"] == "not observed"
    assert row["learning_rate"] is None or row.isna()["learning_rate"]
    assert row.isna()["optimizer.weight_decay"], "the program was never told"

    # The same command again: what is sealed is skipped, the rest begins from nothing.
    retry = {"launcher__retry": ["failed"]}
    again = sweep.run(cell(sweep, "trains", **retry), cell(sweep, "crash", **retry), method="spawn")
    assert [run.skipped for run in again.runs].count(True) == 1
    crash = folder_of(sweep, "crash")
    assert (crash.path / "log-0.txt").exists()
    assert crash.log.read_text().count("how: crash") == 1
    assert len(read_table(crash, "steps")) == 2, "the rows of the first attempt are gone"


RANKS = """
import os, subprocess, sys, time
if "RANK" not in os.environ:
    size = int(sys.argv[1])
    ranks = []
    for rank in range(size):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size)}
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
    sys.exit(max(rank.wait() for rank in ranks))
held = bytearray(os.urandom(1)) * ((64 if os.environ["RANK"] == "0" else 32) << 20)
from batchscape.recorder import Recorder
recorder = Recorder(micro_batch_size=int(sys.argv[2]))
for step in range(1, 5):
    time.sleep(0.3)
    recorder.step(step, loss=1.0, samples=8 * step)
"""


@pytest.mark.slow
def test_ranks_are_seen_from_outside(sweep):
    """Two processes of 64 and 32 MiB with a rank each, under a parent that has none."""
    sweep.script(RANKS)
    cells = [
        sweep.settings(
            *arguments,
            batch={"data_parallel_size": 2, "micro_batch_size": 2, "global_batch_size": 8},
        )
        for arguments in (("{devices}", "{micro_batch_size}"), ("1", "{micro_batch_size}"))
    ]
    result = sweep.run(*cells, method="fork")
    assert sorted(str(run.status) for run in result.runs) == ["completed", "failed"]
    (failed,) = result.failed
    assert "world_size=1" in (failed.reason or "")
    assert "the plan says 2" in (failed.reason or "")
    (done,) = (run.run_id for run in result.runs if run.status is Status.COMPLETED)
    folder = sweep.folder.run(done)
    ranks = read_table(folder, "ranks")
    assert ranks["rank"].tolist() == [0, 1]
    assert set(ranks["memory_method"]) == {"process tree (uss)"}
    for peak, held in zip(ranks["peak_allocated_gib"], (64, 32), strict=True):
        assert held / 1024 < peak < (held + 24) / 1024
    assert (ranks["peak_rss_gib"] >= ranks["peak_allocated_gib"]).all()
    observed = read_json(folder.command)["observed"]
    assert observed["world_size"] == 2


@pytest.mark.slow
def test_a_run_that_is_stopped_leaves_no_process(sweep, monkeypatch):
    """The program, deaf to requests, and its child in another session end with the run."""
    monkeypatch.setattr(attempt, "STOP_GRACE_S", 0.5)
    monkeypatch.setattr(attempt, "CHECKPOINT_GRACE_S", 0.5)

    def interrupt() -> None:
        wait_until(lambda: list(sweep.path.rglob("program/pid")), "the program does not start")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    result = sweep.run(cell(sweep, "deaf"), method="spawn")
    assert result.interrupted
    assert [run.status for run in result.runs] == [Status.INTERRUPTED]
    pid = int((folder_of(sweep, "deaf").program / "pid").read_text())
    wait_until(lambda: not is_alive(pid), "an orphan is left")


@pytest.mark.slow
def test_nothing_outlives_a_launcher_that_is_killed(sweep):
    sweep.script(SCRIPT)
    mapping = cell(sweep, "deaf")
    code = (
        "import json, sys; sys.path[:0] = [sys.argv[1]]\n"
        "from pathlib import Path\n"
        "from conftest import plan_cells, MACHINE\n"
        "from batchscape.launch.launcher import Launcher\n"
        "from batchscape.record.folder import SweepFolder\n"
        "specs = plan_cells(json.loads(sys.argv[2])).specs\n"
        "Launcher(SweepFolder(Path(sys.argv[3])), MACHINE, specs).run()"
    )
    here = str(Path(__file__).parent)
    arguments = [here, json.dumps(mapping), str(sweep.folder.path)]
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(sweep.path / "machine")},
    )
    wait_until(lambda: list(sweep.path.rglob("program/pid")), "the program does not start")
    (noted,) = sweep.path.rglob("program/pid")
    wait_until(lambda: bool(noted.read_text()), "its child has no number")
    pid = int(noted.read_text())
    below = psutil.Process(launcher.pid).children(recursive=True)
    # Nothing that watches a program has imported what trains: that takes seconds.
    assert not any("torch" in at.path for process in below for at in process.memory_maps())
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not is_alive(pid), "an orphan is left")
    _, alive = psutil.wait_procs(below, timeout=20)
    assert [process.cmdline() for process in alive] == []


@pytest.mark.slow
def test_a_timeout_and_a_program_that_goes_on(sweep):
    """A resumable program finds what its first start left, and its steps are counted once."""
    sweep.script(
        "import json, os, sys, time\n"
        "path = os.path.join(sys.argv[1], 'm.jsonl')\n"
        "done = sum(1 for _ in open(path)) if os.path.exists(path) else 0\n"
        "for step in range(done + 1, 5):\n"
        "    open(path, 'a').write(json.dumps({'step': step, 'loss': 1 / step}) + '\\n')\n"
        "    if step == 2: time.sleep(300)\n"
    )
    mapping = sweep.settings(
        "{run_dir}",
        launcher={"name": "local", "device": "cpu", "timeout_s": 5.0, "retry": ["timeout"]},
    )
    mapping["engine"] |= {
        "resumable": True,
        "metrics": {
            "kind": "jsonl",
            "path": "m.jsonl",
            "columns": {"optimizer_step": "step", "loss": "loss"},
            "loss_of": "global_batch",
        },
    }
    first = sweep.run(mapping, method="spawn")
    assert [run.status for run in first.runs] == [Status.TIMEOUT]
    second = sweep.run(mapping, method="spawn")
    assert [run.status for run in second.runs] == [Status.COMPLETED]
    (folder,) = sweep.folder.run_folders()
    steps = read_table(folder, "steps")
    assert steps["optimizer_step"].tolist() == [1, 2, 3, 4]
    assert steps["attempt"].tolist() == [0, 0, 1, 1]
    status = RunStatus.read(folder.status)
    assert [attempt.from_optimizer_step for attempt in status.attempts] == [0, 2]
    assert status.summary["step_time_s"] is None, "it logs no times"


@pytest.mark.slow
def test_a_run_that_failed_does_not_pass_the_second_time(sweep):
    """Every rank prints, and to a `log.txt` of its own as well: one start is like the other."""
    sweep.script(
        "import os, sys\n"
        "own = open(os.path.join(sys.argv[1], 'log.txt'), 'w')\n"
        "for step in range(1, 5):\n"
        "    for rank in (0, 1):\n"
        "        print(f'step {step}: loss {step + rank}', flush=True)\n"
    )
    mapping = sweep.settings("{run_dir}", batch__data_parallel_size=2, launcher__retry=["failed"])
    mapping["engine"] |= {
        "metrics": {
            "kind": "regex",
            "pattern": r"step (?P<optimizer_step>\d+): loss (?P<loss>\S+)",
            "loss_of": "global_batch",
        }
    }
    for attempts in (1, 2):
        (run,) = sweep.run(mapping).runs
        assert run.status == Status.FAILED
        (folder,) = sweep.folder.run_folders()
        status = RunStatus.read(folder.status)
        assert "comes again" in str(status.reason)
        assert len(status.attempts) == attempts
    assert (folder.program / "log.txt").is_file()
    assert "step 4" in folder.log.read_text()


RECORDS = """
import os, sys
from batchscape.recorder import Recorder
recorder = Recorder(world_size=1, micro_batch_size=2, gradient_accumulation_steps=2)
for step in range(1, 5):
    recorder.step(step, loss=1.0)
with open(os.path.join(sys.argv[1], "recorder", "rank_0.jsonl"), "a") as file:
    file.write("garbage\\n")
"""


@pytest.mark.slow
def test_a_damaged_record_is_no_contradiction(sweep):
    sweep.script(RECORDS)
    mapping = sweep.settings("{run_dir}", launcher__retries=0)
    mapping["engine"] |= {"metrics": {"kind": "recorder"}}
    (run,) = sweep.run(mapping).runs
    status = RunStatus.read(sweep.folder.run(run.run_id).status)
    assert (status.status, status.cause) == (Status.FAILED, "damaged_records")
    assert "'garbage' is none of the recorder's lines" in str(status.reason)


def run_with_short_files(sweep, cells, limit: int):
    """Run where no file may grow beyond a limit, as on a disk that is full for the rows alone."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    result = sweep.run(*cells, method="spawn")
    return [str(run.status) for run in result.runs], result.why_stopped


@pytest.mark.slow
def test_a_disk_that_takes_no_more_rows_is_no_fault_of_the_program(sweep):
    """What the program logs fits, what is recorded of it does not, and the outcome does."""
    sweep.script(
        "import json, os, sys\n"
        "with open(os.path.join(sys.argv[1], 'm.jsonl'), 'w') as lines:\n"
        "    for step in range(1, 1001):\n"
        "        lines.write(json.dumps({'step': step, 'loss': 1.5}) + '\\n')\n"
    )
    metrics = {
        "kind": "jsonl",
        "path": "m.jsonl",
        "columns": {"optimizer_step": "step", "loss": "loss"},
        "loss_of": "global_batch",
    }
    cells = [sweep.settings("{run_dir}", budget={"optimizer_steps": 1000}, seed=n) for n in (0, 1)]
    for mapping in cells:
        mapping["engine"] |= {"metrics": metrics}
    statuses, stopped = in_child(run_with_short_files, sweep, cells, 100_000)
    assert sorted(statuses) == ["interrupted", "pending"]
    statuses_on_disk = [RunStatus.read(folder.status) for folder in sweep.folder.run_folders()]
    (cut,) = (status for status in statuses_on_disk if status.status is Status.INTERRUPTED)
    assert (cut.cause, cut.rank) == ("disk", 0)
    assert "steps.jsonl cannot be written: File too large" in str(cut.reason)
    assert str(cut.reason) in str(stopped)
    again = sweep.run(*cells, method="spawn")
    assert [run.status for run in again.runs] == [Status.COMPLETED] * 2
    for folder in sweep.folder.run_folders():
        assert read_table(folder, "steps")["optimizer_step"].tolist() == list(range(1, 1001))
