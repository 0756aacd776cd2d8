"""Every claim finds an effect that was planted, turns with its sign, and says when it is blind."""

from __future__ import annotations

import math
import operator
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from batchscape.analysis.cells import find_cells
from batchscape.analysis.claims.claim import Verdict
from batchscape.analysis.claims.declared import CLAIMS, judge_claims
from batchscape.analysis.claims.evidence import Evidence
from batchscape.analysis.learning_rate.aim import final_losses
from batchscape.analysis.learning_rate.topic import learning_rate_section
from batchscape.compose import compose
from batchscape.config import DataSettings
from batchscape.errors import AnalysisError
from batchscape.plan.build import make_plan
from batchscape.plan.machine import Machine
from batchscape.record.spec import DataIdentity
from batchscape.record.tables import load

BY_ID = {claim.id: claim for claim in CLAIMS}
SEEDS = (0, 1, 2, 3)
GRID = [(1, 8, 1), (1, 8, 4), (1, 32, 1), (1, 32, 4)]
BATCHES = (4, 16, 64)


def jitter(seed: int, *what: int, size: float = 1e-3) -> float:
    """A small relative noise, another one for each run."""
    return float(1 + size * np.random.default_rng([seed, *what]).normal())


def memory(holds, seed):
    """Peaks follow the micro-batch, and accumulation adds 1 % or 30 %."""
    for cut in GRID:
        peak = 1 + 0.1 * cut[1] * (1 + (0.01 if holds else 0.3) * (cut[2] > 1))
        yield cut, {"peak_allocated_gib": peak * jitter(seed, *cut)}


def gradients(holds, seed):
    """Accumulation adds 5 %, or nothing."""
    for cut in GRID:
        peak = cut[1] * (1 + (0.05 if holds else 0) * (cut[2] > 1))
        yield cut, {"peak_allocated_gib": peak * jitter(seed, *cut, size=2e-4)}


def first_rank(holds, seed):
    """Rank 0 holds 10 % more, or the same."""
    yield (2, 8, 1), {"rank0": (1.1 if holds else 1.0) * jitter(seed, size=1e-4)}


def microsteps(holds, seed):
    """A micro-step takes as long as its samples, or 30 % longer under accumulation."""
    for cut in GRID:
        time = cut[1] * (1 + (0 if holds else 0.3) * (cut[2] > 1)) * jitter(seed, *cut) * cut[2]
        yield cut, {"forward_backward_s": time, "step_time_s": time}


def cuts(holds, seed):
    """Every micro-step costs 20 % of a full micro-batch, or nothing."""
    for cut in [(1, 32, 1), (1, 16, 2), (1, 8, 4)]:
        yield cut, {"step_time_s": (32 + (6.4 if holds else 0) * cut[2]) * jitter(seed, *cut)}


def targets(holds, seed):
    """Samples to target follow 1000 + 100 B, or do not depend on B."""
    for steps in (1, 4, 16):
        yield (1, 8, steps), {"reach": (1000 + 100 * steps * holds) * jitter(seed, steps)}


def decompositions(holds, seed):
    """Cuts of 32 end within a ten-thousandth of a nat, or 0.05 apart."""
    for cut in [(1, 32, 1), (4, 8, 1), (2, 8, 2), (1, 8, 4)]:
        loss = 2 + 0.1 * seed + (0 if holds else 0.05) * (cut[2] > 1)
        yield cut, {"final_eval_loss": loss + 1e-4 * (jitter(seed, *cut, size=1) - 1)}


def falling(batch: int, samples: int = 1280) -> np.ndarray:
    """A loss that falls with the samples seen before each step, one value a step."""
    return 1 + 2 * np.exp(-np.arange(0, samples, batch) / 400)


def spikes(holds, seed):
    """The smallest batch jumps up by a third for a while, or does not."""
    for batch in BATCHES:
        curve = falling(batch) * jitter(seed, batch)
        if holds and batch == 4:
            curve[200:260] *= 1.3 + 0.02 * seed
        yield (1, batch, 1), {"curve": curve, "final_loss": curve[-1]}


def gaps(holds, seed):
    """Held-out loss is 0.1 above the training loss, and 0.3 for the largest batch, or not."""
    for batch in BATCHES:
        gap = 0.3 if holds and batch == 64 else 0.1 + 0.0005 * seed
        held_out = 1 + 2 * np.exp(-np.arange(80, 1281, 80) / 400) + gap * jitter(seed, batch)
        curves = {"curve": falling(batch), "held_out": held_out}
        yield (1, batch, 1), {**curves, "final_eval_loss": held_out[-1]}


def rates(holds, seed):
    """The best rate is 0.001 B, or 0.1 / B, between points of the grid."""
    for batch in BATCHES:
        best = (1e-3 * batch if holds else 0.1 / batch) * jitter(seed, batch, size=0.05)
        for rate in 10.0 ** np.arange(-4, 1, 0.5):
            yield (1, batch, 1), {"rate": rate, "final_eval_loss": 2 + np.log(rate / best) ** 2}


def noise(holds, _seed):
    """The variance of a gradient falls as 1 / B, or grows."""
    for batch in BATCHES:
        variance = 8 / batch if holds else 0.05 * batch**0.5
        yield (1, batch, 1), {"noise": variance, "final_loss": 1.0}


def devices(holds, seed):
    """The exchange takes 10 % of a step, or a thousandth."""
    for n in (1, 2, 4):
        share = (0.1 if holds else 1e-3) * (n > 1) * jitter(seed, n)
        yield (n, 8, 1), {"step_time_s": 1.0, "exchange_s": share}


