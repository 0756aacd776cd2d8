"""The mirror, against W&B's own writer and W&B's own reader, without a network."""

from __future__ import annotations

import io
import itertools
import math
import os
import re
import signal
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

from batchscape.config import WandbTracker
from batchscape.launch.launch_record import OTHER_LAUNCHER
from batchscape.record import mirror
from batchscape.record.columns import COLUMNS
from batchscape.record.files import write_json
from batchscape.record.folder import SweepFolder
from batchscape.record.mirror_state import MirrorState, content_of, wandb_folder
from batchscape.record.status import RunStatus, Status
from batchscape.record.summary import SUMMARY
from batchscape.record.sync import sync
from batchscape.record.timing import BUSY, TIMES
from batchscape.record.wandb_memory import memory_page
from batchscape.record.wandb_names import (
    AXES,
    CURVES,
    FIGURES,
    NOT_MIRRORED,
    SUMMARY_ONLY,
    TIMES_OF_STEPS,
    axis_of,
    curve_points,
    figure_points,
    mirrored_names,
)

OFFLINE = WandbTracker(name="wandb", mode="offline", project="geometry", tags=["paper"])
ONLINE = WandbTracker(name="wandb", mode="online", project="geometry", tags=["paper"])
KEY = "0123456789abcdef0123456789abcdef01234567"
TIMEOUT_S = 100.0


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)


def segments_of(training) -> list[str]:
    state = MirrorState.read(training.folder)
    return [] if state is None else state.segments


def has_open_segment(training) -> bool:
    state = MirrorState.read(training.folder)
    return state is not None and not state.closed


def kill(process: mirror.MirrorProcess) -> None:
    helpers = psutil.Process(process.pid).children()
    os.kill(process.pid, signal.SIGKILL)
    psutil.wait_procs(helpers)


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
    sweep, silent_server, tmp_path, fake_training, checked_segments, settings_of_run
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

    assert mirror.start(sweep.path, OFFLINE, live=False).finish(TIMEOUT_S) is None

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

    mirrored = {t.run_id: t.folder.mirror.read_bytes() for t in (done, diverged)}
    # It failed at optimizer step 7; the checkpoint is of step 4.
    failed.begin(after=4)
    failed.train(range(5, 13))
    failed.end(Status.COMPLETED)
    assert mirror.start(sweep.path, OFFLINE, live=False).finish(TIMEOUT_S) is None
    first, second = checked_segments(failed.folder)
    assert first.of("run")[0]["run_id"] == second.of("run")[0]["run_id"]
    assert second.of("run")[0]["resume"]
    assert second.tags == ["paper", "completed"]
    _check_figures(second, RunStatus.read(failed.folder.status))
    # Nothing is mirrored twice.
    assert mirrored == {t.run_id: t.folder.mirror.read_bytes() for t in (done, diverged)}
    assert len(list(wandb_folder(sweep.path).glob("offline-run-*"))) == 4


def _check_figures(segment, status: RunStatus) -> None:
    """The summary has all of them; the last row those with a panel, and the memory of the ranks."""
    assert {name: segment.summary[name] for name in status.summary} == status.summary
    assert segment.summary["status"] == str(status.status)
    last = segment.history[-1]
    known = {FIGURES[name]: v for name, v in status.summary.items() if name in FIGURES}
    present = {name: value for name, value in known.items() if value is not None}
    assert {"memory/peak_allocated_gib", "throughput/mean_tokens_per_s"} <= set(present)
    assert {name: last.get(name) for name in known} == known
    assert last["memory/ranks._type"] == "html-file"
    for row in segment.history[:-1]:
        assert not set(row) & set(present)


def _check_identity(training, segment, settings) -> None:
    run = segment.of("run")[0]
    assert run["display_name"] == training.run_id
    assert run["run_group"] == "fixed_global_batch"
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


