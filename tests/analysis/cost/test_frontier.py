"""The frontier of memory against a search by hand, and what recommendations make of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchscape.analysis.cells import find_cells
from batchscape.analysis.cost.capacity import device_memory, memory_of_ranks, peaks_of_runs
from batchscape.analysis.cost.frontier import (
    FIT,
    OUT,
    SKIPPED,
    find_frontier,
    memory_frontier,
)
from batchscape.analysis.cost.frontier_topic import frontier_section
from batchscape.analysis.decisions.candidates import failures_that_count
from batchscape.analysis.decisions.evidence import bases_of, more_than_tensors
from batchscape.analysis.decisions.recommend import Needs, recommend
from batchscape.record.status import Cause, RunStatus, Status
from batchscape.record.tables import load

Run = tuple[int, int, str]
"""Micro-batch, accumulation, outcome."""


def table(*runs: Run, memory: float = 10.0, each: float = 0.5) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "group": 0,
            "group_label": "",
            "data_parallel_size": 1,
            "micro_batch_size": micro,
            "gradient_accumulation_steps": accumulation,
            "outcome": outcome,
            "memory_gib": math.nan if outcome == SKIPPED else memory,
            "peak_gib": each * micro if outcome == FIT else math.nan,
            "peak_figure": "peak_allocated_gib" if outcome == FIT else None,
            "run_id": f"r{number}",
        }
        for number, (micro, accumulation, outcome) in enumerate(runs)
    )


def contradicts(fit: Run, out: Run) -> bool:
    """What runs with accumulation holds all that it holds without."""
    if (fit[2], out[2]) != (FIT, OUT):
        return False
    return fit[0] >= out[0] and (out[1] == 1 or fit[1] > 1)


def by_hand(runs: list[Run]) -> dict[str, Any]:
    """Try every micro-batch, and every pair of runs."""
    first_out = None
    for size in range(1, 40):
        if any(micro == size and outcome == OUT for micro, _, outcome in runs):
            first_out = size
            break
    last_fit = None
    for size in range(1, 40):
        if first_out is not None and size >= first_out:
            break
        if any(micro == size and outcome == FIT for micro, _, outcome in runs):
            last_fit = size
    return {
        "last_fit": last_fit,
        "first_out": first_out,
        "identified": None not in {last_fit, first_out},
        "is_monotone": not any(contradicts(one, other) for one in runs for other in runs),
        **{
            name: sum(outcome == kind for *_, outcome in runs)
            for name, kind in (("n_fit", FIT), ("n_out", OUT), ("n_skipped", SKIPPED))
        },
    }


some_runs = st.lists(
    st.tuples(st.integers(1, 12), st.sampled_from([1, 2, 4]), st.sampled_from([FIT, OUT, SKIPPED])),
    min_size=1,
    max_size=8,
)


@pytest.mark.slow
@settings(max_examples=50)
@given(some_runs)
def test_it_is_what_a_search_by_hand_finds(runs):
    frontier = find_frontier(table(*runs))
    expected = by_hand(runs)
    assert {name: frontier[name] for name in expected} == expected
    if frontier["last_fit"] is not None:
        assert frontier["peak_gib"] == 0.5 * frontier["last_fit"]
        assert frontier["margin_gib"] == 10 - frontier["peak_gib"]
        assert frontier["margin_pct"] == pytest.approx(10 * frontier["margin_gib"])
    else:
        assert math.isnan(frontier["margin_gib"])
    assert frontier["note"] or (frontier["identified"] and frontier["is_monotone"])


def test_a_peak_above_the_memory_leaves_the_margin_unidentified():
    """Where it counts something else than the memory does."""
    rows = table((2, 1, FIT), (4, 1, OUT), memory=0.5)
    frontier = find_frontier(rows)
    assert (frontier["last_fit"], frontier["peak_gib"], frontier["identified"]) == (2, 1.0, True)
    assert math.isnan(frontier["margin_gib"])
    assert math.isnan(frontier["margin_pct"])
    assert frontier["note"].startswith("margin not identified: the recorded peak is above")


def test_settings_and_devices_have_frontiers_of_their_own():
    one = table((4, 1, FIT), (8, 1, OUT))
    two = table((8, 1, FIT), (16, 1, OUT)).assign(data_parallel_size=2)
    other = table((2, 1, FIT)).assign(group=1, group_label="engine.name fsdp")
    frontiers = memory_frontier(pd.concat([other, two, one], ignore_index=True))
    keys = ["group", "data_parallel_size", "last_fit", "first_out"]
    assert frontiers[keys].to_numpy(dtype=object, na_value=None).tolist() == [
        [0, 1, 4, 8],
        [0, 2, 8, 16],
        [1, 1, 2, None],
    ]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"memory_limit_gib": 2.0}, 2.0),
        ({"data_parallel_size": 4}, 4.0),
        ({"data_parallel_size": 4, "memory_limit_gib": 2.0}, 2.0),
        ({"device_type": "cuda"}, 80.0),
        ({"device_type": "cuda", "data_parallel_size": 4, "launch.devices": [0, 1]}, 40.0),
        ({"device_type": "cuda", "data_parallel_size": 2, "launch.devices": [0, 1]}, 80.0),
        (
            {
                "device_type": "cuda",
                "data_parallel_size": 4,
                "launch.devices": [0, 1],
                "memory_limit_gib": 24.0,
            },
            12.0,
        ),
        ({"launch.runs_per_device": 3}, math.nan),
        ({"launch.runs_per_device": 3, "memory_limit_gib": 1.0}, 1.0),
        ({"environment.memory_gib": None}, math.nan),
    ],
)
def test_memory_of_a_rank(row, expected):
    plain = {
        "device_type": "cpu",
        "data_parallel_size": 1,
        "environment.memory_gib": 16.0,
        "launch.device_memory_gib": 80.0,
    }
    (memory,) = memory_of_ranks(pd.DataFrame([plain | row]))
    assert memory == pytest.approx(expected, nan_ok=True)


def test_peaks_are_what_the_memory_is_held_against():
    figures = {"device_used_gib": 3.0, "peak_reserved_gib": 2.0, "peak_allocated_gib": 1.0}
    taken = {"peak_allocated_gib": 1.0, "peak_taken_gib": 1.5}
    rows = [figures, figures | {"memory_limit_gib": 4.0}, taken, {"peak_allocated_gib": 1.0}, {}]
    peaks = peaks_of_runs(pd.DataFrame(rows))
    assert peaks["peak_gib"].fillna(0).tolist() == [3.0, 2.0, 1.5, 1.0, 0.0]


def test_a_limit_that_counts_more_than_tensors_is_warned_of():
    rows = pd.DataFrame({"peak_allocated_gib": [1.0, 2.0], "peak_taken_gib": [3.0, 2.5]})
    (text,) = more_than_tensors(rows)
    assert "the limit counts all that a process takes, here up to 3 times as much" in text
    assert more_than_tensors(rows[["peak_allocated_gib"]]) == []  # CUDA


def test_devices_of_unlike_limits_have_no_one_memory():
    assert device_memory(pd.DataFrame({"memory_limit_gib": [2.0, 2.0]})) == 2.0
    assert math.isnan(device_memory(pd.DataFrame({"memory_limit_gib": [2.0, None]})))
    assert math.isnan(device_memory(pd.DataFrame({"memory_limit_gib": [None, None]})))
    cuda = pd.DataFrame({"launch.device_memory_gib": [79.6, 80.0]})
    assert device_memory(cuda) == 79.6


@pytest.fixture
def limited(build: Callable[..., Any]) -> Any:
    """A sweep over micro-batch under two limits, of which the smaller one ends at 16."""
    sweep = build(name="memory_frontier")
    for limit, ends in ((0.06, 16), (0.5, 64)):
        for micro in (4, 8, 16, 32):
            device = {"memory_limit_gib": limit}
            spoilt = {"status": "oom", "reason": "out of memory"} if micro >= ends else {}
            folder = sweep.run((1, micro, 1), device=device, **spoilt)
            if spoilt:
                status = RunStatus.read(folder.status)
                status.cause = Cause.OUT_OF_MEMORY
                status.status = Status.REJECTED if micro == 32 else Status.OOM
                status.write(folder.status)
    return sweep


@pytest.mark.slow
def test_memory_limits_are_never_pooled(limited):
    section = frontier_section(find_cells(load(limited.path).runs))
    table = section.tables[0].frame
    assert table["memory_gib"].tolist() == [0.06, 0.5]
    assert table["last_fit"].tolist() == [8, 32]
    assert table["first_out"].fillna(0).tolist() == [16, 0]
    assert "not identified: none ran out of memory, up to micro-batch 32" in section.answer[1]


def test_a_sweep_that_looked_for_no_end_has_no_section(build):
    sweep = build()
    sweep.run((1, 8, 1))
    assert frontier_section(find_cells(load(sweep.path).runs)) is None


@pytest.mark.slow
def test_recommendations_stay_within_the_frontier(limited):
    tables = load(limited.path)
    evidence_by_label = {e.label: e for e in bases_of(find_cells(tables.runs), tables)}
    small, large = (
        evidence_by_label["memory limit (GiB) 0.06"],
        evidence_by_label["memory limit (GiB) 0.5"],
    )
    assert (small.device_memory_gib, large.device_memory_gib) == (0.06, 0.5)
    for evidence, most in ((small, 8), (large, 32)):
        chosen = recommend(evidence, Needs())
        assert chosen.geometry is not None
        fits = chosen.candidates[chosen.candidates["fits"] & (chosen.candidates["time_s"] > 0)]
        assert chosen.geometry[1] <= most
        assert (fits["memory_gib"].dropna() <= evidence.device_memory_gib).all()
        assert any("emulated by device.memory_limit_gib" in text for text in chosen.warnings)
    assert (recommend(small, Needs()).candidates.query("fits")["micro_batch_size"] < 16).all()
    # On a larger device what ran out under the limit may well fit.
    assert failures_that_count(small, 0.06) == [(1, 16, 1)]
    assert failures_that_count(small, 1.0) == []


def test_what_is_not_identified_says_why():
    for runs, note in (
        ([(4, 1, FIT), (8, 1, FIT)], "none ran out of memory, up to micro-batch 8"),
        ([(4, 1, OUT), (8, 1, SKIPPED)], "none fit, down to micro-batch 4"),
        ([(4, 2, OUT), (8, 1, FIT)], "none fit below micro-batch 4, which ran out"),
        ([(8, 1, SKIPPED)], "no run that was launched fit"),
    ):
        frontier = find_frontier(table(*runs))
        assert not frontier["identified"]
        assert note in str(frontier["note"])


def test_contradictions_are_named():
    frontier = find_frontier(table((2, 1, FIT), (4, 1, OUT), (8, 1, FIT), (16, 4, FIT)))
    assert (frontier["last_fit"], frontier["first_out"], frontier["is_monotone"]) == (2, 4, False)
    assert frontier["note"] == "not monotone: micro-batch 8, 16 fit, though 4 ran out"
    edge = find_frontier(table((2, 1, FIT), (4, 1, FIT), (4, 1, OUT), (4, 1, OUT)))
    assert (edge["last_fit"], edge["first_out"], edge["is_monotone"]) == (2, 4, False)
    assert edge["note"] == "not monotone: micro-batch 4 fit in one run and ran out in another"
