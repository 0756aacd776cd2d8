"""The mirror, against W&B's own writer and W&B's own reader, without a network."""

from __future__ import annotations

import io
import itertools
import math
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from batchscape.config import RunConfig, WandbTracker
from batchscape.launch.launch_record import OTHER_LAUNCHER
from batchscape.record.columns import COLUMNS
from batchscape.record.files import write_json
from batchscape.record.folder import SweepFolder
from batchscape.record.status import RunStatus, Status
from batchscape.record.summary import SUMMARY
from batchscape.record.timing import BUSY, TIMES
from batchscape.tracking.mirror import Mirror
from batchscape.tracking.names import (
    AXES,
    CURVES,
    FIGURES,
    axis_of,
    curve_points,
    figure_points,
    mirrored_names,
)
from batchscape.tracking.state import MirrorState, content_of, id_of, standing_of
from batchscape.tracking.sync import sync

OFFLINE = WandbTracker(name="wandb", mode="offline", project="geometry", tags=["paper"])
ONLINE = WandbTracker(name="wandb", mode="online", project="geometry", tags=["paper"])
KEY = "0123456789abcdef0123456789abcdef01234567"
CURVE_NAMES = set(mirrored_names()) - set(FIGURES.values())
NOT_MIRRORED = {"attempt", "warmup", "eval_labels"}  # they mean nothing as a curve
SUMMARY_ONLY = {  # words, constants, and the ends of curves and axes
    *("optimizer_steps", "samples", "tokens", "train_time_s", "measured_optimizer_steps"),
    *("exchanged_bytes", "involuntary_switches", "evaluation_s", "peak_tflops", "peak_source"),
    *("attention_kernel", "not_invariant", "device_limits"),
}


def wait_until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.05)


def files_outside(home: Path) -> list[Path]:
    return [path for path in home.rglob("*") if path.is_file()]


def test_every_column_and_figure_is_mirrored_or_left_out_on_purpose() -> None:
    for table, names in CURVES.items():
        assert set(COLUMNS[table]) <= set(names) | set(AXES) | NOT_MIRRORED
        assert set(names) | set(AXES) <= set(COLUMNS[table])
    assert set(FIGURES) | SUMMARY_ONLY == set(SUMMARY)
    assert not set(FIGURES) & SUMMARY_ONLY


def test_names_are_distinct_and_in_few_sections() -> None:
    names = mirrored_names()
    assert len(set(names)) == len(names)
    sections = {name.partition("/")[0] for name in names}
    assert sections == set(
        "loss gradient optimizer data time throughput system memory".split()  # noqa: SIM905
    )
    assert axis_of("loss/eval") == axis_of("gradient/noise_scale") == "samples"
    assert axis_of("time/step_time_s") == axis_of("memory/uss_gib") == "optimizer_step"


