"""The index of a large sweep: what it gives back is what the run folders hold, or nothing."""

from __future__ import annotations

import json
import os
import shutil

import pandas as pd
import pyarrow.parquet as pq
import pytest
from batchscape.record.index import INDEXED, index_is_stale
from batchscape.record.packed_rows import packed_rows, unpacked_rows
from hypothesis import given
from hypothesis import strategies as st

from batchscape.record import index as index_module
from batchscape.record import reading, tables
from batchscape.record.files import JsonLines, read_json, write_json
from batchscape.record.folder import TABLES, SweepFolder
from batchscape.record.status import RunStatus, Status
from batchscape.record.tables import load, seal
from exact import assert_same_rows

pytestmark = pytest.mark.slow


@pytest.fixture
def add_run(spec_of, tmp_path):
    """Make a run of a few rows, sealed unless it failed."""
    spec = spec_of((2, 1, 2))

    def add(name, length, status=Status.COMPLETED):
        run = SweepFolder(tmp_path).run(name)
        spec.write(run.config)
        write_json(run.config, {**read_json(run.config), "run_id": name})
        write_json(run.launch, {"timing_valid": length % 2 == 0, "devices": [0, 1]})
        steps, evals, ranks = (JsonLines(run.lines(table)) for table in TABLES)
        steps.append(
            {
                "optimizer_step": k + 1, "samples": 4 * (k + 1), "tokens": 40 * (k + 1),
                "train_time_s": 0.5 * k, "attempt": 0, "global_batch_size": 4,
                "loss": float("nan") if k == 2 else 3.0 + length / (k + 1),
                "step_time_s": 0.25, "warmup": k == 0,
                "small_batch_size": 1 if k % 2 else None,
            }
            for k in range(length)
        )  # fmt: skip
        evals.append([{"optimizer_step": 0, "samples": 0, "attempt": 0, "eval_loss": 1 / 3}])
        ranks.append([{"rank": 0, "attempt": 0, "memory_method": "probe" if length % 2 else None}])
        for lines in (steps, evals, ranks):
            lines.close()
        if status.is_sealed:
            seal(run, RunStatus(status, reason="loss" if length == 3 else None), 2)
        else:
            RunStatus(status).write(run.status)
        return run

    return add


@pytest.fixture(autouse=True)
def worth_it(monkeypatch):
    for module in (index_module, tables):
        monkeypatch.setattr(module, "WORTH_AN_INDEX", 2)


@pytest.fixture
def sweep(add_run, tmp_path):
    for number, length in enumerate((4, 1, 0, 7, 3)):
        add_run(f"run-{number}", length)
    add_run("run-2b", 5, Status.FAILED)
    return tmp_path


@pytest.fixture
def opened(monkeypatch):
    """Names of the run folders that are read."""
    found = []
    read = reading._read

    def noted(folder, wanted):
        found.append(folder.path.name)
        return read(folder, wanted)

    monkeypatch.setattr(reading, "_read", noted)
    return found


def indexed(sweep):
    return load(sweep, columns=INDEXED)


