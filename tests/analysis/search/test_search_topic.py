"""What a report says of trials: all of them, the best apart, and nothing estimated."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest

from batchscape.analysis.cells import Cells
from batchscape.analysis.report.topic import Section
from batchscape.analysis.search.topic import search_section
from batchscape.record.folder import SweepFolder
from batchscape.record.trials import read_trials, write_grid_results, write_trials

KEY = "optimizer.learning_rate"


def trial(study: str, number: int, **values: Any) -> dict[str, Any]:
    row = {"study": study, "trial": number, KEY: 1e-3 * (number + 1), "loss": 2.0 - number / 10}
    return {**row, "outcome": "completed", "is_best": False, "runs": f"{study}-{number}"} | values


def section_of(folder: Path, rows: list[dict[str, Any]]) -> Section | None:
    sweep = SweepFolder(folder)
    sweep.search.path.mkdir(parents=True)
    write_trials(sweep.search, [pd.DataFrame(rows)])
    runs = pd.DataFrame({"sweep_dir": [str(folder)] * 3})
    return search_section(cast("Cells", SimpleNamespace(runs=runs)))


def test_all_trials_are_in_the_file(tmp_path):
    rows = [
        *(trial("batch.global_batch_size=8", number, is_best=number == 2) for number in range(3)),
        trial("batch.global_batch_size=32", 0, is_best=True),
        trial("batch.global_batch_size=32", 1, loss=None, outcome="pruned"),
        trial("batch.global_batch_size=32", 2, loss=float("inf"), outcome="diverged"),
        trial("batch.global_batch_size=32", 3, loss=None, outcome=None),
    ]
    section = section_of(tmp_path, rows)
    assert not section.tables
    assert "6 trials in 2 studies" in section.answer[0]
    kept = section.chart_data["trials"]
    assert len(kept) == 7
    pd.testing.assert_frame_equal(kept, cast("pd.DataFrame", read_trials(SweepFolder(tmp_path))))
    assert not section.headlines


def grid_of(
    study: str, points: list[tuple[dict[str, Any], list[float | None]]], **other: Any
) -> dict[str, Any]:
    """Lay down one study as a search records it: values of the objective by seed."""
    values = {"batch.global_batch_size": int(study.rpartition("=")[2])} if "=" in study else {}
    records = [
        {
            "point": point,
            "seeds": {str(seed): value for seed, value in enumerate(seeds, 1)},
            "runs": [f"{place}-{seed}" for seed in range(1, len(seeds) + 1)],
        }
        for place, (point, seeds) in enumerate(points)
    ]
    record = {"study": study, "values": values, "trials": 2, "points": records}
    return {**record, "brackets": [], **other}


def with_grids(folder: Path, grids: list[dict[str, Any]], objective: str = "loss") -> Section:
    sweep = SweepFolder(folder)
    sweep.search.path.mkdir(parents=True, exist_ok=True)
    write_grid_results(sweep.search, objective, grids)
    keys = list(grids[0]["points"][0]["point"]) if grids[0]["points"] else [KEY]
    constants = {"outcome": "completed", "is_best": True, "runs": "r", "reason": ""}
    values = {**dict.fromkeys(keys, 0.1), objective: 2.0}
    rows = [
        {"study": grid["study"], "trial": number, **values, **constants}
        for grid in grids
        for number in range(2)
    ]
    write_trials(sweep.search, [pd.DataFrame(rows)])
    runs = pd.DataFrame({"sweep_dir": [str(folder)]})
    section = search_section(cast("Cells", SimpleNamespace(runs=runs)))
    assert section is not None
    return section


def rate(value: float, *losses: float | None) -> tuple[dict[str, Any], list[float | None]]:
    return {KEY: value}, list(losses)


def bracket(low: float | None, best: float, high: float | None, key: str = KEY) -> dict[str, Any]:
    return {"key": key, "low": low, "best": best, "high": high}


def test_the_best_of_the_grid_leads_with_its_interval_and_its_neighbours(tmp_path):
    """Half-width of the 95 % t-interval of three seeds 0.1 apart: 4.303 x 0.1 / sqrt 3 = 0.2484."""
    studies = ["batch.global_batch_size=8", "batch.global_batch_size=32"]
    points = [rate(0.002, 2.1, 2.3, 2.2), rate(0.001, 2.5, 2.6, 2.7), rate(0.004, 2.4, 2.2, 2.6)]
    # A run of the best's neighbour diverged.
    others = [rate(0.02, 3.1, 3.0, 3.2), rate(0.01, 3.1, 3.1, 3.1), rate(0.04, 3.0, 3.0, None)]
    grids = [
        grid_of(studies[0], points, brackets=[bracket(0.001, 0.002, 0.004)]),
        grid_of(studies[1], others, brackets=[bracket(0.01, 0.02, 0.04)]),
    ]
    section = with_grids(tmp_path, grids)
    assert section.answer[0] == (
        "Least held-out loss: learning rate 0.00200 at B = 8 (2.20 ± 0.25), learning rate 0.0200 "
        "at B = 32 (3.10 ± 0.25); over 3 new seeds, no lower at the next values on either side."
    )
    view = section.tables[0]
    assert view.frame["loss_ci95"].tolist() == pytest.approx([0.248414, 0.248414], abs=1e-5)
    assert view.frame["runs"].iloc[0] == "0-1 0-2 0-3"
    # What has no result has no place in the picture.
    lines = pd.concat(m.table for m in section.pictures[0].marks if m.kind == "line")
    assert lines.groupby("series").size().tolist() == [2, 3]


def test_a_best_at_the_end_of_its_grid_is_no_optimum(tmp_path):
    points = [rate(0.002, 500.0), rate(0.001, 1000.0), rate(0.004, 250.0)]
    grid = grid_of("all", points, brackets=[bracket(0.002, 0.004, None)])
    section = with_grids(tmp_path, [grid], "samples_to_target")
    assert section.answer[0] == (
        "Least samples to target: learning rate 0.00400 (250.0); over 1 new seed; 1 of 1 not "
        "bracketed: the best is the last of its grid."
    )


def test_of_two_settings_each_is_judged_on_its_own_line(tmp_path):
    """The grid is a star: the best of one setting has no neighbours of the other."""
    beta = "optimizer.beta2"
    losses = {(2e-3, 0.9): 2.2, (1e-3, 0.9): 2.4, (4e-3, 0.9): 2.1, (8e-3, 0.9): 2.5}
    losses |= {(2e-3, 0.8): 2.3, (2e-3, 0.99): 2.6}
    points: Any = [({KEY: r, beta: b}, [loss]) for (r, b), loss in losses.items()]
    brackets = [bracket(2e-3, 4e-3, 8e-3), bracket(0.8, 0.9, 0.99, beta)]
    section = with_grids(tmp_path, [grid_of("all", points, brackets=brackets)])
    assert "no lower at the next values" in section.answer[0]
    rates, betas = section.tables[0].frame.to_dict("records")
    assert [rates[name] for name in ("below", "above")] == [2e-3, 8e-3]
    assert [rates[name] for name in ("below_mean", "above_mean")] == [2.2, 2.5]
    assert [betas[name] for name in ("below", "above")] == [0.8, 0.99]
    assert [betas[name] for name in ("below_mean", "above_mean")] == [2.3, 2.6]


def test_what_the_trials_chose_is_said_to_be_theirs(tmp_path):
    """A list, null among its values: one point a study has new seeds."""
    clip = "optimizer.gradient_clip_norm"
    grids = [
        grid_of(f"batch.global_batch_size={batch}", [({clip: value}, [2.5, 2.7])])
        for batch, value in ((8, None), (32, 1.0))
    ]
    section = with_grids(tmp_path, grids)
    assert section.answer[0] == (
        "Chosen by the trials: gradient clip norm null at B = 8 (2.600), "
        "gradient clip norm 1.00 at B = 32 (2.600); held-out loss, over 2 new seeds."
    )
    assert [row[1] for row in section.tables[0].texts.rows] == [
        "gradient clip norm null",
        "gradient clip norm 1.00",
    ]


def test_studies_without_a_result_are_named(tmp_path):
    complete = grid_of(
        "batch.global_batch_size=8",
        [rate(0.002, 2.2), rate(0.001, 2.5), rate(0.004, 2.4)],
        brackets=[bracket(0.001, 0.002, 0.004)],
    )
    lost = grid_of(
        "batch.global_batch_size=16",
        [rate(0.002, None), rate(0.001, None)],
        brackets=[bracket(None, 0.001, 0.002)],
    )
    broken = grid_of("batch.global_batch_size=32", [])
    section = with_grids(tmp_path, [complete, lost, broken])
    assert section.answer[0].endswith("; no result at B = 16, at B = 32.")
    assert len(section.tables[0].texts.rows) == 1


def test_nothing_is_said_where_nothing_was_searched(tmp_path):
    runs = pd.DataFrame({"sweep_dir": [str(tmp_path)]})
    assert search_section(cast("Cells", SimpleNamespace(runs=runs))) is None
