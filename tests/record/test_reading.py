"""Many run folders at once: what comes back is what plain pandas reads of each of them."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from batchscape.record.growing import PLAIN, GrowingColumn
from hypothesis import given
from hypothesis import strategies as st

from batchscape.errors import RecordError
from batchscape.record import growing, reading, reading_pool
from batchscape.record.columns import COLUMNS
from batchscape.record.files import JsonLines, write_json
from batchscape.record.folder import TABLES, RunFolder, SweepFolder
from batchscape.record.status import RunStatus, Status
from batchscape.record.tables import load, seal
from exact import assert_same_rows

STEPS = (4, 1, 0, 7, 3, 5)


@pytest.fixture
def sweep(spec_of, tmp_path):
    """Runs of several lengths: sealed, open, without rows, damaged."""
    spec = spec_of((2, 1, 2))
    for index, length in enumerate(STEPS):
        run = SweepFolder(tmp_path).run(f"run-{index}")
        spec.write(run.config)
        content = json.loads(run.config.read_text())
        write_json(run.config, {**content, "run_id": run.path.name})
        steps = JsonLines(run.lines("steps"))
        steps.append(
            {
                "optimizer_step": k + 1, "samples": 4 * (k + 1), "tokens": 40 * (k + 1),
                "train_time_s": 0.5 * k, "attempt": 0, "global_batch_size": 4,
                "loss": float("nan") if k == 2 else 3.0 + index / (k + 1),
                "step_time_s": 0.25, "warmup": k == 0, "skipped": False,
                "small_batch_size": 1 if k % 2 else None,
            }
            for k in range(length)
        )  # fmt: skip
        steps.close()
        ranks = JsonLines(run.lines("ranks"))
        ranks.append([{"rank": 0, "attempt": 0, "device": "cpu" if index % 2 else None}])
        ranks.close()
        status = RunStatus(Status.COMPLETED if length != 5 else Status.FAILED)
        if status.status.is_sealed:
            seal(run, status, data_parallel_size=2)
        else:
            status.write(run.status)
    path = SweepFolder(tmp_path).run("run-3").parquet("steps")
    path.write_bytes(path.read_bytes()[:-1])
    return tmp_path


def rows_by_pandas(sweep, table):
    """Read every folder but the damaged one, one after the other."""
    parts = []
    typed = {name: column.dtype for name, column in COLUMNS[table].items()}
    for folder in SweepFolder(sweep).run_folders():
        if folder.path.name != "run-3":
            sealed, lines = folder.parquet(table), folder.lines(table)
            if sealed.exists():
                rows = pd.read_parquet(sealed)
            elif lines.exists():
                rows = pd.DataFrame(map(json.loads, lines.read_text().splitlines()))
            else:
                continue
            parts.append(rows.reindex(columns=list(typed)).astype(typed))
            parts[-1] = parts[-1].assign(run_id=folder.path.name, sweep_dir=str(sweep))
    return pd.concat(parts, ignore_index=True)


@pytest.fixture(params=[1, pytest.param(3, marks=pytest.mark.slow)])
def processes(request, monkeypatch):
    """Read with one process, and with three, though the runs are few."""
    monkeypatch.setattr(reading_pool, "_RUNS_A_PROCESS", 1)
    monkeypatch.setattr(reading_pool, "_cores", lambda: request.param)


@pytest.mark.usefixtures("processes")
def test_rows_are_those_that_pandas_reads(sweep):
    tables = load(sweep)
    for table in TABLES:
        found = getattr(tables, table).astype({"run_id": str, "sweep_dir": str})
        assert_same_rows(found, rows_by_pandas(sweep, table))
    assert tables.runs["run_id"].tolist() == ["run-0", "run-1", "run-2", "run-4", "run-5"]
    assert [path.rpartition("/")[2] for path in tables.damaged] == ["run-3"]
    assert "differs from what was sealed" in next(iter(tables.damaged.values()))


@pytest.mark.usefixtures("processes")
def test_lines_count_where_a_launcher_died_while_it_sealed_a_run(sweep):
    folder = SweepFolder(sweep).run("run-5")
    folder.parquet("steps").write_bytes(b"of the seal that was never written")
    tables = load(sweep)
    assert str(folder.path) not in tables.damaged
    assert tables.steps["run_id"].eq("run-5").sum() == 5


def test_a_run_that_goes_on_while_it_is_read_is_not_damaged(sweep, monkeypatch):
    folder = SweepFolder(sweep).run("run-5")
    stopped = RunStatus(Status.INTERRUPTED, rows={"steps": 9})
    stopped.write(folder.status)
    check = reading.check_rows

    def meanwhile(folder, status, table, found):
        RunStatus(Status.RUNNING, rows=stopped.rows).write(folder.status)
        check(folder, status, table, found)

    monkeypatch.setattr(reading, "check_rows", meanwhile)
    found = reading.read_folders([folder.path], {table: tuple(COLUMNS[table]) for table in TABLES})
    assert [(run.damage, run.row["status"]) for run in found.runs] == [(None, "running")]


def test_only_the_wanted_columns_are_read_and_damage_is_found_all_the_same(sweep):
    tables = load(sweep, columns={"steps": ["loss", "small_batch_size"], "ranks": []})
    every = rows_by_pandas(sweep, "steps")
    assert_same_rows(
        tables.steps[["loss", "small_batch_size"]], every[["loss", "small_batch_size"]]
    )
    assert tables.steps["run_id"].tolist() == every["run_id"].tolist()
    assert list(tables.steps) == ["loss", "small_batch_size", "run_id", "sweep_dir"]
    assert tables.ranks.empty
    assert len(tables.damaged) == 1
    for broken in (sweep / "runs" / "run-0", sweep / "runs" / "run-4"):
        RunFolder(broken).parquet("ranks").unlink()
    assert len(load(sweep, columns={"ranks": []}).damaged) == 3


@pytest.mark.usefixtures("processes")
def test_rows_of_copies_are_left_out(sweep, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(sweep / "runs" / "run-1", copy / "runs" / "run-1")
    shutil.copytree(sweep / "runs" / "run-5", copy / "runs" / "run-5")
    tables = load(copy, sweep)
    assert list(tables.copies.values()) == [str(copy / "runs" / "run-1")]
    # An open run may go on differently, so that both count.
    assert tables.steps["run_id"].astype(str).value_counts().to_dict() == {
        "run-0": 4, "run-1": 1, "run-4": 3, "run-5": 10,
    }  # fmt: skip
    own = tables.steps[tables.steps["run_id"] == "run-5"]
    assert own["sweep_dir"].astype(str).tolist() == [str(copy)] * 5 + [str(sweep)] * 5


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"steps": ["los"]}, "steps has no column los"),
        ({"stpes": ["loss"]}, "there is no table stpes, only steps, evals, ranks"),
    ],
)
def test_unknown_columns_are_refused(sweep, columns, message):
    with pytest.raises(RecordError, match=message):
        load(sweep, columns=columns)


def test_a_process_that_dies_costs_nothing_but_time(sweep, monkeypatch):
    expected = load(sweep)
    monkeypatch.setattr(reading_pool, "_RUNS_A_PROCESS", 1)
    monkeypatch.setattr(reading_pool, "_cores", lambda: 2)
    monkeypatch.setattr(reading_pool, "_START", "raise SystemExit(3)")
    found = load(sweep)
    assert_same_rows(found.steps, expected.steps)
    assert_same_rows(found.runs, expected.runs)


@pytest.mark.slow
def test_a_process_that_dies_while_it_hands_over_is_an_error(sweep, monkeypatch):
    start = (
        "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
        "from batchscape.record import reading_pool; "
        "from batchscape.record.growing import GrowingColumn; "
        "GrowingColumn.values = lambda self: []; reading_pool.serve()"
    )
    monkeypatch.setattr(reading_pool, "_RUNS_A_PROCESS", 1)
    monkeypatch.setattr(reading_pool, "_cores", lambda: 2)
    monkeypatch.setattr(reading_pool, "_START", start)
    with pytest.raises(RecordError, match="ended before it had handed over"):
        load(sweep)


@given(
    st.sampled_from(sorted(PLAIN)),
    st.lists(
        st.lists(st.none() | st.integers(-(2**62), 2**62), max_size=9) | st.integers(0, 9),
        max_size=6,
    ),
)
def test_a_growing_column_holds_what_was_appended(dtype, pieces):
    """A number stands for a run without the column, of that many rows."""
    plain = PLAIN[dtype]
    column = GrowingColumn(dtype)
    expected = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing, "_BLOCK", 4)
        for piece in pieces:
            if isinstance(piece, int):
                column.append(None, piece)
                expected += [None] * piece
                continue
            values = [None if value is None else plain(value).item() for value in piece]
            chunked = pa.chunked_array([values[:2], values[2:]], pa.from_numpy_dtype(plain))
            column.append(chunked, len(values))
            expected += values
        missing = np.concatenate([np.zeros(0, bool), *column.missing()])
        values = np.concatenate([np.zeros(0, plain), *column.values()])
    assert column.size == len(expected)
    assert missing.tolist() == [value is None for value in expected]
    assert column.has_missing == (None in expected)
    assert values[~missing].tolist() == [value for value in expected if value is not None]
