"""Each study holds what its first line says, on a machine of two cores."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import batchscape.sweeps
from batchscape.compose import compose
from batchscape.config import Data
from batchscape.plan.build import Plan, make_plan
from batchscape.plan.machine import Machine
from batchscape.record.spec import DataIdentity, RunSpec
from batchscape.search.stand_ins import stand_ins

SWEEPS = Path(batchscape.sweeps.__file__).parent
NAMES = sorted(path.stem for path in SWEEPS.glob("*.yaml"))
PRODUCT = r"\d+ [a-z- ]+(?: x \d+ [a-z- ]+)*"
PROMISE = re.compile(
    rf"# .+\? (?P<runs>\d+) runs \((?P<products>{PRODUCT}(?:, then {PRODUCT})?)\)"
    r"(?:, (?P<rejected>\d+) rejected runs)?\."
)


@functools.cache
def plan_of(name: str, cores: int = 2) -> Plan:
    def prepare(config: Data) -> DataIdentity:
        if config.name == "digits":
            held = round(1797 * config.held_out_pct / 100)
            return DataIdentity(
                config.name, "nowhere", 1797 - held, held, 10, task="class", features=64
            )
        return DataIdentity(config.name, "nowhere", 100_000, 10_000, 256, task="next_token")

    grid = compose([f"sweeps={name}"], "batchscape sweep")
    assert grid is not None
    if grid.intervals:
        grid = stand_ins(grid, Machine(cores, "cores"), prepare).cells
    return make_plan(grid, Machine(cores, "cores"), prepare)


def triples(plan: Plan) -> set[tuple[int, int, int]]:
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
def test_first_line_is_true(name: str) -> None:
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
    if name not in {"sequence_length", "critical_batch_by_branches", "ramp_verified"}:
        check_all_end_at_the_same_samples(plan.specs)


def check_all_end_at_the_same_samples(specs: Sequence[RunSpec]) -> None:
    assert len({spec.samples for spec in specs}) == 1
    stages = [stage for spec in specs for stage in spec.stages]
    common = math.lcm(*(stage.geometry.global_batch_size for stage in stages))
    assert specs[0].samples % common == 0
    for spec in specs:
        assert spec.evaluation_every_samples is not None
        assert spec.evaluation_every_samples % common == 0


@pytest.mark.slow
def test_sequence_lengths_are_compared_at_equal_tokens() -> None:
    specs = plan_of("sequence_length").specs
    lengths = [spec.config.sequence_length or 0 for spec in specs]
    assert set(lengths) == {32, 64, 128}
    for length, spec in zip(lengths, specs, strict=True):
        assert spec.samples * length == 245760
        assert spec.geometry.global_batch_size * length == 2048
        assert spec.geometry.micro_batch_size * length == 512


@pytest.mark.slow
def test_ramps_grow_to_one_global_batch() -> None:
    ramps = {
        tuple((stage.samples, stage.geometry.global_batch_size) for stage in spec.stages)
        for spec in plan_of("batch_ramp").specs
    }
    assert ramps == {
        ((3840, 32),),
        ((1920, 8), (1920, 32)),
        ((640, 8), (1280, 16), (1920, 32)),
    }


@pytest.mark.slow
def test_branches_leave_one_training_at_its_ages_for_one_window() -> None:
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
def test_ramps_that_are_verified_take_equal_samples() -> None:
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


@pytest.mark.slow
def test_rules_differ_in_the_settings_of_the_optimizer_alone() -> None:
    specs = [spec for spec in plan_of("scaling_rule").specs if spec.config.seed == 0]
    large = [spec for spec in specs if spec.geometry.global_batch_size == 128]
    rates = [spec.stages[0].optimizer.learning_rate for spec in large]
    assert rates == pytest.approx([0.001, 0.004, 0.002, 0.002])
    assert len({spec.trajectory_id for spec in specs}) == 8


@pytest.mark.slow
def test_recomputed_activations_are_no_trajectory_of_their_own() -> None:
    specs = plan_of("activation_checkpointing").specs
    assert len({spec.trajectory_id for spec in specs}) == len(specs) / 2


@pytest.mark.parametrize("name", ["fixed_global_batch", "fixed_global_batch_digits"])
def test_fixed_global_batch_is_the_table_of_the_claim(name: str) -> None:
    plan = plan_of(name)
    assert triples(plan) == {(1, 32, 1), (4, 8, 1), (2, 8, 2), (1, 8, 4)}
    rejected = {
        (r.config.batch.data_parallel_size, r.config.batch.micro_batch_size)
        for r in plan.rejections
    }
    assert rejected == {(2, 32), (4, 32)}
    assert all("multiple" in r.reason for r in plan.rejections)


def test_every_trajectory_of_fixed_global_batch_has_four_decompositions() -> None:
    specs = plan_of("fixed_global_batch").specs
    by_seed = {spec.config.seed: set[str]() for spec in specs}
    for spec in specs:
        by_seed[spec.config.seed].add(spec.trajectory_id)
    assert all(len(trajectories) == 1 for trajectories in by_seed.values())
    assert len(set.union(*by_seed.values())) == 3


@pytest.mark.slow
def test_engines_share_cuts_and_names_differ() -> None:
    specs = plan_of("engines").specs
    cuts = {name: set[tuple[int, int, int]]() for name in ("ddp", "fsdp", "accelerate")}
    cuts |= {name: set() for name in ("deepspeed", "fabric")}
    for spec in specs:
        geometry = spec.geometry
        cut = (geometry.data_parallel_size, geometry.micro_batch_size)
        cuts[spec.config.engine.name].add((*cut, geometry.gradient_accumulation_steps))
    assert all(
        triples_of_engine == {(1, 32, 1), (1, 8, 4), (2, 8, 2)}
        for triples_of_engine in cuts.values()
    )
    # What an engine computes is not taken on trust: each has a trajectory of its own.
    assert len({spec.trajectory_id for spec in specs}) == 5 * 2


@pytest.mark.slow
def test_musev_asks_for_every_cut_of_224() -> None:
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


@pytest.mark.slow
def test_musev_trains_eight_optimizer_steps() -> None:
    assert {spec.optimizer_steps for spec in plan_of("musev_224").specs} == {8}


def test_the_two_studies_of_the_demo_share_what_they_compare() -> None:
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
@pytest.mark.parametrize("data", ["", "_digits"])
def test_learning_rates_are_tuned_for_the_global_batches_of_the_other_study(data: str) -> None:
    """Both train alike up to the learning rate, so that a report may join them."""
    tuned, varied = plan_of(f"learning_rate{data}").specs, plan_of(f"vary_global_batch{data}").specs
    sizes = {spec.geometry.global_batch_size for spec in varied}
    assert {spec.geometry.global_batch_size for spec in tuned} == sizes
    trained = {spec.trajectory_id for spec in varied}
    assert trained <= {spec.trajectory_id for spec in tuned}
    assert len(trained) == 5 * len(sizes)
