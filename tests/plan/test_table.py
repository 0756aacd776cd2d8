import io
import json
from dataclasses import replace

import pandas as pd
import pytest
from rich.console import Console

from batchscape.errors import RecordError
from batchscape.plan.forecast import forecast
from batchscape.plan.machine import Machine
from batchscape.plan.table import PLAN_COLUMNS, plan_json, plan_rows, plan_table, write_plan
from batchscape.record.files import read_json
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import Cause, RunStatus, Status
from batchscape.record.tables import load

STUDY = "sweeps=fixed_global_batch"
TWO_CORES = Machine(2, "two cores")


def shown(plan, width=200):
    text = io.StringIO()
    predicted = forecast(plan.specs, SweepFolder(plan.sweep_dir), TWO_CORES)
    Console(width=width, file=text).print(plan_table(plan, predicted))
    return text.getvalue()


def status_shown(plan, run_id):
    (line,) = (line for line in shown(plan).splitlines() if run_id in line.split())
    return line.split()[-1]


def test_rows_hold_every_cell(plan):
    rows = pd.DataFrame(plan_rows(plan(STUDY, "optimizer.learning_rate=0.1,0.2")))
    assert [*rows.columns][: len(PLAN_COLUMNS)] == [*PLAN_COLUMNS]
    assert "optimizer.learning_rate" in rows.columns
    assert rows["planned"].value_counts().to_dict() == {"launch": 24, "rejected": 12}
    assert "status" not in rows.columns
    assert rows["run_id"].is_unique
    launched = rows[rows["planned"] == "launch"]
    product = (
        launched["data_parallel_size"]
        * launched["micro_batch_size"]
        * launched["gradient_accumulation_steps"]
    )
    assert (product == launched["global_batch_size"]).all()
    rejected = rows[rows["planned"] == "rejected"]
    assert rejected["reason"].notna().all()
    assert rejected["gradient_accumulation_steps"].isna().all()


def test_table_shows_runs_and_each_reason_once(plan):
    text = shown(plan(STUDY, "optimizer.learning_rate=0.1,0.2"))
    assert sum("4 x 8 x 1 = 32" in line and "pending" in line for line in text.splitlines()) == 6
    assert text.count("2 x 32 x ? = 32") == 1
    assert "optimizer." in text
    assert "learning_rate" in text
    assert "Runs: 24. Rejected runs: 12. Folder: outputs/fixed_global_batch" in text


def test_eighty_columns_hold_a_plan(plan):
    made = plan(STUDY)
    text = shown(made, 80)
    assert "…" not in text
    for spec in made.specs:
        (line,) = (line for line in text.splitlines() if spec.run_id in line)
        assert f" {spec.geometry} " in line


@pytest.mark.slow
def test_of_a_long_plan_the_first_and_the_last_runs_are_shown(plan):
    made = plan("sweep_dir=outputs/long", "seed=range(0,108)")
    text = shown(made)
    names = [spec.run_id for spec in made.specs]
    assert [name for name in names if name in text] == [*names[:100], *names[-5:]]
    assert "Not shown: 3 more runs. A sweep writes all of them to outputs/long/plan.csv." in text


def test_repeated_cells_are_said(plan):
    assert "Cells left out because they repeat a run: 2." in shown(plan("seed=0,0,0"))


def test_written_plan(plan, tmp_path):
    made = plan(STUDY, f"sweep_dir='{tmp_path}/here'")
    write_plan(made)
    sweep = SweepFolder(made.sweep_dir)
    table = pd.read_csv(sweep.plan)
    assert len(table) == 18
    assert table["run_id"].tolist() == [cell.run_id for cell in made.cells]
    # Only rejected runs have folders: nothing has been launched.
    assert {f.path.name for f in sweep.run_folders()} == {r.run_id for r in made.rejections}
    runs = load(made.sweep_dir).runs
    assert set(runs["status"]) == {"rejected"}
    assert runs["trajectory_id"].isna().all()
    assert set(zip(runs["data_parallel_size"], runs["micro_batch_size"], strict=True)) == {
        (2, 32),
        (4, 32),
    }
    assert sorted(runs["reason"]) == sorted(r.reason for r in made.rejections)
    with pytest.raises(RecordError):
        RunSpec.read(sweep.run(made.rejections[0].run_id).config)


