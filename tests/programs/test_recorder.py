from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from batchscape.config import Metrics
from batchscape.errors import ConfigError, RecordError
from batchscape.geometry import BatchGeometry
from batchscape.programs.metrics import Log, open_reader
from batchscape.recorder import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, Recorder

CONFIG = TypeAdapter(Metrics).validate_json('{"kind": "recorder"}')
GEOMETRY = BatchGeometry(1, 2, 4, 3)

SCRIPT = """
import sys
from batchscape.recorder import Recorder

world_size, accumulation = int(sys.argv[1]), int(sys.argv[2])
recorder = Recorder(
    world_size=world_size, micro_batch_size=4, gradient_accumulation_steps=accumulation
)
samples = 0
for step in range(1, 4):
    samples += world_size * 4 * accumulation
    recorder.step(step, loss=4.0 / step, samples=samples, learning_rate=0.1)
recorder.evaluation(3, eval_loss=1.5)
"""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    monkeypatch.delenv(ATTEMPT_VARIABLE, raising=False)
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path


def read(run_dir: Path, sequence_length: int | None = None) -> Log:
    return open_reader(CONFIG, run_dir, GEOMETRY, sequence_length).read(final=True)


def scripts(run_dir: Path, *ranks: dict[str, str], arguments: tuple[str, str]) -> None:
    for extra in ranks:
        environment = {**os.environ, RUN_DIR_VARIABLE: str(run_dir), **extra}
        subprocess.run([sys.executable, "-c", SCRIPT, *arguments], env=environment, check=True)


def test_two_real_processes_leave_one_log_and_their_number(tmp_path: Path) -> None:
    scripts(tmp_path, {"RANK": "0"}, {"RANK": "1"}, arguments=("2", "3"))
    log = read(tmp_path, sequence_length=8)
    assert [row["loss"] for row in log.steps] == [4.0, 2.0, 4.0 / 3]
    assert [row["samples"] for row in log.steps] == [24, 48, 72]
    assert [row["tokens"] for row in log.steps] == [192, 384, 576]
    assert log.evals[0]["eval_loss"] == 1.5
    assert log.evals[0]["samples"] == 72
    assert log.problems == []
    assert set(log.readings) == {
        ("world_size", 2),
        ("micro_batch_size", 4),
        ("gradient_accumulation_steps", 3),
        ("global_batch_size", 24),
    }


def test_processes_that_train_each_for_itself_are_found(tmp_path: Path) -> None:
    scripts(tmp_path, {}, {}, arguments=("1", "3"))
    log = read(tmp_path)
    assert ("world_size", 1) in log.readings
    assert any("2 recorders are rank_0" in problem for problem in log.problems)


def test_more_ranks_than_the_plan_says_are_found(tmp_path: Path) -> None:
    arguments = ("2", "3")
    scripts(tmp_path, {"RANK": "0"}, {"RANK": "1"}, arguments=arguments)
    extra = (tmp_path / "recorder" / "rank_1.jsonl").read_text()
    (tmp_path / "recorder" / "rank_2.jsonl").write_text(extra)
    assert read(tmp_path).problems == ["3 ranks made a recorder, instead of 2"]


def test_samples_are_read_beside_what_the_script_says(run_dir: Path) -> None:
    # 18 = 4 x 4.5, and the script silently took 4.
    recorder = Recorder(world_size=1, micro_batch_size=4, global_batch_size=18)
    recorder.step(1, loss=1.0, samples=16)
    recorder.step(2, loss=1.0, samples=32)
    assert {("global_batch_size", 18), ("global_batch_size", 16)} <= set(read(run_dir).readings)


def test_a_last_step_of_fewer_samples_is_a_problem(run_dir: Path) -> None:
    recorder = Recorder()
    for step, samples in ((1, 16), (2, 32), (3, 40)):
        recorder.step(step, samples=samples)
    (problem,) = read(run_dir).problems
    assert "40 after optimizer step 3, and not 16 a step" in problem


def test_scalars_of_other_libraries_and_no_number_are_values(run_dir: Path) -> None:
    recorder = Recorder()
    recorder.step(
        torch.tensor(1), loss=torch.tensor(2.5), learning_rate=np.float32(0.5), samples=np.int64(8)
    )
    recorder.step(2, loss=math.nan, gradient_norm=torch.tensor([math.inf]))
    first, second = read(run_dir).steps
    assert (first["loss"], first["learning_rate"], first["samples"]) == (2.5, 0.5, 8)
    assert math.isnan(second["loss"])
    assert second["gradient_norm"] == math.inf


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"optimizer_step": 0}, "optimizer_step must be an int from 1"),
        ({"optimizer_step": 1.0}, "optimizer_step must be an int"),
        ({"optimizer_step": True}, "optimizer_step must be an int"),
        ({"optimizer_step": 5, "samples": 10}, r"samples counts all so far .* 10 after 20"),
        ({"optimizer_step": 4}, r"optimizer_step counts all so far .* 4 after 4"),
        ({"optimizer_step": 5, "loss": "1.0"}, "loss must be a number"),
        ({"optimizer_step": 5, "loss": torch.zeros(2)}, "loss must be a number or a tensor of one"),
        ({"optimizer_step": 5, "step_time_s": -1.0}, "step_time_s must be a time"),
        ({"optimizer_step": 2**70}, "must be an int from"),
    ],
)
def test_wrong_calls_say_what_is_wrong(
    run_dir: Path, arguments: dict[str, Any], match: str
) -> None:
    recorder = Recorder()
    recorder.step(4, samples=20)
    with pytest.raises(ConfigError, match=match):
        recorder.step(**arguments)
    assert len(read(run_dir).steps) == 1