def from_folders(sweep):
    """Load the same from the run folders alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "read_index", lambda *_: None)
        patch.setattr(tables, "write_index", lambda *_: None)
        return indexed(sweep)


def assert_alike(found, expected):
    for table in ("runs", *TABLES):
        assert_same_rows(getattr(found, table), getattr(expected, table))
    assert found.damaged == expected.damaged


def test_sealed_runs_are_read_once(sweep, opened):
    first = indexed(sweep)
    assert len(opened) == 6
    opened.clear()
    second = indexed(sweep)
    assert opened == ["run-2b"], "an open run is read every time"
    assert_alike(first, from_folders(sweep))
    assert_alike(second, from_folders(sweep))
    assert second.steps["loss"].isna().sum() < second.steps["small_batch_size"].isna().sum()


def test_pandas_reads_the_index(sweep):
    indexed(sweep)
    content = json.loads((sweep / "index" / "index.json").read_text())
    assert content["folders"] == ["run-0", "run-1", "run-2", "run-3", "run-4"]
    counts = [count[0] for count in content["counts"]]
    assert counts == [4, 1, 0, 7, 3]
    rows = pd.read_parquet(sweep / "index" / "steps.parquet")
    whole = pd.concat(
        pd.read_parquet(SweepFolder(sweep).run(name).parquet("steps"))
        for name in content["folders"]
    )
    typed = rows.astype(dict(whole[list(rows)].dtypes))
    assert_same_rows(typed, whole[list(rows)])


@pytest.mark.parametrize("part", ["steps.parquet", "status.json", "config.json", "launch.json"])
def test_a_run_that_changed_is_read_and_verified_anew(sweep, opened, part):
    indexed(sweep)
    opened.clear()
    path = sweep / "runs" / "run-3" / part
    if part == "steps.parquet":
        path.write_bytes(path.read_bytes()[:-1] + b"~")
    else:
        write_json(path, read_json(path))
    found = indexed(sweep)
    assert set(opened) == {"run-2b", "run-3"}
    assert_alike(found, from_folders(sweep))
    assert bool(found.damaged) == (part == "steps.parquet")


def test_runs_that_go_and_come_are_seen(sweep, add_run, opened):
    indexed(sweep)
    shutil.rmtree(sweep / "runs" / "run-1")
    add_run("run-0b", 2)
    opened.clear()
    found = indexed(sweep)
    assert set(opened) == {"run-2b", "run-0b"}
    assert_alike(found, from_folders(sweep))
    # One new run is not worth an index; two are.
    before = (sweep / "index" / "index.json").read_bytes()
    add_run("run-9", 6)
    indexed(sweep)
    assert (sweep / "index" / "index.json").read_bytes() != before
    opened.clear()
    assert_alike(indexed(sweep), from_folders(sweep))
    assert opened[0] == "run-2b"


def test_columns_that_the_index_lacks_are_read_from_the_folders(sweep, opened):
    indexed(sweep)
    opened.clear()
    assert load(sweep).steps["step_time_s"].sum() == pytest.approx(0.25 * (15 + 5))
    assert len(opened) == 6
    opened.clear()
    few = load(sweep, columns={"steps": ["loss"], "ranks": []})
    assert opened == ["run-2b"]
    assert list(few.steps) == ["loss", "run_id", "sweep_dir"]


@pytest.mark.parametrize("part", ["index.json", "steps.parquet", "ranks.parquet"])
@pytest.mark.parametrize("how", ["gone", "cut", "other"])
def test_an_index_that_is_damaged_is_as_good_as_none(sweep, opened, part, how):
    indexed(sweep)
    opened.clear()
    path = sweep / "index" / part
    content = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-9] if how == "cut" else content[:-9] + b"123456789")
    assert_alike(indexed(sweep), from_folders(sweep))
    assert "run-3" in opened
    opened.clear()
    indexed(sweep)
    assert opened == ["run-2b"], "it was written anew"


def test_an_index_made_by_other_code_is_not_used(sweep, opened, monkeypatch):
    indexed(sweep)
    opened.clear()
    monkeypatch.setattr(index_module, "_made_by", lambda: "another version")
    assert_alike(indexed(sweep), from_folders(sweep))
    assert "run-3" in opened


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_to_has_none(sweep):
    sweep.chmod(0o555)
    try:
        assert_alike(indexed(sweep), from_folders(sweep))
        assert not (sweep / "index").exists()
    finally:
        sweep.chmod(0o755)


def test_where_the_index_cannot_be_nothing_is_lost(sweep):
    (sweep / "index").write_text("a file is in the way")
    assert_alike(indexed(sweep), from_folders(sweep))


def test_several_sweeps_keep_their_order(sweep, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(sweep / "runs", other / "runs")
    config = other / "runs" / "run-0" / "config.json"
    config.write_text(config.read_text() + " ")
    indexed(sweep)
    indexed(other)
    found = load(other, sweep, columns=INDEXED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "read_index", lambda *_: None)
        expected = load(other, sweep, columns=INDEXED)
    assert_alike(found, expected)
    assert found.copies == expected.copies


def test_when_an_index_is_stale(sweep, add_run):
    folder = SweepFolder(sweep)
    assert index_is_stale(folder)
    indexed(sweep)
    assert not index_is_stale(folder)
    add_run("run-7", 1)
    assert index_is_stale(folder), "with the open run, two are outside"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), VALUES, min_size=1), max_size=8))
def test_packed_rows_come_back_in_order_and_type(rows):
    packed = json.loads(json.dumps(packed_rows(rows)))
    unpacked = unpacked_rows(packed)
    assert [list(row.items()) for row in unpacked] == [list(row.items()) for row in rows]
    assert repr(unpacked) == repr(rows)


def test_long_tables_are_cut_into_groups(sweep, monkeypatch):
    monkeypatch.setattr(index_module, "_ROWS_A_GROUP", 3)
    indexed(sweep)
    assert pq.ParquetFile(sweep / "index" / "steps.parquet").num_row_groups > 4
    assert_alike(indexed(sweep), from_folders(sweep))
