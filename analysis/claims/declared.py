"""The claims, each declared with its rule before any run is looked at.

They come from four practitioners' write-ups: an article on LitGPT's batch settings (000), notes on
Chinese-LLaMA-Alpaca-2 (001) and on MuseV (002), and an article on the formula of the global batch
(003). What is said of batches that grow comes from papers. Thresholds are ours, and stand beside
the rules as constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import log

from batchscape.analysis.claims.claim import Claim, Rule, Verdict
from batchscape.analysis.claims.costs import (
    BATCH,
    DEVICES,
    MICRO,
    STEPS,
    against_musev,
    along,
    asked,
    exposed_share,
    highest_to_lowest,
    itself,
    log_of,
    log_per_micro_step,
    of_rank_0,
    to_1,
    typical_to_others,
)
from batchscape.analysis.claims.evidence import Evidence
from batchscape.analysis.claims.rules import (
    EQUIVALENCE_FEWEST,
    Test,
    above,
    below,
    equal,
    every,
    some,
    within_factor,
)
from batchscape.analysis.claims.training import (
    LEAST,
    RISE,
    at_equal_training_loss,
    of_best_rates,
    of_cuts,
    of_growing_batches,
    of_late_switching,
    of_noise_scale,
    of_rises,
    of_times_to_target,
    of_variance,
)
from batchscape.analysis.comparing.pairs import Contrast

_LITGPT = "LitGPT article (000)"
_MUSEV = "MuseV article (002)"
_GRID = (
    "batchscape sweep sweeps=vary_micro_batch batch.micro_batch_size=8,32 "
    "batch.gradient_accumulation_steps=1,4 evaluation.every_samples=896"
)

_PEAK, _TIME = log_of("peak_allocated_gib"), log_of("step_time_s")
_MICRO_STEP = log_per_micro_step("forward_backward_s")

_GOOD = log(1.05)
"""A cut that is slower by less than 5 % than every other counts as good: ours."""

_EQUIVALENT = (
    "Farthest of {n_cuts}: {cuts}; alike means that every 90 % interval lies within {margin} nats."
)


Compare = Callable[[Contrast, float], Test]


def _all(test: Compare, bound: float | None = None) -> Rule:
    """Ask a test of all contrasts; its bound is the margin of their runs where none is given."""
    return lambda contrasts, margin: every(
        [test(contrast, margin if bound is None else bound) for contrast in contrasts]
    )


def _one(test: Compare, bound: float | None = None) -> Rule:
    """Ask a test of one contrast or more."""
    return lambda contrasts, margin: some(
        [test(contrast, margin if bound is None else bound) for contrast in contrasts]
    )


_ALIKE = partial(equal, fewest=EQUIVALENCE_FEWEST)


def _one_is_good(contrasts: Sequence[Contrast], _: float) -> Test:
    """Everywhere one of the levels is not slower than any base by more than `_GOOD`."""
    places: dict[object, dict[object, list[Test]]] = {}
    for contrast in contrasts:
        levels = places.setdefault(contrast.place, {})
        levels.setdefault(contrast.level, []).append(below(contrast, _GOOD))
    return every([some([*map(every, levels.values())]) for levels in places.values()])


def _rises_more(contrasts: Sequence[Contrast], _: float) -> Test:
    """The first half is tested, and the second half says how large it is."""
    half = len(contrasts) // 2
    sides = zip(contrasts[:half], contrasts[half:], strict=True)
    return some([above(rise, RISE, reported=size) for rise, size in sides])


def _none_is_better(contrasts: Sequence[Contrast], _: float) -> Test:
    """No cut has a time (first half) lower by `_GOOD` without a peak (second half) higher by it."""
    half = len(contrasts) // 2
    cuts = zip(contrasts[:half], contrasts[half:], strict=True)
    return every(
        [some([above(time, -_GOOD), above(peak, _GOOD, reported=time)]) for time, peak in cuts]
    )


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="memory-follows-micro",
        statement="Peak device memory depends on the micro-batch alone, not on the global batch",
        source=_LITGPT,
        needs="two micro-batches at one accumulation, and two global batches at one micro-batch",
        effect="ratio of peak allocated memory, along each of the two",
        rule="supported: every peak grows by more than 5 % from the smallest to the largest "
        "micro-batch, and every peak at a fixed micro-batch is equal within 5 % (TOST) whatever "
        "accumulation and devices; contradicted: one of the two is refuted",
        settle=_GRID,
        view="cost",
        result=asked(
            {
                "global batch": along(STEPS, DEVICES, value=_PEAK),
                "micro-batch": along(MICRO, value=_PEAK, which=highest_to_lowest),
            }
        ),
        definition="ratio of peak allocated memory",
        rules={"global batch": _all(equal, log(1.05)), "micro-batch": _all(above, log(1.05))},
        says="Along the micro-batch: {micro-batch}; along the global batch at a fixed micro-batch, "
        "worst of {n_global batch}: {global batch}. Equal means within 5 %.",
    ),
    Claim(
        id="accumulation-costs-memory",
        statement="Accumulation stores gradients between micro-steps, so it costs slightly more "
        "memory than A = 1",
        source="MuseV article (002), formula article (003)",
        needs="accumulation of 1 and of more, at one micro-batch and number of devices",
        effect="ratio of peak allocated memory, A > 1 to A = 1",
        rule="supported: every peak at A > 1 is more than 0.5 % above that at A = 1; contradicted: "
        "one is less than that",
        settle=_GRID,
        view="cost",
        result=asked({"cost": along(STEPS, value=_PEAK, which=to_1)}),
        definition="ratio of peak allocated memory",
        rules={"cost": _all(above, log(1.005))},
        says="Least of {n_cost}: {cost}; a cost is more than 0.5 %.",
    ),
    Claim(
        id="rank0-costs-memory",
        statement="In multi-device training the first device needs extra memory",
        source=_MUSEV,
        needs="runs on two GPUs or more: no sweep on a processor settles it, which has one memory "
        "for all ranks and no driver that tells theirs",
        effect="ratio of memory of the device, as its driver tells, rank 0 to the mean of the "
        "others",
        rule="supported: rank 0 holds more than 1 % more in every geometry; contradicted: in one "
        "it holds less than that",
        settle="batchscape sweep sweeps=device_scaling",
        view="cost",
        result=asked({"extra": of_rank_0}),
        definition="ratio of memory of the device",
        rules={"extra": _all(above, log(1.01))},
        says="Least of {n_extra} geometries: {extra}; extra means more than 1 %.",
    ),
    Claim(
        id="microstep-time-follows-micro",
        statement="Time of one forward/backward depends mainly on the micro-batch",
        source=_LITGPT,
        needs="valid times at two micro-batches, and at two accumulations of one micro-batch",
        effect="ratio of forward and backward time over accumulation, along each of the two",
        rule="supported: it grows by more than 10 % along the micro-batch everywhere, and is equal "
        "within 10 % (TOST) along accumulation; contradicted: one of the two is refuted",
        settle=_GRID,
        view="cost",
        result=asked(
            {
                "micro-batch": along(MICRO, value=_MICRO_STEP, which=highest_to_lowest),
                "accumulation": along(STEPS, value=_MICRO_STEP),
            }
        ),
        definition="ratio of forward and backward time of a micro-step",
        rules={"micro-batch": _all(above, log(1.1)), "accumulation": _all(equal, log(1.1))},
        says="Along the micro-batch: {micro-batch}; along accumulation, worst of {n_accumulation}: "
        "{accumulation}. Mainly means growth of more than 10 % along the one and equality within "
        "10 % along the other.",
    ),
    Claim(
        id="micro-before-accumulation",
        statement="At a fixed global batch, a larger micro-batch with less accumulation is faster",
        source="001, 002, 003",
        needs="valid times of two accumulations at one global batch and number of devices",
        effect="ratio of step times, most accumulation to least",
        rule="supported: slower by more than 2 % for every global batch and number of devices; "
        "contradicted: for one of them it is slower by less, or faster",
        settle="batchscape sweep sweeps=fixed_global_batch batch.data_parallel_size=1 "
        "batch.micro_batch_size=4,8,16,32",
        view="cost",
        result=asked(
            {"least": along(STEPS, value=_TIME, which=highest_to_lowest, at=(DEVICES, BATCH))}
        ),
        definition="ratio of the step time at a fixed global batch",
        rules={"least": _all(above, log(1.02))},
        says="Least of {n_least}: {least}; slower means by more than 2 %.",
    ),
    Claim(
        id="global-batch-is-free-per-iteration",
        statement="Raising the global batch at a fixed micro-batch leaves the time of an iteration "
        "(micro-step) alone",
        source=_LITGPT,
        needs="valid times of two accumulations at one micro-batch and number of devices",
        effect="ratio of step time over accumulation",
        rule="supported: equal within 10 % (TOST) everywhere; contradicted: outside somewhere",
        settle=_GRID,
        view="cost",
        result=asked({"worst": along(STEPS, value=log_per_micro_step("step_time_s"))}),
        definition="ratio of the time of an iteration (step time over accumulation)",
        rules={"worst": _all(equal, log(1.1))},
        says="Worst of {n_worst}: {worst}; alone means within 10 %. An update comes once in a "
        "step, so that its share falls as accumulation grows.",
    ),
    Claim(
        id="fewer-updates-slower-convergence",
        statement="Raising the global batch lowers the update frequency, so total time to converge "
        "can grow",
        source=_LITGPT,
        needs="two global batches or more at one micro-batch and number of devices that reach a "
        "target loss",
        effect="ratio of time to target, largest global batch to a smaller one, at one micro-batch "
        "and number of devices; without valid times, ratio of samples, to which time is "
        "proportional there but for what an update takes",
        rule="supported: it takes more than 5 % longer than some smaller global batch (Bonferroni "
        "over these); contradicted: not so for any",
        settle="batchscape sweep sweeps=learning_rate batch.global_batch_size=4,8,16,32 "
        "batch.micro_batch_size=2 batch.gradient_accumulation_steps=null "
        "launcher.concurrent_runs=1",
        view="reaching",
        result=of_times_to_target,
        definition="ratio of the {quantity} to a loss of {target}{at}",
        rules={"most": _one(above, log(1.05))},
        says="Largest against the smaller global batches at a loss of {target}, {how}; most, of "
        "{n_most}: {most}; slower means by more than 5 %. {bounds}",
    ),
    Claim(
        id="decompositions-are-equivalent",
        statement="Decompositions of one global batch train alike and differ only in memory and "
        "speed: (devices, micro, accumulation) = (1,32,1), (4,8,1), (2,8,2), (1,8,4)",
        source="formula article (003)",
        needs="two cuts or more of one trajectory, with two seeds, and nothing that depends on the "
        "cut itself (dropout, BatchNorm)",
        effect="paired difference of final held-out loss",
        rule="supported: every paired difference lies within the margin set before launch (TOST); "
        "contradicted: one lies outside",
        settle="batchscape sweep sweeps=fixed_global_batch",
        view="training",
        result=of_cuts(BATCH),
        definition="difference of final loss between two cuts of one trajectory",
        rules={"cuts": _all(_ALIKE)},
        says=_EQUIVALENT,
        unit="nats",
        fewest=EQUIVALENCE_FEWEST,
    ),
    Claim(
        id="accumulation-equals-large-batch",
        statement="Accumulating over A micro-batches and stepping once equals one batch A times "
        "larger: global 8 = micro 4 x 2",
        source="000, 003",
        needs="accumulation of 1 and of more at one global batch and number of devices, with two "
        "seeds, and nothing that depends on the cut itself (dropout, BatchNorm)",
        effect="paired difference of final held-out loss",
        rule="supported: every paired difference lies within the margin set before launch (TOST); "
        "contradicted: one lies outside",
        settle="batchscape sweep sweeps=fixed_global_batch batch.global_batch_size=8 "
        "batch.data_parallel_size=1 batch.micro_batch_size=4,8",
        view="training",
        result=of_cuts(BATCH, DEVICES, from_accumulation=1),
        definition="difference of final loss between accumulation and one large micro-batch",
        rules={"cuts": _all(_ALIKE)},
        says=_EQUIVALENT,
        unit="nats",
        fewest=EQUIVALENCE_FEWEST,
    ),
    Claim(
        id="too-small-unstable",
        statement="Too small a global batch trains unstably",
        source="001, 003",
        needs="two global batches or more, with three seeds",
        effect="largest rise of the training loss above its lowest so far, over 20 windows of the "
        "same samples, as a share of the first, and for a run that diverged 1, or the largest of "
        "all: smallest global batch minus the middle one",
        rule="supported: it rises by 0.02 more; contradicted: it rises by less than that, and the "
        "smallest batch never diverged; a seed in which both diverged tells nothing",
        settle="batchscape sweep sweeps=learning_rate",
        view="training",
        result=of_rises,
        definition="difference of the largest rise of the training loss, over its start",
        rules={"rise": _rises_more},
        says="Largest rise of the training loss above its lowest so far, in {windows} windows of "
        "the same samples, as a share of the loss in the first, 1 or more for a run that "
        "diverged: {rise}; unstable means 0.02 more than the middle batch. Diverged: {counts}.",
    ),
    Claim(
        id="too-large-generalises-worse",
        statement="Too large a global batch generalises worse",
        source="001, 003",
        needs="two global batches or more that went over their training data twice, with three "
        "seeds",
        effect="held-out loss at an equal training loss, largest global batch minus the middle one",
        rule="supported: worse by more than the margin; contradicted: not by that much",
        settle="batchscape sweep sweeps=learning_rate_digits budget.target_loss=null "
        "budget.samples=40960",
        view="training",
        result=at_equal_training_loss,
        definition="difference of held-out loss at an equal training loss",
        rules={"loss": _one(above)},
        says="Held-out loss where the training loss is {level}, which all runs reached, after "
        "{epochs} times over the data: {loss}; worse means by more than {margin} nats. Shallue et "
        "al. 2019 found no such effect once every batch was tuned and trained to the same goal.",
        unit="nats",
    ),
    Claim(
        id="learning-rate-grows-with-batch",
        statement="A larger global batch wants a larger learning rate (linear scaling rule)",
        source="001, 003",
        needs="three learning rates or more at three global batches or more, with three seeds",
        effect="exponent of the best learning rate in the global batch, as in the report's section "
        "on learning rates",
        rule="supported: its 95 % interval is above 0.1; contradicted: below; the rules that lie "
        "in the interval are said beside it",
        settle="batchscape sweep sweeps=learning_rate",
        view="training",
        result=of_best_rates,
        definition="exponent of the best learning rate in the global batch",
        rules={"exponent": _all(above, LEAST)},
        says="As in the report on learning rates: {exponent}; growth means more than 0.1. {rules}",
    ),
    Claim(
        id="large-batch-less-variance",
        statement="A larger global batch lowers the variance of an update",
        source="002",
        needs="two global batches or more, with three seeds",
        effect="exponent, in the global batch, of the variance of the gradient norm from step to "
        "step, without its steady drift",
        rule="supported: below -0.1; contradicted: above; whether -1 lies in the interval is said "
        "beside it; assumed: the norm stands for the gradient, and beside a steady drift all that "
        "it varies by is noise. tr(S)/B of the noise-scale records is not used, since it puts the "
        "1/B in",
        settle="batchscape sweep sweeps=vary_global_batch",
        view="training",
        result=of_variance,
        definition="exponent p of (step-to-step variance of the gradient norm) ~ (global batch)^p",
        rules={"slope": _all(below, -LEAST)},
        says="Of the step-to-step variance of the gradient norm: {slope}; lower means below -0.1. "
        "-1, as for independent samples at the same weights, is {inside}within the interval. The "
        "norm stands for the gradient, of which it is one number; what it drifts by steadily is "
        "taken out, and what the weights move by in other ways is taken for noise. The noise-scale "
        "records are not used: their tr(S)/B puts the 1/B in.",
    ),
    Claim(
        id="devices-scale-batch-linearly",
        statement="More devices or nodes raise the global batch linearly, at a communication cost",
        source="001, 002",
        needs="valid times on several devices",
        effect="share of the step time in exchange that backward did not hide",
        rule="supported: more than 1 % of the step time in every geometry on several devices; "
        "contradicted: less somewhere. That the global batch is in proportion holds by definition, "
        "as a product, and is not tested",
        settle="batchscape sweep sweeps=device_scaling batch.global_batch_size=null "
        "batch.micro_batch_size=8",
        view="cost",
        result=asked({"share": along(STEPS, value=exposed_share, which=itself)}),
        definition="share of the step time in exchange that backward did not hide",
        rules={"share": _all(above, 0.01)},
        says="The global batch is proportional to the number of devices at a fixed micro-batch and "
        "accumulation by definition, as their product, and is not tested: the cost is. Least share "
        "of {n_share}: {share}; a cost means more than 1 % of the step time.",
    ),
    Claim(
        id="accumulation-4-or-8",
        statement="Accumulation of 4 or 8 is a good typical value",
        source="002",
        needs="valid times of accumulation 4 or 8 and of another, at one global batch and number "
        "of devices",
        effect="ratio of step times, the better of 4 and 8 to another accumulation",
        rule="supported: one of them is slower than no other by 5 %, for every global batch and "
        "number of devices; contradicted: for one of these, another is faster by more (the level "
        "is shared by 4 and 8 for the one, by the places for the other)",
        settle="batchscape sweep sweeps=fixed_global_batch batch.data_parallel_size=1 "
        "batch.micro_batch_size=2,4,8,16,32",
        view="cost",
        result=asked(
            {"good": along(STEPS, value=_TIME, which=typical_to_others, at=(DEVICES, BATCH))}
        ),
        definition="ratio of the step time at a fixed global batch",
        rules={"good": _one_is_good},
        says="Of accumulation 4 and 8 the better one against the fastest other, where it is "
        "nearest to the threshold, or farthest beyond: {good}. Good means slower by less than 5 %; "
        "time alone is compared: whether the cuts train alike is a claim of its own. To be "
        "contradicted in one of several places is tested at the level over their number, and 4 and "
        "8 share the level at which one of them is good.",
    ),
    Claim(
        id="musev-224",
        statement="16 devices x micro 7 x accumulation 2 = 224 is a balanced configuration",
        source="002",
        needs="valid times of 16 x 7 x 2, for which it takes 16 devices, and of another cut of 224",
        effect="ratio of step times, another cut of 224 to 16 x 7 x 2",
        rule="supported: no other cut is faster by 5 % with a peak less than 5 % higher; "
        "contradicted: one is",
        settle="batchscape sweep sweeps=musev_224",
        view="cost",
        result=asked({"cuts": against_musev}),
        definition="ratio of the step time of another cut of 224 to that of 16 x 7 x 2",
        rules={"cuts": _none_is_better},
        says="Balanced means on the Pareto front: no other cut is faster by 5 % with a peak that "
        "is higher by less than 5 %: {cuts}.",
    ),
    Claim(
        id="noise-scale-tells-critical-batch",
        statement="The gradient noise scale tells the critical batch",
        source="McCandlish et al. 2018 (arXiv:1812.06162)",
        needs="branches: from one age of a training on, runs with its batch and with larger ones, "
        "with three seeds and sampled noise scales",
        effect="ratio of the critical batch at an age to the gradient noise scale in its window",
        rule="supported: at every age its interval lies within a factor of 2; contradicted: at one "
        "age it lies outside",
        settle="batchscape sweep sweeps=critical_batch_by_branches",
        view="branching",
        result=of_noise_scale,
        definition="ratio of the critical batch by branches to the gradient noise scale",
        rules={"ages": _all(within_factor, 2.0)},
        says="Of {n_ages} ages one decides: {ages}; as large means within a factor of 2. Its ends "
        "are those of both intervals: wider than 95 %, in place of a correction for several ages.",
    ),
    Claim(
        id="growing-batch-loses-nothing",
        statement="A batch that grows with the critical batch loses nothing",
        source="Merrill et al. 2025 (arXiv:2505.23971)",
        needs="branches that tell the critical batch, and of the same training, at equal samples "
        "and with three seeds, the first batch throughout and a ramp that stays within it",
        effect="paired difference of final held-out loss, ramp minus first batch throughout",
        rule="supported: of every such ramp it is below the margin set before launch (95 % "
        "interval); contradicted: of one it is above",
        settle="batchscape sweep sweeps=ramp_verified",
        view="branching",
        result=of_growing_batches,
        definition="difference of final loss between a ramp and its first batch",
        rules={"ramps": _all(below)},
        says="Worst of {n_ramps}: {ramps}; a loss is more than {margin} nats.",
        unit="nats",
    ),
    Claim(
        id="late-switching-beats-early",
        statement="Switching late to a larger batch beats switching early",
        source="Merrill et al. 2025 (arXiv:2505.23971)",
        needs="ramps of equal batches and rates, at equal samples, that climb early and late, with "
        "three seeds",
        effect="paired difference of final held-out loss, the latest minus the earliest",
        rule="supported: it is below 0 everywhere (95 % interval); contradicted: above somewhere; "
        "what the later ramp costs in optimizer steps is not weighed",
        settle="batchscape sweep sweeps=ramp_verified",
        view="branching",
        result=of_late_switching,
        definition="difference of final loss between a late and an early switch",
        rules={"switches": _all(below, 0.0)},
        says="Worst of {n_switches}: {switches}.",
        unit="nats",
    ),
)
"""All claims, in the order of the list they come from."""


def judge_claims(evidence: Evidence, claims: Sequence[Claim] = CLAIMS) -> list[Verdict]:
    """Judge every claim in every context.

    Returns
    -------
    list of Verdict
        One a claim and context, in the order of the claims; a claim without a context that has
        the runs it needs has one, "not identified".
    """
    return [verdict for claim in claims for verdict in claim.judge(evidence)]
