"""The section on claims: all claims in the table, conflicts said aloud, a figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from batchscape.analysis.claims.declared import CLAIMS, judge_claims
from batchscape.analysis.claims.topic import claims_section, claims_table, shown_verdicts
from batchscape.analysis.report.writers import to_markdown
from batchscape.drawing import paper_style

SEEDS = range(3)


def timed(world: Any, hardware: str, cost: float) -> None:
    """Micro-steps that cost a share of a full micro-batch each."""
    for seed in SEEDS:
        for cut in [(1, 32, 1), (1, 8, 4)]:
            time = (1 + cost * cut[2]) * (1 + 0.001 * seed * cut[2])
            world.run(
                cut, seed, hardware=hardware, step_time_s=time, final_eval_loss=2 + 0.1 * seed
            )


def test_every_claim_is_in_the_table(world: Callable[[], Any]) -> None:
    table = world()
    timed(table, "One", 0.2)
    with paper_style():
        section = claims_section(table.evidence())
    assert section is not None
    (view,) = section.tables
    assert view.frame["claim"].tolist() == [claim.id for claim in CLAIMS]
    assert [row[0] for row in view.texts().rows] == [claim.id for claim in CLAIMS]
    assert section.answer[0].startswith("Of 16 claims, these runs leave 3 supported, 1 contra")
    # What is open has the command that would settle it.
    is_open = view.frame["verdict"].eq("not identified")
    assert (view.frame["settle"].notna() == is_open).all()
    assert len(view.texts().footnotes) == is_open.sum()
    assert all("batchscape sweep" in text for text in view.texts().footnotes.values())
    assert section.headlines["claim_micro_before_accumulation"].value == pytest.approx(
        1.5, rel=0.01
    )
    assert "micro-before-accumulation" in to_markdown(view)


def test_contexts_that_disagree_are_listed_and_warned_of(world: Callable[[], Any]) -> None:
    table = world()
    timed(table, "One", 0.2)
    timed(table, "Two", -0.05)
    with paper_style():
        section = claims_section(table.evidence())
    assert section is not None
    assert any("disagree on micro-before-accumulation" in text for text in section.warnings)
    grid = section.tables[0].texts()
    rows = [
        dict(zip(grid.headers, row, strict=True))
        for row in grid.rows
        if row[0] == "micro-before-accumulation"
    ]
    assert [row["verdict"] for row in rows] == ["supported", "contradicted"]
    assert [row["context"].split(",")[0] for row in rows] == ["One", "Two"]
    assert all("larger micro-batch" in row["what it says"] for row in rows)
    assert "claim_micro_before_accumulation" not in section.headlines
    (picture,) = section.pictures
    labels = [text.get_text() for text in picture.figure.axes[0].get_yticklabels()]
    assert len(labels) >= 2
    assert all("One" in label or "Two" in label for label in labels)
    assert "filled: the claim is supported; open: it is contradicted" in picture.caption


@pytest.mark.parametrize("cost", [0.01, 0.2, 1e4])
def test_the_figure_has_two_ticks_and_its_caption_names_only_what_is_drawn(
    world: Callable[[], Any], cost: float
) -> None:
    table = world()
    timed(table, "One", cost)
    with paper_style():
        section = claims_section(table.evidence())
    assert section is not None
    drawn = section.tables[0].frame.query("verdict != 'not identified' and low > 0")
    ratios = drawn[drawn["definition"].str.startswith("ratio")]
    (picture,) = section.pictures
    (axes,) = picture.figure.axes
    low, high = axes.get_xlim()
    assert sum(low <= place <= high for place in axes.get_xticks()) >= 2
    verdicts = set(ratios["verdict"])
    assert ("filled" in picture.caption) == ("supported" in verdicts)
    assert ("open" in picture.caption) == ("contradicted" in verdicts)
    legend = {text.get_text() for of in picture.figure.legends for text in of.get_texts()}
    assert legend == verdicts


def test_a_settled_context_stands_before_an_open_one(world: Callable[[], Any]) -> None:
    table = world()
    timed(table, "One", 0.2)
    table.run((1, 32, 1), 0, hardware="Two", step_time_s=1.0)
    table.run((1, 8, 4), 0, hardware="Two", step_time_s=1.0)
    verdicts = [v for v in judge_claims(table.evidence()) if v.claim.id.startswith("micro-before")]
    assert [v.verdict for v in verdicts] == ["supported", "not identified"]
    assert [v.context.split(",")[0] for v in shown_verdicts(verdicts)] == ["One"]
    assert len(claims_table(verdicts)) == 2


def test_nothing_completed_has_no_section(world: Callable[[], Any]) -> None:
    table = world()
    table.run((1, 32, 1), 0, status="failed")
    assert claims_section(table.evidence()) is None
