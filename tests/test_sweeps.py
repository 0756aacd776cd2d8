"""Each study holds what its first line says, on a machine of two cores."""

import functools
import math
import re
from pathlib import Path

import pytest

import batchscape.sweeps
from batchscape.compose import compose
from batchscape.config import WarmupStableDecay
from batchscape.launch.beginnings import shared_beginnings
from batchscape.plan.build import make_plan
from batchscape.plan.machine import Machine
from batchscape.record.spec import DataIdentity
from batchscape.search.stand_ins import stand_ins

SWEEPS = Path(batchscape.sweeps.__file__).parent
NAMES = sorted(path.stem for path in SWEEPS.glob("*.yaml"))
PRODUCT = r"\d+ [a-z- ]+(?: x \d+ [a-z- ]+)*"
PROMISE = re.compile(
    rf"# .+\? (?P<runs>\d+) runs \((?P<products>{PRODUCT}(?:, then {PRODUCT})?)\)"
    r"(?:, (?P<rejected>\d+) rejected runs)?\."
)


@functools.cache
def plan_of(name, cores=2):
    def prepare(config):
        if config.name == "digits":
            held = round(1797 * config.held_out_pct / 100)
            return DataIdentity(
                config.name, "nowhere", 1797 - held, held, 10, task="class", features=64
            )
        return DataIdentity(config.name, "nowhere", 100_000, 10_000, 256, task="next_token")

    grid = compose([f"sweeps={name}"], "batchscape sweep")
    if grid.intervals:
        grid = stand_ins(grid, Machine(cores, "cores"), prepare).cells
    return make_plan(grid, Machine(cores, "cores"), prepare)


def triples(plan):
    return {
        (
            spec.geometry.data_parallel_size,
            spec.geometry.micro_batch_size,
            spec.geometry.gradient_accumulation_steps,
        )
        for spec in plan.specs
    }


