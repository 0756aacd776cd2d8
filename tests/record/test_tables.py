"""Run folders: torn lines, seals, summaries, and what a reader makes of them."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.errors import RecordError
from batchscape.record import disk
from batchscape.record.commands import LaunchedRun, time_again
from batchscape.record.figures import COLUMNS, FIGURES, TIMES, Figure, FigureColumn, Reduction
from batchscape.record.files import JsonLines, keep_json_lines, read_json_lines, write_json
from batchscape.record.folder import FORMAT_VERSION, RunFolder, SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import Attempt, RunStatus, Status, StopReason
from batchscape.record.tables import load, read_table, seal
from batchscape.record.timing import (
    SHARED_DEVICE,
    THROTTLED,
    is_mended_by_repeating,
    timed_figures,
    why_untimed,
)
from exact import assert_same_rows


@given(st.lists(st.dictionaries(st.text(), st.floats(allow_nan=False) | st.text())), st.data())
def test_a_torn_last_line_is_dropped_and_never_glued_to_the_next(tmp_path_factory, rows, data):
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    lines = JsonLines(path)
    lines.append(rows)
    lines.close()
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut])
    complete = content[:cut].count(b"\n")
    assert list(read_json_lines(path)) == rows[:complete]
    lines = JsonLines(path)
    lines.append([{"new": 1}])
    lines.close()
    assert list(read_json_lines(path)) == [*rows[:complete], {"new": 1}]


def test_damage_before_the_last_line_is_an_error(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(RecordError, match="line 2"):
        list(read_json_lines(path))


def test_rows_after_a_checkpoint_are_removed(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"optimizer_step": k}) + "\n" for k in range(6)))
    keep_json_lines(path, lambda row: row["optimizer_step"] <= 3)
    assert [row["optimizer_step"] for row in read_json_lines(path)] == [0, 1, 2, 3]


def step_row(k, loss, step_time_s, *, warmup=False):
    return {
        "optimizer_step": k, "samples": 4 * k, "tokens": 40 * k, "train_time_s": 0.5 * k,
        "attempt": 0, "global_batch_size": 4, "loss": loss, "learning_rate": 0.1,
        "gradient_norm": 1.0,
        "step_time_s": step_time_s, "data_s": 0.01, "forward_backward_s": 0.3,
        "exchange_s": 0.08, "optimizer_s": 0.02, "exchange_span_s": 0.1, "exchanged_bytes": 8,
        "core_wait_s": 0.05, "processor_time_s": 0.1 * k, "skipped": k == 2,
        "warmup": warmup, "gap_s": None if warmup else 0.05 * (k - 2),
    }  # fmt: skip


@pytest.fixture
def run(spec_of, tmp_path):
    """A sweep with one run whose rows are written, not yet sealed."""
    spec = spec_of((2, 1, 2))
    folder = SweepFolder(tmp_path).run(spec.run_id)
    spec.write(folder.config)
    lines = JsonLines(folder.lines("steps"))
    times = [9.0, 0.4, 0.6, 0.5, 0.5]
    lines.append(step_row(k + 1, 5.0 - k, times[k], warmup=k == 0) for k in range(5))
    lines.close()
    for rank, peak in ((0, 1.5), (1, 2.5)):
        lines = JsonLines(folder.lines("ranks"))
        row = {"rank": rank, "attempt": 0, "peak_allocated_gib": peak, "startup_s": 0.1}
        row |= {"allocator_retries": rank + 1, "workspace_gib": 0.25 * rank}
        row |= {"model_flops_per_sample": 3e12, "peak_tflops": 20.0 + rank, "energy_j": 50.0 + rank}
        lines.append([{**row, "peak_source": "given", "not_invariant": "dropout 0.1"}])
        lines.close()
    return folder


def completed():
    return RunStatus(
        Status.COMPLETED, StopReason.BUDGET, attempts=[Attempt(1.0, 0, 2.0, "completed")]
    )


def figures_of(run):
    """Seal a run and return its summary."""
    status = completed()
    seal(run, status, data_parallel_size=2)
    return status.summary


@contextmanager
def rows_again(run, table):
    """Give the rows of a table to be changed, and write them again."""
    rows = list(read_json_lines(run.lines(table)))
    yield rows
    run.lines(table).unlink()
    lines = JsonLines(run.lines(table))
    lines.append(rows)
    lines.close()


def test_summary_by_hand(run):
    figures = figures_of(run)
    assert set(figures) == set(FIGURES)
    assert figures["optimizer_steps"] == 5
    assert figures["step_time_s"] == 0.5  # of 0.4 0.6 0.5 0.5: the warm-up is out
    assert figures["measured_optimizer_steps"] == 4
    assert figures["tokens_per_s"] == pytest.approx(4 * 40 / 2.0)
    assert figures["tokens_per_s_per_device"] == pytest.approx(40.0)
    assert figures["samples_per_s"] == pytest.approx(8.0)
    assert figures["core_wait_pct"] == pytest.approx(100 * 4 * 0.05 / 2.0)
    assert figures["processor_time_s"] == pytest.approx(0.35)  # of 0.2 0.3 0.4 0.5
    assert figures["final_loss"] == 1.0  # the last tenth of 20 samples is in the last step
    assert figures["peak_allocated_gib"] == 2.5  # of both ranks
    assert figures["final_eval_loss"] is None
    assert figures["peak_reserved_gib"] is None
    assert figures["skipped_optimizer_steps"] == 1
    assert (figures["peak_source"], figures["not_invariant"]) == ("given", "dropout 0.1")
    # 8 samples a second on two devices: 4 each, of 3 TFLOP, on devices of at least 20 TFLOP/s.
    assert figures["model_tflops_per_s_per_device"] == pytest.approx(12.0)
    assert figures["mfu_pct"] == pytest.approx(100 * 12 / 20)
    # Of 0.4 0.6 0.5 0.5 s and 0 0.05 0.1 0.15 s between them, in which devices draw power too.
    assert figures["gap_pct"] == pytest.approx(100 * 0.3 / 2.3)
    assert figures["power_w"] == pytest.approx(101 / 2.3)
    assert figures["energy_j_per_token"] == pytest.approx(101 / 160)
    assert (figures["allocator_retries"], figures["workspace_gib"]) == (3, 0.25)


REDUCED = [
    ("last", "Float64", (3.0, 7.0, 5.0, 1.0, 4.0), 4.0),
    ("sum", "Int64", (3, 7, 5, 1, 4), np.sum),
    ("median", "Float64", (3.0, 7.0, 5.0, 1.0, 4.0), lambda v: np.median(v[1:])),  # measured
    ("max", "Float64", (9.0, 7.0, 5.0, 1.0, 4.0), np.max),
    ("min", "Int64", (3, 7, 5, 1, 4), np.min),
    ("any", "boolean", (False, True, False, False, False), np.any),
    ("first", "Float64", (None, 7.0, 5.0, 1.0, 4.0), 7.0),
    ("each", "string", ("b", "a", "b", "b", "b"), lambda v: "; ".join(np.unique(v))),
]
"""Reduction, type and values of five steps, of which the first is warm-up; and what follows."""


@pytest.mark.parametrize(("how", "dtype", "values", "expected"), REDUCED)
def test_a_new_figure_of_a_step_is_reduced_as_declared(
    run, monkeypatch, how, dtype, values, expected
):
    """As docs/architecture.md has it: an entry of `record/figures.py`, and rows that hold it."""
    figure = Figure("of a test", how, name="held_figure")
    monkeypatch.setitem(COLUMNS["steps"], "held", FigureColumn(dtype, "of a test", figure))
    monkeypatch.setitem(FIGURES, "held_figure", figure)
    with rows_again(run, "steps") as rows:
        for row, value in zip(rows, values, strict=True):
            row["held"] = value
    value = figures_of(run)["held_figure"]
    assert value == (expected(np.array(values)) if callable(expected) else expected)
    json.dumps(value)


def test_each_reduction_of_a_step_is_tried():
    assert [how for how, *_ in REDUCED] == [how for how in get_args(Reduction) if how]


def test_each_figure_without_a_reduction_is_computed(run):
    with rows_again(run, "steps") as rows:
        rows[2] |= {"small_batch_size": 2, "small_gradient_square": 3.0, "gradient_norm": 1.5}
    figures = figures_of(run)
    assert [
        name for name, of in FIGURES.items() if not of.reduction and figures[name] is None
    ] == []


def test_a_reduction_that_is_not_there_is_refused_in_the_declaration():
    with pytest.raises(ValueError, match="reduces its column") as refusal:
        Figure("mean of the steps", "mean")
    for part in ("last, sum, median", "given 'mean' (mean of the steps)", "record/summary.py"):
        assert part in str(refusal.value)


def test_the_step_time_is_a_median_and_the_throughput_a_mean(run):
    """One step of five is late: the step time is as before, the rate is not."""
    with rows_again(run, "steps") as rows:
        rows[4]["step_time_s"] = 2.1
    figures = figures_of(run)
    assert figures["step_time_s"] == pytest.approx((0.5 + 0.6) / 2)  # of 0.4 0.6 0.5 2.1
    assert figures["samples_per_s"] == pytest.approx(4 * 4 / 3.6)


def test_devices_of_two_nodes_are_two_though_each_is_the_first_of_its_node(run):
    """Two ranks a node share its only device, which the first of them reports the energy of."""
    with rows_again(run, "ranks") as rows:
        first, second = rows
        rows[:] = [
            {**row, "rank": 2 * node + nth, "node": node, "device": "cuda:0"}
            for node in range(2)
            for nth, row in enumerate((first, second | {"energy_j": None}))
        ]
    figures = figures_of(run)
    # 8 samples a second of 3 TFLOP, on two devices.
    assert figures["model_tflops_per_s_per_device"] == pytest.approx(12.0)
    assert figures["mfu_pct"] == pytest.approx(100 * 12 / 20)
    assert figures["power_w"] == pytest.approx(2 * 50 / 2.3)


def test_gaps_are_taken_where_they_are_known(run):
    """An evaluation before a step leaves its time out of both sides of the share."""
    with rows_again(run, "steps") as rows:
        rows[3]["gap_s"] = None
    assert figures_of(run)["gap_pct"] == pytest.approx(100 * 0.2 / (0.2 + 0.4 + 0.6 + 0.5))


def test_steps_that_sampled_the_noise_scale_stay_out_of_times(run):
    with rows_again(run, "steps") as rows:
        rows[2] |= {"small_batch_size": 2, "small_gradient_square": 3.0, "gradient_norm": 1.5}
    figures = figures_of(run)
    assert figures["measured_optimizer_steps"] == 3
    assert figures["tokens_per_s"] == pytest.approx(3 * 40 / 1.4)
    # b = 2 and B = 4: tr(S) = (3 - 2.25) / (1/2 - 1/4), |G|^2 = (4 * 2.25 - 2 * 3) / (4 - 2).
    assert figures["gradient_noise_scale"] == pytest.approx(3.0 / 1.5)


def test_a_ramp_whose_last_steps_were_sampled_has_no_times_of_an_earlier_batch(run):
    with rows_again(run, "steps") as rows:
        rows[-1] |= {"global_batch_size": 8, "small_batch_size": 2, "small_gradient_square": 1.0}
    figures = figures_of(run)
    assert figures["measured_optimizer_steps"] == 3
    assert figures["step_time_s"] is None
    assert figures["exchanged_bytes"] is None


def test_where_every_step_was_sampled_there_is_no_time(run):
    with rows_again(run, "steps") as rows:
        for row in rows:
            row |= {"small_batch_size": 2, "small_gradient_square": 1.0}
    figures = figures_of(run)
    assert figures["measured_optimizer_steps"] == 0
    assert figures["step_time_s"] is None
    assert figures["skipped_optimizer_steps"] == 1


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"warmup": True}, ("all were warm-up", "a smaller measure.warmup_optimizer_steps")),
        ({"step_time_s": None}, ("the program logs no step times", "let it log")),
        ({"step_time_s": None, "warmup": True}, ("the program logs no step times", "let it log")),
    ],
)
def test_what_no_repetition_gives_times_says_what_does(run, changes, parts):
    with rows_again(run, "steps") as rows:
        for row in rows:
            row.update(changes)
    with rows_again(run, "ranks") as rows:
        for row in rows:
            row["energy_j"] = None
    launch = {"timing_valid": False, "timing_invalid_reason": "up to 2 runs share the machine"}
    reason = why_untimed(launch, figures_of(run))
    assert reason is not None
    assert all(part in reason for part in parts)
    assert time_again([LaunchedRun("out", "batchscape sweep a=1", reason)], {}) is None


@pytest.mark.parametrize(
    ("of_ranks", "reason"),
    [
        ([{"foreign_processes": 0, "throttled": False}] * 2, None),
        ([{}, {}], None),  # a driver that tells nothing
        ([{"foreign_processes": 0}, {"foreign_processes": 2}], SHARED_DEVICE),
        ([{"foreign_processes": None}, {"foreign_processes": 1}], SHARED_DEVICE),
        ([{"throttled": False}, {"throttled": True}], THROTTLED),
        ([{"throttled": True, "foreign_processes": 1}, {}], f"{SHARED_DEVICE}; {THROTTLED}"),
        ([{"power_capped": True}, {}], None),  # how a device under a full load is meant to run
        ([{"device_limits": "power limit 500 W of 700 W"}, {}], None),  # another device: hardware
    ],
)
def test_a_device_that_others_used_or_heat_held_down_has_no_times(run, of_ranks, reason):
    with rows_again(run, "ranks") as rows:
        for row, changes in zip(rows, of_ranks, strict=True):
            row.update(changes)
    figures = figures_of(run)
    untimed = why_untimed({"timing_valid": True}, figures)
    assert untimed == reason
    if untimed is not None:
        assert is_mended_by_repeating(untimed)
        assert "step_time_s" not in timed_figures(figures, untimed)
    foreign = [changes.get("foreign_processes") for changes in of_ranks]
    assert figures["foreign_processes"] == max((t for t in foreign if t is not None), default=None)


def test_limits_of_devices_are_named_once(run):
    with rows_again(run, "ranks") as rows:
        for row in rows:
            row["device_limits"] = "power limit 500 W of 700 W"
    assert figures_of(run)["device_limits"] == "power limit 500 W of 700 W"


def test_ranks_that_share_a_device_are_one_device(run):
    with rows_again(run, "ranks") as rows:
        for row in rows:
            row["device"] = "cuda:0"
        rows[1]["energy_j"] = None
    figures = figures_of(run)
    assert figures["model_tflops_per_s_per_device"] == pytest.approx(24.0)
    assert figures["power_w"] == pytest.approx(50 / 2.3)


@pytest.mark.parametrize(
    ("label", "there"),
    [("dropout: a, p=0.1", True), ("batch normalisation: a; dropout: b, p=0.1", False)],
)
def test_small_batches_with_another_objective_have_no_noise_scale(run, label, there):
    with rows_again(run, "ranks") as ranks:
        for row in ranks:
            row["not_invariant"] = label
    with rows_again(run, "steps") as rows:
        rows[2] |= {"small_batch_size": 2, "small_gradient_square": 3.0, "gradient_norm": 1.5}
    figures = figures_of(run)
    assert (figures["gradient_noise_scale"] is not None) == there


def test_an_unknown_peak_or_energy_of_one_rank_leaves_the_figure_out(run):
    with rows_again(run, "ranks") as rows:
        rows[1] |= {"peak_tflops": None, "energy_j": None}
    figures = figures_of(run)
    assert figures["model_tflops_per_s_per_device"] == pytest.approx(12.0)
    for name in ("mfu_pct", "peak_tflops", "power_w", "energy_j_per_token"):
        assert figures[name] is None, name


def test_energy_of_a_resumed_run_is_over_the_steps_of_its_attempt(run):
    with rows_again(run, "steps") as rows:
        for row in rows[3:]:
            row["attempt"] = 1
    with rows_again(run, "ranks") as ranks:
        ranks += [{**row, "attempt": 1, "energy_j": 8.0} for row in ranks]
    figures = figures_of(run)
    assert figures["energy_j_per_token"] == pytest.approx(16 / 80)
    assert figures["power_w"] == pytest.approx(16 / 1.25)


def test_times_of_a_ramp_are_those_of_its_last_global_batch(run):
    with rows_again(run, "steps") as rows:
        for row in rows[3:]:
            row["global_batch_size"] = 8
    figures = figures_of(run)
    assert figures["step_time_s"] == 0.5  # of 0.5 0.5
    assert figures["measured_optimizer_steps"] == 4


def test_a_last_row_that_lacks_its_samples_leaves_figures_out(run):
    with rows_again(run, "steps") as rows:
        for name in ("samples", "tokens", "warmup"):
            del rows[-1][name]
    figures = figures_of(run)
    assert figures["optimizer_steps"] == 5
    assert figures["samples"] is None
    assert figures["final_loss"] is None
    assert figures["measured_optimizer_steps"] == 3


def test_uneven_steps_are_weighted_by_their_labels(run):
    with rows_again(run, "steps") as rows:
        for row, tokens in zip(rows, (40, 80, 120, 130, 160), strict=True):
            row["tokens"] = tokens
            row["samples"] = 1000 - (5 - row["optimizer_step"])
    figures = figures_of(run)
    expected = (5 * 40 + 4 * 40 + 3 * 40 + 2 * 10 + 1 * 30) / 160
    assert figures["final_loss"] == pytest.approx(expected)


def test_sealed_tables_equal_the_open_ones(run):
    before = {table: read_table(run, table) for table in ("steps", "evals", "ranks")}
    seal(run, completed(), data_parallel_size=2)
    assert not list(run.path.glob("*.jsonl"))
    for table, rows in before.items():
        assert_same_rows(read_table(run, table), rows)


def test_load_joins_identity_geometry_and_figures(run, tmp_path):
    seal(run, completed(), data_parallel_size=2)
    tables = load(tmp_path)
    row = tables.runs.iloc[0]
    assert (row["data_parallel_size"], row["micro_batch_size"], row["global_batch_size"]) == (
        2,
        1,
        4,
    )
    assert row["optimizer_steps"] == 5
    assert row["planned_optimizer_steps"] == 20
    assert row["optimizer.learning_rate"] == row["learning_rate"] == 3e-3
    assert tables.steps["run_id"].unique().tolist() == [row["run_id"]]
    assert tables.damaged == {}
    # A folder that is written in two ways, one of them a text as in a notebook, is read once.
    assert len(load(str(tmp_path), tmp_path / "runs" / "..").runs) == 1


def test_the_learning_rate_is_the_resolved_one_of_the_last_stage(run, tmp_path):
    content = json.loads(run.config.read_text())
    first = content["resolved"]["stages"][0]
    last = json.loads(json.dumps(first)) | {"samples": 8}
    last["optimizer"]["learning_rate"] = 0.25
    content["resolved"]["stages"] = [first, last]
    write_json(run.config, content)
    seal(run, completed(), data_parallel_size=2)
    row = load(tmp_path).runs.iloc[0]
    assert row["learning_rate"] == 0.25
    assert row["optimizer.learning_rate"] == 3e-3
    assert row["ramp"] == "4→4"


def test_a_rejected_cell_shows_what_was_asked_for(config_of, tmp_path):
    folder = SweepFolder(tmp_path).run("rejected")
    config = config_of(batch={"global_batch_size": 32, "micro_batch_size": 24})
    write_json(
        folder.config,
        {"format_version": FORMAT_VERSION, "run_id": "rejected", "trajectory_id": None,
         "sweep_name": "s", "geometry": None, "resolved": None, "data": None,
         "config": config.to_mapping()},
    )  # fmt: skip
    RunStatus(Status.REJECTED, reason="32 % 24 = 8").write(folder.status)
    row = load(tmp_path).runs.iloc[0]
    assert row["status"] == "rejected"
    assert row["reason"] == "32 % 24 = 8"
    assert (row["global_batch_size"], row["micro_batch_size"]) == (32, 24)
    assert pd.isna(row["gradient_accumulation_steps"])
    assert pd.isna(row["learning_rate"])


@pytest.mark.parametrize("name", ["steps.parquet", "status.json", "config.json"])
def test_a_damaged_run_is_reported_and_in_no_table(run, tmp_path, name):
    seal(run, completed(), data_parallel_size=2)
    path = run.path / name
    path.write_bytes(path.read_bytes()[:-7])
    tables = load(tmp_path)
    assert tables.runs.empty
    assert tables.steps.empty
    assert list(tables.damaged) == [str(run.path)]


@pytest.mark.parametrize("run_id", [5, None])
def test_a_run_whose_name_is_no_text_is_damaged(run, tmp_path, run_id):
    seal(run, completed(), data_parallel_size=2)
    write_json(run.config, json.loads(run.config.read_text()) | {"run_id": run_id})
    tables = load(tmp_path)
    assert tables.runs.empty
    assert tables.steps.empty
    assert f"run_id is {run_id}, and must be a text" in tables.damaged[str(run.path)]


def test_a_sealed_table_that_cannot_be_opened_is_damage(run, tmp_path):
    seal(run, completed(), data_parallel_size=2)
    run.parquet("steps").unlink()
    run.parquet("steps").mkdir()
    assert "cannot be read" in load(tmp_path).damaged[str(run.path)]


def test_a_table_with_neither_seal_nor_lines_says_how_to_get_one(run, tmp_path):
    seal(run, completed(), data_parallel_size=2)
    write_json(run.status, json.loads(run.status.read_text()) | {"seal": {}})
    (message,) = load(tmp_path).damaged.values()
    for part in (
        f"{run.parquet('steps')} has no seal in status.json, and steps.jsonl is missing",
        f"delete {run.path} to run it again",
    ):
        assert part in message


@pytest.mark.parametrize(
    "row", ['{"warmup": [true]}', '{"samples": 1000000000000000000000}', '{"loss": "high"}']
)
def test_rows_of_other_types_are_damage(run, tmp_path, row):
    RunStatus(Status.INTERRUPTED).write(run.status)
    with run.lines("steps").open("a") as lines:
        lines.write(f"{row}\n")
    assert list(load(tmp_path).damaged) == [str(run.path)]


def test_a_shared_file_system_gives_the_same_tables(run, tmp_path, monkeypatch):
    names = [f"run-{number:02d}" for number in range(40)]
    for number, name in enumerate(names):
        folder = SweepFolder(tmp_path).run(name)
        shutil.copytree(run.path, folder.path)
        write_json(folder.config, json.loads(run.config.read_text()) | {"run_id": name})
        if number % 3:
            seal(folder, completed(), data_parallel_size=2)
        else:
            RunStatus(Status.INTERRUPTED).write(folder.status)
        if number % 5 == 1:
            folder.config.write_text("{")
    alone = load(tmp_path)
    assert (len(alone.runs), len(alone.damaged)) == (32, 9)
    monkeypatch.setattr(disk, "is_of_this_machine", lambda _: False)
    shared = load(tmp_path)
    assert shared.damaged == alone.damaged
    for table in ("runs", "steps", "evals", "ranks"):
        pd.testing.assert_frame_equal(getattr(shared, table), getattr(alone, table))


def test_another_format_version_is_refused(run):
    content = json.loads(run.config.read_text())
    write_json(run.config, {**content, "format_version": 99})
    with pytest.raises(
        RecordError, match=f"format version 99; this .* reads version {FORMAT_VERSION}"
    ):
        RunSpec.read(run.config)


def test_spec_round_trip(run, spec_of):
    assert RunSpec.read(run.config) == spec_of((2, 1, 2))


def test_an_empty_folder_is_no_sweep(tmp_path):
    with pytest.raises(RecordError, match="holds no runs"):
        load(tmp_path)


def test_status_round_trip(tmp_path):
    folder = RunFolder(tmp_path)
    status = completed()
    status.write(folder.status)
    assert RunStatus.read(folder.status) == status
    assert Status.COMPLETED.is_sealed
    assert not Status.FAILED.is_sealed


def test_a_folder_named_twice_is_read_once(run, tmp_path, monkeypatch):
    seal(run, completed(), data_parallel_size=2)
    monkeypatch.chdir(tmp_path.parent)
    tables = load(tmp_path, tmp_path, tmp_path / "runs" / "..", Path(tmp_path.name))
    assert len(tables.runs) == 1
    assert len(tables.steps) == 5


def test_a_copied_run_is_refused_and_another_training_is_not(run, tmp_path):
    one, copy, again = (tmp_path / name for name in ("one", "copy", "again"))
    for place in (one, again):
        shutil.copytree(run.path.parent, place / "runs")
    folders = {place: SweepFolder(place).run(run.path.name) for place in (one, copy, again)}
    # The same run, trained again: its times differ.
    with rows_again(folders[again], "steps") as rows:
        rows[2]["step_time_s"] += 0.1
    for place in (one, again):
        seal(folders[place], completed(), data_parallel_size=2)
    tables = load(one, again)
    assert tables.runs["sweep_dir"].tolist() == [str(one), str(again)]
    assert len(tables.steps) == 10
    shutil.copytree(one / "runs", copy / "runs")
    with pytest.raises(RecordError) as raised:
        load(one, copy, again)
    message = f"{folders[copy].path} is a copy of {folders[one].path}, and would count twice"
    assert str(raised.value).startswith(message)


def test_open_runs_are_never_taken_for_copies(run, tmp_path):
    RunStatus(Status.RUNNING).write(run.status)
    shutil.copytree(run.path.parent, tmp_path / "other" / "runs")
    assert len(load(tmp_path, tmp_path / "other").runs) == 2


def test_the_meeting_point_of_the_ranks_is_no_setting(run, tmp_path):
    write_json(run.launch, {"attempt": 0, "rendezvous": "/gone"})
    seal(run, completed(), data_parallel_size=2)
    runs = load(tmp_path).runs
    assert runs["launch.attempt"].tolist() == [0]
    assert not [name for name in runs if "rendezvous" in name]


def test_a_figure_counts_as_its_unit_says():
    """What is of seconds is a time, and may not count; but processor time, which is no step's."""
    of_seconds = re.compile(r"_s$|_per_s|_w$|_j_per_token$|^mfu_pct$|^gap_pct$")
    times = {name for name in FIGURES if of_seconds.search(name)} - {"processor_time_s"}
    kinds = {
        kind: {name for name, figure in FIGURES.items() if figure.kind == kind}
        for kind in ("time", "memory", "loss")
    }
    assert kinds == {
        "time": times,
        "memory": {name for name in FIGURES if name.endswith("_gib")},
        "loss": {"final_loss", "final_eval_loss", "final_eval_accuracy"},
    }
    assert times == TIMES
