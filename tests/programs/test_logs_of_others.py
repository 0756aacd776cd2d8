"""Logs as other people's programs write them: which time is whose, and what is not told."""

from __future__ import annotations

import json

import pytest

from batchscape.cli import main
from batchscape.config.metrics import RecorderMetrics
from batchscape.geometry import BatchGeometry
from batchscape.programs.metrics import open_reader
from batchscape.programs.settings import unlogged
from batchscape.record.status import RunStatus, Status
from batchscape.record.tables import load
from batchscape.record.timing import SEEN_BETWEEN_ROWS

WRITES = """
import pathlib, sys
pathlib.Path(sys.argv[1], "train.jsonl").write_text(pathlib.Path("given.jsonl").read_text())
"""
MMENGINE = {
    "kind": "jsonl",
    "path": "train.jsonl",
    "columns": {
        "optimizer_step": "step",
        "loss": "loss",
        "step_time_s": "time",
        "learning_rate": "lr",
        "eval_loss": "val_loss",
    },
    "units": {"step_time_s": "s"},
    "loss_of": "other",
}


def line_of(step: int) -> dict[str, float]:
    """A line of MMEngine's JSON log, every 50th step: `time` is the mean of one iteration."""
    return {"lr": 0.02, "data_time": 0.01, "loss": 3 - step / 250, "time": 0.2, "step": step}


def validation_of(step: int) -> dict[str, float]:
    """A line of its validation: `time` is that of one batch of it."""
    return {"mIoU": 31.0, "val_loss": 3.1 - step / 250, "data_time": 0.001, "time": 0.02} | {
        "step": step
    }


