from __future__ import annotations

import json
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.analysis import compare, find_cells, load
from batchscape.analysis.cells import plain_texts, shorten_values
from batchscape.analysis.cost.table import cost_groups
from batchscape.analysis.numbers import TIMES
from batchscape.analysis.report.notes import find_notes
from batchscape.analysis.report.tables import comparison_table
from batchscape.errors import RecordError


def geometries(table: pd.DataFrame) -> list[tuple[Any, ...]]:
    names = ["data_parallel_size", "micro_batch_size", "gradient_accumulation_steps"]
    return list(table[names].itertuples(index=False, name=None))


def test_seeds_and_timing_repeats_share_a_cell(build):
    sweep = build()
    for seed in (0, 1):
        for repeat in (0, 1):
            sweep.run((2, 8, 2), seed=seed, timing_repeat=repeat)
    sweep.run((2, 8, 2), seed=3, init_seed=7, data_seed=8)
    cells = find_cells(load(sweep.path).runs)
    assert len(cells.table) == 1
    assert cells.settings == []
    assert set(cells.runs["cell"]) == {0}


def test_cells_are_ordered_by_global_batch_and_rejected_ones_come_last(build):
    sweep = build().fork(seeds=(0,))
    sweep.run((1, 8, 1))
    table = find_cells(load(sweep.path).runs).table
    assert geometries(table)[:5] == [(1, 8, 1), (1, 32, 1), (1, 8, 4), (2, 8, 2), (4, 8, 1)]
    assert [g[:2] for g in geometries(table)[5:]] == [(2, 32), (4, 32)]
    assert table["gradient_accumulation_steps"].isna().sum() == 2


def test_varying_settings_are_found_and_numbers_sorted_as_numbers(build):
    sweep = build()
    for rate in (0.01, 0.001, 0.1):
        for length in (128, 64):
            sweep.run(optimizer__learning_rate=rate, data__sequence_length=length)
    cells = find_cells(load(sweep.path).runs)
    assert cells.settings == ["data.sequence_length", "optimizer.learning_rate"]
    assert cells.contexts == cells.key_settings == cells.settings
    assert list(cells.table["data.sequence_length"]) == ["64"] * 3 + ["128"] * 3
    assert list(cells.table["optimizer.learning_rate"])[:3] == ["0.001", "0.01", "0.1"]
    assert cells.context_of.nunique() == 6
    assert cells.labels()[0] == f"1{TIMES}32{TIMES}1, sequence length 64, learning rate 0.001"


def test_up_to_three_settings_that_vary_together_are_all_named(build):
    sweep = build()
    for layers, width in ((2, 128), (4, 256)):
        sweep.run(model={"name": "gpt", "n_layers": layers, "n_heads": 4, "d_model": width})
    cells = find_cells(load(sweep.path).runs)
    assert (
        cells.settings
        == cells.key_settings
        == cells.contexts
        == ["model.n_layers", "model.d_model"]
    )
    assert cells.labels()[1] == f"1{TIMES}32{TIMES}1, n layers 4, d model 256"
    assert cells.context_of.nunique() == 2


def test_of_more_settings_that_vary_together_three_are_named_and_a_note_has_the_rest(
    build,
):
    sweep = build()
    for factor in (1, 2):
        sizes = {"n_layers": 2 * factor, "n_heads": 4 * factor, "d_model": 128 * factor}
        sweep.run(model={"name": "gpt", **sizes, "dropout": 0.1 * factor})
    cells = find_cells(load(sweep.path).runs)
    assert len(cells.settings) == 4
    assert len(cells.key_settings) == 3
    (rest,) = cells.dependent_settings()
    notes = comparison_table(compare(cells), cells).notes
    assert f"Also vary, together with settings shown: {rest}." in notes


def test_a_name_and_a_learning_rate_stand_for_what_comes_with_them(build):
    sweep = build()
    shared = {"learning_rate": 0.01, "weight_decay": 0.0}
    sweep.run(optimizer={"name": "adamw", **shared})
    sweep.run(optimizer={"name": "sgd", "momentum": 0.5, **shared})
    cells = find_cells(load(sweep.path).runs)
    assert cells.key_settings == ["optimizer.name"]
    assert "optimizer.momentum" in cells.dependent_settings()
    # So they do where cells are told apart by what costs memory or time.
    assert cells.cost_settings() == ["optimizer.name"]
    rates = build("rates")
    for rate in (0.001, 0.01):
        rates.run(optimizer__learning_rate=rate, optimizer__weight_decay=10 * rate)
    assert find_cells(load(rates.path).runs).key_settings == ["optimizer.learning_rate"]


def test_a_setting_that_follows_from_the_geometry_makes_no_context(build):
    sweep = build()
    for accumulation in (1, 2, 4):
        sweep.run((1, 8, accumulation), optimizer__learning_rate=1e-3 * accumulation)
    cells = find_cells(load(sweep.path).runs)
    assert cells.key_settings == ["optimizer.learning_rate"]
    assert cells.contexts == []
    assert set(cells.context_of) == {0}


def test_hardware_is_never_pooled_across_sweeps(build):
    here, there = build("here"), build("there")
    for seed in (0, 1):
        here.run(seed=seed)
        there.run(seed=seed, hardware="Other CPU", core_wait=0.01)
    there.run(device_type="cuda", hardware="Accelerator")
    cells = find_cells(load(here.path, there.path).runs)
    assert cells.settings == ["hardware", "device_type"]
    assert cells.key_settings == ["hardware"]
    assert sorted(cells.table["hardware"]) == [
        "Accelerator",
        "Example CPU, 2 cores",
        "Other CPU, 2 cores",
    ]
    assert cells.runs.groupby("cell").size().tolist() == [1, 2, 2]


