"""What is said of runs as samples: each run once, groups at one target, intervals from three."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import pytest
from statsmodels.stats.multitest import multipletests

from batchscape.analysis.comparing.samples_topic import samples_section
from batchscape.analysis.report.topic import Section


def reaches(
    group: int, targets: tuple[float, ...], n: int = 4, lost: int = 0, batch: int = 8
) -> pd.DataFrame:
    """Steps of `n` runs to each target, of which the first `lost` diverged."""
    rows = [
        {"group": group, "global_batch_size": batch, "seed": seed, "target_loss": target,
         "outcome": "diverged" if seed < lost else "reached",
         "steps_to_target": np.nan if seed < lost else 100.0 * (1 + group) + seed - 10 * target}
        for target in targets for seed in range(n)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def shown(section: Section, name: str) -> tuple[pd.DataFrame, list[list[str]]]:
    view = next(view for view in section.tables if view.name == name)
    return view.frame, view.texts.rows


def said(table: pd.DataFrame, names: Mapping[int, str] | None = None) -> str:
    return " ".join(samples_section(table, groups=names).answer)


def test_a_run_counts_once_whatever_its_targets() -> None:
    text = said(reaches(0, (3.0, 2.5, 2.0), n=6, lost=1))
    assert "Of 6 runs 1 diverged: a share of 0.167 [0.00421, 0.641] (95% interval of" in text


def test_groups_are_compared_at_a_common_target_or_not_at_all() -> None:
    apart = pd.concat([reaches(0, (3.0,)), reaches(1, (2.5,), lost=1)], ignore_index=True)
    section = samples_section(apart)
    assert "no two of them have a target in common" in " ".join(section.answer)
    # Neither group is lost where they are not compared.
    assert section.headlines["seed_spread"].n == 7
    assert shown(section, "divergence")[0][["n", "finite"]].to_numpy().tolist() == [[4, 4], [4, 3]]
    third = pd.concat([apart, reaches(2, (2.5, 2.0))], ignore_index=True)
    section = samples_section(third, groups={0: "a", 1: "b", 2: "c"})
    answer = " ".join(section.answer)
    assert "compared at the target 2.5; without runs at it, and not compared: a." in answer
    table, _ = shown(section, "group_comparisons")
    assert table[["reference", "other"]].to_numpy().tolist() == [["b", "c"]]


def test_groups_that_differ_are_counted_by_holm_over_all_places() -> None:
    away = np.linspace(-0.01, 0.01, 5)
    parts = [
        pd.DataFrame({"group": group, "global_batch_size": batch, "seed": range(5),
                      "final_eval_loss": 2 + group * far + away})
        for batch, far in ((8, 0.1), (16, 0.013), (32, 0.013), (64, 0.0)) for group in (0, 1)
    ]  # fmt: skip
    section = samples_section(pd.concat(parts, ignore_index=True))
    table, _ = shown(section, "group_comparisons")
    adjusted = multipletests(table["p_different"], method="holm")[1]
    assert table["p_adjusted"].to_numpy() == pytest.approx(adjusted)
    assert (table["p_different"] < 0.05).sum() == 3
    assert (adjusted < 0.05).sum() == 1
    assert "in 1 of 4 that could be tested they differ at 5%" in " ".join(section.answer)


def test_no_interval_is_announced_that_is_not_shown() -> None:
    one = said(pd.DataFrame({"group": 0, "global_batch_size": 8, "final_eval_loss": [2.0]}))
    assert one.endswith("Of 1 runs 0 diverged: a share of 0 (n = 1).")
    losses = {"group": 0, "global_batch_size": 8, "final_eval_loss": [2.0, 2.1]}
    section = samples_section(pd.DataFrame(losses))
    assert "interval" not in " ".join(section.answer)
    assert "(n = 2) nats (standard deviation)." in section.answer[0]
    assert shown(section, "final_losses")[1][0][-1] == "0"