def test_times_that_do_not_count_are_not_in_wandb_and_the_reason_is(
    sweep, fake_training, checked_segments
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

    assert mirror.start(sweep.path, OFFLINE, live=False).finish(TIMEOUT_S) is None

    panels = {FIGURES[name] for name in TIMES & set(FIGURES)}
    for training, reason in ((waited, BUSY), (spoiled, OTHER_LAUNCHER)):
        (segment,) = checked_segments(training.folder)
        assert not set(segment.summary) & (TIMES | panels | TIMES_OF_STEPS)
        assert not any(set(row) & panels for row in segment.history)
        assert segment.summary["timing_valid"] is False
        assert segment.summary["timing_invalid_reason"] == reason
        assert segment.tags == ["paper", "completed", "timing_invalid"]
        # What is valid all the same, and what the disturbance was.
        for name in ("final_loss", "core_wait_pct", "peak_allocated_gib", "processor_time_s"):
            assert segment.summary[name] == training.status.summary[name] is not None
        assert segment.of("run")[0]["config"]["update"]["launch"] == {"attempt": 0}
    (segment,) = checked_segments(valid.folder)
    known = {name: v for name, v in valid.status.summary.items() if name in TIMES}
    assert {name: segment.summary[name] for name in known} == known
    assert known["step_time_s"] == 0.125
    assert segment.history[-1]["time/median_step_time_s"] == 0.125
    assert segment.summary["timing_valid"] is True
    assert segment.summary["timing_invalid_reason"] is None
    assert segment.tags == ["paper", "completed"]


@pytest.mark.slow
def test_a_run_that_goes_on_disturbed_takes_its_times_back(sweep, server, fake_training) -> None:
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 9))
    training.end(Status.INTERRUPTED, "stopped by SIGINT")
    assert mirror.start(sweep.path, ONLINE, live=False).finish(TIMEOUT_S) is None
    found = server.run_of("run-a")
    assert found.summary["step_time_s"] == found.summary["time/median_step_time_s"] == 0.125
    assert "time/step_time_s" not in found.summary

    training.begin(after=4)
    training.core_wait_s = 0.09
    training.train(range(5, 13))
    training.end(Status.COMPLETED)
    # By hand, as after a launch without a tracker.
    console = Console(file=io.StringIO())
    assert sync([sweep.path], console)
    panels = {FIGURES[name] for name in TIMES & set(FIGURES)}
    assert not set(found.summary) & (TIMES | panels | TIMES_OF_STEPS)
    assert found.summary["timing_invalid_reason"] == BUSY
    # Those of the tracker are of the run's own settings, which have none.
    assert found.settings["tags"] == ["completed", "timing_invalid"]
    assert found.summary["final_loss"] == training.status.summary["final_loss"]
    before = found.lines_received
    assert sync([sweep.path], console)
    assert found.lines_received == before


def test_memory_of_ranks_is_a_table_of_the_last_attempt() -> None:
    ranks = pd.DataFrame(
        {
            "rank": [0, 1, 1, 0, 1],
            "attempt": [0, 0, 1, 1, 1],
            "memory_method": ["old", "old", "a<b", "a<b", "a<b"],
            "peak_allocated_steady_gib": [9.0, 9.0, 3.0, 1.0, 2.0],
            "uss_gib": pd.array([9.0, 9.0, 3.0, None, 4.0], dtype="Float64"),
            "device_used_gib": pd.array([9.0, None, None, None, None], dtype="Float64"),
        }
    )
    page = memory_page(ranks)
    assert page is not None
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", page)
    assert cells == ["rank", "steady", "resident, own", "0", "1.000", "", "1", "2.000", "4.000"]
    assert re.findall(r"--w:(\d+)%", page) == ["25", "50", "100"]
    assert "a&lt;b" in page
    assert "old" not in page
    assert memory_page(ranks[["rank", "attempt", "memory_method"]]) is None


@pytest.mark.slow
def test_following_a_run_and_being_killed(
    sweep, monkeypatch, fake_training, offline_segments, checked_segments
) -> None:
    monkeypatch.setenv("WANDB__TRANSACTION_LOG_FLUSH_INTERVAL", "0.1")
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 5))
    process = mirror.start(sweep.path, OFFLINE, live=True)
    assert psutil.Process(process.pid).nice() == 19
    wait_until(lambda: has_open_segment(training))
    training.train(range(5, 9))
    # W&B holds the latest row back, in case more is logged at its step.
    wait_until(lambda: offline_segments(training.folder)[0].reaches(8))
    kill(process)
    assert process.finish(TIMEOUT_S) is None  # no run has ended, so none is lacking
    assert has_open_segment(training)

    cut_short = segments_of(training)
    process = mirror.start(sweep.path, OFFLINE, live=True)
    wait_until(lambda: segments_of(training) != cut_short)
    training.train(range(9, 13))
    training.end(Status.COMPLETED)
    assert process.finish(TIMEOUT_S) is None
    (segment,) = checked_segments(training.folder)
    assert segment.tags == ["paper", "completed"]
    _check_figures(segment, training.status)


