"""Ranges of step times before anything has run, against closed forms by hand."""

import functools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.compose import compose
from batchscape.config import Cluster, RunConfig
from batchscape.config.cluster import datasheets
from batchscape.data.corpus import prepare
from batchscape.geometry import BatchGeometry
from batchscape.plan.machine import Machine
from batchscape.plan.parameters import count_parameters
from batchscape.plan.step_time import Coefficients, Range, StepTimeRanges, rings
from batchscape.record.spec import RunSpec, Stage

H100 = next(sheet for sheet in datasheets() if sheet.device == "H100 SXM 80 GB")
MACHINE = Machine.of(replace(H100, nodes=8))


@functools.cache
def spec_of(*arguments, precision="bfloat16"):
    grid = compose([*arguments, "cluster=h100_80g"], "batchscape plan")
    config = RunConfig.from_mapping(grid.cells[0].settings)
    geometry = BatchGeometry(1, 2, 4, 3)
    return RunSpec(
        run_id="b24",
        trajectory_id="t",
        sweep_name="s",
        stages=(Stage(24, geometry, config.optimizer),),
        device_type="cuda",
        precision=precision,
        evaluation_every_samples=None,
        data=prepare(config.data),
        config=config,
    )


def coefficients(spec, ranks=2, nodes=1, machine=MACHINE):
    outcome = StepTimeRanges(machine).coefficients(spec, BatchGeometry(nodes, ranks // nodes, 1, 1))
    assert isinstance(outcome, Coefficients), outcome
    return outcome


def products_s(spec):
    """Time of a sample's products at the peak, where moving bytes takes none."""
    machine = Machine.of(replace(H100, memory_gb_per_s=1e15))
    return 0.66 * coefficients(spec, machine=machine).terms["per_sample_s"].middle


def test_terms_follow_from_operations_bytes_and_peaks():
    """Chowdhery et al. 2022 for the operations: 6N + 12LHQT a token."""
    spec = spec_of("model=gpt_nano")
    parameters = count_parameters(spec.config, spec.data)
    length, width, layers = spec.config.sequence_length or 0, 128, 2
    # Matrices alone: no bias, no norm, and no table that is looked up.
    matrices = layers * 12 * width**2 + 256 * width
    flops = length * (6 * matrices + 12 * layers * width * length)
    terms = coefficients(spec).terms
    assert products_s(spec) == pytest.approx(flops / 989.5e12)
    # What is moved besides is the same at every rate of products.
    moved = terms["per_sample_s"].middle - flops / (0.66 * 989.5e12)
    assert moved > 0
    assert terms["per_sample_s"].low == pytest.approx(
        flops / (1.5 * 0.66 * 989.5e12) + moved / 1.5, rel=1e-9
    )
    assert terms["per_sample_s"].high == pytest.approx(1.8 * terms["per_sample_s"].middle)
    buckets = math.ceil(4 * parameters / (25 * 2**20))
    sent = 4 * parameters / 450e9
    for end, times, latency in ((0, 0.78, 0.0), (1, 0.78, 1e-5), (2, 2.5, 1e-4)):
        assert terms["exchange_s"][end] == pytest.approx(times * sent + buckets * latency)
    # AdamW reads parameter, gradient and two moments, and writes all but the gradient.
    assert terms["optimizer_s"].low == pytest.approx(7 * 4 * parameters / 3350e9)


@pytest.mark.parametrize(
    ("ranks", "nodes", "bandwidth"),
    [
        (8, 1, 450),
        (64, 8, 400),  # a card of 50 GB/s for each of eight devices, and a ring through each
        (4, 2, 100),
        (2, 2, 50),  # one device a node uses no link within it
    ],
)
def test_rings_go_through_every_card_of_a_node(ranks, nodes, bandwidth):
    spec = spec_of("model=gpt_nano")
    outcome = coefficients(spec, ranks, nodes)
    parameters = count_parameters(spec.config, spec.data)
    assert outcome.terms["exchange_s"].low == pytest.approx(0.78 * 4 * parameters / bandwidth / 1e9)


def test_a_fast_network_is_as_slow_as_the_link_within_a_node():
    spec = spec_of("model=gpt_nano")
    fast = StepTimeRanges(Machine.of(replace(H100, nodes=2, network_gb_per_s=100.0)))
    outcome = fast.coefficients(spec, BatchGeometry(2, 8, 1, 1))
    assert outcome.terms["exchange_s"].low == pytest.approx(
        coefficients(spec, 8).terms["exchange_s"].low
    )


def test_cores_of_a_node_share_one_card():
    spec = replace(spec_of("model=gpt_nano"), device_type="cpu", precision="float32")
    cores = Cluster(
        memory_gb_per_s=10.0, tflops={"float32": 0.1}, link_gb_per_s=10.0, network_gb_per_s=1.0
    )
    machine = Machine(8, "cores", nodes=2, cluster=cores)
    outcome = StepTimeRanges(machine).coefficients(spec, BatchGeometry(2, 4, 1, 1))
    parameters = count_parameters(spec.config, spec.data)
    assert outcome.terms["exchange_s"].low == pytest.approx(4 * parameters / 1e9)


@pytest.mark.slow
def test_arithmetic_decides_the_peak():
    spec = spec_of("model=gpt_nano")
    half = products_s(spec)
    assert products_s(replace(spec, precision="float32")) == pytest.approx(half * 989.5 / 67)
    tf32 = spec_of("model=gpt_nano", "engine.float32_matmul=high", precision="float32")
    assert products_s(tf32) == pytest.approx(half * 2, rel=1e-3)
    again = spec_of("model=gpt_nano", "engine.activation_checkpointing=true")
    twice, once = (coefficients(each).terms["per_sample_s"] for each in (again, spec))
    assert twice == pytest.approx(tuple(4 / 3 * end for end in once))


def test_one_device_exchanges_nothing():
    spec = spec_of("model=gpt_nano")
    single = coefficients(spec, 1)
    terms = single.terms
    assert single.step_time_s(1, 4, 3) == pytest.approx(
        tuple(
            3 * (terms["micro_step_fixed_s"][end] + 4 * terms["per_sample_s"][end])
            + terms["optimizer_s"][end]
            for end in (0, 1, 2)
        )
    )


def test_gathers_of_every_micro_step_count_as_often_as_there_are_micro_steps():
    """FSDP over 4 devices: half a ring an optimizer step and one a micro-step, of 2 * 3/4 each."""
    none = Range(0.0, 0.0, 0.0)
    terms = dict.fromkeys(("micro_step_fixed_s", "per_sample_s", "optimizer_s"), none)
    coefficients = Coefficients(terms | {"exchange_s": Range(1.0, 2.0, 4.0)}, (0.5, 1.0))
    for accumulation in (1, 3):
        rings = 1.5 * (0.5 + accumulation)
        expected = (rings, 2 * rings, 4 * rings)
        assert coefficients.step_time_s(4, 8, accumulation) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), (1.0, 0.0)),
        (("engine=fsdp",), (0.5, 1.0)),
        (("engine=fsdp", "engine.reshard_after_forward=false"), (0.5, 0.5)),
        (("engine=deepspeed", "engine.zero_stage=1"), (1.0, 0.0)),
        (("engine=deepspeed", "engine.zero_stage=2"), (0.5, 0.5)),
        (("engine=deepspeed", "engine.zero_stage=3"), (0.0, 1.5)),
    ],
)
def test_rings_are_what_engines_reduce_and_gather(arguments, expected):
    assert rings(spec_of("data=digits", "model=mlp", *arguments).config) == expected


