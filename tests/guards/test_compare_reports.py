"""The comparison of reports names what was planted, and nothing else."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from batchscape.analysis import write_report

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
Change = Callable[[pd.DataFrame], pd.DataFrame]


def load(name: str) -> ModuleType:
    described = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    sys.modules[name] = module
    described.loader.exec_module(module)
    return module


compare_reports = load("compare_reports")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a sweep with a run of every status."""
    folder = tmp_path_factory.mktemp("recorded")
    load("record_sweeps").write_statuses(folder / "every_status")
    write_report([folder / "every_status"], folder / "report", with_charts=False)
    return folder / "report"


@pytest.fixture
def changed(
    report: Path, tmp_path: Path
) -> Callable[[str, Callable[[pd.DataFrame], pd.DataFrame]], Path]:
    """Return a maker of copies of the report in which one table is another."""

    def change(table: str, how: Change) -> Path:
        copy = tmp_path / "copy"
        shutil.copytree(report, copy)
        path = copy / "tables" / f"{table}.csv"
        content = pd.read_csv(path, dtype=str, keep_default_na=False)
        how(content).to_csv(path, index=False)
        return copy

    return change


def test_every_status_is_in_the_recorded_sweep(report: Path) -> None:
    runs = pd.read_csv(report / "tables" / "runs.csv")
    launched = {"completed", "oom", "diverged", "timeout", "failed", "interrupted", "pruned"}
    assert set(runs["status"]) == launched | {"pending", "rejected"}
    assert {"budget", "target"} <= set(runs["stop_reason"].dropna())


def test_a_report_equals_itself(report: Path) -> None:
    found = compare_reports.compare(report, report)
    assert found.equal > 1000
    assert (found.different, found.only_old, found.only_new) == ([], [], [])
    assert found.code == 0


def test_a_changed_number_is_named_with_its_cell_and_both_values(
    report: Path, changed: Callable[..., Path]
) -> None:
    def plant(table: pd.DataFrame) -> pd.DataFrame:
        row = table.index[table["step_time_s_mean"] != ""][0]
        table.loc[row, "step_time_s_mean"] = str(float(table["step_time_s_mean"][row]) * 1.001)
        return table

    found = compare_reports.compare(report, changed("comparison", plant))
    (one,) = found.different
    assert one.where.startswith("comparison [data_parallel_size=")
    assert "micro_batch_size=" in one.where
    assert one.where.endswith("] step_time_s_mean")
    assert float(one.new) / float(one.old) == pytest.approx(1.001)
    assert found.code == 1
    assert one.where in str(found)


def test_a_headline_is_compared_too(report: Path, changed: Callable[..., Path]) -> None:
    copy = changed("comparison", lambda table: table)
    macros = copy / "paper" / "macros.tex"
    text = macros.read_text()
    macros.write_text(text.replace(r"\bsCriticalBatchSizeN}{", r"\bsCriticalBatchSizeN}{7"))
    (one,) = compare_reports.compare(report, copy).different
    assert one.where == "headlines [name=CriticalBatchSizeN] value"


def test_rows_in_another_order_and_other_writing_are_equal(
    report: Path, changed: Callable[..., Path]
) -> None:
    def shuffle(table: pd.DataFrame) -> pd.DataFrame:
        sizes = table["global_batch_size"].map(lambda text: f"{float(text):.3e}")
        return table.assign(global_batch_size=sizes).iloc[::-1]

    found = compare_reports.compare(report, changed("learning_rates", shuffle))
    assert (found.different, found.only_old, found.only_new) == ([], [], [])


def test_what_one_shows_alone_is_listed_and_no_difference(
    report: Path, changed: Callable[..., Path]
) -> None:
    copy = changed("comparison", lambda table: table.drop(columns="reason"))
    (copy / "tables" / "targets.csv").unlink()
    found = compare_reports.compare(report, copy)
    assert found.only_old == ["table targets", "comparison: column reason"]
    assert (found.different, found.only_new, found.code) == ([], [], 0)


def test_renamed_words_are_one_word(report: Path, changed: Callable[..., Path]) -> None:
    def rename(table: pd.DataFrame) -> pd.DataFrame:
        return table.rename(columns={"global_batch_size": "batch", "n": "runs"})

    copy = changed("comparison", rename)
    (copy / "tables" / "comparison.csv").rename(copy / "tables" / "cells.csv")
    renamed = {
        "tables": {"comparison": "cells"},
        "columns": {"comparison.global_batch_size": "batch", "comparison.n": "runs"},
    }
    found = compare_reports.compare(report, copy, renamed)
    assert (found.different, found.only_old, found.only_new) == ([], [], [])
    assert compare_reports.compare(report, copy).only_old == ["table comparison"]


def test_nothing_to_compare_is_no_success(tmp_path: Path) -> None:
    assert compare_reports.main(["reports", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
