"""The mirror, against W&B's own writer and W&B's own reader, without a network."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import psutil
import pytest

from batchscape.cli import main
from batchscape.config import WandbTracker
from batchscape.launch import launcher
from batchscape.launch.devices import OTHER_LAUNCHER
from batchscape.record.figures import COLUMNS, FIGURES, RESIDENT, TIMES
from batchscape.record.files import read_json, write_json
from batchscape.record.folder import SweepFolder
from batchscape.record.status import RunStatus, Status
from batchscape.record.tables import read_table
from batchscape.record.timing import BUSY
from batchscape.tracking import mirror as mirrors
from batchscape.tracking.mirror import Mirror, patience_s
from batchscape.tracking.run import AXES, CURVES, curve_points, section_axes
from exact import assert_same_rows

OFFLINE = WandbTracker(name="wandb", mode="offline", project="geometry", tags=["paper"])
ONLINE = WandbTracker(name="wandb", mode="online", project="geometry", tags=["paper"])
KEY = "0123456789abcdef0123456789abcdef01234567"
NOT_MIRRORED = {"attempt", "warmup", "eval_labels"}  # they mean nothing as a curve


def wait_until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.05)


def files_outside(home: Path) -> list[Path]:
    return [path for path in home.rglob("*") if path.is_file()]


def test_every_column_is_mirrored_or_left_out_on_purpose() -> None:
    for table, names in CURVES.items():
        assert set(COLUMNS[table]) <= set(names) | set(AXES) | NOT_MIRRORED
        assert set(names) | set(AXES) <= set(COLUMNS[table])
    curves = [name for names in CURVES.values() for name in names.values()]
    assert len(set(curves)) == len(curves)
    assert {name.partition("/")[0] for name in curves} <= set(section_axes())
    assert section_axes()["loss"] == "samples"
    assert section_axes()["time"] == "optimizer_step"


@pytest.mark.slow
def test_offline_mirror_holds_what_the_run_folders_hold(
    sweep, silent_server, tmp_path, fake_training, mirrored, checked_segment, settings_of_run
) -> None:
    done, failed, diverged = (fake_training(f"run-{name}") for name in "abc")
    fake_training("run-pending")
    rejected = fake_training("run-rejected")
    RunStatus(Status.REJECTED, reason="needs 16 devices").write(rejected.folder.status)
    for training in (done, failed, diverged):
        training.begin()
    done.train(range(1, 13))
    done.end(Status.COMPLETED)
    failed.train(range(1, 8))
    failed.end(Status.FAILED, "rank 1 died")
    diverged.train(range(1, 7), nan_at=6)
    diverged.end(Status.DIVERGED, "the loss is not a number")

    assert mirrored(OFFLINE) is None

    with pytest.raises(BlockingIOError):
        silent_server.accept()
    assert files_outside(tmp_path / "home") == []
    for training, exit_code in ((done, 0), (failed, 1), (diverged, 1)):
        status = RunStatus.read(training.folder.status)
        segment = checked_segment(training.folder)
        _check_identity(training, segment, settings_of_run)
        assert segment.tags == ["paper", str(status.status)]
        _check_figures(segment, status)
        assert segment.summary["reason"] == status.reason
        assert segment.of("exit")[-1]["exit_code"] == exit_code
    assert "loss/train" not in segment.history[-1]  # of the diverged run
    assert not sweep.run("run-pending").mirror.exists()
    assert not rejected.folder.mirror.exists()

    noted = {t.run_id: t.folder.mirror.read_bytes() for t in (done, diverged)}
    before = checked_segment(failed.folder).of("run")[0]["run_id"]
    # It failed at optimizer step 7; the checkpoint is of step 4.
    failed.begin(after=4)
    failed.train(range(5, 13))
    failed.end(Status.COMPLETED)
    assert mirrored(OFFLINE) is None
    segment = checked_segment(failed.folder)
    assert segment.of("run")[0]["run_id"] == before
    assert segment.tags == ["paper", "completed"]
    _check_figures(segment, RunStatus.read(failed.folder.status))
    # Nothing is mirrored twice.
    assert noted == {t.run_id: t.folder.mirror.read_bytes() for t in (done, diverged)}
    assert len(list(sweep.wandb.glob("offline-run-*"))) == 3


def _check_figures(segment, status: RunStatus) -> None:
    """The summary has each figure by its name in the record, and no end of a curve."""
    summary = segment.summary
    assert {name: summary[name] for name in FIGURES} == {
        name: status.summary.get(name) for name in FIGURES
    }
    assert not [name for name in summary if "/" in name]
    assert summary["status"] == str(status.status)
    assert summary["peak_allocated_gib"] == 0.5
    assert summary["tokens_per_s"] > 0


def _check_identity(training, segment, settings) -> None:
    run = segment.of("run")[0]
    cell, sweep_id = re.fullmatch(
        r"(2x8x2 ddp gpt adamw 0\.001 [0-9a-f]{6}) \((fixed_global_batch-[0-9a-f]{8})\)",
        run["run_group"],
    ).groups()
    assert run["display_name"] == f"{cell} s3"
    assert run["job_type"] == "train"
    assert run["project"] == "geometry"
    config = run["config"]["update"]
    geometry = {
        "nodes": 1,
        "devices_per_node": 2,
        "micro_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "data_parallel_size": 2,
        "global_batch_size": 32,
    }
    expected = settings | geometry
    expected |= {
        "run_id": training.run_id,
        "trajectory_id": "t1",
        "sweep_name": "fixed_global_batch",
        "sweep_id": sweep_id,
        "data_manifest_hash": "hash",
        "device_type": "cpu",
        "precision": "float32",
        "planned_optimizer_steps": 12,
        "planned_samples": 384,
        "evaluation_every_samples": 128,
        "init_seed": 3,
        "data_seed": 3,
        "source_hash": None,
        "stages": [{"samples": 384, "geometry": geometry, "optimizer": settings["optimizer"]}],
        "launch": {"attempt": 0},
    }
    assert {name: value for name, value in config.items() if name != "_wandb"} == expected
    metrics = {metric.get("name") or metric["glob_name"]: metric for metric in segment.of("metric")}
    assert set(AXES) <= set(metrics)
    for section, axis in section_axes().items():
        assert metrics[f"{section}/*"]["step_metric"] == axis


def test_times_that_do_not_count_are_not_in_wandb_and_the_reason_is(
    fake_training, mirrored, checked_segment
) -> None:
    waited, spoiled, valid = (
        fake_training(name, core_wait_s=wait_s)
        for name, wait_s in (("run-waited", 0.09), ("run-spoiled", 0.001), ("run-valid", 0.001))
    )
    for training in (waited, spoiled, valid):
        training.begin()  # each as valid
        training.train(range(1, 13))
    write_json(
        spoiled.folder.launch,
        {"attempt": 0, "timing_valid": False, "timing_invalid_reason": OTHER_LAUNCHER},
    )
    for training in (waited, spoiled, valid):
        training.end(Status.COMPLETED)
    assert waited.status.summary["core_wait_pct"] == pytest.approx(72.0)

    assert mirrored(OFFLINE) is None

    for training, reason in ((waited, BUSY), (spoiled, OTHER_LAUNCHER)):
        segment = checked_segment(training.folder)
        assert {segment.summary[name] for name in TIMES} == {None}
        assert segment.summary["timing_valid"] is False
        assert segment.summary["timing_invalid_reason"] == reason
        assert segment.tags == ["paper", "completed", "timing_invalid"]
        # What is valid all the same, and what the disturbance was.
        for name in ("final_loss", "core_wait_pct", "peak_allocated_gib", "processor_time_s"):
            assert segment.summary[name] == training.status.summary[name] is not None
        assert segment.of("run")[0]["config"]["update"]["launch"] == {"attempt": 0}
    segment = checked_segment(valid.folder)
    _check_figures(segment, valid.status)
    assert segment.summary["step_time_s"] == 0.125
    assert segment.summary["timing_valid"] is True
    assert segment.summary["timing_invalid_reason"] is None
    assert segment.tags == ["paper", "completed"]


@pytest.mark.slow
def test_what_is_not_known_of_a_program_is_not_in_wandb(
    fake_training, mirrored, checked_segment
) -> None:
    """Resident memory does not pass for allocated memory, nor a setting for one that it had."""
    training = fake_training("run-a")
    content = read_json(training.folder.config)
    lacking = ["seed", "init_seed", "data_seed", "optimizer.learning_rate"]
    content["resolved"]["not_passed"] = lacking
    write_json(training.folder.config, content)
    training.begin()
    training.train(range(1, 5))
    training.folder.lines("ranks").write_text(
        json.dumps({"rank": 0, "attempt": 0, "memory_method": RESIDENT, "uss_gib": 0.2}) + "\n"
    )
    training.end(Status.COMPLETED)
    assert training.status.summary["peak_allocated_gib"] == 0.5
    assert mirrored(OFFLINE) is None
    segment = checked_segment(training.folder)
    assert segment.summary["peak_allocated_gib"] is None
    assert segment.summary["uss_gib"] == 0.2
    run = segment.of("run")[0]
    assert re.fullmatch("2x8x2 ddp gpt adamw [0-9a-f]{6}", run["display_name"])
    config = run["config"]["update"]
    assert not {"not_passed", "seed", "init_seed", "data_seed"} & config.keys()
    (stage,) = config["stages"]
    for optimizer in (config["optimizer"], stage["optimizer"]):
        assert optimizer["name"] == "adamw"
        assert "learning_rate" not in optimizer


@pytest.mark.slow
def test_following_a_run_and_being_killed(
    sweep, monkeypatch, fake_training, workers, open_rows, checked_segment
) -> None:
    monkeypatch.setenv("WANDB__TRANSACTION_LOG_FLUSH_INTERVAL", "0.1")
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 5))
    mirror = Mirror(OFFLINE, sweep, live=True)
    (worker,) = workers()
    assert worker.nice() == 19
    wait_until(lambda: open_rows(training.folder))
    training.train(range(5, 9))
    # W&B holds the latest row back, in case more is logged at its step.
    wait_until(lambda: open_rows(training.folder)[-1]["optimizer_step"] >= 8)
    worker.kill()
    wait_until(lambda: worker.status() == psutil.STATUS_ZOMBIE)
    training.train(range(9, 13))
    training.end(Status.COMPLETED)
    # The killed one is not missed: another writes the run anew.
    assert mirror.finish(interrupted=False) is None
    segment = checked_segment(training.folder)
    assert segment.tags == ["paper", "completed"]
    _check_figures(segment, training.status)


@pytest.mark.slow
def test_a_dead_launcher_takes_its_mirror_along(sweep, fake_training) -> None:
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 6))
    launcher = f"""
