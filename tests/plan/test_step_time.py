"""Ranges of step times before anything has run, against closed forms by hand."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchscape.compose import compose
from batchscape.config import RunConfig
from batchscape.config.cluster import datasheets
from batchscape.data.corpus import prepare
from batchscape.geometry import BatchGeometry
from batchscape.plan.machine import Machine
from batchscape.plan.parameters import count_parameters
from batchscape.plan.step_time import Coefficients, Range, StepTimes, rings
from batchscape.record.spec import RunSpec, Stage

H100 = next(sheet for sheet in datasheets() if sheet.device == "H100 SXM 80 GB")
MACHINE = Machine.of(replace(H100, nodes=2))


@functools.cache
def spec_of(*arguments: str, precision: str = "bfloat16") -> RunSpec:
    grid = compose([*arguments, "cluster=h100_80g"], "batchscape plan")
    assert grid is not None
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


def coefficients(spec: RunSpec, ranks: int = 2, nodes: int = 1) -> Coefficients:
    found = StepTimes(MACHINE).coefficients(spec, BatchGeometry(nodes, ranks // nodes, 1, 1))
    assert isinstance(found, Coefficients), found
    return found


def test_terms_follow_from_operations_bytes_and_peaks() -> None:
    """Chowdhery et al. 2022 for the operations: 6N + 12LHQT a token."""
    spec = spec_of("model=gpt_nano")
    parameters = count_parameters(spec.config, spec.data)
    assert parameters is not None
    length, width, layers = spec.config.sequence_length or 0, 128, 2
    # Matrices alone: no bias, no norm, and no table that is looked up.
    matrices = layers * 12 * width**2 + 256 * width
    flops = length * (6 * matrices + 12 * layers * width * length)
    terms = coefficients(spec).terms
    assert terms["per_sample_s"].low == pytest.approx(flops / (0.8 * 989.5e12), rel=1e-9)
    assert terms["per_sample_s"].high > flops / (0.25 * 989.5e12)
    assert terms["exchange_s"].low == pytest.approx(4 * parameters / (1.1 * 450e9))
    buckets = math.ceil(4 * parameters / (25 * 2**20))
    exchange = 4 * parameters / (0.25 * 450e9) + buckets * 1e-4
    assert terms["exchange_s"].high == pytest.approx(exchange)
    # AdamW reads parameter, gradient and two moments, and writes all but the gradient.
    assert terms["optimizer_s"].low == pytest.approx(7 * 4 * parameters / 3350e9)


def test_between_nodes_the_slower_link_counts() -> None:
    spec = spec_of("model=gpt_nano")
    near, far = (coefficients(spec, 16 // 2 * nodes, nodes) for nodes in (1, 2))
    ratio = far.terms["exchange_s"].low / near.terms["exchange_s"].low
    assert ratio == pytest.approx(450 / 50)


def test_arithmetic_decides_the_peak() -> None:
    spec = spec_of("model=gpt_nano")
    half = coefficients(spec).terms["per_sample_s"].low
    assert coefficients(replace(spec, precision="float32")).terms[
        "per_sample_s"
    ].low == pytest.approx(half * 989.5 / 67)
    tf32 = spec_of("model=gpt_nano", "engine.float32_matmul=high", precision="float32")
    assert coefficients(tf32).terms["per_sample_s"].low == pytest.approx(half * 2, rel=1e-3)
    own = spec_of("model=gpt_nano", "measure.peak_tflops=98.95")
    assert coefficients(own).terms["per_sample_s"].low == pytest.approx(half * 10)
    again = spec_of("model=gpt_nano", "engine.activation_checkpointing=true")
    assert coefficients(again).terms["per_sample_s"].low == pytest.approx(half * 4 / 3)


def test_one_device_exchanges_nothing_and_waits_for_nobody() -> None:
    spec = spec_of("model=gpt_nano")
    found = coefficients(spec, 1)
    terms = found.terms
    assert found.step_time_s(1, 4, 3) == pytest.approx(
        tuple(
            3 * (terms["micro_step_fixed_s"][end] + 4 * terms["per_sample_s"][end])
            + terms["optimizer_s"][end]
            for end in (0, 1)
        )
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), (1.0, 0.0)),
        (("engine=fsdp",), (0.5, 1.0)),
        (("engine=fsdp", "engine.reshard_after_forward=false"), (0.5, 0.5)),
        (("engine=fsdp", "engine.exchange_every_micro_step=true"), (0.0, 1.5)),
        (("engine=deepspeed", "engine.zero_stage=1"), (1.0, 0.0)),
        (("engine=deepspeed", "engine.zero_stage=2"), (0.5, 0.5)),
        (("engine=deepspeed", "engine.zero_stage=3"), (0.0, 1.5)),
    ],
)
def test_rings_are_what_engines_reduce_and_gather(
    arguments: tuple[str, ...], expected: tuple[float, float]
) -> None:
    assert rings(spec_of("data=digits", "model=mlp", *arguments).config) == expected


seconds = st.floats(1e-7, 10)
ranges = st.tuples(seconds, seconds).map(lambda ends: Range(*sorted(ends)))


@settings(max_examples=300, deadline=None)
@given(
    st.tuples(ranges, ranges, ranges, ranges),
    st.sampled_from([(1.0, 0.0), (0.5, 1.0), (0.0, 1.5), (0.5, 0.5)]),
    st.integers(1, 64),
    st.integers(1, 16),
    st.integers(1, 8),
    st.integers(2, 6),
)
def test_more_accumulation_is_never_faster(
    terms: tuple[Range, ...],
    exchanged: tuple[float, float],
    devices: int,
    micro: int,
    accumulation: int,
    factor: int,
) -> None:
    """Nor is a larger micro-batch, or a further micro-step."""
    names = ("micro_step_fixed_s", "per_sample_s", "exchange_s", "optimizer_s")
    found = Coefficients(dict(zip(names, terms, strict=True)), exchanged, Range(0.0, 0.25))

    def least(one: Range, other: Range) -> bool:
        return all(a <= b * (1 + 1e-12) for a, b in zip(one, other, strict=True))

    few = found.step_time_s(devices, micro * factor, accumulation)
    many = found.step_time_s(devices, micro, accumulation * factor)
    assert few.low <= few.high
    assert least(few, many)
    assert least(found.step_time_s(devices, micro, accumulation), few)
    assert least(few, found.step_time_s(devices, micro * factor, accumulation + 1))


def test_what_is_not_known_says_why() -> None:
    spec = spec_of("data=digits", "model=mlp")
    no_network = Machine.of(replace(H100, network_gb_per_s=None, nodes=2))
    found = StepTimes(no_network).of(spec, BatchGeometry(2, 1, 4, 1))
    assert found == "no datasheet here has it: give cluster.network_gb_per_s"
    t4 = Machine.of(next(sheet for sheet in datasheets() if sheet.device == "T4"))
    assert "cluster.bfloat16_tflops" in str(StepTimes(t4).of(spec, BatchGeometry(1, 1, 4, 1)))