@pytest.mark.slow
def test_a_dead_launcher_leaves_a_whole_segment(sweep, fake_training, checked_segments) -> None:
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 6))
    launcher = f"""
import pathlib, sys
from batchscape.config import WandbTracker
from batchscape.record import mirror
tracker = WandbTracker(name="wandb", mode="offline")
process = mirror.start(pathlib.Path({str(sweep.path)!r}), tracker, live=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", launcher], stdin=subprocess.PIPE) as process:
        wait_until(lambda: has_open_segment(training))
        training.train([6])
        process.kill()
    wait_until(lambda: not has_open_segment(training))
    state = MirrorState.read(training.folder)
    assert state is not None
    assert state.status == "running"
    checked_segments(training.folder)


@pytest.mark.slow
def test_unreachable_server_leaves_an_offline_copy(
    sweep, monkeypatch, fake_training, checked_segments
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 13))
    training.end(Status.COMPLETED)
    tracker = WandbTracker(name="wandb")
    said = mirror.start(sweep.path, tracker, live=True).finish(TIMEOUT_S)
    assert said is not None
    assert "Weights & Biases was not updated: 1 of 1 runs were written offline" in said
    assert "because W&B cannot be written to: it failed on the start of run-a (CommError: " in said
    assert f"batchscape sync {sweep.path}" in said
    checked_segments(training.folder)
    for path in sweep.path.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes()


@pytest.mark.slow
def test_hanging_server_no_key_and_a_damaged_run(
    sweep, silent_server, monkeypatch, fake_training, checked_segments
) -> None:
    """The first start is killed at the timeout, the second one mirrors what can be read."""
    for name in ("run-a", "run-b"):
        training = fake_training(name)
        training.begin()
        training.train(range(1, 3))
        training.end(Status.PRUNED)
    tracker = WandbTracker(name="wandb", mode="online")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    process = mirror.start(sweep.path, tracker, live=True)
    wait_until(sweep.run("run-a").mirror.exists)
    said = process.finish(0.5)
    assert said is not None
    assert "it lacks 2 of 2 runs (run-a, run-b), because the mirror did not end within" in said
    silent_server.accept()[0].close()

    monkeypatch.delenv("WANDB_API_KEY")
    training.folder.parquet("steps").write_bytes(b"not what was sealed")
    said = mirror.start(sweep.path, tracker, live=False).finish(TIMEOUT_S)
    assert said is not None
    assert "lacks 1 of 2 runs (run-b)" in said
    assert "because no API key is known" in said
    (segment,) = checked_segments(sweep.run("run-a"))
    assert segment.of("exit")[-1]["exit_code"] == 0


@pytest.mark.slow
def test_online_run_is_gone_on_with_where_the_server_stands(
    sweep, server, fake_training, rows_of
) -> None:
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 6))
    tracker = WandbTracker(name="wandb", tags=["paper"])
    assert mirror.start(sweep.path, tracker, live=True).finish(TIMEOUT_S) is None
    state = MirrorState.read(training.folder)
    assert state is not None
    assert state.closed
    run = server.run_of("run-a")
    assert len(run.history) == 7
    assert run.state == "failed"  # nobody runs it any more
    # As if the mirror had been killed before it could note that.
    state.closed, state.last_step, state.uploaded_step = False, -1, -1
    state.write(training.folder)
    training.train(range(6, 13))
    training.end(Status.COMPLETED)
    assert mirror.start(sweep.path, tracker, live=True).finish(TIMEOUT_S) is None
    assert run.visible_history == rows_of(training.folder)
    assert run.lines_received == len(run.history)
    assert run.settings["tags"] == ["paper", "completed"]
    assert run.state == "finished"
    assert run.summary["final_loss"] == training.status.summary["final_loss"]
    assert run.last_row["memory/peak_allocated_gib"] == 0.5


@pytest.mark.slow
def test_what_was_begun_offline_goes_on_online(sweep, server, fake_training, rows_of) -> None:
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 6))
    training.end(Status.FAILED, "rank 0 died")
    assert mirror.start(sweep.path, OFFLINE, live=False).finish(TIMEOUT_S) is None
    training.begin(after=4)
    training.train(range(5, 13))
    training.end(Status.COMPLETED)
    assert mirror.start(sweep.path, ONLINE, live=False).finish(TIMEOUT_S) is None
    run = server.run_of("run-a")
    assert run.visible_history == rows_of(training.folder)
    # W&B's own upload finds nothing left to do.
    _sync_by_hand(sweep)
    assert run.lines_received == len(run.history)


@pytest.mark.slow
def test_segments_may_be_uploaded_by_hand(sweep, server, fake_training, rows_of) -> None:
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 6))
    training.end(Status.FAILED, "rank 0 died")
    assert mirror.start(sweep.path, OFFLINE, live=False).finish(TIMEOUT_S) is None
    training.begin(after=4)
    training.train(range(5, 13))
    training.end(Status.COMPLETED)
    assert mirror.start(sweep.path, OFFLINE, live=False).finish(TIMEOUT_S) is None
    state = MirrorState.read(training.folder)
    assert state is not None
    assert not state.is_uploaded(training.status, sweep.path)
    _sync_by_hand(sweep)
    run = server.run_of("run-a")
    assert run.visible_history == rows_of(training.folder)
    assert state.is_uploaded(training.status, sweep.path)
    assert mirror.start(sweep.path, ONLINE, live=False).finish(TIMEOUT_S) is None
    assert run.lines_received == len(run.history)


def _sync_by_hand(sweep: SweepFolder) -> None:
    written = sorted(wandb_folder(sweep.path).glob("offline-run-*"))
    command = [sys.executable, "-m", "wandb", "sync", *map(str, written)]
    subprocess.run(command, capture_output=True, check=True)


@pytest.mark.slow
def test_rows_that_the_server_refuses_are_not_taken_for_mirrored(
    sweep, server, fake_training, rows_of, monkeypatch
) -> None:
    """W&B's client ends such a run without an error."""
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 6))
    training.end(Status.COMPLETED)
    server.refused["run-a"] = 403
    said = mirror.start(sweep.path, ONLINE, live=False).finish(TIMEOUT_S)
    assert said is not None
    assert "lacks 1 of 1 runs (run-a)" in said
    server.refused.clear()
    assert mirror.start(sweep.path, ONLINE, live=False).finish(TIMEOUT_S) is None
    assert server.run_of("run-a").visible_history == rows_of(training.folder)


