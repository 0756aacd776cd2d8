"""What a report says of trials: all of them, the best apart, and nothing estimated."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import matplotlib as mpl
import pandas as pd
import pytest

from batchscape.analysis.cells import Cells
from batchscape.analysis.report.topic import Section
from batchscape.analysis.search.topic import search_section
from batchscape.record.folder import SweepFolder
from batchscape.record.trials import read_trials, write_measured, write_trials

KEY = "optimizer.learning_rate"


def trial(study: str, number: int, **values: Any) -> dict[str, Any]:
    row = {"study": study, "trial": number, KEY: 1e-3 * (number + 1), "loss": 2.0 - number / 10}
    return {**row, "outcome": "completed", "is_best": False, "runs": f"{study}-{number}"} | values


def section_of(folder: Path, rows: list[dict[str, Any]]) -> Section | None:
    sweep = SweepFolder(folder)
    sweep.search.path.mkdir(parents=True)
    write_trials(sweep.search, rows)
    runs = pd.DataFrame({"sweep_dir": [str(folder)] * 3})
    return search_section(cast("Cells", SimpleNamespace(runs=runs)))


def test_the_best_of_each_study_stand_in_the_table_and_all_trials_in_the_file(
    tmp_path: Path,
) -> None:
    rows = [
        *(trial("batch.global_batch_size=8", number, is_best=number == 2) for number in range(3)),
        trial("batch.global_batch_size=32", 0, is_best=True),
        trial("batch.global_batch_size=32", 1, loss=None, outcome="pruned"),
        trial("batch.global_batch_size=32", 2, loss=float("inf"), outcome="diverged"),
        trial("batch.global_batch_size=32", 3, loss=None, outcome=None),
    ]
    section = section_of(tmp_path, rows)
    assert section is not None
    (view,) = section.tables
    assert view.grid.rows == [
        ["batch.global_batch_size=8", "3", "0", "0.00300", "1.80"],
        ["batch.global_batch_size=32", "4", "2", "0.00100", "2.00"],
    ]
    assert "6 trials in 2 studies" in section.answer[0]
    kept = section.curves["trials"]
    assert len(kept) == 7
    pd.testing.assert_frame_equal(kept, cast("pd.DataFrame", read_trials(SweepFolder(tmp_path))))
    assert not section.headlines


def test_the_picture_has_every_trial_with_a_value(tmp_path: Path) -> None:
    rows = [trial("all", number, is_best=number == 4) for number in range(5)]
    rows.append(trial("all", 5, loss=float("inf"), outcome="diverged"))
    section = section_of(tmp_path, rows)
    assert section is not None
    (axes,) = section.pictures[0].figure.axes
    drawn = sorted(tuple(p) for c in axes.collections for p in c.get_offsets().tolist())
    expected = sorted((row[KEY], row["loss"]) for row in rows[:5])
    assert sum(drawn, ()) == pytest.approx(sum(expected, ()))


def test_studies_have_the_colours_of_their_batches_and_grey_without_a_grid(tmp_path: Path) -> None:
    studies = [f"batch.global_batch_size={batch}" for batch in (64, 8, 16, 32)]
    rows = [trial(study, number, is_best=number == 1) for study in studies for number in range(2)]
    (tmp_path / "search").mkdir()
    write_trials(SweepFolder(tmp_path).search, rows)
    runs = pd.DataFrame({"sweep_dir": str(tmp_path), "global_batch_size": [16, 128, 8, 8]})
    runs["status"] = "completed"
    section = search_section(cast("Cells", SimpleNamespace(runs=runs)))
    assert section is not None
    (axes,) = section.pictures[0].figure.axes
    drawn = {
        str(part.get_label()).rpartition("=")[2]: tuple(part.get_facecolor()[0])
        for part in axes.collections
        if "=" in str(part.get_label())
    }
    assert list(drawn) == ["8", "16", "32", "64"]
    viridis = mpl.colormaps["viridis"]
    assert drawn["8"] == pytest.approx(viridis(0.0), abs=0.003)
    assert drawn["16"] == pytest.approx(viridis(0.44), abs=0.003)
    greys = [drawn[batch][:3] for batch in ("32", "64")]
    assert all(red == green == blue for red, green, blue in greys)
    assert greys[0] != greys[1]


def test_a_front_is_drawn_of_two_objectives(tmp_path: Path) -> None:
    rows = [
        trial("all", number, peak_allocated_gib=1.0 + number, is_best=number < 3)
        for number in range(4)
    ]
    section = section_of(tmp_path, rows)
    assert section is not None
    (axes,) = section.pictures[0].figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == (
        "held-out loss (nats)",
        "peak memory (GiB)",
    )
    assert len(axes.lines[0].get_xdata()) == 3


def test_searches_of_two_folders_share_no_table_and_no_picture(tmp_path: Path) -> None:
    rows = [trial("all", number, is_best=number == 2) for number in range(3)]
    steps = [{**row, "samples_to_target": 640.0 + row["trial"]} for row in rows]
    for row in steps:
        del row["loss"]
    for name, own in (("a", rows), ("b", steps)):
        (tmp_path / name / "search").mkdir(parents=True)
        write_trials(SweepFolder(tmp_path / name).search, own)
    runs = pd.DataFrame({"sweep_dir": [str(tmp_path / name) for name in ("a", "b", "a")]})
    section = search_section(cast("Cells", SimpleNamespace(runs=runs)))
    assert section is not None
    assert [view.grid.rows for view in section.tables] == [
        [["all", "3", "0", "0.00300", "1.80"]],
        [["all", "3", "0", "0.00300", "642"]],
    ]
    assert [view.name for view in section.tables] == ["search_1", "search_2"]
    assert [picture.name for picture in section.pictures] == ["search_1", "search_2"]
    axes = [picture.figure.axes[0] for picture in section.pictures]
    assert [one.get_ylabel() for one in axes] == ["held-out loss (nats)", "samples to target"]
    assert {name: len(table) for name, table in section.curves.items()} == {
        "trials_1": 3,
        "trials_2": 3,
    }
    assert "least held-out loss" in section.answer[0]
    assert "least samples to target" in section.answer[1]


def grid_run(study: str, rate: float, seed: int, loss: float | None, **other: Any) -> Any:
    run = f"{study[-1]}-{rate}-{seed}"
    row = {"study": study, "seed": seed, KEY: rate, **other, "loss": loss}
    return {**row, "outcome": "completed", "run": run}


def with_measured(folder: Path, rows: list[dict[str, Any]]) -> Section:
    sweep = SweepFolder(folder)
    sweep.search.path.mkdir(parents=True, exist_ok=True)
    write_measured(sweep.search, rows)
    keys = [key for key in rows[0] if "." in key]
    trials = [{**trial("all", n, is_best=n == 0), **dict.fromkeys(keys, 0.1)} for n in range(2)]
    for row in trials:
        for name in ("loss", "outcome", "is_best", "runs"):
            row[name] = row.pop(name)
    write_trials(sweep.search, trials)
    runs = pd.DataFrame({"sweep_dir": [str(folder)]})
    section = search_section(cast("Cells", SimpleNamespace(runs=runs)))
    assert section is not None
    return section


LOSSES = {0.001: (2.5, 2.6, 2.7), 0.002: (2.1, 2.3, 2.2), 0.004: (2.4, 2.2, 2.6)}
"""By rate; half-width of the 95 % t-interval of the second: 4.303 x 0.1 / sqrt 3 = 0.2484."""


def test_the_best_of_the_grid_leads_with_its_interval_and_its_neighbours(tmp_path: Path) -> None:
    study, other = "batch.global_batch_size=8", "batch.global_batch_size=32"
    rows = [
        grid_run(study, rate, seed, loss)
        # As they are measured: the middle first.
        for rate in (0.002, 0.001, 0.004)
        for seed, loss in enumerate(LOSSES[rate])
    ]
    rows += [grid_run(other, rate, s, 3 - rate + s / 10) for rate in (0.01, 0.02) for s in range(3)]
    rows += [grid_run(other, 0.04, s, float("inf")) for s in range(3)]
    section = with_measured(tmp_path, rows)
    assert section.short == section.answer[:1]
    assert section.answer[0] == (
        "The least held-out loss is at learning rate 0.00200 at B = 8, 0.0200 at B = 32 (means "
        "over 3 new seeds, around the best of 2 trials), and higher at the values next to it on "
        "both sides."
    )
    view = section.tables[0]
    assert view.grid.rows == [
        [study, "0.00200", "2.20 ± 0.25", "3", "0.00100 (2.600)", "0.00400 (2.400)"],
        [other, "0.0200", "3.08 ± 0.25", "3", "0.0100 (3.090)", "0.0400 (∞)"],
    ]
    assert view.table["loss_ci95"].tolist() == pytest.approx([0.248414, 0.248414], abs=1e-5)
    assert view.table["runs"].iloc[0] == "8-0.002-0 8-0.002-1 8-0.002-2"


def test_a_best_at_the_end_of_its_grid_is_no_optimum(tmp_path: Path) -> None:
    rows = [grid_run("all", rate, 1, 1 / rate) for rate in (0.002, 0.001, 0.004)]
    section = with_measured(tmp_path, rows)
    assert section.answer[0].endswith(
        "; the best is the last of its grid on a side, so no optimum."
    )
    assert section.tables[0].grid.rows == [["all", "0.00400", "250.0", "1", "0.00200 (500.0)"]]


def test_of_two_settings_each_has_its_own_neighbours(tmp_path: Path) -> None:
    beta = "optimizer.beta2"
    points = {(2e-3, 0.9): 2.0, (1e-3, 0.9): 2.4, (4e-3, 0.9): 2.5, (2e-3, 0.8): 2.2}
    points[2e-3, 0.99] = 2.1
    rows = [grid_run("all", r, 1, loss, **{beta: b}) for (r, b), loss in points.items()]
    section = with_measured(tmp_path, rows)
    assert "is at learning rate 0.00200, beta2 0.900 (means over 1 new seed" in section.answer[0]
    (best,) = section.tables[0].table.to_dict("records")
    assert [best[f"{KEY}_below"], best[f"{KEY}_above"]] == [1e-3, 4e-3]
    assert [best[f"{beta}_below"], best[f"{beta}_above"]] == [0.8, 0.99]
    assert [best[f"{beta}_below_mean"], best[f"{beta}_above_mean"]] == [2.2, 2.1]


def test_a_grid_without_all_its_runs_names_no_best(tmp_path: Path) -> None:
    rows = [grid_run("all", rate, 1, 1 / rate) for rate in (0.002, 0.001)]
    section = with_measured(tmp_path, [*rows, grid_run("all", 0.004, 1, None)])
    assert section.answer[0].startswith(f"{KEY} was searched")
    assert [view.name for view in section.tables] == ["search"]


def test_nothing_is_said_where_nothing_was_searched(tmp_path: Path) -> None:
    runs = pd.DataFrame({"sweep_dir": [str(tmp_path)]})
    assert search_section(cast("Cells", SimpleNamespace(runs=runs))) is None