def typical(holds, seed):
    """A step is as fast with 4 as with 1, or 20 % slower."""
    for steps, time in {1: 1.0, 4: 1.0 if holds else 1.2, 8: 1.5, 16: 2.0}.items():
        yield (1, 32 // steps, steps), {"step_time_s": time * jitter(seed, steps)}


def musev(holds, seed):
    """16 x 14 x 1 needs more memory, or is 20 % faster at the same peak."""
    yield (16, 7, 2), {"step_time_s": jitter(seed, 7), "peak_allocated_gib": 1.0}
    peak = 1.5 if holds else 1.0
    yield (16, 14, 1), {"step_time_s": 0.8 * jitter(seed, 14), "peak_allocated_gib": peak}


def branches(holds, seed):
    """From 512 samples on batches of 33 lose 0.005; the noise scale is 30, or 300."""
    for batch, rise in {4: 0.0, 8: 0.001, 16: 0.002, 32: 0.0045, 64: 0.02}.items():
        stages = ((0, 4, 1e-3), (512, batch, 1e-3))[: 1 if batch == 4 else 2]
        recorded = {
            "trajectory_id": f"{batch}-{seed}",
            "curve": np.full(1536 // batch, 2 + rise * jitter(seed, batch, size=0.05)),
            "planned_samples": 1536,
            "schedule.name": "constant",
            "stages": stages,
        }
        if batch == 4:
            recorded["noise_scale"] = (30 if holds else 300) * jitter(seed, 7)
        yield (1, batch, 1), recorded


def ramps(holds, seed):
    """A ramp within the critical batch loses nothing, or 0.05; climbing early 0.03, or 0.02."""
    yield from branches(True, seed)
    late, early = (0.0, 0.03) if holds else (0.05, 0.02)
    for begins, lost in {(): 0.0, (512, 1024): late, (256, 512): early}.items():
        batch = 16 if begins else 4
        stages = ((0, 4, 1e-3), *zip(begins, (8, 16), (1e-3, 1e-3), strict=False))
        yield (
            (1, batch, 1),
            {
                "trajectory_id": f"{begins}-{seed}",
                "final_eval_loss": 2 + lost * jitter(seed, batch, *begins, size=0.1),
                "planned_samples": 2048,
                "schedule.name": "constant",
                "stages": stages,
            },
        )


PLANTED = {
    "memory-follows-micro": memory,
    "accumulation-costs-memory": gradients,
    "rank0-costs-memory": first_rank,
    "microstep-time-follows-micro": microsteps,
    "micro-before-accumulation": cuts,
    "global-batch-is-free-per-iteration": microsteps,
    "fewer-updates-slower-convergence": targets,
    "decompositions-are-equivalent": decompositions,
    "accumulation-equals-large-batch": decompositions,
    "too-small-unstable": spikes,
    "too-large-generalises-worse": gaps,
    "learning-rate-grows-with-batch": rates,
    "large-batch-less-variance": noise,
    "devices-scale-batch-linearly": devices,
    "accumulation-4-or-8": typical,
    "musev-224": musev,
    "noise-scale-tells-critical-batch": branches,
    "growing-batch-loses-nothing": ramps,
    "late-switching-beats-early": ramps,
}
"""Each yields the cuts of the runs of one seed, and what they recorded."""
LISTED = list(PLANTED)


def fill(world: Any, name: str, holds: bool, seeds: Sequence[int] = SEEDS, **more: Any) -> Any:
    for seed in seeds:
        for cut, recorded in PLANTED[name](holds, seed):
            scale = recorded.pop("noise_scale", None)
            world.run(cut, seed, **recorded, **more)
            if scale is not None:
                world.steps[-1] = world.steps[-1].assign(
                    gradient_norm=np.sqrt(1 + scale / 4),
                    small_batch_size=2,
                    small_gradient_square=1 + scale / 2,
                )
    return world


def filled(make: Callable[[], Any], name: str, holds: bool, seeds: Sequence[int] = SEEDS) -> Any:
    return fill(make(), name, holds, seeds)


def judged(name: str, evidence: Evidence) -> Verdict:
    (verdict,) = BY_ID[name].judge(evidence)
    return verdict


def test_the_claims():
    assert [claim.id for claim in CLAIMS] == LISTED
    for claim in CLAIMS:
        assert claim.settle.startswith("batchscape sweep sweeps=")
        assert "supported: " in claim.rule
        assert "contradicted: " in claim.rule


@pytest.mark.parametrize("name", LISTED)
def test_a_planted_effect_is_found_and_turns_with_its_sign(world, name):
    for holds, expected in ((True, "supported"), (False, "contradicted")):
        table = filled(world, name, holds)
        verdict, mixed = (judged(name, table.evidence(order)) for order in (None, (1, 2)))
        assert verdict.verdict == expected, verdict.explanation
        # The order of rows does not matter.
        assert mixed.verdict == expected
        assert mixed.run_ids == verdict.run_ids
        assert mixed.effect.value == pytest.approx(verdict.effect.value, rel=1e-12)
        assert verdict.settle is None
        # Of the exponent of the best learning rate, it is global batches.
        assert verdict.effect.n == (3 if name == "learning-rate-grows-with-batch" else len(SEEDS))
        assert verdict.effect.low <= verdict.effect.value <= verdict.effect.high
        assert verdict.n_runs >= len(SEEDS)
        assert verdict.context.startswith("Example, 16 cores; float32; gpt")


@pytest.mark.parametrize(
    "name",
    [
        "micro-before-accumulation",
        "decompositions-are-equivalent",
        "accumulation-equals-large-batch",
    ],
)
def test_one_seed_settles_nothing(world, name):
    verdict = judged(name, filled(world, name, holds=True, seeds=(0,)).evidence())
    assert verdict.verdict == "not identified"
    assert not verdict.effect.is_identified
    assert verdict.settle == BY_ID[name].settle


def test_no_data_settles_nothing(world):
    bare = world()
    for seed in SEEDS:
        bare.run((1, 8, 1), seed)
    evidence = bare.evidence()
    for name in LISTED:
        verdict = judged(name, evidence)
        assert verdict.verdict == "not identified", name
        assert verdict.settle == BY_ID[name].settle
        assert verdict.n_runs == 0
        assert BY_ID[name].needs in verdict.explanation


@pytest.mark.parametrize(
    "name",
    ["micro-before-accumulation", "fewer-updates-slower-convergence", "too-small-unstable"],
)
def test_machines_are_judged_apart(world, name):
    """One claim of each view, which sorts runs into contexts."""
    table = world()
    fill(table, name, holds=True, hardware="One")
    fill(table, name, holds=False, hardware="Two")
    verdicts = BY_ID[name].judge(table.evidence())
    answers = {verdict.context.split(",")[0]: verdict.verdict for verdict in verdicts}
    assert answers == {"One": "supported", "Two": "contradicted"}


COMMAND = "batchscape sweep sweeps=mine seed=0,1 launcher.concurrent_runs=2"
MINE = {
    "launch.command": COMMAND,
    "launch.timing_valid": False,
    "launch.timing_invalid_reason": "up to 2 runs share the machine",
}


def test_what_lacks_nothing_but_times_is_measured_again_by_its_own_sweep(
    world,
):
    table = filled(world, "micro-before-accumulation", holds=True)
    for row in table.runs:
        row.update(MINE, sweep_dir="out/mine", timing_repeat=4)
    verdict = judged("micro-before-accumulation", table.evidence())
    assert verdict.verdict == "not identified"
    assert verdict.is_own
    assert verdict.settle == (
        "batchscape sweep sweeps=mine seed=0,1 launcher.concurrent_runs=1 timing_repeat=5 "
        "sweep_dir=out/mine"
    )
    assert verdict.explanation.startswith("The times of ")
    assert "up to 2 runs share the machine" in verdict.explanation
    assert not verdict.effect.is_identified
    # It needs another cut, which times of these do not give: a study that ships.
    other = judged("musev-224", table.evidence())
    assert (other.is_own, other.settle) == (False, BY_ID["musev-224"].settle)


def test_more_seeds_are_added_to_the_sweep_at_hand(world):
    table = world()
    for cut in [(1, 32, 1), (1, 8, 4)]:
        table.run(cut, 0, step_time_s=float(cut[2]), **{"launch.command": COMMAND})
    verdict = judged("micro-before-accumulation", table.evidence())
    assert verdict.is_own
    words = shlex.split(str(verdict.settle))
    assert words[2:] == [
        *("sweeps=mine", "launcher.concurrent_runs=2", "seed=0,1,2,3,4,5,6,7,8,9"),
        'sweep_dir="sweep"',
    ]


def test_censored_runs_bound_the_effect_from_below(world):
    table = world()
    for seed in SEEDS:
        table.run((1, 8, 1), seed, reach=1000 * jitter(seed, 1))
        table.run((1, 8, 16), seed, reach=np.inf)
    verdict = judged("fewer-updates-slower-convergence", table.evidence())
    assert verdict.verdict == "supported"
    assert verdict.effect.high == np.inf
    assert verdict.effect.value == pytest.approx(1000, rel=0.01)
    assert verdict.effect.definition.startswith("ratio of the samples")
    assert "in samples, for lack of valid times" in verdict.explanation


def add_reaches(table: Any, group: int, rates: Sequence[float], best: float, **more: Any) -> None:
    """Targets that each batch reaches after 1000 samples at its best rate, and later at others."""
    for seed in SEEDS:
        for steps in (1, 4, 16):
            for rate in rates:
                slower = 1 + abs(np.log(rate / best)) * (1 + 0.2 * steps)
                reach = 1000 * slower * jitter(seed, steps, int(rate * 1e5))
                curve = falling(8 * steps) * jitter(seed, steps)
                table.run((1, 8, steps), seed, rate=rate, reach=reach, curve=curve, **more)
                table.reaches[-1]["group"] = group


def test_runs_of_each_budget_are_taken_at_the_best_rate_of_their_own(world):
    """At the other budget's best rate the largest batch would take 1.6 times the samples."""
    table, rates = world(), (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
    for group, best in enumerate((1e-3, 4e-3)):
        budget = {"budget.samples": 1000 + group}
        add_reaches(table, group, rates, best, sweep_dir=f"sweep-{group}", **budget)
    verdict = judged("fewer-updates-slower-convergence", table.evidence())
    assert verdict.verdict == "contradicted"
    assert verdict.effect.value == pytest.approx(1, abs=0.01)
    taken = {row["learning_rate"] for row in table.runs if row["run_id"] in verdict.run_ids}
    assert taken == {1e-3, 4e-3}
    assert (verdict.effect.n, verdict.n_runs) == (
        2 * len(SEEDS),
        2 * 2 * len(SEEDS) + len(SEEDS) * 2,
    )


def test_a_best_rate_that_is_tuned_in_one_group_alone_takes_each_run_once(world):
    """0.001 lies inside the grid of one cadence of evaluations, and is the lowest of the other."""
    table = world()
    for group, rates in enumerate(((5e-4, 1e-3, 2e-3), (1e-3, 2e-3, 4e-3))):
        cadence = {"evaluation.every_samples": 64 * (group + 1)}
        add_reaches(table, group, rates, 1e-3, sweep_dir=f"sweep-{group}", **cadence)
    verdict = judged("too-small-unstable", table.evidence())
    assert verdict.verdict == "contradicted"
    assert (verdict.effect.n, verdict.n_runs) == (2 * len(SEEDS), 2 * 2 * len(SEEDS))
    assert verdict.effect.note == "learning rates were not tuned for each global batch"


def test_without_targets_no_claim_on_them_is_judged_and_all_others_are(world):
    """Rates vary and no target was chosen, as where no run reached one."""
    table = world()
    add_reaches(table, 0, (5e-4, 1e-3, 2e-3), 1e-3, peak_allocated_gib=1.0)
    evidence = replace(table.evidence(), reaches=None)
    verdicts = {verdict.claim.id: verdict for verdict in judge_claims(evidence)}
    assert verdicts["fewer-updates-slower-convergence"].n_runs == 0
    # One micro-batch: its claim asks for others, and for no seeds.
    assert "along the micro-batch" in verdicts["memory-follows-micro"].explanation.lower()
    assert verdicts["memory-follows-micro"].settle == BY_ID["memory-follows-micro"].settle


def test_a_noise_scale_whose_interval_ends_at_0_bounds_the_ratio_from_below(world):
    table = filled(world, "noise-scale-tells-critical-batch", holds=True)
    (scale,) = {len(frame) for frame in table.steps if frame["small_batch_size"].eq(2).all()}
    squares = iter((0.8, 1.05, 1.3, 0.9))
    for frame in table.steps:
        if frame["small_batch_size"].eq(2).all():
            frame["gradient_norm"] = 1.0
            frame["small_gradient_square"] = next(squares)
    verdict = judged("noise-scale-tells-critical-batch", table.evidence())
    assert scale == 1536 // 4
    assert verdict.verdict == "contradicted"
    assert 2 < verdict.effect.low < verdict.effect.value < verdict.effect.high == np.inf


@pytest.mark.parametrize("valid", [True, False])
def test_batches_that_differ_in_their_micro_batch_are_not_held_against_each_other(world, valid):
    """The micro-batch grows with the batch: a time may be that of the cut, a sample is none."""
    table = world()
    for seed in SEEDS:
        for batch, least in ((8, 1000), (64, 3000)):
            samples = least * jitter(seed, batch)
            more = {"reach_s": samples} if valid else MINE
            table.run((1, batch, 1), seed, reach=samples, **more)
    verdict = judged("fewer-updates-slower-convergence", table.evidence())
    assert verdict.verdict == "not identified"
    assert not verdict.effect.is_identified
    assert not verdict.is_own, "it takes other cuts, and no times of these"
    assert verdict.settle.startswith(BY_ID["fewer-updates-slower-convergence"].settle)


def test_times_at_one_micro_batch_decide(world):
    """Three times the samples, and a time a sample of a tenth: the largest batch is faster."""
    for cost, expected, ratio in ((1.0, "supported", 3.0), (0.1, "contradicted", 0.3)):
        table = world()
        for seed in SEEDS:
            for steps, least, time in ((1, 1000, 1.0), (8, 3000, cost)):
                samples = least * jitter(seed, steps)
                table.run((1, 8, steps), seed, reach=samples, reach_s=samples * time)
            # Faster than all, by its micro-batch; untimed, on other devices: no part in it.
            table.run((1, 64, 1), seed, reach=3000.0, reach_s=1.0)
            table.run((4, 8, 2), seed, reach=3000.0, **{"launch.timing_valid": False})
        verdict = judged("fewer-updates-slower-convergence", table.evidence())
        assert verdict.verdict == expected
        assert verdict.effect.value == pytest.approx(ratio, rel=0.01)
        assert verdict.effect.definition.startswith("ratio of the time to a loss of 2")


def test_smaller_batches_share_the_level(world):
    """One of four, tested alone, would tell; Bonferroni over them leaves it open."""
    apart = np.array([0.117, 0.145, 0.173])
    assert stats.t.interval(0.95, 2, apart.mean(), stats.sem(apart))[0] > np.log(1.05)
    table = world()
    for seed, less in enumerate(apart):
        for steps in (1, 2, 4, 8, 16):
            time = float(np.exp(-less)) if steps == 1 else 1.0
            table.run((1, 8, steps), seed, reach=1000.0, reach_s=time)
    verdict = judged("fewer-updates-slower-convergence", table.evidence())
    assert verdict.verdict == "not identified"
    assert verdict.effect.n == 3


def test_a_batch_that_shares_no_seed_leaves_the_claim_open(world):
    """It ran with other seeds, and might turn the answer."""
    for others in ((), (5, 6, 7)):
        table = world()
        for seed in SEEDS:
            table.run((1, 8, 4), seed, reach=1000.0, reach_s=10.0 + seed / 100)
            table.run((1, 8, 8), seed, reach=1000.0, reach_s=5.0)
        for seed in others:
            table.run((1, 8, 1), seed, reach=1000.0, reach_s=1.0)
        verdict = judged("fewer-updates-slower-convergence", table.evidence())
        assert verdict.verdict == ("not identified" if others else "contradicted")
        if others:
            assert "1 of 2 comparisons: fewer than 3 pairs of runs" in verdict.explanation


def test_a_variance_that_the_records_only_divide_by_the_batch_is_not_measured(
    world,
):
    table = filled(world, "large-batch-less-variance", holds=True)
    for number, frame in enumerate(table.steps):
        # tr(S) of the records is 8 for every batch, so that tr(S)/B falls as 1/B; the norms do not.
        big, small = frame["global_batch_size"], frame["small_batch_size"]
        norm = 1 + 0.01 * np.random.default_rng(number).normal(size=len(frame)) * big**0.25
        frame["gradient_norm"] = norm
        frame["small_gradient_square"] = norm**2 + 8 * (1 / small - 1 / big)
    verdict = judged("large-batch-less-variance", table.evidence())
    assert verdict.verdict == "contradicted"
    assert "tr(S)/B puts the 1/B in" in verdict.explanation


def test_a_steady_drift_of_the_gradient_is_no_variance(world):
    plain, drifting = (filled(world, "large-batch-less-variance", holds=True) for _ in range(2))
    for frame in drifting.steps:
        frame["gradient_norm"] += 1e-3 * frame["samples"]
    one, other = (
        judged("large-batch-less-variance", table.evidence()) for table in (plain, drifting)
    )
    assert other.effect.value == pytest.approx(one.effect.value, rel=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "decompositions-are-equivalent",
        "accumulation-equals-large-batch",
        "too-large-generalises-worse",
    ],
)
def test_several_margins_leave_no_verdict(world, name):
    table = filled(world, name, holds=True)
    for number, row in enumerate(table.runs):
        row["measure.equivalence_margin"] = 0.005 if number % 2 else 0.01
    verdict = judged(name, table.evidence())
    assert verdict.verdict == "not identified"
    assert "several margins (0.005, 0.01)" in verdict.explanation


@pytest.mark.parametrize(
    "name", ["decompositions-are-equivalent", "accumulation-equals-large-batch"]
)
def test_runs_that_depend_on_their_cut_are_left_out(world, name):
    table = filled(world, name, holds=True)
    for seed in SEEDS:
        table.run((1, 4, 8), seed, final_eval_loss=9.0, not_invariant="dropout 0.1")
    verdict = judged(name, table.evidence())
    assert verdict.verdict == "supported"
    assert not {row["run_id"] for row in table.runs[-4:]} & set(verdict.run_ids)


def test_the_proportion_of_the_batch_is_by_definition(world):
    table = filled(world, "devices-scale-batch-linearly", holds=True)
    verdict = judged("devices-scale-batch-linearly", table.evidence())
    assert "by definition" in verdict.explanation


def test_a_cut_that_is_timed_alone_tells_its_time_and_no_loss(world):
    """It stopped early, so that its loss is not to be held against that of a whole training."""
    table = world()
    for seed in SEEDS:
        for cut, recorded in cuts(True, seed):
            end = (None, 2.0) if cut == (1, 32, 1) else (40, 9.0)
            table.run(cut, seed, timed_steps=end[0], final_eval_loss=end[1], **recorded)
    evidence = table.evidence()
    assert judged("micro-before-accumulation", evidence).verdict == "supported"
    equivalent = judged("decompositions-are-equivalent", evidence)
    assert equivalent.n_runs == 0
    assert "no context has the runs it needs" in equivalent.explanation.lower()


def test_one_slow_place_of_many_may_be_chance(world):
    def table(places: int) -> Verdict:
        made = world()
        for seed in SEEDS:
            for place in range(places):
                micro = 4 * (place + 1)
                made.run((1, 4 * micro, 1), seed, step_time_s=1.0 + 1e-4 * seed)
                slow = 1.12 + 0.05 * (seed - 1.5) / 1.5 if place == 0 else 1.0
                made.run((1, micro, 4), seed, step_time_s=slow)
        return judged("accumulation-4-or-8", made.evidence())

    assert table(1).verdict == "contradicted"
    assert table(20).verdict == "not identified"


def test_diverged_runs_show_instability(world):
    table = world()
    for seed in range(6):
        for batch in (4, 16, 64):
            status = "diverged" if batch == 4 and seed < 5 else "completed"
            curve = falling(batch) * jitter(seed, batch)
            curve = curve[: len(curve) // 4] if status == "diverged" else curve
            table.run((1, batch, 1), seed, curve=curve, status=status, final_loss=curve[-1])
    verdict = judged("too-small-unstable", table.evidence())
    assert "5 of 6 at 4" in verdict.explanation
    assert verdict.verdict == "supported"


def test_seeds_that_all_diverge_show_instability_and_cuts_do_not_multiply_them(
    world,
):
    def table(seeds: int) -> Any:
        made = world()
        for seed in range(seeds):
            for cut in [(1, 4, 1), (1, 2, 2), (1, 1, 4)]:
                made.run(cut, seed, status="diverged")
            made.run((1, 64, 1), seed, curve=falling(64), final_loss=1.0 + 0.01 * seed)
        return made

    verdict = judged("too-small-unstable", table(4).evidence())
    assert verdict.verdict == "supported"
    assert verdict.effect.value == 1
    # Three cuts of a seed are one seed.
    assert verdict.effect.n == 4
    assert "Beware: learning rates were not tuned for each global batch." in verdict.explanation
    assert judged("too-small-unstable", table(2).evidence()).verdict == "not identified"


def test_a_seed_in_which_both_batches_diverge_tells_nothing(world):
    """Two of six diverge at 4 and at 16: the other seeds are alike, and 4 is not called stable."""
    for lost, n in ((2, 4), (6, 0)):
        table = world()
        for seed in range(6):
            for batch in BATCHES:
                status = "diverged" if batch < 64 and seed < lost else "completed"
                table.run((1, batch, 1), seed, curve=falling(batch), status=status)
        verdict = judged("too-small-unstable", table.evidence())
        assert verdict.verdict == "not identified"
        assert verdict.effect.n == n
        assert verdict.n_runs == 2 * n


def test_no_rise_is_larger_than_that_of_a_middle_batch_that_diverged(world):
    """The smallest rises by more than its loss at the start, and yet never diverges."""
    table = world()
    for seed in SEEDS:
        for batch in BATCHES:
            curve = falling(batch) * jitter(seed, batch)
            if batch == 4:
                curve[200:260] *= 5
            status = "diverged" if batch == 16 else "completed"
            table.run((1, batch, 1), seed, curve=curve, status=status)
    verdict = judged("too-small-unstable", table.evidence())
    assert verdict.verdict != "supported"
    assert verdict.effect.value <= 0


def test_rises_of_runs_that_diverged_have_no_interval(world):
    """They are one constant, whose spread of 0 says nothing."""
    table = world()
    for seed in SEEDS:
        for batch in BATCHES:
            status = "diverged" if batch == 4 else "completed"
            table.run((1, batch, 1), seed, curve=falling(batch), status=status)
    verdict = judged("too-small-unstable", table.evidence())
    assert (verdict.verdict, verdict.effect.value) == ("supported", 1)
    assert math.isnan(verdict.effect.low)
    assert math.isnan(verdict.effect.high)
    assert verdict.effect.method == "no interval; diverged: 4 of 4 at 4, 0 of 4 at 16"
    assert "[" not in verdict.explanation


@pytest.mark.parametrize(("off", "expected"), [(0.5, "contradicted"), (0.0, "supported")])
@pytest.mark.parametrize("first", [[(1, 32, 1), (1, 8, 4)], [(1, 16, 2), (1, 8, 4)]])
def test_accumulation_is_compared_on_every_number_of_devices(world, first, off, expected):
    """One device has a cut without accumulation, or none; on four, accumulation ends `off`."""
    table = world()
    for seed in SEEDS:
        for cut in [*first, (4, 8, 1), (4, 4, 2)]:
            loss = 2 + 0.1 * seed + off * (cut == (4, 4, 2))
            table.run(cut, seed, final_eval_loss=loss + 1e-5 * (jitter(seed, *cut, size=1) - 1))
    verdict = judged("accumulation-equals-large-batch", table.evidence())
    assert verdict.verdict == expected
    assert verdict.effect.value == pytest.approx(off, abs=1e-3)
    assert f"Farthest of {1 + (first[0][2] == 1)}: " in verdict.explanation


@pytest.mark.parametrize(
    "name", ["decompositions-are-equivalent", "accumulation-equals-large-batch"]
)
def test_a_cut_that_alone_diverged_is_not_equivalent(world, name):
    table = filled(world, name, holds=True)
    cut = {"data_parallel_size": 1, "gradient_accumulation_steps": 4}
    lone = next(row for row in table.runs if cut.items() <= row.items())
    lone["status"] = "diverged"
    verdict = judged(name, table.evidence())
    assert verdict.verdict == "not identified"
    assert "diverged under one cut" in verdict.explanation


def test_a_cut_that_diverged_against_another_than_the_reference_is_not_equivalent(
    world,
):
    """On the last seed the reference failed, one other cut diverged, and one completed."""
    table = world()
    for seed in SEEDS:
        for cut, last in (
            ((1, 32, 1), "failed"),
            ((1, 8, 4), "completed"),
            ((2, 8, 2), "diverged"),
        ):
            status = last if seed == SEEDS[-1] else "completed"
            ended = {"final_eval_loss": 2 + 0.1 * seed} if status == "completed" else {}
            table.run(cut, seed, status=status, **ended)
    verdict = judged("decompositions-are-equivalent", table.evidence())
    assert verdict.verdict == "not identified"
    words = "1 of 4 trajectories diverged under one cut and not under another."
    assert words in verdict.explanation


@pytest.mark.parametrize(
    "name", ["decompositions-are-equivalent", "accumulation-equals-large-batch"]
)
def test_a_reference_that_always_diverged_is_said(world, name):
    table = world()
    for seed in SEEDS[:3]:
        table.run((1, 32, 1), seed, status="diverged")
        table.run((1, 8, 4), seed, final_eval_loss=2 + 0.1 * seed)
    verdict = judged(name, table.evidence())
    assert verdict.verdict == "not identified"
    words = "3 of 3 trajectories diverged under one cut and not under another."
    assert words in verdict.explanation


def test_a_repeat_of_a_trajectory_counts_once(world):
    table = world()
    for seed in SEEDS:
        table.run((1, 32, 1), seed, final_eval_loss=1.0)
        for folder, loss in (("one", 1.0), ("other", 1.02)):
            table.run((1, 8, 4), seed, sweep_dir=folder, final_eval_loss=loss)
    for name in ("decompositions-are-equivalent", "accumulation-equals-large-batch"):
        verdict = judged(name, table.evidence())
        assert verdict.verdict == "supported", verdict.explanation
        assert verdict.effect.value == pytest.approx(0, abs=1e-12)
        assert (verdict.effect.n, verdict.n_runs) == (4, 8)


def test_a_loss_that_was_infinite_once_makes_no_rise(world):
    for place in (0, 100):
        table = filled(world, "too-small-unstable", holds=True)
        table.steps[0].loc[place, "loss"] = np.inf
        verdict = judged("too-small-unstable", table.evidence())
        assert verdict.verdict == "supported", verdict.explanation
        assert 0 < verdict.effect.value < 1
        assert verdict.effect.n == len(SEEDS)


def test_runs_without_a_value_are_not_behind_a_verdict(world):
    """Another cut of the smallest batch has no curve, so that it has no rise."""
    table = filled(world, "too-small-unstable", holds=True)
    for seed in SEEDS:
        table.run((1, 2, 2), seed, final_loss=1.0)
    bare = filled(world, "too-small-unstable", holds=True)
    found, expected = (judged("too-small-unstable", one.evidence()) for one in (table, bare))
    assert found.verdict == expected.verdict == "supported"
    assert found.run_ids == expected.run_ids
    assert found.n_runs == 2 * len(SEEDS)


def test_what_lacks_pairs_along_the_global_batch_is_called_so(world):
    table = world()
    for seed in SEEDS:
        for micro in (8, 32):
            table.run((1, micro, 1), seed, peak_allocated_gib=micro * jitter(seed, micro))
    verdict = judged("memory-follows-micro", table.evidence())
    assert verdict.explanation.startswith("Along the global batch, ")


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        *((name, True) for name in LISTED),
        ("decompositions-are-equivalent", False),
        ("accumulation-equals-large-batch", False),
    ],
)
def test_two_seeds_settle_nothing_but_equivalence(world, name, holds):
    verdict = judged(name, filled(world, name, holds, seeds=SEEDS[:2]).evidence())
    assert "[" not in verdict.explanation
    if name in {"decompositions-are-equivalent", "accumulation-equals-large-batch"}:
        assert verdict.verdict == ("supported" if holds else "contradicted")
        assert "Judged from 2 pairs of runs, as its rule allows" in verdict.explanation
        assert "two seeds" in verdict.claim.needs
        return
    assert verdict.verdict == "not identified"
    assert not verdict.effect.is_identified
    assert verdict.settle
    if name != "learning-rate-grows-with-batch":
        assert "(n = 2; 3 needed)" in verdict.explanation


def test_more_devices_than_16_do_not_beat_musev(world):
    table = filled(world, "musev-224", holds=True)
    for seed in SEEDS:
        table.run((32, 7, 1), seed, step_time_s=1e-3, peak_allocated_gib=1e-3)
    assert judged("musev-224", table.evidence()).verdict == "supported"


def test_one_epoch_cannot_show_a_generalisation_gap(world):
    table = filled(world, "too-large-generalises-worse", holds=True)
    for row in table.runs:
        row["train_samples"] = 10_000.0
    verdict = judged("too-large-generalises-worse", table.evidence())
    assert verdict.verdict == "not identified"
    assert "0.13 times" in verdict.explanation


def test_an_open_interval_asks_for_more_seeds(world):
    table = world()
    for seed in (0, 1, 2):
        for cut in [(1, 32, 1), (1, 8, 4)]:
            table.run(cut, seed, step_time_s=jitter(seed, *cut, size=0.2))
    verdict = judged("micro-before-accumulation", table.evidence())
    assert verdict.verdict == "not identified"
    assert verdict.settle is not None
    assert verdict.settle.endswith("seed=0,1,2,3,4,5,6,7,8,9")


def test_an_open_exponent_asks_for_more_seeds_than_there_are(world):
    """Its effect counts global batches, of which there are three."""
    table, seeds = world(), range(7)
    for seed in seeds:
        for batch in BATCHES:
            best = 1e-3 * jitter(seed, batch, size=0.3)
            for rate in 10.0 ** np.arange(-4, -1.5, 0.5):
                loss = 2 + np.log(rate / best) ** 2
                table.run((1, batch, 1), seed, rate=rate, final_eval_loss=loss)
    verdict = judged("learning-rate-grows-with-batch", table.evidence())
    assert (verdict.verdict, verdict.effect.n) == ("not identified", 3)
    assert str(verdict.settle).endswith(f" seed={','.join(map(str, range(2 * len(seeds))))}")


@pytest.mark.parametrize("noise", [0.05, 2.0])
def test_the_exponent_of_a_claim_is_that_of_the_report(world, noise):
    table = world()
    for seed in SEEDS:
        for batch in (4, 8, 16, 64, 4096):  # the last one's best rate is beyond the grid
            for rate in 10.0 ** np.arange(-4, 1, 0.5):
                far = np.log(rate / (1e-3 * batch * jitter(seed, batch, size=noise / 10))) ** 2
                table.run((1, batch, 1), seed, rate=rate, final_eval_loss=2 + far)
    evidence = table.evidence()
    verdict = judged("learning-rate-grows-with-batch", evidence)
    section = learning_rate_section(evidence.reaches, final_losses(evidence.cells.runs))
    expected = section.headlines["learning_rate_exponent"]
    assert verdict.effect.is_identified
    assert verdict.effect.text() == expected.text()
    assert (verdict.effect.n, verdict.effect.method) == (expected.n, expected.method)
    assert (verdict.effect.n, verdict.n_runs) == (4, 4 * 10 * len(SEEDS))


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted({claim.settle for claim in CLAIMS}))
def test_the_command_that_settles_it_is_a_plan(command):
    def prepare(config: DataSettings) -> DataIdentity:
        return DataIdentity(config.name, "nowhere", 100_000, 10_000, 256, task="next_token")

    grid = compose([*command.split()[2:], "seed=0,1,2,3"], "batchscape sweep")
    assert grid is not None
    specs = make_plan(grid, Machine(16, "cores"), prepare).specs
    assert {spec.config.seed for spec in specs} == {0, 1, 2, 3}
    assert len({spec.geometry for spec in specs}) > 1