@pytest.mark.slow
def test_offline_mirror_holds_what_the_run_folders_hold(
    sweep, silent_server, tmp_path, fake_training, mirrored, checked_segments, settings_of_run
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
        (segment,) = checked_segments(training.folder)
        _check_identity(training, segment, settings_of_run)
        assert segment.tags == ["paper", str(status.status)]
        _check_figures(segment, status)
        assert segment.summary["reason"] == status.reason
        assert segment.of("exit")[-1]["exit_code"] == exit_code
    assert "loss/train" not in segment.history[-1]  # of the diverged run
    assert not sweep.run("run-pending").mirror.exists()
    assert not rejected.folder.mirror.exists()

    noted = {t.run_id: t.folder.mirror.read_bytes() for t in (done, diverged)}
    # It failed at optimizer step 7; the checkpoint is of step 4.
    failed.begin(after=4)
    failed.train(range(5, 13))
    failed.end(Status.COMPLETED)
    assert mirrored(OFFLINE) is None
    first, second = checked_segments(failed.folder)
    assert first.of("run")[0]["run_id"] == second.of("run")[0]["run_id"]
    assert second.of("run")[0]["resume"]
    assert second.tags == ["paper", "completed"]
    _check_figures(second, RunStatus.read(failed.folder.status))
    # Nothing is mirrored twice.
    assert noted == {t.run_id: t.folder.mirror.read_bytes() for t in (done, diverged)}
    assert len(list(sweep.wandb.glob("offline-run-*"))) == 4


def _check_figures(segment, status: RunStatus) -> None:
    """The summary has all of them; the last row those with a panel."""
    summary = segment.summary
    assert {name: summary[FIGURES.get(name, name)] for name in status.summary} == status.summary
    # Each once: not by another name too, nor as the end of a curve.
    assert not set(summary) & (set(FIGURES) | CURVE_NAMES)
    assert segment.summary["status"] == str(status.status)
    last = segment.history[-1]
    known = {FIGURES[name]: v for name, v in status.summary.items() if name in FIGURES}
    present = {name: value for name, value in known.items() if value is not None}
    assert {"memory/peak_allocated_gib", "throughput/mean_tokens_per_s"} <= set(present)
    assert {name: last.get(name) for name in known} == known
    for row in segment.history[:-1]:
        assert not set(row) & set(present)


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
    metrics = {metric["name"]: metric for metric in segment.of("metric")}
    assert set(AXES) <= set(metrics)
    for name in mirrored_names():
        assert metrics[name].get("step_metric") == axis_of(name)


def test_classes_are_labels_and_no_tokens(fake_training, mirrored, offline_segments) -> None:
    training = fake_training("run-a", task="class")
    training.begin()
    training.train(range(1, 13))
    training.end(Status.COMPLETED)
    assert mirrored(OFFLINE) is None
    (segment,) = offline_segments(training.folder)
    assert not [name for row in segment.history for name in row if "tokens_per_s" in name]
    assert segment.summary["throughput/mean_tokens_per_s"] is None
    assert segment.summary["throughput/mean_samples_per_s"] > 0
    steps = [row for row in segment.history if "data/labels" in row]
    assert len(steps) == 12
    assert all(row["throughput/samples_per_s"] > 0 for row in steps)


def test_times_that_do_not_count_are_not_in_wandb_and_the_reason_is(
    fake_training, mirrored, checked_segments
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

    panels = {FIGURES[name] for name in TIMES & set(FIGURES)}
    for training, reason in ((waited, BUSY), (spoiled, OTHER_LAUNCHER)):
        (segment,) = checked_segments(training.folder)
        assert not set(segment.summary) & (TIMES | panels | CURVE_NAMES)
        assert not any(set(row) & panels for row in segment.history)
        assert segment.summary["timing_valid"] is False
        assert segment.summary["timing_invalid_reason"] == reason
        assert segment.tags == ["paper", "completed", "timing_invalid"]
        # What is valid all the same, and what the disturbance was.
        for name in ("final_loss", "core_wait_pct", "peak_allocated_gib", "processor_time_s"):
            said = segment.summary[FIGURES.get(name, name)]
            assert said == training.status.summary[name] is not None
        assert segment.of("run")[0]["config"]["update"]["launch"] == {"attempt": 0}
    (segment,) = checked_segments(valid.folder)
    known = {name: v for name, v in valid.status.summary.items() if name in TIMES}
    assert {name: segment.summary[FIGURES.get(name, name)] for name in known} == known
    assert known["step_time_s"] == 0.125
    assert segment.history[-1]["time/median_step_time_s"] == 0.125
    assert segment.summary["timing_valid"] is True
    assert segment.summary["timing_invalid_reason"] is None
    assert segment.tags == ["paper", "completed"]


@pytest.mark.slow
def test_a_run_of_a_search_carries_its_parameters_and_what_is_made_small(
    fake_training, settings_of_run, mirrored, offline_segments
) -> None:
    objectives = ["loss", "samples_to_target"]
    searched = settings_of_run | {"search": {"name": "gp", "objective": objectives}}
    done = fake_training("run-a", config=RunConfig.from_mapping(searched))
    lost = fake_training("run-b", config=RunConfig.from_mapping(searched))
    for training, status in ((done, Status.COMPLETED), (lost, Status.DIVERGED)):
        training.begin()
        training.train(range(1, 13))
        training.end(status)
    assert mirrored(OFFLINE) is None
    (segment,), (other,) = offline_segments(done.folder), offline_segments(lost.folder)
    assert segment.summary["objective/loss"] == done.status.summary["final_eval_loss"]
    # It met no target, which is no number that a chart could draw.
    assert "objective/samples_to_target" not in segment.summary
    config = segment.of("run")[0]["config"]["update"]
    assert config["optimizer"]["learning_rate"] == 1e-3
    assert not [name for name in other.summary if name.startswith("objective")]


def test_a_run_that_goes_on_disturbed_takes_its_times_back(
    sweep, server, fake_training, mirrored
) -> None:
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 9))
    training.end(Status.INTERRUPTED, "stopped by SIGINT")
    assert mirrored(ONLINE) is None
    found = server.run_of("run-a")
    assert found.summary["time/median_step_time_s"] == 0.125
    assert "step_time_s" not in found.summary
    assert "time/step_time_s" not in found.summary

    training.begin(after=4)
    training.core_wait_s = 0.09
    training.train(range(5, 13))
    training.end(Status.COMPLETED)
    # By hand, as after a launch without a tracker.
    console = Console(file=io.StringIO())
    assert sync([sweep.path], console)
    panels = {FIGURES[name] for name in TIMES & set(FIGURES)}
    assert not set(found.summary) & (TIMES | panels | CURVE_NAMES)
    assert found.summary["timing_invalid_reason"] == BUSY
    # Those of the tracker are of the run's own settings, which have none.
    assert found.settings["tags"] == ["completed", "timing_invalid"]
    assert found.summary["loss/final_train"] == training.status.summary["final_loss"]
    # W&B's own time is that of the processes, not that of the upload.
    ran_s = sum(a.ended_at - a.started_at for a in training.status.attempts)
    assert found.summary["_runtime"] == pytest.approx(ran_s)
    before = found.lines_received
    assert sync([sweep.path], console)
    assert found.lines_received == before


