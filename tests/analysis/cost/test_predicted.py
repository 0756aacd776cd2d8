"""Predictions against what was measured, by hand."""

from __future__ import annotations

import json

import pytest

from batchscape.analysis import find_cells, load
from batchscape.analysis.cost.predicted import compare_predictions, predicted_section
from batchscape.analysis.numbers import TIMES
from batchscape.record.files import write_json
from batchscape.record.folder import RunFolder


def cut(*factors: int) -> str:
    return TIMES.join(map(str, factors))


def measured(folder: RunFolder, figure: str) -> float:
    return float(json.loads(folder.status.read_text())["summary"][figure])


def predict(folder: RunFolder, figure: str, times: float, reach: float | None, method: str) -> None:
    """Predict a multiple of what was measured, with a range of `reach` times it on both sides."""
    value = times * measured(folder, figure)
    ends = {} if reach is None else {"low": value * (1 - reach), "high": value * (1 + reach)}
    predictions = json.loads(folder.prediction.read_text()) if folder.prediction.exists() else {}
    write_json(
        folder.prediction, predictions | {figure: {"value": value, **ends, "method": method}}
    )


def test_errors_by_hand(build):
    sweep = build()
    for of, times in (((1, 32, 1), 1.1), ((1, 8, 4), 0.98), ((2, 8, 2), 1.0)):
        for seed in (0, 1):
            folder = sweep.run(of, seed=seed)
            predict(folder, "peak_allocated_gib", times, 0.05, "fake tensors")
            predict(folder, "step_time_s", 2.0, None, "datasheet")
    sweep.run((4, 8, 1))  # nothing was predicted of it
    failed = sweep.run((1, 16, 2), status="failed", reason="it broke")
    write_json(failed.prediction, {"peak_allocated_gib": {"value": 1.0, "method": "fake tensors"}})
    cells = find_cells(load(sweep.path).runs)
    table = compare_predictions(cells)
    memory = table[table["figure"] == "peak_allocated_gib"].set_index("label")
    assert memory[["n", "n_within"]].loc[
        [cut(1, 32, 1), cut(1, 8, 4), cut(2, 8, 2)]
    ].to_numpy().tolist() == [[2, 0], [2, 2], [2, 2]]
    assert len(memory) == 3
    errors = memory["error_pct"].loc[[cut(1, 32, 1), cut(1, 8, 4), cut(2, 8, 2)]]
    assert errors.tolist() == pytest.approx([10, -2, 0], abs=1e-9)
    memory_text, time_text = predicted_section(cells).answer
    assert memory_text.endswith(
        f"was off by 10 % at most ({cut(1, 32, 1)}), by 2.0 % in the median of 3 cells; 4 of 6 "
        "runs measured within the stated range."
    )
    assert time_text.endswith("by 100 % in the median of 3 cells.")


def test_learning_rates_are_no_cells_of_a_prediction_and_optimizers_are(build):
    sweep = build()
    for settings in ({}, {"optimizer__learning_rate": 0.5}, {"optimizer__name": "sgd"}):
        predict(sweep.run((1, 32, 1), **settings), "peak_allocated_gib", 1.0, 0.1, "fake tensors")
    cells = find_cells(load(sweep.path).runs)
    assert len(cells.table) == 3
    table = compare_predictions(cells)
    assert sorted(table["n"]) == [1, 2]


def test_times_of_a_busy_machine_judge_no_prediction(build):
    folder = build().run((1, 32, 1), concurrent_runs=2)
    predict(folder, "step_time_s", 1.0, 0.1, "datasheet")
    assert predicted_section(find_cells(load(folder.path.parents[1]).runs)) is None
