"""What a program really used, against what was planned."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.programs.agreement import compare_batch, why_late, why_unfinished
from batchscape.programs.metrics import Log
from batchscape.record.spec import RunSpec


@pytest.fixture
def spec(settings, plan) -> RunSpec:
    """2 ranks x 1 sample x 4 micro-steps = 8, four steps, 16 tokens a sample: no two are alike."""
    batch = {"data_parallel_size": 2, "micro_batch_size": 1, "global_batch_size": 8}
    (spec,) = plan(settings(batch=batch, data__sequence_length=16)).specs
    return spec


PLANNED = {
    "world_size": 2,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "global_batch_size": 8,
    "tokens_per_optimizer_step": 128,
}


def log_of(**values: int) -> Log:
    return Log(readings={(name, value): f"line of {name}" for name, value in values.items()})


def judged(spec: RunSpec, world_size_seen: int | None = None, **values: int) -> list[str]:
    return compare_batch(spec, log_of(**values), world_size_seen)[1]


def test_what_agrees_or_is_not_observed_is_no_contradiction(spec):
    for count in range(len(PLANNED) + 1):
        for names in itertools.combinations(PLANNED, count):
            assert judged(spec, **{name: PLANNED[name] for name in names}) == []
    assert judged(spec, tokens_per_optimizer_step=8 * 15) == [], "the last token predicts nothing"


def test_processes_that_share_a_model_are_no_contradiction_where_the_script_says_its_batch(spec):
    batch = {"micro_batch_size": 1, "gradient_accumulation_steps": 4}
    assert judged(spec, 4, **batch, global_batch_size=8) == []
    assert judged(spec, 4, **batch, tokens_per_optimizer_step=128) == []
    (problem,) = judged(spec, 4, **batch)
    assert "world_size=4" in problem


@pytest.mark.parametrize("name", PLANNED)
def test_every_other_number_is_one(spec, name):
    for value in (PLANNED[name] + 1, 0):
        (problem,) = judged(spec, **{name: value})
        assert f"{name}={value} (line of {name})" in problem
        assert f"the plan says {PLANNED[name]}" in problem


def test_one_of_two_sources_that_disagree_contradicts_the_plan(spec):
    log = Log(readings={("world_size", 2): "the script", ("world_size", 1): "another"})
    observed, (problem,) = compare_batch(spec, log, None)
    assert "world_size=1 (another)" in problem
    assert observed["world_size"] is None


def test_ranks_seen_from_outside_count_where_the_program_is_silent(spec):
    assert judged(spec, world_size_seen=2) == []
    assert "WORLD_SIZE" in judged(spec, world_size_seen=1)[0]
    assert judged(spec, world_size_seen=1, world_size=2) == [], (
        "what the program says of itself counts more"
    )


def test_contradictions_within_the_metrics_are_some(spec):
    assert compare_batch(spec, Log(problems=["rank 1 says otherwise"]), None)[1] == [
        "rank 1 says otherwise"
    ]


def test_what_was_not_observed_says_so(spec):
    observed, _ = compare_batch(spec, log_of(world_size=2), 3)
    assert (observed["world_size"], observed["world_size_source"]) == (2, "line of world_size")
    assert observed["micro_batch_size"] is None
    assert observed["micro_batch_size_source"] == "not observed"


@pytest.mark.parametrize("unknown", [*PLANNED][:4])
def test_any_three_give_the_fourth(spec, unknown):
    three = {name: PLANNED[name] for name in [*PLANNED][:4] if name != unknown}
    observed, problems = compare_batch(spec, log_of(**three), None)
    assert problems == []
    assert observed[unknown] == PLANNED[unknown]
    assert observed[f"{unknown}_source"] == "follows from the other three"
    name = next(iter(three))
    observed, _ = compare_batch(spec, log_of(**three | {name: 3 * PLANNED[name]}), None)
    assert observed[unknown] is None, "what contradicts itself or the plan gives nothing"


def test_samples_follow_from_tokens(spec):
    observed, _ = compare_batch(spec, log_of(tokens_per_optimizer_step=8 * 15), None)
    assert observed["global_batch_size"] == 8
    observed, _ = compare_batch(spec, log_of(tokens_per_optimizer_step=8 * 17), None)
    assert observed["global_batch_size"] is None


@given(every=st.integers(1, 6), did=st.integers(1, 12))
def test_a_log_of_every_nth_step_tells_a_whole_training_from_a_cut_one(every, did):
    """The oracle is the program: it did `did` of 9 steps and logged each `every`-th."""

    class Nine:
        optimizer_steps = 9

    logged = [{"optimizer_step": step} for step in range(every, did + 1, every)]
    verdict = why_unfinished(Nine(), logged)  # type: ignore[arg-type]  # it reads nothing else
    if did == 9 and logged:
        assert verdict is None
    if did > 9 and logged and logged[-1]["optimizer_step"] > 9:
        assert "the plan says 9" in verdict
    if not logged or did + every <= 9:
        assert verdict is not None


@given(
    every=st.integers(1, 6),
    begin=st.integers(1, 30),
    count=st.integers(1, 12),
    more=st.integers(0, 6),
)
def test_a_log_that_begins_late_says_so(every, begin, count, more):
    """It logs each `every`-th step from `begin` on, and the last one, whichever that is."""
    logged = [begin + every * number for number in range(count)]
    logged += [logged[-1] + min(more, every)] if more else []
    verdict = why_late([{"optimizer_step": step} for step in logged])
    if begin <= every or len(logged) < 3:
        assert verdict is None
    else:
        assert f"begin with optimizer step {begin}: " in str(verdict)


def test_a_log_of_ever_rarer_steps_begins_in_time():
    logged = [{"optimizer_step": 2**power} for power in range(8)]
    assert why_late(logged) is None
    assert why_late(logged[3:]) is None, "its first gap is no longer than a later one"
