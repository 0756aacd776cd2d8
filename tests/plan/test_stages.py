"""Ramps: every stage is solved by the same rule, and evaluations fall between optimizer steps."""

import re
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchscape.config import AdamW
from batchscape.errors import ConfigError
from batchscape.geometry import BatchGeometry
from batchscape.plan.stages import check_evaluations
from batchscape.plan.table import plan_rows
from batchscape.record.spec import RunSpec, Stage

RAMP = "batch.ramp=[{samples:640,global_batch_size:8},{samples:1280,global_batch_size:16}]"
ADAMW = AdamW(name="adamw", learning_rate=0.1)


def cuts(spec):
    return [(stage.samples, str(stage.geometry)) for stage in spec.stages]


def test_accumulation_is_derived_for_every_stage(plan):
    (spec,) = plan(RAMP).specs
    assert cuts(spec) == [
        (640, "1 x 8 x 1 = 8"),
        (1280, "1 x 8 x 2 = 16"),
        (1920, "1 x 8 x 4 = 32"),
    ]
    assert spec.optimizer_steps == 80 + 80 + 60
    assert spec.samples == 3840
    assert spec.run_id.startswith("b32-d1-m8-a4-s0-")


def test_micro_batch_is_derived_where_accumulation_is_given(plan):
    lines = [
        "batch.micro_batch_size=null",
        "batch.gradient_accumulation_steps=2",
        "batch.data_parallel_size=2",
    ]
    (spec,) = plan(RAMP, *lines).specs
    assert [c for _, c in cuts(spec)] == ["2 x 2 x 2 = 8", "2 x 4 x 2 = 16", "2 x 8 x 2 = 32"]


def test_ranks_are_those_of_the_last_stage(plan):
    (spec,) = plan(RAMP, "batch.data_parallel_size=1").specs
    assert {stage.geometry.data_parallel_size for stage in spec.stages} == {1}
    # Two ranks are derived for 32; they hold for 16 and cannot be cut so, where one would do.
    derived = ["batch.data_parallel_size=null", "batch.gradient_accumulation_steps=2"]
    ramp = "batch.ramp=[{samples:640,global_batch_size:16}]"
    with pytest.raises(ConfigError, match=r"batch\.ramp, stage 1 of 1: "):
        plan(ramp, *derived)


@pytest.mark.parametrize(
    ("lines", "samples"),
    [
        (["budget=tokens", "budget.tokens=245760"], 1920),
        (["budget=optimizer_steps", "budget.optimizer_steps=165"], 160),
    ],
)
def test_the_rest_of_any_budget_is_the_last_stage(lines, samples, plan):
    (spec,) = plan(RAMP, *lines, "evaluation.every_samples=null").specs
    assert spec.stages[-1].samples == samples
    assert cuts(spec)[:2] == [(640, "1 x 8 x 1 = 8"), (1280, "1 x 8 x 2 = 16")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["batch.ramp=[{samples:640,global_batch_size:12}]"],
            r"batch\.ramp, stage 1 of 1: .*12",
        ),
        (
            [RAMP, "batch.gradient_accumulation_steps=4"],
            r"batch\.ramp, stage 1 of 2: ",
        ),
        (
            ["batch.ramp=[{samples:100,global_batch_size:8}]"],
            r"stage 1 of 1: samples must be .*8; given 100; use 96 or 104",
        ),
        (["batch.ramp=[{samples:3848,global_batch_size:8}]"], "3848 samples, 8 too many"),
        ([RAMP, "budget=optimizer_steps", "budget.optimizer_steps=9"], "beyond the budget"),
        ([RAMP, "budget.samples=3844"], r"rest of the budget, .*32; given 1924"),
        ([RAMP, "budget=tokens", "budget.tokens=245761"], "whole samples of 64"),
        ([RAMP, "evaluation.every_samples=20"], r"after 20 samples, within .* 8 "),
        (
            [RAMP, "batch.global_batch_size=null", "batch.gradient_accumulation_steps=4"],
            "give batch.global_batch_size",
        ),
        (["scaling=adam", "optimizer=sgd"], "Adam's betas"),
        (
            ["batch.ramp=[{tokens:40961,global_batch_size:8}]"],
            "stage 1 of 1: tokens must be whole samples of 64 tokens; given 40961; "
            "use 40960 or 41024",
        ),
        (["batch.ramp=[{global_batch_size:8}]"], "one of samples, tokens; got none of them"),
        (
            ["batch.ramp=[{samples:640,tokens:40960,global_batch_size:8}]"],
            "give exactly one of samples, tokens; got samples=",
        ),
        (
            ["data=digits", "model=mlp", "batch.ramp=[{tokens:640,global_batch_size:8}]"],
            "stage 1: tokens=640 needs packed text, .* give samples instead",
        ),
        (
            [
                "scaling=sqrt",
                "batch.ramp=[{samples:640,global_batch_size:8,learning_rate_factor:2}]",
            ],
            r"factors of the learning rate, \[2.0\], and scaling.learning_rate=sqrt .*leave out",
        ),
        (
            ["batch.ramp=[{samples:640,global_batch_size:8,learning_rate_factor:0}]"],
            "greater than 0",
        ),
    ],
)
def test_rules(lines, message, plan):
    with pytest.raises(ConfigError, match=message):
        plan(*lines)


