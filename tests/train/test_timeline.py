"""Stages against a plain list of steps."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from batchscape.config import AdamW
from batchscape.geometry import BatchGeometry
from batchscape.record.spec import Stage
from batchscape.train.timeline import Timeline

ADAMW = AdamW(name="adamw", learning_rate=0.1)


def stage(steps: int, *cut: int) -> Stage:
    geometry = BatchGeometry(1, *cut)
    return Stage(steps * geometry.global_batch_size, geometry, ADAMW)


cuts = st.tuples(st.integers(1, 9), st.just(2), st.integers(1, 5), st.integers(1, 4))


@given(st.lists(cuts, min_size=1, max_size=5))
def test_steps_follow_each_other_without_gap(cut: list[tuple[int, int, int, int]]) -> None:
    stages = [stage(*one) for one in cut]
    timeline = Timeline(stages)
    sizes = [s.geometry.global_batch_size for s in stages for _ in range(s.optimizer_steps)]
    edges = [0, *accumulate(sizes)]
    for k, size in enumerate(sizes):
        planned = timeline.step(k)
        assert planned.first_sample == timeline.samples_before(k) == edges[k]
        assert planned.stage.geometry.global_batch_size == size
        assert planned.samples_after == edges[k + 1]
        assert planned.midpoint == (edges[k] + edges[k + 1]) / 2
    assert timeline.samples_before(len(sizes)) == edges[-1] == sum(s.samples for s in stages)


def test_the_heaviest_stage_has_the_largest_micro_batch_or_accumulates() -> None:
    assert Timeline([stage(5, 1, 8, 1)]).heaviest_step() == 0
    # Micro-batch held: the first stage that accumulates, as more micro-steps hold no more.
    grown = [stage(5, 1, 8, 1), stage(3, 1, 8, 2), stage(3, 1, 8, 4)]
    assert Timeline(grown).heaviest_step() == 5
    # Accumulation held: the largest micro-batch, wherever it is.
    assert Timeline([stage(5, 1, 2, 2), stage(3, 1, 8, 2), stage(3, 1, 4, 2)]).heaviest_step() == 5
