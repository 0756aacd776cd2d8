"""What a command line asks to search: intervals, choices, studies, and what is refused."""

import pytest

from batchscape.compose import compose
from batchscape.errors import ConfigError
from batchscape.search.space import space_of

RATE = "optimizer.learning_rate=tag(log,interval(1e-4,1e-1))"
BATCHES = "batch.global_batch_size=8,16"


def grid(*lines):
    composed = compose(lines, "batchscape sweep")
    assert composed is not None
    return composed


def space(*lines):
    return space_of(grid(*lines))


def test_an_interval_of_the_command_line_is_searched_and_a_list_is_an_axis():
    searched = space(RATE, BATCHES, "search=tpe")
    (interval,) = searched.intervals
    assert (interval.key, interval.low, interval.high) == ("optimizer.learning_rate", 1e-4, 1e-1)
    assert interval.is_log
    assert [study.name for study in searched.studies] == [
        "batch.global_batch_size=8",
        "batch.global_batch_size=16",
    ]
    assert [study.values for study in searched.studies] == [
        {"batch.global_batch_size": 8},
        {"batch.global_batch_size": 16},
    ]


def test_the_cells_of_a_trial_have_its_values_and_its_seed():
    searched = space(RATE, BATCHES, "model=gpt_nano,gpt_micro", "search=tpe")
    assert [study.name for study in searched.studies] == [
        f"batch.global_batch_size={size}, model={model}"
        for size in (8, 16)
        for model in ("gpt_nano", "gpt_micro")
    ]
    cell = searched.studies[1].at({"optimizer.learning_rate": 0.003}, 7)
    assert cell.settings["batch"]["global_batch_size"] == 8
    assert cell.settings["optimizer"]["learning_rate"] == 0.003
    assert cell.settings["seed"] == 7
    assert cell.settings["model"]["d_model"] == 32
    assert cell.value_of_axis["optimizer.learning_rate"] == 0.003


def test_choices_are_searched_where_they_are_named():
    searched = space(RATE, "optimizer=adamw,muon", "search=tpe", "search.over=[optimizer]")
    assert searched.choices == {"optimizer": ("adamw", "muon")}
    assert [study.name for study in searched.studies] == ["all"]
    point = {"optimizer": "muon", "optimizer.learning_rate": 0.02}
    cell = searched.studies[0].at(point, 0)
    assert cell.settings["optimizer"]["name"] == "muon"
    assert cell.settings["optimizer"]["learning_rate"] == 0.02


def test_whole_numbers_are_searched_as_such():
    searched = space("schedule.warmup_samples=int(interval(32,320))", "search=random")
    assert isinstance(searched.intervals[0].low, int)
    assert not searched.intervals[0].is_log


@pytest.mark.slow
def test_what_would_make_trials_incomparable_tells_two_searches_apart():
    one = space(RATE, BATCHES, "search=tpe").identity
    assert one == space(RATE, BATCHES, "search=gp", "search.trials=3").identity
    assert one == space(RATE, "batch.global_batch_size=8,32", "search=tpe").identity
    assert one == space(RATE, BATCHES, "search=tpe", "timing_repeat=1", "tracker=none").identity
    for other in ("budget.samples=1600", "search.seeds=2", "seed=1", "optimizer.beta2=0.9"):
        assert one != space(RATE, BATCHES, "search=tpe", other).identity, other


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((RATE,), "an interval is searched, not listed: add search="),
        (("search=tpe",), "nothing to search"),
        (
            (RATE, "search=tpe", "seed=0,1,2"),
            "search.seeds gives each trial as many",
        ),
        ((RATE, "search=tpe", "search.over=[model]"), "model is no axis"),
        ((RATE, "search=tpe", "search.objective=steps_to_target"), "needs a budget.target_loss"),
        ((RATE, "search=tpe", "budget=target"), "compares losses at equal samples"),
        (
            (
                RATE,
                "search=tpe",
                "budget=target",
                "search.objective=time_to_target_s",
                "launcher.concurrent_runs=2",
            ),
            "one run alone",
        ),
        (
            (RATE, "search=tpe", "search.objective=peak_allocated_gib", "measure.memory=false"),
            "needs measure.memory=true",
        ),
        ((RATE, "search=tpe", "init_seed=1", "data_seed=2"), "fresh seeds"),
        (
            (
                RATE,
                "search=tpe",
                "search.pruner=median",
                "search.objective=peak_allocated_gib",
                "measure.memory=true",
            ),
            "not judged by them",
        ),
        ((RATE, "search=tpe", "search.objective=[loss]"), "written as one name"),
        ((RATE, "search=tpe", "search.pruner=median", "search.seeds=2"), "cuts single runs"),
        (
            (RATE, "search=tpe", "search.pruner=median", "evaluation.every_samples=null"),
            "evaluations on the way",
        ),
        ((RATE, "search=tpe", "search.pruner=median", "schedule=cosine"), "ranks change later"),
        (
            ("search=tpe", "search.over=[budget.samples]", "budget.samples=640,1280"),
            "what the results",
        ),
        (("search=tpe", "optimizer.beta1=interval(1,2)"), "beta1"),
        (
            (
                RATE,
                "search=grid",
                "search.trials=5",
                "optimizer=adamw,sgd,muon",
                "model=gpt_nano,gpt_micro",
                "search.over=[optimizer,model]",
            ),
            "every combination of optimizer, model, 6 in all, and search.trials=5 are fewer: use "
            "search.trials=6",
        ),
        (
            ("search=tpe", "batch.global_batch_size=interval(6,50)"),
            "list values that do, with search.over=[batch.global_batch_size]",
        ),
        (
            ("search=tpe", "schedule.warmup_samples=interval(32,320)"),
            r"'schedule.warmup_samples=int\(interval\(32,320\)\)'",
        ),
        (
            (RATE, "search=tpe", "search.objective=[loss,peak_allocated_gib]"),
            "a search has one objective, .* given the list ['loss', 'peak_allocated_gib']. Two "
            "quantities are compared by a grid of plain runs",
        ),
        (
            (
                RATE,
                "search=tpe",
                "search.pruner=median",
                BATCHES,
                "search.over=[batch.global_batch_size]",
            ),
            "one global batch and cut",
        ),
        (
            (
                RATE,
                "search=tpe",
                "search.pruner=median",
                "budget.samples=640",
                "schedule.warmup_samples=320",
            ),
            "lasts longer",
        ),
    ],
)
def test_refusals(lines, message):
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        space(*lines)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("optimizer.learning_rate=tag(log,interval(0,1))", "above 0 where it is tagged log"),
        ("optimizer=interval(0,1)", "no group"),
        ("optimizer.learning_rat=interval(0,1)", "did you mean learning_rate?"),
        ("optimizer.learning_rate=tag(lg,interval(1e-4,1))", "the tag lg means nothing"),
    ],
)
def test_intervals_that_cannot_be_searched(line, message):
    with pytest.raises(ConfigError, match=message):
        grid(line, "search=tpe")


def test_a_setting_that_follows_a_searched_one_is_refused():
    with pytest.raises(ConfigError, match="would not follow it"):
        grid(RATE, "optimizer.epsilon=${optimizer.learning_rate}", "search=tpe")