def test_a_ramp_that_cannot_be_cut_rejects_its_cell_only(plan):
    sweep_plan = plan(RAMP, "batch.micro_batch_size=8,16")
    assert len(sweep_plan.specs) == 1
    (rejected,) = sweep_plan.rejections
    assert "batch.ramp, stage 1 of 2" in rejected.reason


@pytest.mark.slow
def test_equal_trainings_are_one_run_however_they_are_asked_for(plan):
    plain = plan().specs[0]
    same = "batch.ramp=[{samples:640,global_batch_size:32}]"
    assert plan(same).specs[0].run_id == plain.run_id
    halves = (
        "batch.ramp=[{samples:320,global_batch_size:8},{samples:320,global_batch_size:8},"
        "{samples:1280,global_batch_size:16}]"
    )
    assert plan(halves).specs[0].run_id == plan(RAMP).specs[0].run_id
    ruled = plan("scaling=linear", "scaling.reference_global_batch_size=16").specs[0]
    written = plan("optimizer.learning_rate=0.002").specs[0]
    assert ruled.trajectory_id == written.trajectory_id != plain.trajectory_id


def test_a_ramp_may_fill_the_budget(plan):
    stages = "[{samples:1920,global_batch_size:32},{samples:1920,global_batch_size:16%s}]"
    spec, slower = (
        plan(f"batch.ramp={stages % factor}").specs[0]
        for factor in ("", ",learning_rate_factor:0.5")
    )
    assert cuts(spec) == cuts(slower) == [(1920, "1 x 8 x 4 = 32"), (1920, "1 x 8 x 2 = 16")]
    rates = [stage.optimizer.learning_rate for stage in slower.stages]
    assert rates[1] == rates[0] / 2
    assert slower.geometry.global_batch_size == 16


def test_a_rule_follows_the_ramp(plan):
    (spec,) = plan(RAMP, "scaling=linear").specs
    rates = [stage.optimizer.learning_rate for stage in spec.stages]
    assert rates == pytest.approx([0.00025, 0.0005, 0.001])


def test_a_stage_has_its_own_factor_of_the_learning_rate(plan):
    """As in Seesaw: twice the batch goes with the rate over root 2."""
    stages = "{tokens:40960,global_batch_size:8,learning_rate_factor:2},"
    stages += "{samples:1280,global_batch_size:16,learning_rate_factor:1.41421356}"
    (spec,) = plan(f"batch.ramp=[{stages}]").specs
    assert cuts(spec) == cuts(plan(RAMP).specs[0])
    rates = [stage.optimizer.learning_rate for stage in spec.stages]
    assert rates == pytest.approx([0.002, 0.00141421356, 0.001], rel=1e-12)
    # Weight decay follows the factor as it follows a rule: its timescale in tokens is held.
    decay = ("scaling.weight_decay=timescale", "scaling.reference_global_batch_size=32")
    (held,) = plan(f"batch.ramp=[{stages}]", "optimizer.weight_decay=0.1", *decay).specs
    products = [
        stage.geometry.global_batch_size
        / (stage.optimizer.learning_rate * stage.optimizer.weight_decay)
        for stage in held.stages
    ]
    assert products == pytest.approx([32 / (0.001 * 0.1)] * 3, rel=1e-12)
    (muon,) = plan(f"batch.ramp=[{stages}]", "optimizer=muon").specs
    first, *_, last = (stage.optimizer for stage in muon.stages)
    assert first.adamw_learning_rate == pytest.approx(2 * last.adamw_learning_rate)
    assert first.learning_rate == pytest.approx(2 * last.learning_rate)


def test_a_spec_with_stages_comes_back_from_its_file(plan, tmp_path):
    (spec,) = plan(RAMP, "scaling=adam").specs
    spec.write(tmp_path / "config.json")
    assert RunSpec.read(tmp_path / "config.json") == spec


def test_rows_show_the_ramp(plan):
    assert [row["ramp"] for row in plan_rows(plan(RAMP))] == ["8 -> 16 -> 32"]
    assert [row["ramp"] for row in plan_rows(plan())] == [None]


# The first one in the second stage falls between steps, the next one does not.
@example(7, [(4, 1), (3, 8)])
@given(st.integers(1, 400), st.lists(st.tuples(st.integers(1, 12), st.integers(1, 20)), max_size=4))
def test_evaluations_fall_between_steps_or_are_refused(every, stages):
    """Against every edge of every optimizer step, counted one by one."""
    cut = tuple(Stage(size * steps, BatchGeometry(1, 1, size, 1), ADAMW) for size, steps in stages)
    sizes = [size for size, steps in stages for _ in range(steps)]
    edges = set(accumulate(sizes))
    due = range(every, sum(sizes) + 1, every)
    if all(position in edges for position in due):
        check_evaluations(every, cut)
        return
    first = next(position for position in due if position not in edges)
    with pytest.raises(ConfigError) as caught:
        check_evaluations(every, cut)
    assert f"due after {first} samples" in str(caught.value)
    rule = r"multiples of (\d+) \(.*\) for the samples of each stage and for evaluation\.every_.*"
    (common,) = re.fullmatch(rule, str(caught.value).rpartition("; use ")[2]).groups()
    assert not any(int(common) % size for size in sizes)
