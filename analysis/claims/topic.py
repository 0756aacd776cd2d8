"""What a report says of the claims: a verdict for each, and what would settle the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from batchscape.analysis.claims.claim import Claim, Verdict
from batchscape.analysis.claims.declared import CLAIMS, judge_claims
from batchscape.analysis.claims.evidence import Evidence
from batchscape.analysis.claims.figures import draw_claims
from batchscape.analysis.claims.rules import CONTRADICTED, OPEN, SUPPORTED
from batchscape.analysis.estimates import LEVEL
from batchscape.analysis.numbers import MISSING
from batchscape.analysis.report.grids import Grid, columns_grid, lettered
from batchscape.analysis.report.topic import Section, TableView

__all__ = ["claims_section", "claims_table", "shown_verdicts"]

_LEVEL_OF_A_CLAIM = 0.05


def claims_section(evidence: Evidence, claims: Sequence[Claim] = CLAIMS) -> Section | None:
    """Say which of the practitioners' claims the runs support.

    Call it inside `paper_style`.

    Returns
    -------
    Section or None
        None where no run has completed.
    """
    if not evidence.cells.runs["status"].eq("completed").any():
        return None
    verdicts = judge_claims(evidence, claims)
    shown = shown_verdicts(verdicts)
    settled = [verdict for verdict in shown if verdict.verdict != OPEN]
    positions = {id(verdict): row for row, verdict in enumerate(verdicts)}
    rows = [positions[id(verdict)] for verdict in shown]
    view = TableView("claims", "Claims", claims_table(verdicts), _grid(shown), rows)
    picture = draw_claims(settled)
    return Section(
        title="What practitioners claim, and what these runs say",
        answer=[
            *_answer(shown, verdicts),
            *(f"{v.claim.id}: {v.verdict} ({v.context}). {v.explanation}" for v in settled),
        ],
        settle=[*_settle(shown)],
        tables=[view],
        pictures=[] if picture is None else [picture],
        warnings=[*_conflicts(settled), *_untuned(settled)],
        headlines={
            f"claim_{v.claim.id.replace('-', '_')}": v.effect
            for v in shown
            if v.effect.is_identified and sum(o.claim is v.claim for o in shown) == 1
        },
    )


def claims_table(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """Write verdicts as a table.

    Returns
    -------
    DataFrame
        One row a claim and context: `claim`, `statement`, `source`, `verdict`, `context`,
        `effect`, `low`, `high`, `unit`, `n`, `n_runs`, `method`, `definition`, `note`, `rule`,
        `needs`, `explanation`, `settle` (missing where it is settled), `run_ids` and
        `sweep_dirs`.
    """
    rows = [
        {
            "claim": verdict.claim.id,
            "statement": verdict.claim.statement,
            "source": verdict.claim.source,
            "verdict": verdict.verdict,
            "context": verdict.context,
            "effect": verdict.effect.value,
            "low": verdict.effect.low,
            "high": verdict.effect.high,
            "unit": verdict.effect.unit,
            "n": verdict.effect.n,
            "n_runs": verdict.n_runs,
            "method": verdict.effect.method,
            "definition": verdict.effect.definition,
            "note": verdict.effect.note,
            "rule": verdict.claim.rule,
            "needs": verdict.claim.needs,
            "explanation": verdict.explanation,
            "settle": verdict.settle,
            "run_ids": ";".join(verdict.run_ids),
            "sweep_dirs": ";".join(verdict.sweep_dirs),
        }
        for verdict in verdicts
    ]
    return pd.DataFrame(rows)


def shown_verdicts(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Choose what a page shows: for each claim the settled contexts, else the one with most runs.

    Returns
    -------
    list of Verdict
        In the order given.
    """
    shown = []
    for claim in dict.fromkeys(verdict.claim for verdict in verdicts):
        own = [verdict for verdict in verdicts if verdict.claim is claim]
        settled = [verdict for verdict in own if verdict.verdict != OPEN]
        shown += settled or [max(own, key=lambda v: (v.effect.is_identified, v.n_runs))]
    return shown