import pathlib, sys
from batchscape.config import WandbTracker
from batchscape.record.folder import SweepFolder
from batchscape.tracking.mirror import Mirror
tracker = WandbTracker(name="wandb", mode="offline")
mirror = Mirror(tracker, SweepFolder(pathlib.Path({str(sweep.path)!r})), live=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", launcher], stdin=subprocess.PIPE) as process:
        wait_until(lambda: list(sweep.wandb.glob("offline-run-*")))
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


@pytest.mark.slow
def test_an_unreachable_server_is_told(sweep, monkeypatch, fake_training, mirrored) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 13))
    training.end(Status.COMPLETED)
    note = mirrored(WandbTracker(name="wandb"))
    assert note is not None
    assert "Weights & Biases was not updated: it lacks 1 of 1 runs (run-a), because" in note
    # On a busy machine W&B takes longer to say so than the mirror waits for it.
    assert re.search("because (Weights & Biases cannot be used: |it did not answer for )", note)
    assert f"batchscape sync {sweep.path}" in note
    for path in sweep.path.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes()


@pytest.mark.slow
def test_no_key_and_a_damaged_run(sweep, fake_training, mirrored, checked_segment) -> None:
    for name in ("run-a", "run-b"):
        training = fake_training(name)
        training.begin()
        training.train(range(1, 3))
        training.end(Status.PRUNED)
    training.folder.parquet("steps").write_bytes(b"not what was sealed")
    note = mirrored(ONLINE)
    assert note is not None
    assert "it lacks 2 of 2 runs (run-a and run-b), because no API key is known" in note
    note = mirrored(WandbTracker(name="wandb"))  # auto: offline
    assert note is not None
    assert "it lacks 1 of 2 runs (run-b), because" in note
    assert f"{training.folder.parquet('steps')} is missing or differs" in note
    assert checked_segment(sweep.run("run-a")).of("exit")[-1]["exit_code"] == 0