@pytest.mark.slow
def test_a_cell_that_lacks_devices_keeps_its_geometry(plan, tmp_path):
    place = f"sweep_dir='{tmp_path}/here'"
    small = plan("sweeps=musev_224", "seed=0", place)
    write_plan(small)
    runs = load(small.sweep_dir).runs.set_index("run_id")
    (lacking,) = (
        r
        for r in small.rejections
        if r.geometry and r.geometry.devices_per_node == 16 and r.geometry.micro_batch_size == 7
    )
    row = runs.loc[lacking.run_id]
    assert (row["data_parallel_size"], row["gradient_accumulation_steps"]) == (16, 2)
    # A larger machine launches it, and a smaller one then leaves the result alone.
    large = plan("sweeps=musev_224", "seed=0", place, machine=Machine(16, "cores"))
    planned = {row["run_id"]: row["planned"] for row in plan_rows(large)}
    assert planned[lacking.run_id] == "launch"
    assert status_shown(large, lacking.run_id) == "pending"
    folder = SweepFolder(large.sweep_dir).run(lacking.run_id)
    RunStatus(Status.COMPLETED).write(folder.status)
    write_plan(small)
    assert RunStatus.read(folder.status).status is Status.COMPLETED


def test_rejections_are_rewritten_only_when_the_reason_changes(plan, tmp_path):
    made = plan(STUDY, f"sweep_dir='{tmp_path}/here'")
    write_plan(made)
    cell = made.cells[-1]
    folder = SweepFolder(made.sweep_dir).run(cell.run_id)
    written = folder.status.stat().st_mtime_ns, read_json(folder.status)
    write_plan(made)
    assert (folder.status.stat().st_mtime_ns, read_json(folder.status)) == written
    write_plan(replace(made, cells=(*made.cells[:-1], replace(cell, reason="another"))))
    assert RunStatus.read(folder.status).reason == "another"


def test_status_is_what_the_folders_say(plan, tmp_path):
    made = plan(STUDY, f"sweep_dir='{tmp_path}/here'")
    sweep = SweepFolder(made.sweep_dir)
    first, second, third, fifth, *_ = made.specs
    ends = [
        (first, RunStatus(Status.COMPLETED)),
        (second, RunStatus(Status.INTERRUPTED)),
        (fifth, RunStatus(Status.REJECTED, reason="not launched", cause=Cause.OUT_OF_MEMORY)),
    ]
    for spec, status in ends:
        folder = sweep.run(spec.run_id)
        spec.write(folder.config)
        status.write(folder.status)
    broken = sweep.run(third.run_id)
    third.write(broken.config)
    broken.status.write_text("{")
    assert status_shown(made, first.run_id) == "completed"
    assert status_shown(made, second.run_id) == "interrupted"
    assert status_shown(made, third.run_id) == "unreadable"
    assert status_shown(made, fifth.run_id) == "rejected"
    written = plan_json(made, TWO_CORES, forecast(made.specs, sweep, TWO_CORES))
    status = {run["run_id"]: run["status"] for run in json.loads(written)["runs"]}
    told = [status[spec.run_id] for spec in (first, second, third, fifth)]
    assert told == ["completed", "interrupted", "unreadable", "rejected"]
    assert {status[spec.run_id] for spec in made.specs[4:]} == {"pending"}
    assert {status[cell.run_id] for cell in made.rejections} == {"rejected"}


def test_a_damaged_rejected_folder_is_written_again(plan, tmp_path):
    made = plan(STUDY, f"sweep_dir='{tmp_path}/here'")
    write_plan(made)
    first, second, *_ = made.rejections
    folders = [SweepFolder(made.sweep_dir).run(cell.run_id) for cell in (first, second)]
    for folder in folders:
        folder.status.write_text("{")
    # What was launched is no such cell, whatever its status file looks like.
    folders[1].launch.write_text("{}")
    write_plan(made)
    assert RunStatus.read(folders[0].status).reason == first.reason
    assert folders[1].status.read_text() == "{"