@pytest.mark.slow
def test_following_a_run_and_being_killed(
    sweep, monkeypatch, fake_training, workers, open_rows, checked_segments
) -> None:
    monkeypatch.setenv("WANDB__TRANSACTION_LOG_FLUSH_INTERVAL", "0.1")
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 5))
    first = Mirror(OFFLINE, sweep, live=True)
    (worker,) = workers()
    assert worker.nice() == 19
    wait_until(lambda: open_rows(training.folder))
    training.train(range(5, 9))
    # W&B holds the latest row back, in case more is logged at its step.
    wait_until(lambda: open_rows(training.folder)[-1]["optimizer_step"] >= 8)
    worker.kill()
    wait_until(lambda: worker.status() == psutil.STATUS_ZOMBIE)
    (cut_short,) = sweep.wandb.glob("offline-run-*")

    second = Mirror(OFFLINE, sweep, live=True)
    wait_until(lambda: not cut_short.exists() and open_rows(training.folder))
    training.train(range(9, 13))
    training.end(Status.COMPLETED)
    assert second.finish(10, interrupted=False) is None
    (segment,) = checked_segments(training.folder)
    assert segment.tags == ["paper", "completed"]
    _check_figures(segment, training.status)
    # The killed one is not missed: the launcher starts another, which finds nothing to do.
    assert first.finish(10, interrupted=False) is None
    assert len(list(sweep.wandb.glob("offline-run-*"))) == 1


