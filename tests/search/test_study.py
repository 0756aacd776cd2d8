"""Trials in Optuna's storage: asked once, told once, also after a kill."""

import math
import statistics
from dataclasses import replace

import optuna
import pandas as pd
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from threadpoolctl import threadpool_info, threadpool_limits

from batchscape.config import Sampler
from batchscape.plan.expand import Cell, Interval
from batchscape.search.objective import TrialOutcome
from batchscape.search.space import Space, StudyCells
from batchscape.search.study import Study, storage_of

RATE = Interval("rate", 1e-4, 1e-1, is_log=True)


def space(name="tpe", *, intervals=(RATE,), **settings):
    sampler = Sampler(name=name, **settings)
    choices = {"optimizer": ("adamw", "sgd")} if settings.get("over") else {}
    return Space(sampler, intervals, choices, (StudyCells("all", {}, (Cell({}, {}),)),), 0)


def opened(of, folder):
    return Study(of, "study", storage_of(folder))


def told(study, value, state="completed"):
    number = study.ask().number
    study.tell(number, TrialOutcome(state, value, None), [f"run-{number}"], {})


def test_a_trial_is_chosen_with_one_thread(tmp_path, monkeypatch):
    """Others belong to runs whose times are measured."""
    study = opened(space("gp"), tmp_path)
    for number in range(4):
        told(study, float(number))
    ask, numbers = optuna.Study.ask, []

    def watched(self, *arguments):
        numbers.extend(library["num_threads"] for library in threadpool_info())
        return ask(self, *arguments)

    monkeypatch.setattr(optuna.Study, "ask", watched)
    with threadpool_limits(2):
        assert {library["num_threads"] for library in threadpool_info()} == {2}
        study.ask()
    assert set(numbers) == {1}


@pytest.mark.parametrize("name", ["tpe", pytest.param("gp", marks=pytest.mark.slow)])
def test_a_search_that_is_opened_again_goes_on_as_if_it_never_ended(name, tmp_path):
    """The same trials, whether one process asks for all of them or each has its own."""

    def drawn(folder, *, at_once):
        folder.mkdir()
        study = opened(space(name), folder)
        for number in range(7):
            if not at_once:
                study = opened(space(name), folder)
            trial = study.ask()
            assert trial.number == number
            loss = (math.log10(trial.params["rate"]) + 2.5) ** 2
            study.tell(number, TrialOutcome("completed", loss, None), [f"run-{number}"], {})
        return [trial.params["rate"] for trial in study.trials]

    one, many = drawn(tmp_path / "1", at_once=True), drawn(tmp_path / "2", at_once=False)
    assert len(set(one)) == 7
    assert one == many


@pytest.mark.parametrize("name", ["random", "tpe", "grid"])
def test_trials_that_are_asked_together_are_unlike_each_other(name, tmp_path):
    study = opened(space(name), tmp_path)
    rates = [study.ask().params["rate"] for _ in range(6)]
    assert len({round(math.log(rate), 6) for rate in rates}) == 6


def test_the_first_trials_are_spread_over_the_whole_space(tmp_path):
    width = Interval("width", 1, 8, is_log=False)
    for seed in range(3):
        of = replace(space("gp", intervals=(RATE, width), over=["optimizer"]), first_seed=seed)
        study = Study(of, f"study {seed}", storage_of(tmp_path))
        points = [study.ask().params for _ in range(4)]
        quarters = sorted(int((math.log10(point["rate"]) + 4) / 3 * 4) for point in points)
        assert quarters == [0, 1, 2, 3]
        assert {point["optimizer"] for point in points} == {"adamw", "sgd"}
        assert all(isinstance(point["width"], int) and 1 <= point["width"] <= 8 for point in points)


def test_a_trial_that_was_asked_and_not_told_is_the_next_one(tmp_path):
    trial = opened(space(), tmp_path).ask()
    again = opened(space(), tmp_path)
    assert [(trial.number, trial.params) for trial in again.running] == [(0, trial.params)]
    again.tell(0, TrialOutcome("failed", None, "the disk was full"), [], {})
    (row,) = opened(space(), tmp_path).table().to_dict("records")
    assert (row["outcome"], row["reason"]) == ("failed", "the disk was full")
    again.tell(0, TrialOutcome("completed", 1.0, None), ["run"], {})
    assert opened(space(), tmp_path).running == []
    (row,) = opened(space(), tmp_path).table().to_dict("records")
    assert row == {
        "study": "study",
        "trial": 0,
        "rate": trial.params["rate"],
        "loss": 1.0,
        "outcome": "completed",
        "is_best": True,
        "runs": "run",
        "reason": "",
    }


def test_the_lock_of_a_killed_search_holds_nobody_up(tmp_path):
    opened(space(), tmp_path).ask()
    (tmp_path / "optuna.journal.lock").symlink_to(tmp_path / "optuna.journal")
    assert len(opened(space(), tmp_path).trials) == 1


def test_a_grid_asks_for_each_of_its_points_once(tmp_path):
    of = space("grid", trials=4)
    rates = []
    while len(opened(of, tmp_path).trials) < opened(of, tmp_path).planned:
        study = opened(of, tmp_path)
        trial = study.ask()
        rates.append(trial.params["rate"])
        study.tell(trial.number, TrialOutcome("completed", 1.0, None), [], {})
    assert rates == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1])


