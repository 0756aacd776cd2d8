"""What a report says of learning rates."""

import math

import numpy as np
import pandas as pd
import pytest

from batchscape.analysis.learning_rate.topic import learning_rate_section

RATES = 0.001 * 2.0 ** np.arange(8)
BATCHES = (8, 16, 32, 64, 128)


def reaches(batches=BATCHES, rates=RATES, target=2.0, **columns):
    """Steps are fewest at 0.002 times the root of the batch."""
    rng = np.random.default_rng(5)
    rows = [
        {
            "global_batch_size": batch,
            "learning_rate": rate,
            "seed": seed,
            "target_loss": target,
            "group": 0,
            "run_id": f"{batch}-{rate:.3g}-{seed}",
            "steps_to_target": (50 + 2000 / batch)
            * math.exp(math.log(rate / (0.002 * math.sqrt(batch))) ** 2 / 2)
            * math.exp(0.02 * rng.standard_normal()),
            **columns,
        }
        for batch in batches
        for rate in rates
        for seed in range(3)
    ]
    return pd.DataFrame(rows)


def test_a_tuned_grid_is_answered():
    section = learning_rate_section(reaches())
    assert not section.warnings
    assert section.headlines["learning_rate_exponent"].value == pytest.approx(0.5, abs=0.05)
    assert "Outside the exponent's interval: fixed, linear." in section.answer[0]
    (optima,) = section.tables
    assert optima.frame["run_ids"].str.count(";").eq(3 * len(RATES) - 1).all()
    best = next(marks.table for marks in section.pictures[1].marks if marks.name == "best")
    assert best["global_batch_size"].tolist() == list(BATCHES)


def test_an_optimum_at_the_edge_is_loud():
    table = reaches()
    section = learning_rate_section(
        table[(table["learning_rate"] < 0.01) | (table["global_batch_size"] < 64)]
    )
    assert any(text.startswith("NOT TUNED EVERYWHERE") for text in section.warnings)
    assert any("B = 128" in text and "Left out" in text for text in section.warnings)
    by_batch = {row[0]: row[1] for row in section.tables[0].texts.rows}
    assert by_batch["128"] == "≥ 0.0040"


def test_the_hardest_target_that_all_reached_is_used():
    hard = reaches(target=1.0)
    hard.loc[hard["global_batch_size"] == 8, "steps_to_target"] = math.nan
    section = learning_rate_section(pd.concat([reaches(target=3.0), reaches(target=2.0), hard]))
    assert section.tables[0].frame["target_loss"].unique().tolist() == [2.0]


def test_final_losses_serve_where_no_target_was_reached():
    unreached = reaches().assign(steps_to_target=math.nan)
    finals = reaches().rename(columns={"steps_to_target": "final_eval_loss"})
    section = learning_rate_section(unreached, finals.drop(columns="target_loss"))
    assert section.headlines["learning_rate_exponent"].is_identified


def test_groups_are_shown_apart():
    two = pd.concat([reaches(), reaches(group=1)])
    section = learning_rate_section(two, groups={0: "model gpt", 1: "model mlp"})
    assert section.answer[1].startswith("model mlp: ")
    assert set(section.headlines) == {"learning_rate_exponent_0", "learning_rate_exponent_1"}
    assert section.tables[0].texts.n_left == 2
    for chart in section.pictures:
        assert chart.choices[0].options == {"0": "model gpt", "1": "model mlp"}


@pytest.mark.parametrize(
    "table",
    [
        reaches(rates=RATES[:1]),
        reaches().drop(columns="learning_rate"),
        reaches().iloc[:0],
        reaches().assign(steps_to_target=math.nan),
    ],
)
def test_nothing_is_said_of_what_was_not_varied(table):
    assert learning_rate_section(table) is None


def test_a_contradiction_is_a_warning_and_no_end_of_the_report():
    section = learning_rate_section(pd.concat([reaches(), reaches()]))
    assert section.answer == ["Not identified."]
    assert "rows that repeat" in section.warnings[0]
