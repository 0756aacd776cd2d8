"""Chosen targets: reached by every batch, between measurements, readable."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchscape.analysis.targets.choice import choose_targets, why_unsettled
from batchscape.analysis.targets.crossings import steps_to_target
from batchscape.errors import AnalysisError


def sweep(
    batches: tuple[int, ...] = (8, 32, 128),
    rates: tuple[float, ...] = (0.1,),
    seeds: int = 2,
    floor: float = 2.0,
    group: int = 0,
) -> pd.DataFrame:
    """Curves of a loss that falls as a power of samples, slower for a rate away from 0.1."""
    parts = []
    for batch in batches:
        for rate in rates:
            for seed in range(seeds):
                samples = np.arange(0, 12801, 640)
                speed = batch / (1 + batch / 64) * np.exp(-(np.log(rate / 0.1) ** 2)) / batch
                loss = floor + 4 * (1 + speed * samples * (1 + 0.05 * seed) / 200) ** -0.5
                parts.append(
                    pd.DataFrame(
                        {
                            "run": f"{group} {batch} {rate} {seed}",
                            "group": group,
                            "global_batch_size": batch,
                            "learning_rate": rate,
                            "seed": seed,
                            "samples": samples,
                            "loss": loss,
                            "status": "completed",
                        }
                    )
                )
    return pd.concat(parts, ignore_index=True)


@settings(max_examples=15)
@given(st.integers(1, 7), st.floats(0.0, 50.0), st.lists(st.sampled_from([4, 8, 64]), min_size=1))
def test_all_runs_reach_the_chosen_targets_between_measurements(n, floor, batches):
    curves = sweep(tuple(dict.fromkeys(batches)), floor=floor)
    chosen = choose_targets(curves, n)
    targets = chosen.by_group[0]
    assert 1 <= len(targets) <= n
    assert list(targets) == sorted(targets, reverse=True)
    reaches = steps_to_target(curves, targets)
    assert reaches["outcome"].eq("reached").all()
    assert (reaches["steps_low"] > 0).all()


def test_the_hardest_target_is_the_worst_last_loss_rounded_up():
    curves = sweep()
    worst = curves.groupby("run")["loss"].last().max()
    hardest = choose_targets(curves).by_group[0][-1]
    assert worst <= hardest < worst + 0.01
    assert len(str(hardest)) <= 6


def test_only_the_best_learning_rate_of_each_batch_counts():
    curves = sweep(rates=(0.01, 0.1, 1.0))
    assert choose_targets(curves).by_group == choose_targets(sweep()).by_group


def test_a_batch_that_lost_seeds_at_every_rate_is_named_and_left_out():
    curves = sweep()
    lost = curves["run"].eq("0 128 0.1 1")
    curves.loc[lost, "status"] = "diverged"
    chosen = choose_targets(curves)
    assert chosen.by_group == choose_targets(sweep(batches=(8, 32))).by_group
    assert chosen.notes[0] == ("no target is set by global batch 128: of 2 runs, 1 diverged")
    reaches = steps_to_target(curves)
    assert reaches[reaches["run"].eq("0 128 0.1 1")]["outcome"].eq("diverged").all()


def test_without_any_batch_there_is_no_target():
    with pytest.raises(AnalysisError, match="no target was reached by all seeds"):
        choose_targets(sweep().assign(status="diverged"))
    silent = sweep(rates=(0.1, 0.2)).drop_duplicates("run").assign(loss=np.nan, status="oom")
    why = "at every learning rate some run is lost: of 4 runs, 4 measured no loss"
    with pytest.raises(AnalysisError, match=f"set by global batch 8: {why}\n"):
        choose_targets(silent)


def test_groups_share_targets_only_where_that_costs_little():
    near = pd.concat([sweep(), sweep(group=1, floor=2.001)])
    shared = choose_targets(near).by_group
    assert shared[0] == shared[1]
    apart = pd.concat([sweep(), sweep(group=1, floor=5.0)])
    chosen = choose_targets(apart).by_group
    assert chosen[0] == choose_targets(sweep()).by_group[0]
    assert set(chosen[0]).isdisjoint(chosen[1])
    reaches = steps_to_target(apart)
    assert reaches["outcome"].eq("reached").all()
    for group, targets in chosen.items():
        group_reaches = reaches[reaches["group"].eq(group)]
        assert set(group_reaches["target_loss"]) == set(targets)


def test_a_target_that_runs_were_stopped_at_is_used():
    curves = sweep()
    hardest = curves.groupby("run")["loss"].last().max() + 0.0137
    curves = curves[curves["loss"].shift().gt(hardest) | curves["samples"].eq(0)]
    curves = curves.assign(stop_reason="target", stop_target_loss=hardest)
    assert choose_targets(curves).by_group[0][-1] == hardest


def test_a_flat_curve_gives_one_target():
    curves = sweep().assign(loss=3.0)
    curves.loc[curves["samples"].eq(0), "loss"] = 6.0
    assert choose_targets(curves).by_group == {0: (3.0,)}


def noisy(late: float) -> pd.DataFrame:
    """Losses that fall, and of some runs rise again above 2.5 until late in the training."""
    samples = np.arange(0, 6401, 320)
    parts = []
    for batch in (8, 32):
        for seed in range(5):
            loss = 2 + 3 * np.exp(-samples / 600)
            if seed < late * 5:
                loss = loss + 0.5 * ((samples > 3000) & (samples < 6000) & (samples % 640 == 0))
            run = f"{batch} {seed}"
            parts.append(
                pd.DataFrame({"run": run, "global_batch_size": batch, "samples": samples}).assign(
                    seed=seed, learning_rate=0.1, loss=loss, status="completed", group=0
                )
            )
    return pd.concat(parts, ignore_index=True)


def test_the_hardest_target_is_settled():
    curves = noisy(late=0.8)
    raw = curves.groupby("run")["loss"].last().max()
    assert why_unsettled(steps_to_target(curves, [raw + 0.01])) == (
        "8 of 10 runs first met it more than 10 % earlier than for good, and 10 % of runs at most "
        "may"
    )
    chosen = choose_targets(curves)
    reaches = steps_to_target(curves)
    for _, group_reaches in reaches.groupby("target_loss"):
        assert why_unsettled(group_reaches) is None
    assert chosen.by_group[0][-1] > raw + 0.2
    assert chosen.notes[0].startswith("no target is set below ")
    assert "8 of 10 runs first met it" in chosen.notes[0]
    assert choose_targets(noisy(late=0.0)).notes == ()