def test_another_grid_adds_the_points_that_are_not_there(tmp_path):
    study = opened(space("grid", trials=4), tmp_path)
    for _ in range(4):
        told(study, 1.0)
    finer = opened(space("grid", trials=7), tmp_path)
    assert finer.planned == 7
    while len(finer.trials) < finer.planned:
        told(finer, 1.0)
    rates = sorted(trial.params["rate"] for trial in finer.trials)
    assert rates == pytest.approx([10 ** (-4 + n / 2) for n in range(7)])
    # A sampler goes on from a grid, and a grid from a sampler.
    told(opened(space("gp", trials=8), tmp_path), 1.0)
    assert opened(space("grid", trials=6), tmp_path).planned == 8 + 4


@pytest.mark.parametrize("name", ["random", "tpe"])
def test_of_few_points_each_is_asked_for_once(name, tmp_path):
    width = Interval("width", 1, 4, is_log=False)
    study = opened(space(name, trials=20, intervals=(width,), over=["optimizer"]), tmp_path)
    assert study.planned == 8
    for _ in range(8):
        told(study, 1.0)
    points = {(trial.params["width"], trial.params["optimizer"]) for trial in study.trials}
    assert points == {(width, name) for width in range(1, 5) for name in ("adamw", "sgd")}


def test_a_grid_has_no_more_points_than_trials():
    width = Interval("width", 1, 3, is_log=False)
    points = space("grid", trials=20, intervals=(RATE, width), over=["optimizer"]).listed_points
    assert len(points) == 18  # 3 x 3 x 2: a fourth value of each would be 32
    assert {point["width"] for point in points} == {1, 2, 3}
    assert len({tuple(point.values()) for point in points}) == len(points)


@pytest.mark.parametrize("name", ["tpe", pytest.param("gp", marks=pytest.mark.slow)])
def test_a_sampler_stays_away_from_what_cannot_be(name, tmp_path):
    """Above a rate of 0.003 nothing fits, and below it the higher the rate, the better."""
    study = opened(space(name, trials=16), tmp_path)
    for _ in range(16):
        trial = study.ask()
        fits = trial.params["rate"] < 3e-3
        loss = -math.log10(trial.params["rate"]) if fits else math.inf
        outcome = TrialOutcome("completed" if fits else "oom", loss, None)
        study.tell(trial.number, outcome, [], {})
    later = [trial.params["rate"] for trial in study.trials[8:]]
    assert name != "gp" or sum(rate < 3e-3 for rate in later) >= 6
    table = study.table().set_index("trial")
    cannot = table.index[table["outcome"] == "oom"]
    assert len(cannot)
    assert (table.loc[cannot, "loss"] == math.inf).all()
    assert not table.loc[cannot, "is_best"].any()
    feasible = [trial.number for trial in study.trials if trial.number not in cannot]
    best = study.best()
    assert best.params["rate"] == max(study.trials[number].params["rate"] for number in feasible)


def test_a_trial_above_the_median_of_those_before_it_is_cut(tmp_path):
    """Not before a quarter of its samples, nor before four are done; what is cut counts no more."""
    study = opened(space("random", pruner="median"), tmp_path)
    curves = [{100: 9.0, 200: loss, 400: loss, 800: loss} for loss in (1.0, 1.1, 1.2, 1.3)]
    for curve in curves:
        number = study.ask().number
        assert study.loss_at_cut(number, curve, 800) is None
        study.tell(number, TrialOutcome("completed", curve[800], None), ["run"], curve)
    median = statistics.median([1.0, 1.1, 1.2, 1.3])
    bad, good = study.ask().number, study.ask().number
    assert study.loss_at_cut(bad, {100: 99.0}, 800) is None
    # At one look a later loss is there that would have been good.
    cut = {100: 99.0, 200: median + 0.01, 400: 0.5}
    assert study.loss_at_cut(bad, cut, 800) == median + 0.01
    again = opened(space("random", pruner="median"), tmp_path)
    assert again.loss_at_cut(bad, cut, 800) == median + 0.01
    study.tell(bad, TrialOutcome("pruned", None, "cut"), ["run"], {100: 99.0, 200: median + 0.01})
    assert study.loss_at_cut(good, {100: 99.0, 200: median - 0.01}, 800) is None
    row = study.table().iloc[bad]
    assert (row["outcome"], row["reason"]) == ("pruned", "cut")
    assert pd.isna(row["loss"])


def test_the_best_is_the_least_and_what_diverged_never_is(tmp_path):
    study = opened(space("random"), tmp_path)
    for value, state in ((3.0, "completed"), (math.inf, "diverged"), *[(2.0, "completed")] * 2):
        told(study, value, state=state)
    best = study.best()
    assert best.number == 2
    assert study.table()["is_best"].tolist() == [False, False, True, False]
    assert study.trials[1].user_attrs["outcome"] == "diverged"
    assert study.trials[1].value == math.inf


def test_nothing_is_best_where_nothing_has_a_value(tmp_path):
    study = opened(space("random"), tmp_path)
    told(study, math.inf, state="oom")
    assert study.best() is None
    assert not study.table()["is_best"].any()


def test_optuna_reads_the_journal(tmp_path):
    study = opened(space("random"), tmp_path)
    told(study, 1.0)
    path = str(tmp_path / "optuna.journal")
    (trial,) = optuna.load_study(
        study_name="study", storage=JournalStorage(JournalFileBackend(path))
    ).trials
    assert trial.values == [1.0]