def test_the_judgement_of_real_folders(build):
    tables = load(build().fork().path)
    evidence = Evidence(find_cells(tables.runs), tables.steps, tables.evals, tables.ranks)
    verdicts = {verdict.claim.id: verdict for verdict in judge_claims(evidence)}
    assert set(verdicts) == set(LISTED)
    assert verdicts["decompositions-are-equivalent"].verdict == "supported"
    assert verdicts["decompositions-are-equivalent"].n_runs == 12
    assert verdicts["rank0-costs-memory"].verdict == "not identified"
    assert verdicts["musev-224"].verdict == "not identified"


def test_reaches_without_their_columns_are_refused(world):
    table = filled(world, "fewer-updates-slower-convergence", holds=True)
    for row in table.reaches:
        del row["outcome"]
    with pytest.raises(AnalysisError, match="needs the columns outcome"):
        table.evidence()


MICRO, STEPS = operator.itemgetter(1), operator.itemgetter(2)
LEVEL_OF: dict[str, Callable[[Sequence[int]], object]] = {
    "memory-follows-micro": MICRO,
    "accumulation-costs-memory": STEPS,
    "microstep-time-follows-micro": MICRO,
    "micro-before-accumulation": STEPS,
    "global-batch-is-free-per-iteration": STEPS,
    "fewer-updates-slower-convergence": math.prod,
    "decompositions-are-equivalent": tuple,
    "accumulation-equals-large-batch": STEPS,
    "too-small-unstable": math.prod,
    "too-large-generalises-worse": math.prod,
    "learning-rate-grows-with-batch": math.prod,
    "large-batch-less-variance": math.prod,
    "accumulation-4-or-8": STEPS,
    "musev-224": tuple,
}
"""What of a cut a claim is about: the factor that is compared."""
SAME_TRAINING = {"decompositions-are-equivalent", "accumulation-equals-large-batch"}
"""Claims whose pairs are one trajectory, which is the same training in every sweep."""
OF_RATES = "learning-rate-grows-with-batch"
"""Its optima have intervals of their own, so that batches need no seeds in common."""
OF_A_CUT = {
    "accumulation-costs-memory",
    "micro-before-accumulation",
    "global-batch-is-free-per-iteration",
    "fewer-updates-slower-convergence",
}
"""Claims that every other number of the cut confounds; of the others it is part of the claim, or
no loss depends on it."""
OF_LOSSES = {
    "fewer-updates-slower-convergence",
    "too-small-unstable",
    "too-large-generalises-worse",
    "learning-rate-grows-with-batch",
    "large-batch-less-variance",
}
"""Claims about global batches, whose runs need not be one training."""
SETTINGS = {
    "model": "model.n_layers",
    "engine": "engine.name",
    "precision": "precision",
    "hardware": "hardware",
    "data": "data.name",
    "optimizer": "optimizer.name",
    "schedule": "schedule.name",
    "weight decay": "optimizer.weight_decay",
}