DEMO = {"fixed_global_batch_digits", "fewer_updates_digits"}
"""What each change is tried on; the long tier has the others."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in DEMO else pytest.mark.slow) for name in NAMES],
)
def test_first_line_is_true(name):
    header, first, *_ = (SWEEPS / f"{name}.yaml").read_text().splitlines()
    assert header == "# @package _global_"
    promise = PROMISE.fullmatch(first)
    assert promise, first
    plan = plan_of(name)
    assert len(plan.specs) == int(promise["runs"])
    assert len(plan.rejections) == int(promise["rejected"] or 0)
    assert plan.repeated == 0
    # A search has a product of trials and then one of its grid, whose seeds are fresh.
    products = promise["products"].split(", then ")
    counts = [math.prod(map(int, re.findall(r"\d+", product))) for product in products]
    assert sum(counts) == len(plan.specs)
    if len(products) == 1:
        assert f"{len({spec.config.seed for spec in plan.specs})} seeds" in promise["products"]
    assert plan.sweep_dir == Path("outputs") / name
    beginnings = {"horizons", "critical_batch_by_branches", "ramp_verified"}
    if name not in {"sequence_length", *beginnings}:
        check_all_end_at_the_same_samples(plan.specs)


def check_all_end_at_the_same_samples(specs):
    assert len({spec.samples for spec in specs}) == 1
    stages = [stage for spec in specs for stage in spec.stages]
    common = math.lcm(*(stage.geometry.global_batch_size for stage in stages))
    assert specs[0].samples % common == 0
    for spec in specs:
        assert spec.evaluation_every_samples is not None
        assert spec.evaluation_every_samples % common == 0


@pytest.mark.slow
def test_sequence_lengths_are_compared_at_equal_tokens():
    specs = plan_of("sequence_length").specs
    lengths = [spec.config.sequence_length or 0 for spec in specs]
    assert set(lengths) == {32, 64, 128}
    for length, spec in zip(lengths, specs, strict=True):
        assert spec.samples * length == 245760
        assert spec.geometry.global_batch_size * length == 2048
        assert spec.geometry.micro_batch_size * length == 512


@pytest.mark.slow
def test_horizons_are_ages_of_one_trunk_with_a_tenth_of_decay():
    specs = plan_of("horizons").specs
    for spec in specs:
        assert isinstance(spec.config.schedule, WarmupStableDecay)
        assert spec.config.schedule.decay_samples == spec.samples / 10
    beginnings = shared_beginnings(specs)
    longest = max(spec.samples for spec in specs)
    shorter = [spec for spec in specs if spec.samples < longest]
    own = {spec.run_id: spec.optimizer_steps for spec in specs}
    assert len(beginnings) > 0.9 * len(shorter)
    trained = sum(own.values()) - sum(b.optimizer_steps for b in beginnings.values())
    assert trained < sum(own.values()) / 4


@pytest.mark.slow
def test_branches_leave_one_training_at_its_ages_for_one_window():
    specs = plan_of("critical_batch_by_branches").specs
    trunks = [spec for spec in specs if len(spec.stages) == 1]
    ages = {512 << n for n in range(5)}
    assert {spec.samples - 1024 for spec in trunks} == ages
    for spec in trunks:
        assert spec.stages[0].optimizer.learning_rate == 0.004
    sizes = {
        age: [
            (spec.stages[1].geometry.global_batch_size, spec.stages[1].samples)
            for spec in specs
            if spec.config.seed == 0 and len(spec.stages) == 2 and spec.stages[0].samples == age
        ]
        for age in ages
    }
    assert all(sorted(found) == [(4 << n, 1024) for n in range(1, 6)] for found in sizes.values())
    assert all(spec.stages[0].optimizer == trunks[0].stages[0].optimizer for spec in specs)


@pytest.mark.slow
def test_ramps_that_are_verified_take_equal_samples():
    specs = [spec for spec in plan_of("ramp_verified").specs if spec.config.seed == 0]
    assert {spec.samples for spec in specs} == {12288}
    stages = {
        tuple((stage.samples, stage.geometry.global_batch_size) for stage in spec.stages)
        for spec in specs
    }
    found = ((1024, 4), (3072, 8), (8192, 32))
    early, late = ((512, 4), (1536, 8), (10240, 32)), ((2048, 4), (6144, 8), (4096, 32))
    decayed = ((1024, 4), (3072, 4), (8192, 4))
    assert stages == {((12288, 4),), ((12288, 32),), found, early, late, decayed}
    # By the root of the batch; Seesaw's by its inverse; the decay by the batch itself.
    exponents = [
        math.log(stage.optimizer.learning_rate / 0.004)
        / math.log(stage.geometry.global_batch_size / 4)
        for spec in specs
        for stage in spec.stages[1:]
        if stage.geometry.global_batch_size > 4
    ]
    assert sorted(round(exponent, 4) for exponent in exponents) == [-0.5] * 2 + [0.5] * 6
    (rates,) = (
        [stage.optimizer.learning_rate for stage in spec.stages]
        for spec in specs
        if len(spec.stages) == 3 and spec.geometry.global_batch_size == 4
    )
    assert rates == [0.004, 0.002, 0.0005]


@pytest.mark.parametrize("name", ["fixed_global_batch", "fixed_global_batch_digits"])
def test_fixed_global_batch_is_the_table_of_the_claim(name):
    plan = plan_of(name)
    assert triples(plan) == {(1, 32, 1), (4, 8, 1), (2, 8, 2), (1, 8, 4)}
    rejected = {
        (r.config.batch.data_parallel_size, r.config.batch.micro_batch_size)
        for r in plan.rejections
    }
    assert rejected == {(2, 32), (4, 32)}
    assert all("multiple" in r.reason for r in plan.rejections)


TRAJECTORIES = {
    "fixed_global_batch": 3,  # cuts of one seed train alike
    "activation_checkpointing": 6,  # with and without
    "engines": 5 * 2,  # what an engine computes is not taken on trust
    "scaling_rule": 4 * 2 * 3,
    "batch_ramp": 3 * 3,
}


@pytest.mark.slow
def test_studies_vary_what_they_ask_about():
    for name, count in TRAJECTORIES.items():
        assert len({spec.trajectory_id for spec in plan_of(name).specs}) == count, name
    assert triples(plan_of("engines")) == {(1, 32, 1), (1, 8, 4), (2, 8, 2)}
    assert {spec.optimizer_steps for spec in plan_of("musev_224").specs} == {8}
    ramps = {
        tuple((stage.samples, stage.geometry.global_batch_size) for stage in spec.stages)
        for spec in plan_of("batch_ramp").specs
    }
    thirds = ((640, 8), (1280, 16), (1920, 32))
    assert ramps == {((3840, 32),), ((1920, 8), (1920, 32)), thirds}
    rates = [
        spec.stages[0].optimizer.learning_rate
        for spec in plan_of("scaling_rule").specs
        if spec.config.seed == 0 and spec.geometry.global_batch_size == 128
    ]
    assert rates == pytest.approx([0.001, 0.004, 0.002, 0.002])


@pytest.mark.slow
def test_musev_asks_for_every_cut_of_224():
    small, large = plan_of("musev_224"), plan_of("musev_224", cores=16)
    cuts = {
        (ranks, micro, accumulation)
        for ranks in (1, 2, 4, 8, 16)
        for micro in range(7, 225)
        for accumulation in range(1, 33)
        if ranks * micro * accumulation == 224
    }
    assert (16, 7, 2) in cuts
    assert triples(large) == cuts
    # What two cores cannot run is rejected with its geometry, not left out.
    assert triples(small) == {cut for cut in cuts if cut[0] <= 2}
    lacking = {
        (
            r.geometry.data_parallel_size,
            r.geometry.micro_batch_size,
            r.geometry.gradient_accumulation_steps,
        )
        for r in small.rejections
        if r.geometry is not None
    }
    assert lacking == {cut for cut in cuts if cut[0] > 2}
    # The larger machine goes on in the folders that the smaller one left.
    assert {r.run_id for r in small.rejections if r.geometry} <= {s.run_id for s in large.specs}


def test_the_two_studies_of_the_demo_share_what_they_compare():
    """Cuts of 32 train as 32 does in the range, and one micro-batch makes the whole range."""
    cuts = plan_of("fixed_global_batch_digits").specs
    batches = plan_of("fewer_updates_digits").specs
    assert {spec.trajectory_id for spec in cuts} < {spec.trajectory_id for spec in batches}
    assert {spec.config.measure for spec in cuts} == {spec.config.measure for spec in batches}
    assert {spec.geometry.micro_batch_size for spec in batches} == {8}
    assert {spec.geometry.data_parallel_size for spec in batches} == {1}
    # One at a time, so that times are compared; six times over the 1258 images.
    assert {spec.config.launcher.concurrent_runs for spec in (*cuts, *batches)} == {1}
    assert {spec.config.budget.samples for spec in (*cuts, *batches)} == {7680}


@pytest.mark.slow
def test_learning_rates_are_tuned_for_the_global_batches_of_the_other_study():
    """Both train alike up to the learning rate, so that a report may join them."""
    tuned, varied = plan_of("learning_rate").specs, plan_of("vary_global_batch").specs
    sizes = {spec.geometry.global_batch_size for spec in varied}
    assert {spec.geometry.global_batch_size for spec in tuned} == sizes
    trained = {spec.trajectory_id for spec in varied}
    assert trained <= {spec.trajectory_id for spec in tuned}
    assert len(trained) == 5 * len(sizes)
