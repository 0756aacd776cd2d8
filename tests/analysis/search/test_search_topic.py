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
from batchscape.record.trials import read_trials, write_trials

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


def test_nothing_is_said_where_nothing_was_searched(tmp_path: Path) -> None:
    runs = pd.DataFrame({"sweep_dir": [str(tmp_path)]})
    assert search_section(cast("Cells", SimpleNamespace(runs=runs))) is None
