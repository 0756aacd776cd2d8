"""The section on claims: all claims in the table, conflicts said aloud, a figure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from batchscape.analysis.claims.declared import CLAIMS, judge_claims
from batchscape.analysis.claims.topic import claims_section, claims_table, main_verdicts

SEEDS = range(3)


def timed(world: Any, hardware: str, cost: float) -> None:
    """Micro-steps that cost a share of a full micro-batch each."""
    for seed in SEEDS:
        for cut in [(1, 32, 1), (1, 8, 4)]:
            time = (1 + cost * cut[2]) * (1 + 0.001 * seed * cut[2])
            world.run(
                cut, seed, hardware=hardware, step_time_s=time, final_eval_loss=2 + 0.1 * seed
            )


def test_every_claim_is_in_the_table(world):
    table = world()
    timed(table, "One", 0.2)
    section = claims_section(table.evidence())
    (view,) = section.tables
    assert view.frame["claim"].tolist() == [claim.id for claim in CLAIMS]
    assert section.answer[0].startswith("Of 19 claims, these runs leave 3 supported, 1 contra")
    # What is open has the command that would settle it.
    is_open = view.frame["verdict"].eq("not identified")
    assert (view.frame["settle"].notna() == is_open).all()
    effect = section.headlines["claim_micro_before_accumulation"]
    assert effect.value == pytest.approx(1.5, rel=0.01)


def test_contexts_that_disagree_are_listed_and_warned_of(world):
    table = world()
    timed(table, "One", 0.2)
    timed(table, "Two", -0.05)
    section = claims_section(table.evidence())
    assert any("disagree on micro-before-accumulation" in text for text in section.warnings)
    rows = section.tables[0].frame.query("claim == 'micro-before-accumulation'")
    assert rows["verdict"].tolist() == ["supported", "contradicted"]
    assert rows["context"].str.partition(",")[0].tolist() == ["One", "Two"]
    assert "claim_micro_before_accumulation" not in section.headlines
    assert section.answer[0].split(", ")[-1] == "and 2 that differ between contexts."


def test_claims_on_rates_that_were_not_tuned_are_warned_of(world):
    table = world()
    for seed in SEEDS:
        table.run((1, 4, 1), seed, status="diverged")
        table.run((1, 64, 1), seed, curve=np.linspace(3.0, 1.0, 20))
    (warning,) = claims_section(table.evidence()).warnings
    assert warning.startswith("Learning rates were not tuned for each global batch")
    assert warning.endswith(": too-small-unstable.")


def test_a_settled_context_stands_before_an_open_one(world):
    table = world()
    timed(table, "One", 0.2)
    table.run((1, 32, 1), 0, hardware="Two", step_time_s=1.0)
    table.run((1, 8, 4), 0, hardware="Two", step_time_s=1.0)
    verdicts = [v for v in judge_claims(table.evidence()) if v.claim.id.startswith("micro-before")]
    assert [v.verdict for v in verdicts] == ["supported", "not identified"]
    assert [v.context.split(",")[0] for v in main_verdicts(verdicts)] == ["One"]
    assert len(claims_table(verdicts)) == 2


def test_nothing_completed_has_no_section(world):
    table = world()
    table.run((1, 32, 1), 0, status="failed")
    assert claims_section(table.evidence()) is None
