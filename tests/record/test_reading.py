"""Many run folders at once: what comes back is what plain pandas reads of each of them."""

from __future__ import annotations

import hashlib
import json

import pandas as pd
import pytest

from batchscape.errors import DamageError, RecordError
from batchscape.record import reading
from batchscape.record.figures import COLUMNS
from batchscape.record.files import JsonLines, sha256_of, write_json
from batchscape.record.folder import TABLES, RunFolder, SweepFolder
from batchscape.record.status import RunStatus, Status
from batchscape.record.tables import load, seal
from exact import assert_same_rows

STEPS = (4, 1, 0, 7, 3, 5)
TEXTS = {"run_id": str, "sweep_dir": str}


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


@pytest.mark.parametrize("runs_a_scan", [500, 2])
def test_rows_are_those_that_pandas_reads(sweep, runs_a_scan, monkeypatch):
    monkeypatch.setattr(reading, "_RUNS_A_SCAN", runs_a_scan)
    tables = load(sweep)
    for table in TABLES:
        values = getattr(tables, table).astype(TEXTS)
        assert_same_rows(values, rows_by_pandas(sweep, table))
    assert tables.runs["run_id"].tolist() == ["run-0", "run-1", "run-2", "run-4", "run-5"]
    assert [path.rpartition("/")[2] for path in tables.damaged] == ["run-3"]
    assert "differs from what was sealed" in next(iter(tables.damaged.values()))


def test_lines_count_where_a_launcher_died_while_it_sealed_a_run(sweep):
    folder = SweepFolder(sweep).run("run-5")
    folder.parquet("steps").write_bytes(b"of the seal that was never written")
    tables = load(sweep)
    assert str(folder.path) not in tables.damaged
    assert tables.steps["run_id"].eq("run-5").sum() == 5


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


def change_sealed(folder, table, change):
    """Write another sealed table, with the seal that fits."""
    path, status = folder.parquet(table), RunStatus.read(folder.status)
    change(pd.read_parquet(path)).to_parquet(path, index=False)
    status.seal[path.name]["sha256"] = sha256_of(path)
    status.write(folder.status)


def test_columns_that_nobody_knows_are_left_out_and_those_that_lack_are_missing(sweep):
    folder = SweepFolder(sweep).run("run-0")
    change_sealed(folder, "steps", lambda rows: rows.assign(more=1).drop(columns="loss"))
    tables = load(sweep)
    assert str(folder.path) not in tables.damaged
    assert list(tables.steps) == [*COLUMNS["steps"], "run_id", "sweep_dir"]
    steps = tables.steps[tables.steps["run_id"] == "run-0"]
    assert steps["loss"].isna().all()
    assert steps["tokens"].tolist() == [40, 80, 120, 160]


def test_a_table_of_other_types_is_named_among_many(sweep):
    folder = SweepFolder(sweep).run("run-1")
    change_sealed(folder, "steps", lambda rows: rows.assign(loss=rows["loss"].astype(str)))
    with pytest.raises(DamageError, match=rf"{folder.path}: steps\.parquet does not fit"):
        load(sweep)


def test_the_bytes_that_were_verified_are_those_that_are_parsed(sweep, monkeypatch):
    path = SweepFolder(sweep).run("run-0").parquet("steps")
    expected, content, sha256 = load(sweep), path.read_bytes(), hashlib.sha256

    def changed_meanwhile(data):
        if data == content:
            path.write_bytes(SweepFolder(sweep).run("run-4").parquet("steps").read_bytes())
        return sha256(data)

    monkeypatch.setattr(hashlib, "sha256", changed_meanwhile)
    tables = load(sweep)
    assert path.read_bytes() != content
    assert tables.damaged == expected.damaged
    assert_same_rows(tables.steps.astype(TEXTS), expected.steps.astype(TEXTS))