def run_of(sweep, entries, metrics):
    """Run a program that leaves a log; return the row of its run."""
    (sweep.path / "given.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in entries))
    sweep.script(WRITES)
    mapping = sweep.settings("{run_dir}", budget={"optimizer_steps": 320})
    mapping["engine"] |= {"metrics": metrics}
    sweep.run(mapping)
    (run,) = load(sweep.folder.path).runs.to_dict("records")
    assert run["status"] == Status.COMPLETED, run["reason"]
    return run


def test_the_time_of_a_validation_is_no_step_s(sweep) -> None:
    """Validations every 20 steps, steps every 50: at 100 both have a time."""
    entries = []
    for step in range(10, 301, 10):
        entries += [line_of(step)] if step % 50 == 0 else []
        entries += [validation_of(step)] if step % 20 == 0 else []
    run = run_of(sweep, entries, MMENGINE)
    assert run["step_time_s"] == 0.2
    assert run["samples_per_s"] == pytest.approx(40.0)
    tables = load(sweep.folder.path)
    assert tables.steps["optimizer_step"].tolist() == [50, 100, 150, 200, 250, 300]
    assert tables.evals["optimizer_step"].tolist() == list(range(20, 301, 20))


PRINTS = """
import sys, time
for step in range(1, 5):
    time.sleep(1.5)
    print(f"step {step} loss {1 / step}", flush=True)
"""
STEP_LOSS = {
    "kind": "regex",
    "pattern": r"step (?P<optimizer_step>\d+) loss (?P<loss>\S+)",
    "loss_of": "global_batch",
}


def test_times_that_are_seen_from_outside_are_marked_and_do_not_count(sweep) -> None:
    sweep.script(PRINTS)
    mapping = sweep.settings()
    mapping["engine"] |= {"metrics": STEP_LOSS}
    sweep.run(mapping)
    (run,) = load(sweep.folder.path).runs.to_dict("records")
    assert run["status"] == Status.COMPLETED, run["reason"]
    # It sleeps at least 1.5 s a step; how much longer it takes is the machine's.
    assert run["step_time_s"] > 1.0
    assert not run["launch.timing_valid"]
    assert run["launch.timing_invalid_reason"] == SEEN_BETWEEN_ROWS
    first = load(sweep.folder.path).steps.iloc[0]
    assert first.isna()["step_time_s"], "before the first row is the start of the program"


BURNS = """
import os, sys, time
while time.process_time() < 1:
    pass
for step in range(1, 5):
    print(f"step {step} loss {1 / step}", flush=True)
"""
IDLES = "time.sleep(600)\n"
ABORTS = 'print("terminate called without an active exception", flush=True)\nos.abort()\n'


@pytest.mark.skipif("not __import__('os').path.exists('/proc/self/schedstat')")
def test_a_program_that_idles_after_its_last_step_is_complete(sweep) -> None:
    sweep.script(BURNS + IDLES)
    mapping = sweep.settings(launcher__hang_s=3.0)
    mapping["engine"] |= {"metrics": STEP_LOSS}
    sweep.run(mapping)
    (run,) = load(sweep.folder.path).runs.to_dict("records")
    assert run["status"] == Status.COMPLETED
    assert run["reason"].startswith("the program did nothing for 3 s after its last optimizer step")
    assert "os._exit(0)" in run["reason"]
    assert run["optimizer_steps"] == 4


@pytest.mark.parametrize(("steps", "is_explained"), [(4, True), (8, False)])
def test_an_abort_after_the_last_step_is_explained(sweep, steps: int, is_explained: bool) -> None:
    sweep.script(BURNS.replace("1:", "0:") + ABORTS)
    mapping = sweep.settings(budget={"optimizer_steps": steps}, launcher__retries=0)
    mapping["engine"] |= {"metrics": STEP_LOSS}
    sweep.run(mapping)
    (folder,) = sweep.folder.run_folders()
    status = RunStatus.read(folder.status)
    assert status.status is Status.FAILED
    assert str(status.reason).startswith("the program was killed by SIGABRT")
    assert ("a thread of its process group" in str(status.reason)) == is_explained
    assert ("os._exit(0)" in str(status.reason)) == is_explained


TIMES, LOSS, HELD_OUT = "the time of an optimizer step", "the loss of each", "a held-out loss"


@pytest.mark.parametrize(
    ("metrics", "arguments", "missing"),
    [
        ({"kind": "recorder"}, [], []),
        (STEP_LOSS, [], [TIMES, HELD_OUT]),
        (MMENGINE, [], []),
        ({"kind": "trainer_state"}, ["--logging_steps=1"], [TIMES]),
        ({"kind": "trainer_state"}, ["--include_num_input_tokens_seen"], [TIMES, LOSS]),
        (
            {"kind": "trainer_state"},
            ["--include_num_input_tokens_seen", "no", "--logging_steps", "1"],
            [TIMES],
        ),
        (
            {"kind": "trainer_state"},
            ["--include_num_input_tokens_seen=yes", "--logging_steps", "1"],
            [],
        ),
        (
            {"kind": "trainer_state"},
            ["--include_num_input_tokens_seen=non_padding", "--logging_steps", "1"],
            [],
        ),
    ],
)
def test_what_metrics_will_not_tell(config, metrics, arguments, missing) -> None:
    engine = {"name": "command", "argv": ["{python}", *arguments], "metrics": metrics}
    texts = unlogged(config(engine=engine).engine)
    assert [text[: len(begin)] for text, begin in zip(texts, missing, strict=True)] == missing


def test_a_plan_says_before_the_launch_what_is_not_told(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    missing = [
        "engine=command",
        "engine.argv=['{python}',train.py]",
        "engine.metrics.kind=trainer_state",
        "batch.global_batch_size=8",
        "batch.micro_batch_size=8",
        "launcher.device=cpu",
    ]
    assert main(["plan", *missing]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "the program will not tell the time of an optimizer step" in printed
    assert "--include_num_input_tokens_seen=yes" in printed
    assert "BatchscapeCallback" in printed


# No rank imports torch, which takes seconds at each start; torchrun starts and restarts them.
RESTARTED = """
import json, os, pathlib, sys, time
from batchscape.recorder import Recorder

run_dir, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def barrier(step):
    (run_dir / f"start{start}-step{step}-rank{rank}").touch()
    while not all((run_dir / f"start{start}-step{step}-rank{r}").exists() for r in range(2)):
        time.sleep(0.01)

snapshot, done, weight = run_dir / "snapshot.json", 0, 3.0
if snapshot.exists():
    done, weight = json.loads(snapshot.read_text())
recorder = Recorder(world_size=world_size, micro_batch_size=4, gradient_accumulation_steps=1)
for step in range(done + 1, steps + 1):
    loss = weight ** 2 + step % 3
    weight -= 0.05 * 2 * weight
    recorder.step(step, loss=loss, samples=step * 4 * world_size)
    if rank == 0:
        # What is done again is told apart: it would have the same loss.
        print(f"step {step} loss {loss + start:.5f}", flush=True)
    if step % 5 == 0 and rank == 0:
        snapshot.write_text(json.dumps([step, weight]))
    barrier(step)
    if step == 6 and start == 0:
        raise RuntimeError("node lost")
"""


@pytest.mark.slow
def test_a_run_that_torchrun_starts_again_is_one_run(sweep) -> None:
    """It fails once after step 6, and goes on from its snapshot of step 5."""
    sweep.script(RESTARTED)
    torchrun = ["{python}", "-m", "torch.distributed.run", "--nproc_per_node={devices}"]
    torchrun += ["--master_port={port}", "--max_restarts=1"]
    mapping = sweep.settings(
        batch={"data_parallel_size": 2, "micro_batch_size": 4, "global_batch_size": 8},
        budget={"optimizer_steps": 12},
        launcher__retries=0,
    )
    argv = [*torchrun, "train.py", "{run_dir}", "{optimizer_steps}"]
    mapping["engine"] |= {"metrics": STEP_LOSS, "argv": argv}
    sweep.run(mapping)
    (run,) = load(sweep.folder.path).runs.to_dict("records")
    assert run["status"] == Status.COMPLETED, run["reason"]
    assert run["reason"].startswith("optimizer steps 6 to 6 come again in its metrics")
    steps = load(sweep.folder.path).steps
    assert steps["optimizer_step"].tolist() == list(range(1, 13))
    (folder,) = sweep.folder.run_folders()
    recorded = open_reader(
        RecorderMetrics("recorder"), folder.program, BatchGeometry(1, 2, 4, 1), None
    )
    log = recorded.read(final=True)
    assert log.problems == []
    assert ("world_size", 2) in log.readings
    losses = [row["loss"] + (row["optimizer_step"] > 5) for row in log.steps]
    assert steps["loss"].tolist() == pytest.approx(losses, abs=1e-5)
