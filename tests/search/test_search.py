"""Real searches: real runs, killed on the way, and the grid around what they found."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from batchscape.analysis import write_report
from batchscape.analysis.numbers import significant
from batchscape.cli import main
from batchscape.errors import RecordError
from batchscape.record.folder import SweepFolder
from batchscape.record.locks import take
from batchscape.record.overview import overview
from batchscape.record.status import RunStatus, Status
from batchscape.record.tables import read_table

CHAOS = Path(__file__).parents[1] / "chaos"
SMALL = (
    *("data=digits", "model=mlp", "optimizer=sgd", "schedule.warmup_samples=0"),
    *("batch.micro_batch_size=null", "batch.gradient_accumulation_steps=1"),
    *("budget.samples=1280", "evaluation.every_samples=640", "measure.noise_scale_every=null"),
    *("launcher.concurrent_runs=2", "tracker=none"),
    "measure.memory=false",
)
SEARCH = (
    "optimizer.learning_rate=tag(log,interval(1e-3,1))",
    # A Gaussian process is fitted by threads, whose rounding another process need not repeat.
    *("search=tpe", "search.trials=6", "search.grid_seeds=2", "search.grid_points=3"),
)
TWO_STUDIES = (*SEARCH, "batch.global_batch_size=16,64")


def swept(folder, *lines):
    return main(["sweep", *SMALL, f"sweep_dir={folder}", *lines])


def trials_of(folder):
    return pd.read_csv(folder / "search" / "trials.csv")


def statuses(sweep):
    return {run.path.name: RunStatus.read(run.status) for run in sweep.run_folders()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a search of two studies that nobody disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "s"
    assert swept(folder, *TWO_STUDIES) == 0
    return folder


def _sealed_trials(folder):
    """Return the steps of each trial's run that is sealed, by its folder."""
    paths = folder.glob("search/runs/*/steps.parquet")
    return {str(path.parent.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.slow
def test_a_search_that_is_stopped_and_killed_ends_as_one_that_was_not(
    undisturbed, tmp_path, capsys
):
    folder = tmp_path / "s"
    command = [sys.executable, "-m", "batchscape", "sweep", *SMALL, *TWO_STUDIES]

    def search_until(entries):
        with (tmp_path / "printed.txt").open("ab") as file:
            process = subprocess.Popen(
                [*command, f"sweep_dir={folder}"], stdout=file, start_new_session=True
            )
        while process.poll() is None and len(_sealed_trials(folder)) < entries:
            time.sleep(0.05)
        assert process.poll() is None
        return process

    process = search_until(3)
    assert overview(SweepFolder(folder).search).state == "running"
    process.terminate()
    assert process.wait() == 130
    done = _check_stopped(folder, capsys)
    sealed = _sealed_trials(folder)
    # Wherever it is once most of the trials are done.
    process = search_until(max(10, done + 1))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    again = (tmp_path / "printed.txt").read_text()
    assert f"\nTrials: {done} of 12\n" in again
    assert f"/{12 - done}] " in again
    assert sealed.items() <= (later := _sealed_trials(folder)).items()
    assert swept(folder, *TWO_STUDIES) == 0
    assert later.items() <= _sealed_trials(folder).items()
    capsys.readouterr()
    assert main(["status", "--json", str(folder)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["state"] == "finished"
    assert sum(content["counts"].values()) == len(statuses(SweepFolder(folder)))

    trials = trials_of(folder)
    assert trials.groupby("study")["trial"].agg(list).tolist() == [[*range(6)]] * 2
    assert trials["outcome"].isin(["completed", "diverged"]).all()
    # No run but those of trials, and one of each.
    status_by_run = statuses(SweepFolder(folder).search)
    assert sorted(trials["runs"]) == sorted(status_by_run)
    assert all(status.status.is_sealed for status in status_by_run.values())
    # Neither end changed anything of what was asked and found.
    pd.testing.assert_frame_equal(trials, trials_of(undisturbed))
    assert statuses(SweepFolder(folder)).keys() == statuses(SweepFolder(undisturbed)).keys()
    _check_brackets(folder)


def _check_stopped(folder, capsys):
    """Hold what is said of a search that was stopped against its trials; return how many ended."""
    trials = trials_of(folder)
    done = {study: int(group["outcome"].notna().sum()) for study, group in trials.groupby("study")}
    sealed = [s for s in statuses(SweepFolder(folder).search).values() if s.status.is_sealed]
    count = sum(done.values())
    assert 3 <= count == len(sealed) < 12
    capsys.readouterr()
    assert main(["status", "--json", str(folder)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["state"] == "interrupted"
    assert content["trials"] == {"asked": 6, "done": done, "grid_is_left": True}
    assert main(["status", str(folder)]) == 0
    assert f"Trials: {count} of 12 done\n" in capsys.readouterr().out
    # Until there is a grid, the runs are those of the trials.
    ends = {status: n for status, n in content["counts"].items() if Status(status).is_sealed}
    assert sum(ends.values()) == len(sealed)
    return count


def _check_brackets(folder):
    """Rebuild the grid of each study from its run folders: its best has worse neighbours."""
    rows = []
    for run in SweepFolder(folder).run_folders():
        settings = json.loads(run.config.read_text())["config"]
        status = RunStatus.read(run.status)
        assert settings["seed"] in {1, 2}, "no seed of a trial"
        assert status.status in {Status.COMPLETED, Status.DIVERGED}
        loss = status.summary["final_eval_loss"]
        batch = settings["batch"]["global_batch_size"]
        rows.append((batch, settings["optimizer"]["learning_rate"], loss))
    grid = pd.DataFrame(rows, columns=["batch", "rate", "loss"])
    assert set(grid["batch"]) == {16, 64}
    for _, group in grid.groupby("batch"):
        means = group.groupby("rate")["loss"].apply(lambda losses: losses.mean(skipna=False))
        means = means.fillna(float("inf")).sort_index()
        place = int(means.argmin())
        assert 0 < place < len(means) - 1


@pytest.mark.slow
def test_trials_enter_no_number_of_a_report(undisturbed, tmp_path, capsys):
    shutil.copytree(undisturbed, tmp_path / "s")
    report = write_report([tmp_path / "s"], with_charts=False)
    runs = pd.read_csv(report.out / "tables" / "runs.csv")
    assert set(runs["run_id"]) == set(statuses(SweepFolder(tmp_path / "s")))
    trials = trials_of(tmp_path / "s")
    assert not set(runs["run_id"]) & set(trials["runs"])
    pd.testing.assert_frame_equal(pd.read_csv(report.out / "tables" / "trials.csv"), trials)
    for folder in ("s/search", "s/search/../search"):
        with pytest.raises(RecordError, match="chosen for good results"):
            write_report([tmp_path / folder])
    assert main(["recommend", str(tmp_path / "s" / "search")]) == 2
    measured = pd.read_csv(report.out / "tables" / "search_measured.csv")
    means = runs.groupby(["batch.global_batch_size", "optimizer.learning_rate"])["final_eval_loss"]
    least = means.mean().groupby(level=0).min()
    assert measured["loss"].tolist() == pytest.approx(least.tolist(), rel=1e-9)
    assert report.sections[0].answer[0].startswith("Least held-out loss: learning rate ")
    # The same command does nothing more.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("s/**/steps.parquet")}
    assert swept(tmp_path / "s", *TWO_STUDIES) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("s/**/steps.parquet")} == before
    # More trials extend it, another space does not.
    more = tuple("search.trials=7" if "trials" in line else line for line in TWO_STUDIES)
    assert swept(tmp_path / "s", *more) == 0
    assert len(trials_of(tmp_path / "s")) == 14
    capsys.readouterr()
    other = (SEARCH[0].replace("1e-3", "1e-2"), *TWO_STUDIES[1:])
    assert swept(tmp_path / "s", *other) == 2
    assert "[0.001, 1.0, " in (refusal := capsys.readouterr().err)
    assert "another search" in refusal


@pytest.mark.slow
def test_a_study_without_a_best_trial_is_named(tmp_path, capsys):
    """Two steps of 640 samples reach no target; steps of 16 do."""
    lines = (
        *("optimizer.learning_rate=tag(log,interval(0.05,0.2))", "search=random"),
        *("search.trials=3", "search.grid_seeds=1", "search.grid_points=3"),
        *("search.objective=samples_to_target", "budget.target_loss=1.0"),
        *("batch.global_batch_size=16,640", "evaluation.every_samples=640"),
    )
    assert swept(tmp_path / "s", *lines) == 0
    printed = capsys.readouterr().out
    assert printed.count("batch.global_batch_size=640: no trial has a value") == 1
    assert main(["status", "--json", str(tmp_path / "s")]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"


@pytest.mark.slow
def test_what_the_median_rule_cuts_is_pruned_and_says_why(tmp_path, monkeypatch):
    """Samples are waited for: a run lasts for six seconds, within which it is looked at."""
    monkeypatch.syspath_prepend(CHAOS)
    monkeypatch.setenv("BATCHSCAPE_CHAOS_DELAY_S", "0.001")
    lines = ("search.pruner=median", "search.trials=10", "search.grid_points=0")
    slow = (
        "data=custom",
        "data._target_=chaos_data.Points",
        "budget.samples=6400",
        "evaluation.samples=16",
    )
    small = (line for line in SMALL if not line.startswith(("data=", "budget.")))
    folder = f"sweep_dir={tmp_path / 's'}"
    assert main(["sweep", *small, SEARCH[0], "search=random", *lines, *slow, folder]) == 0
    status_by_run = statuses(SweepFolder(tmp_path / "s").search)
    cut = {run: status for run, status in status_by_run.items() if status.status is Status.PRUNED}
    assert cut
    for run, status in cut.items():
        assert status.reason is not None
        assert "the median of the trials before it" in status.reason
        assert status.summary["samples"] < 6400
        assert (tmp_path / "s" / "search" / "runs" / run / "evals.parquet").exists()
    trials = trials_of(tmp_path / "s").set_index("runs")
    assert set(trials.index[trials["outcome"].eq("pruned")]) == set(cut)
    assert trials.loc[list(cut), "loss"].isna().all()


@pytest.mark.slow
def test_a_rule_that_is_broken_between_the_ends_rejects_the_one_trial(tmp_path, capsys):
    lines = (
        *(line for line in SMALL if not line.startswith(("data=", "model=", "budget"))),
        *("data.sequence_length=32", "evaluation.samples=16", "budget.samples=640"),
        *("model=gpt_nano", "model.d_model=int(interval(28,36))", "search=random"),
        *("search.trials=6", "search.grid_seeds=1", "search.grid_points=3"),
        *(f"sweep_dir={tmp_path / 's'}", "optimizer=adamw", "optimizer.learning_rate=0.003"),
    )
    assert main(["plan", *lines]) == 0
    assert main(["sweep", *lines]) == 0
    printed = capsys.readouterr().out
    trials = trials_of(tmp_path / "s")
    divides = trials["model.d_model"] % 4 == 0
    assert list(trials["outcome"]) == ["completed" if one else "rejected" for one in divides]
    assert 0 < divides.sum() < 6
    reasons = trials.loc[~divides, "reason"]
    assert reasons.str.contains("n_heads must divide d_model").all()
    assert trials.loc[divides, "reason"].isna().all()
    assert "n_heads must divide d_model" in printed
    # The grid's neighbours are rejected as well, and the best is measured.
    best = int(trials.loc[trials["is_best"], "model.d_model"].item())
    status_by_run = statuses(SweepFolder(tmp_path / "s"))
    assert [status.status for status in status_by_run.values()] == [Status.COMPLETED]
    assert f"Least held-out loss: d model {best} (" in printed
    assert "no lower at the next values on either side" in printed


def test_a_rule_that_is_broken_everywhere_refuses_the_search(tmp_path, capsys):
    lines = ("search=random", "optimizer.momentum=interval(1.5,2)", f"sweep_dir={tmp_path / 's'}")
    assert main(["sweep", *SMALL, *lines]) == 2
    assert "optimizer.momentum" in capsys.readouterr().err
    # A budget that the batches do not divide leaves no folder that would refuse the right one.
    lines = (SEARCH[0], "search=random", "batch.global_batch_size=8,12")
    assert swept(tmp_path / "s", *lines) == 2
    assert "budget.samples must be a multiple of 24" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("lines", "trials", "grid"),
    [
        (("search=grid", "search.trials=12", "optimizer.momentum=interval(0.1,0.9)"), 9, 27),
        (("search=gp", "optimizer=sgd,adamw", "search.over=[optimizer]"), 8, 15),
    ],
)
def test_a_plan_counts_the_trials_that_there_will_be(lines, trials, grid, tmp_path, capsys):
    command = ["plan", "--json", *SMALL, SEARCH[0], *lines, f"sweep_dir={tmp_path / 's'}"]
    assert main(command) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == trials + grid
    command.remove("--json")
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert f": {trials} trials, by " in printed
    assert f"In all {trials + grid} runs: {trials} of trials, " in printed
    assert f" and {grid} of the grid around the best." in printed


@pytest.mark.slow
def test_a_target_is_searched_for_by_time(tmp_path):
    alone = tuple(line for line in SMALL if "concurrent_runs" not in line)
    lines = (
        *(SEARCH[0], "search=gp", "search.trials=5", "search.grid_points=0"),
        *("budget=target", "budget.samples=5120", "budget.target_loss=0.8"),
        "search.objective=time_to_target_s",
    )
    folder = tmp_path / "s"
    assert main(["sweep", *alone, f"sweep_dir={folder}", *lines]) == 0
    trials = trials_of(folder).drop_duplicates("runs").set_index("runs")
    for run, status in statuses(SweepFolder(folder).search).items():
        value = trials.loc[run, "time_to_target_s"]
        if status.stop_reason == "target" and trials.loc[run, "outcome"] == "completed":
            # The last step of the record: all there are, warm-up included, and no median.
            steps = read_table(SweepFolder(folder).search.run(run), "steps")
            assert value == pytest.approx(steps["step_time_s"].sum())
        elif trials.loc[run, "outcome"] == "completed":
            assert value == float("inf")
        else:
            assert pd.isna(value)


def test_one_folder_has_one_search_at_a_time(tmp_path, capsys):
    folder = tmp_path / "s" / "search"
    folder.mkdir(parents=True)
    held = take(folder / ".search.lock")
    assert swept(tmp_path / "s", *SEARCH) == 2
    assert "another process searches" in capsys.readouterr().err
    held.release()


def test_an_interval_without_a_search_says_what_would_work(tmp_path, capsys):
    no_list = (
        "learning_rate: an interval holds infinitely many values, and a sweep needs a list; write"
    )
    for verb, message in (("sweep", no_list), ("plan", "search="), ("run", "asks for a search")):
        assert main([verb, *SMALL, SEARCH[0], f"sweep_dir={tmp_path / 's'}"]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_two_cells_that_are_one_training_are_told_alike(tmp_path):
    lines = (SEARCH[0], "search=random", "search.trials=2", "search.grid_points=0")
    cuts = "batch.micro_batch_size=null,16"
    assert swept(tmp_path / "s", *lines, "batch.global_batch_size=16", cuts) == 0
    trials = trials_of(tmp_path / "s")
    assert trials["outcome"].eq("completed").all()
    assert len(trials) == 4


@pytest.mark.slow
def test_a_search_of_a_list_ends_with_the_value_that_its_trials_chose(tmp_path, capsys):
    lines = ("search=grid", "search.trials=3", "search.grid_seeds=2")
    rates = ("optimizer.learning_rate=0.001,0.1,0.3", "search.over=[optimizer.learning_rate]")
    assert swept(tmp_path / "s", *lines, *rates) == 0
    trials = trials_of(tmp_path / "s")
    assert set(trials["optimizer.learning_rate"]) == {0.001, 0.1, 0.3}
    best = trials.loc[trials["loss"].idxmin(), "optimizer.learning_rate"]
    grid = statuses(SweepFolder(tmp_path / "s")).values()
    mean = sum(status.summary["final_eval_loss"] for status in grid) / 2
    assert (
        f"Chosen by the trials: learning rate {significant(best, 3)} ({significant(mean, 4)}); "
        "held-out loss, over 2 new seeds."
    ) in capsys.readouterr().out