def confound(world: Any, name: str, confounder: str) -> Any:
    """Have another factor change with every level of the one that a claim is about."""
    level_of, run, levels = LEVEL_OF[name], world.run, []

    def run_confounded(cut: Any, seed: int, **more: Any) -> None:
        level = level_of(cut)
        if level not in levels:
            levels.append(level)
        number = levels.index(level)
        if confounder == "sweep":
            more["sweep_dir"] = f"sweep-{number}"
        elif confounder == "seeds":
            seed += 10 * number
        elif confounder == "timing repeat":
            more["timing_repeat"] = number
        elif confounder == "learning rate":
            more["rate"] = 1e-3 * 2**number
        elif confounder == "batch normalisation and micro-batch":
            more["not_invariant"] = "batch normalisation"
            cut = (1, level, 1)
        elif confounder in SETTINGS:
            is_number = confounder in {"model", "weight decay"}
            more[SETTINGS[confounder]] = number if is_number else f"{confounder} {number}"
        else:
            place = {"devices": 0, "micro-batch": 1}[confounder]
            factor = 3**number  # no cut is met again
            cut = tuple(n * (factor if i == place else 1) for i, n in enumerate(cut))
        run(cut, seed, **more)

    world.run = run_confounded
    return world


CONFOUNDED = [
    *((name, "seeds") for name in LEVEL_OF if name != OF_RATES),
    *((name, "sweep") for name in LEVEL_OF if name not in {*SAME_TRAINING, OF_RATES}),
    *((name, what) for name in OF_A_CUT for what in ("devices", "micro-batch", "sweep")),
    # Settings separate contexts in one place: one claim of each view tries them all.
    *((name, "model") for name in LEVEL_OF),
    *((name, "weight decay") for name in OF_LOSSES),
    *(("large-batch-less-variance", what) for what in SETTINGS),
    *(("fewer-updates-slower-convergence", what) for what in SETTINGS),
    *(
        ("micro-before-accumulation", what)
        for what in ("engine", "precision", "hardware", "data", "optimizer")
    ),
    *((name, "timing repeat") for name in OF_A_CUT - OF_LOSSES),
    *((name, "learning rate") for name in OF_LOSSES - {OF_RATES}),
    ("too-small-unstable", "batch normalisation and micro-batch"),
    ("too-large-generalises-worse", "batch normalisation and micro-batch"),
    ("learning-rate-grows-with-batch", "batch normalisation and micro-batch"),
]