def test_what_counts_as_uploaded(sweep, fake_training) -> None:
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 3))
    training.end(Status.COMPLETED)
    status = RunStatus.read(training.folder.status)
    state = MirrorState("run-a-1", "p", None, "online", status="completed", attempts=1)
    assert state.is_uploaded(status, sweep.path)  # of an older version, without a digest
    state.content = content_of(status)
    assert state.is_uploaded(status, sweep.path)
    state.closed = False
    assert not state.is_uploaded(status, sweep.path)
    state.closed = True
    changed = RunStatus.read(training.folder.status)
    changed.summary["final_loss"] = 7.0
    assert not state.is_uploaded(changed, sweep.path)

    state.mode, state.segments = "offline", ["run-1", "offline-run-2", "offline-run-3"]
    assert not state.is_uploaded(status, sweep.path)  # gone, perhaps never uploaded
    for name in state.segments:
        (wandb_folder(sweep.path) / name).mkdir(parents=True)
        (wandb_folder(sweep.path) / name / "run-a.wandb").touch()
    assert len(state.unsent(sweep.path)) == 2
    (wandb_folder(sweep.path) / "offline-run-3" / "run-a.wandb.synced").touch()
    assert not state.is_uploaded(status, sweep.path)
    state.mark_sent(sweep.path)
    assert state.unsent(sweep.path) == []
    assert state.is_uploaded(status, sweep.path)
    state.write(training.folder)
    assert MirrorState.read(training.folder) == state


@settings(max_examples=50)
@given(
    tokens=st.lists(st.integers(1, 10**6), min_size=1, max_size=20),
    start=st.integers(0, 20),
    step_time_s=st.floats(1e-3, 1e3),
)
def test_targets_of_all_steps_add_up(tokens, start, step_time_s) -> None:
    """Wherever the mirror goes on, what it computes from two rows is what one reading gives."""
    sums = list(itertools.accumulate(tokens))
    rows = [
        {"optimizer_step": k, "tokens": total, "step_time_s": step_time_s, "global_batch_size": 4}
        for k, total in enumerate(sums, start=1)
    ]
    first = min(start, len(rows) - 1)
    before = [0, *sums]
    points = [curve_points("steps", rows[k], before[k]) for k in range(first, len(rows))]
    assert sum(point["data/targets"] for point in points) == sums[-1] - before[first]
    for point, fresh in zip(points, tokens[first:], strict=True):
        assert point["throughput/tokens_per_s"] * step_time_s == pytest.approx(fresh)
        assert point["throughput/samples_per_s"] * step_time_s == pytest.approx(4)


def test_what_is_missing_has_no_point() -> None:
    row = {"optimizer_step": 1, "tokens": None, "loss": math.nan, "step_time_s": pd.NA}
    row |= {"skipped": True, "gradient_norm": None}
    assert curve_points("steps", row, None) == {"optimizer_step": 1, "gradient/skipped": 1}
    summary = {"throttled": False, "mfu_pct": None, "final_loss": 2.5}
    assert figure_points(summary) == {"system/throttled": 0, "loss/final_train": 2.5}