def test_what_is_not_known_says_why():
    spec = spec_of("data=digits", "model=mlp")
    no_network = Machine.of(replace(H100, network_gb_per_s=None, nodes=2))
    reason = StepTimeRanges(no_network).of(spec, BatchGeometry(2, 1, 4, 1))
    assert reason == "no datasheet here has it: give cluster.network_gb_per_s"
    t4 = Machine.of(next(sheet for sheet in datasheets() if sheet.device == "T4"))
    assert "cluster.tflops.bfloat16" in str(StepTimeRanges(t4).of(spec, BatchGeometry(1, 1, 4, 1)))


SECONDS = st.floats(1e-7, 10)
ENDS = st.tuples(SECONDS, SECONDS, SECONDS).map(lambda ends: Range(*sorted(ends)))


@given(
    terms=st.tuples(ENDS, ENDS, ENDS, ENDS),
    rings=st.sampled_from([(1.0, 0.0), (0.5, 1.0), (0.0, 1.5), (0.5, 0.5)]),
    cut=st.tuples(st.integers(1, 64), st.integers(1, 16), st.integers(1, 8)),
    factor=st.integers(2, 6),
)
def test_more_accumulation_is_never_faster(terms, rings, cut, factor):
    """Nor is a larger micro-batch; what is hidden of an exchange is no more than it takes."""
    names = ("micro_step_fixed_s", "per_sample_s", "exchange_s", "optimizer_s")
    coefficients = Coefficients(dict(zip(names, terms, strict=True)), rings)
    devices, micro, accumulation = cut

    def time(micro, accumulation):
        return coefficients.step_time_s(devices, micro, accumulation)

    few, larger = time(micro, accumulation), time(micro * factor, accumulation)
    assert few.low <= few.middle <= few.high
    more = (time(micro, accumulation * factor), time(micro * factor, accumulation + 1))
    for one, other in ((few, larger), *((larger, each) for each in more)):
        assert all(a <= b * (1 + 1e-12) for a, b in zip(one, other, strict=True))
