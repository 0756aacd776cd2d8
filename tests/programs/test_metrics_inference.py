"""The batch that follows from what a program logs: exact, or not observed, or a problem."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.programs.metrics.log import ObservedBatch, even_growth

counts = st.integers(1, 50)


def batch_of(**values: int) -> ObservedBatch:
    batch = ObservedBatch()
    for name, value in values.items():
        batch.put(name, value, f"said {name}")
    return batch


@given(counts, counts, counts, st.sampled_from(range(4)))
def test_any_three_give_the_fourth(devices: int, micro: int, parts: int, left_out: int) -> None:
    values = {
        "world_size": devices,
        "micro_batch_size": micro,
        "gradient_accumulation_steps": parts,
        "global_batch_size": devices * micro * parts,
    }
    name, value = list(values.items())[left_out]
    del values[name]
    batch = batch_of(**values)
    observed = batch.infer(None)
    assert getattr(observed, name) == value
    assert set(observed.sources) == {*values, name}
    assert batch.problems == []


@given(counts, counts, st.integers(1, 2000))
def test_a_remainder_is_a_problem_and_never_rounded(
    devices: int, micro: int, global_batch: int
) -> None:
    batch = batch_of(world_size=devices, micro_batch_size=micro, global_batch_size=global_batch)
    parts = batch.infer(None).gradient_accumulation_steps
    if global_batch % (devices * micro):
        assert parts is None
        assert "gradient_accumulation_steps is no whole number" in batch.problems[0]
    else:
        assert parts == global_batch // (devices * micro)
        assert batch.problems == []


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40)), max_size=6))
def test_growth_is_even_exactly_where_every_step_adds_as_much(
    moves: list[tuple[int, int]],
) -> None:
    points = [(0, 0)]
    for steps, growth in moves:
        points.append((points[-1][0] + steps, points[-1][1] + growth))
    size, uneven = even_growth(points)
    fits = [n for n in range(41) if all(growth == n * steps for steps, growth in moves)]
    if not moves:
        assert (size, uneven) == (None, None)
    else:
        assert size == (fits[0] if fits else None)
        assert (uneven is None) == bool(fits)


def test_sources_that_disagree_leave_a_quantity_unobserved() -> None:
    batch = batch_of(world_size=2, micro_batch_size=4, gradient_accumulation_steps=2)
    batch.put("world_size", 1, "another")
    observed = batch.infer(None)
    assert observed.world_size is None
    assert batch.problems == ["world_size is 2 by said world_size, 1 by another"]


@pytest.mark.parametrize(
    ("tokens", "length", "samples", "is_problem"),
    [
        (16 * 64, 64, 16, False),
        (16 * 63, 64, 16, False),  # predicted tokens: one less a sample
        (63 * 64, 64, None, False),  # 63 samples of 64, or 64 of 63: not told
        (1000, 64, None, True),
    ],
)
def test_samples_from_tokens(
    tokens: int, length: int, samples: int | None, is_problem: bool
) -> None:
    batch = batch_of(tokens_per_optimizer_step=tokens)
    assert batch.infer(length).global_batch_size == samples
    assert bool(batch.problems) == is_problem


def test_tokens_that_contradict_the_factors() -> None:
    factors = {"world_size": 1, "micro_batch_size": 4, "gradient_accumulation_steps": 4}
    batch = batch_of(**factors, tokens_per_optimizer_step=18 * 64)
    assert batch.infer(64).global_batch_size is None
    (problem,) = batch.problems
    assert "global_batch_size is 16" in problem
    assert "18 by 1152" in problem


def test_a_batch_of_padded_samples_is_no_problem() -> None:
    rows = [{"optimizer_step": step, "tokens": tokens} for step, tokens in ((1, 90), (2, 200))]
    batch = ObservedBatch()
    batch.put_growth("tokens_per_optimizer_step", rows, "tokens", "the log")
    assert batch.infer(None).tokens_per_optimizer_step is None
    assert batch.problems == []