@pytest.mark.slow
def test_a_dead_launcher_takes_its_mirror_along(
    sweep, fake_training, mirrored, checked_segments
) -> None:
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
    training.train([6])
    training.end(Status.COMPLETED)
    assert mirrored(OFFLINE) is None
    checked_segments(training.folder)
    assert len(list(sweep.wandb.glob("offline-run-*"))) == 1


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
    said = mirrored(WandbTracker(name="wandb"))
    assert said is not None
    assert "Weights & Biases was not updated: it lacks 1 of 1 runs (run-a), because" in said
    # On a busy machine W&B takes longer to say so than the mirror waits for it.
    assert re.search("because (Weights & Biases cannot be used: |it did not answer for )", said)
    assert f"batchscape sync {sweep.path}" in said
    for path in sweep.path.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("silent_server")
def test_an_interrupted_wait_no_key_and_a_damaged_run(
    sweep, monkeypatch, fake_training, mirrored, checked_segments
) -> None:
    """The first mirror hangs at a silent server, the second one mirrors what can be read."""
    for name in ("run-a", "run-b"):
        training = fake_training(name)
        training.begin()
        training.train(range(1, 3))
        training.end(Status.PRUNED)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    said = Mirror(ONLINE, sweep, live=True).finish(2, interrupted=True)
    assert said is not None
    assert "it lacks 2 of 2 runs (run-a, run-b), because the sweep was interrupted" in said
    assert "it did not end within 5 s" in said

    monkeypatch.delenv("WANDB_API_KEY")
    training.folder.parquet("steps").write_bytes(b"not what was sealed")
    said = mirrored(ONLINE)
    assert said is not None
    assert "it lacks 2 of 2 runs (run-a, run-b), because no API key is known" in said
    said = mirrored(OFFLINE)
    assert said is not None
    assert "it lacks 1 of 2 runs (run-b), because" in said
    assert f"{training.folder.parquet('steps')} is missing or differs" in said
    (segment,) = checked_segments(sweep.run("run-a"))
    assert segment.of("exit")[-1]["exit_code"] == 0


@pytest.mark.slow
def test_online_run_is_gone_on_with_where_the_server_stands(
    sweep, server, fake_training, rows_of
) -> None:
    """Also where nobody came to note which rows had arrived."""
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 6))
    tracker = WandbTracker(name="wandb", tags=["paper"])
    mirror = Mirror(tracker, sweep, live=True)
    wait_until(lambda: server.runs and server.run_of("run-a").history)
    assert mirror.finish(10, interrupted=False) is None
    state = MirrorState.read(training.folder)
    assert state is not None
    assert state.is_cut_short_online
    run = server.run_of("run-a")
    assert len(run.history) == 7
    assert run.state == "failed"  # nobody runs it any more
    training.train(range(6, 13))
    training.end(Status.COMPLETED)
    assert Mirror(tracker, sweep, live=True).finish(10, interrupted=False) is None
    assert run.visible_history == rows_of(training.folder)
    assert run.lines_received == len(run.history)
    assert run.settings["tags"] == ["paper", "completed"]
    assert run.state == "finished"
    assert run.summary["loss/final_train"] == training.status.summary["final_loss"]
    assert run.last_row["memory/peak_allocated_gib"] == 0.5


@pytest.mark.slow
def test_segments_may_be_uploaded_by_hand(sweep, server, fake_training, mirrored, rows_of) -> None:
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 6))
    training.end(Status.FAILED, "rank 0 died")
    assert mirrored(OFFLINE) is None
    training.begin(after=4)
    training.train(range(5, 13))
    training.end(Status.COMPLETED)
    assert mirrored(OFFLINE) is None
    assert standing_of(sweep.path).offline == ["run-a"]
    _sync_by_hand(sweep)
    run = server.run_of("run-a")
    assert run.visible_history == rows_of(training.folder)
    assert standing_of(sweep.path).uploaded == ["run-a"]
    assert mirrored(ONLINE) is None
    assert run.lines_received == len(run.history)


def _sync_by_hand(sweep: SweepFolder) -> None:
    written = sorted(sweep.wandb.glob("offline-run-*"))
    command = [sys.executable, "-m", "wandb", "sync", *map(str, written)]
    subprocess.run(command, capture_output=True, check=True)


