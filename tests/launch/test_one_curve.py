"""Of runs that train alike one is trained in full: real sweeps, and what a report says of them."""

from __future__ import annotations

import io
import shlex
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from batchscape.analysis import write_report
from batchscape.analysis.decisions.evidence import gather
from batchscape.analysis.decisions.recommend import Needs, recommend
from batchscape.cli import main
from batchscape.record.folder import SweepFolder
from batchscape.record.status import RunStatus, Status
from batchscape.record.tables import load

pytestmark = pytest.mark.slow

FAULTS = Path(__file__).parents[1] / "faults"
SMALL = (
    *(
        "data=digits",
        "model=mlp",
        "optimizer=sgd",
        "schedule.warmup_samples=0",
        "batch=hold_global",
    ),
    *("batch.global_batch_size=32", "batch.micro_batch_size=8,16,32", "seed=0,1"),
    *("budget.samples=1920", "evaluation.every_samples=320", "evaluation.samples=64"),
    *("launcher.exclusive_devices=false", "tracker=none", "measure.memory=false"),
)


def swept(folder: Path, *lines: str) -> pd.DataFrame:
    command = ["sweep", *SMALL, f"sweep_dir={folder}", "launcher.one_curve=true", *lines]
    assert main(command) == 0
    return load(folder).runs


def test_one_of_each_trajectory_is_trained_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the machine had been free: what is asked is where a time comes from.
    monkeypatch.setattr("batchscape.analysis.hardware.why_untimed", lambda *_: None)
    runs = swept(tmp_path)
    counts = runs.groupby("trajectory_id")["stop_reason"].value_counts().unstack()
    assert (counts == pd.DataFrame({"budget": 1, "prefix": 2}, counts.index)).all(axis=None)
    short = runs["stop_reason"].eq("prefix")
    # The cheapest cut, of both seeds.
    assert set(runs.loc[~short, "micro_batch_size"]) == {32}
    # Warm-up and 15 measured steps, with the 20th sampled for the noise of the gradient.
    assert set(runs.loc[short, "optimizer_steps"]) == {21}
    assert runs.loc[short, ["final_loss", "final_eval_loss"]].isna().all(axis=None)
    assert runs.loc[short, "measured_optimizer_steps"].ge(15).all()
    assert runs["step_time_s"].notna().all()

    printed = io.StringIO()
    write_report([tmp_path], tmp_path / "report").render(Console(file=printed, width=200))
    equivalence = pd.read_csv(tmp_path / "report" / "tables" / "equivalence.csv")
    assert set(equivalence["verdict"]) == {"not identified"}
    page = next((tmp_path / "report" / "details").glob("do_decomp*")).read_text()
    command = next(
        line for line in page.splitlines() if "launcher.one" in line and "sweep " in line
    )
    candidates = pd.read_csv(tmp_path / "report" / "tables" / "time_to_target.csv")
    measured = candidates[candidates["source"] == "measured"]
    # The cut that is trained in full has steps of its own.
    derived = measured["micro_batch_size"] < 32
    assert derived.sum() == 2
    assert measured["derived"].eq(derived).all()
    claims = pd.read_csv(tmp_path / "report" / "tables" / "claims.csv")
    assert not claims["claim"].str.contains("cut").all()
    found = recommend(gather([tmp_path])[0], Needs())
    assert found.geometry is not None
    is_derived = any("derived: " in reason for reason in found.reasons)
    assert is_derived == (found.geometry[1] < 32)

    # The command of the report trains the rest in full, in the same folder.
    words = shlex.split(command[command.index("batchscape sweep") :].replace("\\", "").strip("` "))
    assert main(words[1:]) == 0
    whole = load(tmp_path).runs
    assert set(whole["run_id"]) == set(runs["run_id"])
    assert set(whole["stop_reason"]) == {"budget"}
    assert whole["final_loss"].notna().all()
    assert set(whole.loc[whole["run_id"].isin(runs.loc[short, "run_id"]), "attempts"]) == {2}


def test_a_cut_that_trains_otherwise_goes_on_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FAULTS)
    lines = ("model=custom", "model._target_=own_models.NoisyGradients", "seed=0")
    runs = swept(tmp_path, *lines)
    assert set(runs["stop_reason"]) == {"budget"}
    other = runs["another_curve"].notna()
    assert other.sum() == 2, "two cuts differ from the one that was trained first"
    assert set(runs.loc[other, "attempts"]) == {2}
    assert runs["not_invariant"].isna().all(), "no forward shows it"
    steps = load(tmp_path).steps.groupby("run_id", observed=True)["optimizer_step"]
    assert steps.apply(lambda own: list(own) == list(range(1, 61))).all(), "it went on"
    text = write_report([tmp_path], tmp_path / "report")
    assert text is not None
    notes = (tmp_path / "report" / "details" / "left_out.md").read_text()
    assert notes.count("does not train like its trajectory") == 2


def test_models_labelled_as_dependent_on_the_cut_are_trained_in_full(tmp_path: Path) -> None:
    runs = swept(tmp_path, "model.dropout=0.1", "seed=0")
    assert set(runs["stop_reason"]) == {"budget"}
    assert runs["not_invariant"].str.startswith("dropout").all()
    assert runs["another_curve"].isna().all()
    assert set(runs["attempts"]) == {1}


def test_the_next_one_is_trained_in_full_where_the_first_one_is_gone(tmp_path: Path) -> None:
    runs = swept(tmp_path, "seed=0")
    whole = runs.loc[runs["stop_reason"].eq("budget"), "run_id"].item()
    folder = SweepFolder(tmp_path).run(whole)
    sealed = {run: status for run, status in _statuses(tmp_path).items() if run != whole}
    for path in sorted(folder.path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.path.rmdir()
    told = write_report([tmp_path], tmp_path / "report", figures=False).out / "details"
    lost = "1 of 1 trained as far as a prefix: their curve is that of another run of their "
    lost += "trajectory, which 1 of them lack here"
    assert any(lost in page.read_text() for page in told.iterdir())
    again = swept(tmp_path, "seed=0")
    assert again.loc[again["stop_reason"].eq("budget"), "run_id"].item() == whole
    assert {run: s for run, s in _statuses(tmp_path).items() if run != whole} == sealed


def _statuses(folder: Path) -> dict[str, RunStatus]:
    found = {run.path.name: RunStatus.read(run.status) for run in SweepFolder(folder).run_folders()}
    assert all(status.status is Status.COMPLETED for status in found.values())
    return found