@pytest.mark.slow
def test_a_mirror_that_does_not_answer_is_ended(sweep, server, fake_training, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    monkeypatch.setattr(mirrors, "_SILENCE_S", 7.0)
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 4))
    mirror = Mirror(ONLINE, sweep, live=True)
    wait_until(training.folder.mirror.exists)
    server.hangs = True
    training.train(range(4, 6))
    training.end(Status.COMPLETED)
    note = mirror.finish(interrupted=False)
    assert note is not None
    assert "it lacks 1 of 1 runs (run-a), because it did not answer for 10 s" in note


@pytest.mark.slow
def test_a_sweep_keeps_its_name_without_the_run_that_began_first(
    fake_training, mirrored, checked_segment
) -> None:
    """Deleting a damaged run moves no other one to another group."""
    groups = {}
    for name in ("run-a", "run-b"):
        training = fake_training(name)
        training.begin()
        training.train(range(1, 4))
        training.end(Status.COMPLETED)
        assert mirrored(OFFLINE) is None
        groups[name] = checked_segment(training.folder).of("run")[0]["run_group"]
        shutil.rmtree(training.folder.path)
    assert groups["run-a"] == groups["run-b"]


@pytest.mark.slow
def test_a_long_run_is_no_silence(sweep, fake_training) -> None:
    """However long W&B takes for all its rows, the mirror is heard of in between."""
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 601))
    training.end(Status.COMPLETED)
    worker = mirrors.Worker(mirrors.MirrorRequest(str(sweep.path), "offline", "rest"))
    try:
        kinds = [event.kind for event in worker.events(600.0)]
    finally:
        worker.close()
    assert kinds.count("rows") >= 2
    assert kinds[-2:] == ["done", "end"]


