"""What the page says of decompositions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from batchscape.analysis import find_cells, load
from batchscape.analysis.equivalence.paired import judge_equivalence
from batchscape.analysis.equivalence.topic import equivalence_section
from batchscape.analysis.numbers import TIMES
from batchscape.record.gradient_sketch import write_sketch


def section_of(sweep: Any) -> Any:
    tables = load(sweep.path)
    return equivalence_section(find_cells(tables.runs), tables)


def test_all_equivalent(build):
    section = section_of(build().fork())
    assert "margin of 0.005 nats: all equivalent" in section.answer[0]
    assert section.warnings == []
    assert section.headlines["decomposition_loss_difference"].value == 0.0
    assert [picture.name for picture in section.pictures] == ["equivalence", "divergence"]
    # Both quantities for the CSV, the one that decides for the page.
    assert [len(section.tables[0].frame), len(section.tables[0].texts.rows)] == [6, 3]


def test_one_seed_says_so_loudly(build):
    section = section_of(build().fork(seeds=(0,)))
    assert "Not identified for 3 of 3: 1 pair; a spread needs 2." in section.warnings[0]
    assert section.headlines == {}


def test_what_differs_is_told(build):
    sweep = build()
    for seed in (0, 1, 2):
        for geometry, offset in (((1, 32, 1), 0.0), ((1, 8, 4), 0.1)):
            sweep.run(geometry, seed=seed, loss=lambda k, e=offset: 0 * k + 2 + e,
                      rounding=1e-6, evaluated=False)  # fmt: skip
    tables = load(sweep.path)
    section = equivalence_section(find_cells(tables.runs), tables)
    assert "by the final training loss" in section.answer[0]
    assert "1 different" in section.answer[0]


def test_gradients_have_a_table_even_without_pairs_of_losses(build):
    sweep = build()
    rng = np.random.default_rng(0)
    base = rng.normal(size=1024)
    away = 2e-7 * np.linalg.norm(base) * np.eye(1024)[0]
    for geometry, sketch in (((1, 32, 1), base), ((1, 8, 4), base + away)):
        write_sketch(sweep.run(geometry, status="interrupted"), sketch)
    section = section_of(sweep)
    assert f"of the first decomposition by 2.0 {TIMES} 10⁻⁷ in float32" in section.answer[0]


def test_nothing_to_say(build):
    sweep = build()
    sweep.run((1, 32, 1))
    sweep.run((1, 64, 1))
    assert section_of(sweep) is None


def reaches_of(cells: Any, targets: dict[float, set[int]]) -> pd.DataFrame:
    """Steps to targets, each reached by the cells named."""
    return pd.concat(
        cells.runs[["sweep_dir", "run_id"]].assign(
            target_loss=target,
            outcome=np.where(cells.runs["cell"].isin(reached), "reached", "censored"),
            steps_to_target=np.where(cells.runs["cell"].isin(reached), 50.0, math.nan),
        )
        for target, reached in targets.items()
    )


@pytest.mark.slow
def test_the_hardest_target_that_all_reached(build):
    tables = load(build().fork().path)
    cells = find_cells(tables.runs)
    everyone = set(cells.table.index)
    reaches = reaches_of(cells, {3.0: everyone, 2.5: everyone, 2.0: {0, 1}})
    section = equivalence_section(cells, tables, reaches)
    assert set(section.tables[0].frame["target_loss"].dropna()) == {2.5}


NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)


@settings(max_examples=60)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 2), NUMBERS, NUMBERS, st.sampled_from([0.005, 0.1, math.nan])),
        max_size=12,
    )
)
def test_any_table_gives_verdicts_and_reasons(rows):
    table = pd.DataFrame(rows, columns=["cell", "difference", "value_reference", "margin"])
    rest = {"reference": 9, "quantity": "final_loss", "target_loss": math.nan, "run_id": "a"}
    rest |= {"run_id_reference": "b", "sweep_dir": "s", "sweep_dir_reference": "s"}
    judged = judge_equivalence(table.assign(margin_reference=0.005, **rest))
    verdicts = {"equivalent", "different", "not identified"}
    assert judged.empty or set(judged["verdict"]) <= verdicts
    for row in judged.to_dict("records"):
        assert isinstance(row["reason"], str) == (row["verdict"] == "not identified")


@pytest.mark.slow
def test_the_headline_has_the_level_of_all_others(build):
    sweep = build()
    for seed in range(4):
        for cut in [(1, 32, 1), (1, 8, 4)]:
            # Losses that differ between cuts, seed by seed.
            sweep.run(cut, seed=seed, rounding=1e-3, evaluated=False)
    tables = load(sweep.path)
    section = section_of(sweep)
    headline = section.headlines["decomposition_loss_difference"]
    runs = tables.runs.set_index(["seed", "gradient_accumulation_steps"])["final_loss"]
    wide = runs.unstack().astype(float)
    differences = wide[4] - wide[1]
    expected = stats.ttest_1samp(differences, 0.0).confidence_interval(0.95)
    assert (headline.low, headline.high) == pytest.approx(tuple(expected))
    assert headline.low < headline.high
    assert "95%" in headline.method