@pytest.mark.parametrize(("name", "confounder"), sorted(set(CONFOUNDED)))
def test_a_confounded_claim_is_not_identified(world, name, confounder):
    table = fill(confound(world(), name, confounder), name, holds=True)
    verdicts = BY_ID[name].judge(table.evidence())
    assert {verdict.verdict for verdict in verdicts} == {"not identified"}


@pytest.mark.parametrize("apart", ["sweep", "seeds"])
def test_best_rates_need_neither_one_sweep_nor_equal_seeds(world, apart):
    """As the pages on claims and numbers say of this claim alone."""
    table = fill(confound(world(), OF_RATES, apart), OF_RATES, holds=True)
    assert judged(OF_RATES, table.evidence()).verdict == "supported"


def test_a_rate_that_a_rule_makes_for_each_batch_confounds_nothing(
    world,
):
    """One rate was set, and the rule is a setting that all runs share."""
    table = filled(world, "large-batch-less-variance", holds=True)
    for row in table.runs:
        row["learning_rate"] *= row["global_batch_size"] ** 0.5
    assert judged("large-batch-less-variance", table.evidence()).verdict == "supported"


def test_a_ratio_between_unequal_micro_batches_is_not_that_of_the_batch(
    world,
):
    """1 x 8 x 16 at 128 takes 3.18 times as long as 1 x 32 x 1 at 32; as 1 x 8 x 4 1.15 times."""
    table = world()
    for seed in SEEDS:
        off = 1 + 0.3 * np.random.default_rng(seed).normal()
        for cut, time in (((1, 32, 1), 1.0), ((1, 8, 4), 2.77 * off), ((1, 8, 16), 3.18)):
            table.run(cut, seed, reach=1000.0, reach_s=time)
    verdict = judged("fewer-updates-slower-convergence", table.evidence())
    assert verdict.verdict == "not identified"
    assert verdict.effect.low < 1 < verdict.effect.high < 3.18
    assert "global batch 128 against 32" in verdict.effect.definition


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_sweep_of_one_micro_batch_is_asked_for_another_and_not_for_seeds(world, seeds):
    table = world()
    for seed in range(seeds):
        for cut in ((1, 8, 1), (1, 8, 4)):
            command = {"launch.command": "batchscape sweep sweeps=mine"}
            table.run(cut, seed, peak_allocated_gib=1.0, **command)
    verdict = judged("memory-follows-micro", table.evidence())
    assert verdict.verdict == "not identified"
    assert verdict.explanation.startswith(
        "Along the micro-batch, nothing can be compared: the claim needs two micro-batches at one "
    )
    assert (verdict.settle, verdict.is_own) == (verdict.claim.settle, False)
    assert "micro_batch_size=8,32" in verdict.settle