def _answer(shown: Sequence[Verdict], verdicts: Sequence[Verdict]) -> Iterator[str]:
    by_claim: dict[str, set[str]] = {}
    for verdict in shown:
        by_claim.setdefault(verdict.claim.id, set()).add(verdict.verdict)
    conflicting = [name for name, found in by_claim.items() if len(found) > 1]
    counts = [
        f"{sum(found == {answer} for found in by_claim.values())} {answer}"
        for answer in (SUPPORTED, CONTRADICTED, OPEN)
    ]
    differ = f", and {len(conflicting)} that differ between contexts" if conflicting else ""
    yield f"Of {len(by_claim)} claims, these runs leave {', '.join(counts)}{differ}."
    judged = len(by_claim) - sum(found == {OPEN} for found in by_claim.values())
    if judged:
        # What was tested and stayed open had its chance to be settled wrongly too.
        tested = sum(verdict.effect.is_identified for verdict in verdicts)
        yield (
            f"Each claim is tested at {_LEVEL_OF_A_CLAIM:.0%} on its own, with a correction for "
            f"its several comparisons but none for the number of claims: of {tested} verdicts with "
            f"an effect, about {tested * _LEVEL_OF_A_CLAIM:.2g} may be settled by chance. Runs of "
            "different hardware, precision, model or data are judged apart."
        )


def _settle(shown: Sequence[Verdict]) -> Iterator[str]:
    names = dict.fromkeys(verdict.claim.id for verdict in shown if verdict.verdict == OPEN)
    if names:
        yield (
            f"Not identified: {', '.join(names)}. The notes under the table give what would settle "
            "each: where these runs do not have what a claim needs, a study that ships with "
            "batchscape. It is of its own model, and on digits where the runs are: add your "
            "settings."
        )


def _conflicts(settled: Sequence[Verdict]) -> Iterator[str]:
    for claim in dict.fromkeys(verdict.claim for verdict in settled):
        own = [verdict for verdict in settled if verdict.claim is claim]
        if len({verdict.verdict for verdict in own}) > 1:
            places = "; ".join(f"{v.verdict} for {v.context}" for v in own)
            yield f"Contexts disagree on {claim.id}: {places}."


def _untuned(settled: Sequence[Verdict]) -> Iterator[str]:
    names = [v.claim.id for v in settled if v.effect.note and "not tuned" in v.effect.note]
    if names:
        yield (
            f"Learning rates were not tuned for each global batch, which alone may decide: "
            f"{', '.join(dict.fromkeys(names))}."
        )


def _grid(shown: Sequence[Verdict]) -> Grid:
    several = len({verdict.context for verdict in shown if verdict.context}) > 1
    effects = (verdict.effect for verdict in shown)
    texts = [f"{e.text() if e.is_identified else MISSING} {e.unit}".strip() for e in effects]
    return columns_grid(
        [
            ("claim", [verdict.claim.id for verdict in shown]),
            ("what it says", [verdict.claim.statement for verdict in shown]),
            ("verdict", [verdict.verdict for verdict in shown]),
            *([("context", [v.context or MISSING for v in shown])] if several else []),
        ],
        [
            (f"effect, {LEVEL:.0%} interval", texts),
            ("n", [str(verdict.effect.n or MISSING) for verdict in shown]),
            ("runs", [str(verdict.n_runs) for verdict in shown]),
        ],
        footnoted=lettered([[_how_to_settle(verdict)] for verdict in shown]),
        notes=[
            "Sources, rules, definitions of the effects and run ids: claims.csv. An "
            "effect is the comparison that decides: the one nearest to, or farthest beyond, the "
            "rule's threshold. n: pairs of runs behind its interval (t-interval of the mean); of "
            "the best learning rate's exponent, global batches."
        ],
    )


def _how_to_settle(verdict: Verdict) -> str | None:
    if not verdict.settle:
        return None
    how = "the same sweep again" if verdict.is_own else "a study that ships with batchscape"
    return f"{verdict.explanation} To settle it, {how}: {verdict.settle}"