def test_runs_that_never_started_take_the_hardware_of_their_sweep(build):
    here, there = build("here"), build("there")
    here.run(seed=0)
    here.run(seed=1, status="pending")
    there.run(seed=0, hardware="Other CPU", core_wait=0.01)
    cells = find_cells(load(here.path, there.path).runs)
    assert len(cells.table) == 2
    assert cells.runs["hardware"].notna().all()


def test_nothing_to_sort_is_refused(build):
    sweep = build()
    sweep.run()
    runs = load(sweep.path).runs
    with pytest.raises(RecordError, match="no run to compare"):
        find_cells(runs.iloc[:0])
    with pytest.raises(RecordError, match="lack columns: status"):
        find_cells(runs.drop(columns="status"))


def test_a_setting_that_differs_between_cuts_is_another_experiment(build):
    """Else a figure would blame the cut for what the learning rate does."""
    sweep = build()
    for seed in (0, 1):
        sweep.run((1, 8, 4), seed=seed, optimizer__learning_rate=0.001)
        sweep.run((1, 4, 8), seed=seed, optimizer__learning_rate=0.003)
    cells = find_cells(load(sweep.path).runs)
    assert cells.contexts == ["optimizer.learning_rate"]
    assert all("learning rate" in label for label in cells.labels())
    assert cells.context_of.nunique() == 2
    assert compare(cells)["throughput_ratio"].eq(1).all()


@pytest.mark.parametrize(
    ("values", "dtype", "texts"),
    [
        ([1, None, 3], "Int64", ["1", "null", "3"]),
        ([None, None], "Int64", ["null", "null"]),
        ([1, None], "float64", ["1", "null"]),
        ([1.5, None], "Float64", ["1.5", "null"]),
        ([True, None], "boolean", ["True", "null"]),
        (["a", None], "string", ["a", "null"]),
        ([2, None, [1, "a"]], "object", ["2", "null", '[1, "a"]']),
    ],
)
def test_what_is_not_set_is_written_so_whatever_the_column(values, dtype, texts):
    column = pd.Series(values, dtype=dtype, index=[5] * len(values))
    assert plain_texts(column).tolist() == texts


@pytest.mark.parametrize(
    ("setting", "values", "is_told_apart", "has_cost"),
    [
        ("optimizer.beta1", (0.8, 0.9), True, False),
        ("loader.workers", (0, 2), True, True),
        ("evaluation.batch_size", (32, 64), True, True),
        ("engine.activation_checkpointing", (False, True), True, True),
        ("engine.name", ("ddp", "fsdp"), True, True),
        ("data.manifest_hash", ("0" * 16, "1" * 16), True, True),
        ("measure.warmup_optimizer_steps", (1, 5), True, True),
        ("measure.memory", (False, True), False, False),
        ("measure.equivalence_margin", (0.1, 0.2), False, False),
        ("checkpoint.every_s", (1.0, 2.0), False, False),
        ("launcher.timeout_s", (1.0, 2.0), False, False),
        ("a_column_of_mine", (1, 2), True, True),
    ],
)
def test_runs_are_pooled_by_what_their_settings_decide(
    setting, values, is_told_apart, has_cost, build
):
    sweep = build()
    for seed in range(4):
        sweep.run((2, 8, 2), seed=seed)
    runs = load(sweep.path).runs
    runs[setting] = [values[0], values[0], values[1], values[1]]
    cells = find_cells(runs)
    assert cells.settings == ([setting] if is_told_apart else [])
    assert len(cells.table) == 1 + is_told_apart
    assert cost_groups(cells)["group"].nunique() == 1 + has_cost


@given(st.lists(st.lists(st.text("ab ", min_size=1, max_size=30), min_size=1, max_size=6)))
def test_different_values_stay_different(values):
    texts = pd.Series([json.dumps(value) for value in values], dtype=str)
    assert shorten_values(texts).nunique() == texts.nunique()


def test_failed_runs_of_replaced_files_are_left_out_in_one_note(build):
    """Seed 0 completed later with other files; seed 1, which only failed, stays."""
    sweep = build()
    for seed in (0, 1):
        sweep.run(seed=seed)
    done = load(sweep.path).runs.assign(source_hash="new", started_at=200.0)
    tried = done.assign(
        source_hash="old", status="failed", reason="KeyError: 'x'", run_id=done["run_id"] + "-old"
    ).assign(started_at=100.0)
    runs = pd.concat([done[done["seed"].eq(0)], tried], ignore_index=True)
    cells = find_cells(runs)
    assert sorted(cells.runs["run_id"]) == sorted([done["run_id"][0], tried["run_id"][1]])
    assert cells.replaced["run_id"].tolist() == [tried["run_id"][0]]
    (note,) = [note for note in find_notes(cells, {}) if "other files of the program" in note]
    assert note.startswith("In no table: 1 failed run of which the same settings and seeds")
    # What completed before it failed says nothing of the files that fail.
    assert find_cells(pd.concat([done, tried.assign(started_at=300.0)])).replaced.empty
    # What fails with the newer files, where another seed completed, is a finding.
    assert find_cells(pd.concat([done[done["seed"].eq(0)], tried[1:]])).replaced.empty