def test_wrong_batches_say_what_is_wrong(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="rank must be below world_size, got rank=2 of 2"):
        Recorder(world_size=2, rank=2)
    with pytest.raises(ConfigError, match="micro_batch_size must be an int from 1"):
        Recorder(micro_batch_size=0)
    assert not (run_dir / "recorder").exists()


def test_nothing_happens_outside_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_DIR_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    recorder = Recorder(world_size=2)
    recorder.step(1, loss=object())  # type: ignore[arg-type]  # not even looked at
    recorder.evaluation(1, eval_loss=1.0)
    recorder.problem("none")
    recorder.exclude()
    assert not recorder.is_active
    assert list(tmp_path.iterdir()) == []


def test_trouble_with_the_disk_is_one_warning(run_dir: Path) -> None:
    (run_dir / "recorder").write_text("a file where the folder should be")
    with pytest.warns(RuntimeWarning, match="batchscape records nothing more"):
        recorder = Recorder()
    # A second warning would be an error.
    recorder.step(1, loss=1.0)


@pytest.mark.usefixtures("run_dir")
def test_a_full_disk_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        recorder.step(1, loss=1.0)
    recorder.step(2, loss=1.0)


def test_every_line_is_written_at_once(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    write = os.write

    def spy(file: int, line: bytes) -> int:
        written.append(line)
        return write(file, line)

    monkeypatch.setattr(os, "write", spy)
    recorder = Recorder()
    recorder.step(1, loss=1.0)
    assert len(written) == 2
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in written)
    assert (run_dir / "recorder" / "rank_0.jsonl").read_bytes() == b"".join(written)


def test_times_leave_evaluations_and_checkpoints_out(run_dir: Path) -> None:
    recorder = Recorder()
    time.sleep(0.02)
    recorder.step(1)
    time.sleep(0.05)
    recorder.evaluation(1, eval_loss=1.0)
    time.sleep(0.05)
    recorder.exclude()
    time.sleep(0.02)
    recorder.step(2)
    recorder.step(5)
    first, second, third = read(run_dir).steps
    (evaluation,) = read(run_dir).evals
    assert evaluation["evaluation_s"] >= 0.05
    assert evaluation["train_time_s"] == first["train_time_s"] == first["step_time_s"] >= 0.02
    assert second["train_time_s"] == pytest.approx(first["step_time_s"] + second["step_time_s"])
    # What was slept in the evaluation and the checkpoint is in no step.
    lines = (run_dir / "recorder" / "rank_0.jsonl").read_text().splitlines()
    assert second["step_time_s"] >= 0.02
    assert json.loads(lines[-2])["train_time_s"] == second["train_time_s"]
    assert "step_time_s" not in third


def test_a_second_start_from_a_checkpoint_replaces_what_it_repeats(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Recorder()
    for step in range(1, 6):
        first.step(step, loss=float(step))
        first.evaluation(step, eval_loss=float(step))
    monkeypatch.setenv(ATTEMPT_VARIABLE, "1")
    Recorder().step(4, loss=40.0)
    log = read(run_dir)
    assert [row["loss"] for row in log.steps] == [1.0, 2.0, 3.0, 40.0]
    assert [row["optimizer_step"] for row in log.evals] == [1, 2, 3]
    last_line = json.loads((run_dir / "recorder" / "rank_0.jsonl").read_text().splitlines()[-1])
    assert log.steps[3]["train_time_s"] == pytest.approx(
        log.steps[2]["train_time_s"] + last_line["train_time_s"]
    )
    assert log.problems == []


def test_a_window_is_the_loss_of_no_step(run_dir: Path) -> None:
    recorder = Recorder()
    recorder.step(2, loss=1.0, loss_window=2)
    recorder.step(4, loss=math.nan, loss_window=2)
    log = read(run_dir)
    assert "loss" not in log.steps[0]
    assert math.isnan(log.steps[1]["loss"])
    assert "mean over [2] optimizer steps" in log.sources["loss"]


def test_the_process_group_is_seen_and_compared(run_dir: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        Recorder(world_size=2).step(1)
    finally:
        dist.destroy_process_group()
    (problem,) = read(run_dir).problems
    assert "the script says world_size=2, torch.distributed has 1" in problem


def test_an_empty_folder_is_an_error_only_at_the_end(tmp_path: Path) -> None:
    reader = open_reader(CONFIG, tmp_path, GEOMETRY, None)
    assert reader.read() == Log()
    with pytest.raises(RecordError, match=r"made no batchscape\.recorder\.Recorder"):
        reader.read(final=True)


def test_a_torn_line_waits_and_a_damaged_one_stays_an_error(run_dir: Path) -> None:
    Recorder().step(1, loss=1.0)
    path = run_dir / "recorder" / "rank_0.jsonl"
    reader = open_reader(CONFIG, run_dir, GEOMETRY, None)
    with path.open("a") as file:
        file.write('{"event": "step", "optim')
    assert len(reader.read().steps) == 1
    with path.open("a") as file:
        file.write('izer_step": 2}\nnonsense\n')
    for _ in range(2):
        with pytest.raises(RecordError, match="is damaged: 'nonsense'"):
            reader.read()
    path.write_text('{"event": "step", "loss": 1.0}\n')
    with pytest.raises(RecordError, match=r"is damaged: .* is none of the recorder's lines"):
        reader.read()