def test_every_wait_has_a_bound(monkeypatch) -> None:
    monkeypatch.delenv("WANDB_INIT_TIMEOUT", raising=False)
    assert patience_s() == 20
    for text, expected in (("7", 7), ("inf", 600)):
        monkeypatch.setenv("WANDB_INIT_TIMEOUT", text)
        assert patience_s() == expected


TABLES = {
    "steps": ["optimizer_step", "samples", "tokens", "loss", "gradient_norm", "learning_rate"],
    "evals": ["optimizer_step", "samples", "eval_loss", "eval_labels"],
}


@pytest.mark.slow
@pytest.mark.usefixtures("sweep")
def test_training_beside_a_hanging_mirror_is_the_same_bit_for_bit(
    tmp_path, server, monkeypatch, capsys
) -> None:
    """The mirror follows the runs while they train, and hangs, and everything is kept."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # no other launcher of this machine
    monkeypatch.setattr(launcher, "may_mirror_live", lambda *_: True)
    settings = [
        *("sweep", "seed=0,1", "model=gpt_micro", "batch.micro_batch_size=8"),
        *("batch.global_batch_size=16", "launcher.device=cpu", "data.sequence_length=16"),
        *("budget.samples=640", "evaluation.every_samples=160", "evaluation.samples=16"),
        "measure.memory=false",
    ]
    assert main([*settings, "tracker=none", "sweep_dir=plain"]) == 0
    plain, tracked = SweepFolder(tmp_path / "plain"), SweepFolder(tmp_path / "hanging")
    capsys.readouterr()
    server.hangs = True
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    code = main([*settings, "tracker=wandb", "tracker.mode=online", "sweep_dir='hanging'"])
    assert code == 0, capsys.readouterr().err
    assert "was not updated" in capsys.readouterr().out
    names = [folder.path.name for folder in plain.run_folders()]
    assert len(names) == 2
    assert [folder.path.name for folder in tracked.run_folders()] == names
    for name in names:
        one, other = plain.run(name), tracked.run(name)
        assert RunStatus.read(other.status).status is Status.COMPLETED
        assert read_json(other.launch)["timing_valid"]
        for table, columns in TABLES.items():
            rows, others = (read_table(folder, table)[columns] for folder in (one, other))
            assert len(rows) > 2
            assert_same_rows(others, rows)


def test_what_is_missing_has_no_point() -> None:
    row = {"optimizer_step": 1, "tokens": None, "loss": math.nan, "step_time_s": pd.NA}
    row |= {"skipped": True, "gradient_norm": None, "global_batch_size": 4}
    points = {"optimizer_step": 1, "gradient/skipped": 1, "data/global_batch_size": 4}
    assert curve_points("steps", row) == points
    row["step_time_s"] = 0.5
    assert curve_points("steps", row) == points | {
        "time/step_time_s": 0.5,
        "throughput/samples_per_s": 8.0,
    }