def test_what_counts_as_uploaded(sweep, fake_training) -> None:
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 3))
    training.end(Status.COMPLETED)
    segments = [sweep.wandb / f"offline-run-{number}" for number in (2, 3)]

    def stands(state: MirrorState) -> str:
        state.write(training.folder)
        assert MirrorState.read(training.folder) == state
        found = standing_of(sweep.path)
        (place,) = (p for p in ("uploaded", "offline", "lacking") if "run-a" in getattr(found, p))
        return place

    state = MirrorState("p", None, "online", content=content_of(training.status))
    assert stands(state) == "uploaded"
    state.content = None  # opened there, and its end never seen
    assert stands(state) == "lacking"
    other = RunStatus.read(training.folder.status)
    other.summary["final_loss"] = 7.0
    state.content = content_of(other)
    assert stands(state) == "lacking"

    state.mode, state.content = "offline", content_of(training.status)
    state.segments = [path.name for path in segments]
    assert stands(state) == "offline"  # gone, perhaps never uploaded
    for path in segments:
        path.mkdir(parents=True)
        (path / "run-a.wandb").touch()
    (segments[1] / "run-a.wandb.synced").touch()
    assert stands(state) == "offline"
    state.mark_sent(sweep.path)
    assert stands(state) == "uploaded"


def test_only_segments_that_were_cut_short_are_removed(sweep) -> None:
    state = MirrorState("p", None, segments=["offline-run-1-a-1"])
    others = ("offline-run-1-a-1", "offline-run-2-b-1", "run-2-a-1", "offline-run-3-a-1")
    for name in (*others, "offline-run-4-a-1"):
        (sweep.wandb / name).mkdir(parents=True)
    (sweep.wandb / "offline-run-3-a-1" / "a.wandb.synced").touch()  # by hand
    state.remove_strays(sweep.path, "a-1")
    assert {path.name for path in sweep.wandb.iterdir()} == set(others)


def test_a_run_begun_anew_is_another_one_of_wandb(fake_training) -> None:
    """The W&B run of its name has the steps of the damaged folder: they would be skipped."""
    run = fake_training("run-a")
    run.begin()
    name = id_of("run-a", run.status)
    assert re.fullmatch("run-a-[0-9a-f]{8}", name)
    run.begin(after=2)
    assert id_of("run-a", run.status) == name
    run.status.attempts.clear()
    run.begin()
    assert id_of("run-a", run.status) != name


@settings(max_examples=50)
@given(
    tokens=st.lists(st.integers(1, 10**6), min_size=1, max_size=20),
    start=st.integers(0, 20),
    step_time_s=st.floats(1e-3, 1e3),
)
def test_labels_of_all_steps_add_up(tokens, start, step_time_s) -> None:
    """Wherever the mirror goes on, what it computes from two rows is what one reading gives."""
    sums = list(itertools.accumulate(tokens))
    rows = [
        {"optimizer_step": k, "tokens": total, "step_time_s": step_time_s, "global_batch_size": 4}
        for k, total in enumerate(sums, start=1)
    ]
    first = min(start, len(rows) - 1)
    before = [0, *sums]
    points = [curve_points("steps", rows[k], before[k]) for k in range(first, len(rows))]
    assert sum(point["data/labels"] for point in points) == sums[-1] - before[first]
    for point, fresh in zip(points, tokens[first:], strict=True):
        assert point["throughput/tokens_per_s"] * step_time_s == pytest.approx(fresh)
        assert point["throughput/samples_per_s"] * step_time_s == pytest.approx(4)


def test_what_is_missing_has_no_point() -> None:
    row = {"optimizer_step": 1, "tokens": None, "loss": math.nan, "step_time_s": pd.NA}
    row |= {"skipped": True, "gradient_norm": None}
    assert curve_points("steps", row, None) == {"optimizer_step": 1, "gradient/skipped": 1}
    summary = {"throttled": False, "mfu_pct": None, "final_loss": 2.5}
    assert figure_points(summary) == {"system/throttled": 0, "loss/final_train": 2.5}
