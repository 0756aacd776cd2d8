"""The comparison of reports names what was planted, and nothing else."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest

from batchscape.analysis import write_report

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def load(name):
    described = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(described)
    sys.modules[name] = module
    described.loader.exec_module(module)
    return module


compare_reports = load("compare_reports")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a sweep with a run of every status."""
    folder = tmp_path_factory.mktemp("recorded")
    load("record_sweeps").write_statuses(folder / "every_status")
    write_report([folder / "every_status"], folder / "report", figures=False)
    return folder / "report"


def test_every_status_is_in_the_recorded_sweep(report):
    runs = pd.read_csv(report / "tables" / "runs.csv")
    launched = {"completed", "oom", "diverged", "timeout", "failed", "interrupted", "pruned"}
    assert set(runs["status"]) == launched | {"pending", "rejected"}
    assert {"budget", "target"} <= set(runs["stop_reason"].dropna())


def test_a_report_equals_itself(report):
    found = compare_reports.compare(report, report)
    assert found.equal > 1000
    assert (found.different, found.only_old, found.only_new) == ([], [], [])
    assert found.code == 0


def test_a_changed_number_is_named_with_its_cell_and_both_values(report, tmp_path):
    shutil.copytree(report, tmp_path / "copy")
    path = tmp_path / "copy" / "tables" / "comparison.csv"
    table = pd.read_csv(path)
    table.loc[table["step_time_s_mean"].first_valid_index(), "step_time_s_mean"] *= 1.001
    table.to_csv(path, index=False)
    found = compare_reports.compare(report, tmp_path / "copy")
    (one,) = found.different
    assert one.where.startswith("comparison [data_parallel_size=")
    assert "micro_batch_size=" in one.where
    assert one.where.endswith("] step_time_s_mean")
    assert float(one.new) / float(one.old) == pytest.approx(1.001)
    assert found.code == 1
    assert one.where in str(found)


def test_nothing_to_compare_is_no_success(tmp_path):
    assert compare_reports.main(["reports", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
