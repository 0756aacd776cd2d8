"""What a report says of the claims: a verdict for each, and what would settle the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter

import pandas as pd

from batchscape.analysis.claims.claim import Claim, Verdict
from batchscape.analysis.claims.declared import CLAIMS, judge_claims
from batchscape.analysis.claims.evidence import Evidence
from batchscape.analysis.claims.figures import claims_chart
from batchscape.analysis.claims.rules import CONTRADICTED, OPEN, SUPPORTED
from batchscape.analysis.estimates import LEVEL
from batchscape.analysis.numbers import MISSING
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section

__all__ = ["claims_section", "claims_table", "shown_verdicts"]

_LEVEL_OF_A_CLAIM = 0.05


_COLUMNS = {
    "claim": "claim.id",
    "statement": "claim.statement",
    "source": "claim.source",
    "verdict": "verdict",
    "context": "context",
    "effect": "effect.value",
    "low": "effect.low",
    "high": "effect.high",
    "unit": "effect.unit",
    "n": "effect.n",
    "n_runs": "n_runs",
    "method": "effect.method",
    "definition": "effect.definition",
    "note": "effect.note",
    "rule": "claim.rule",
    "needs": "claim.needs",
    "explanation": "explanation",
    "settle": "settle",
    "run_ids": "run_ids",
    "sweep_dirs": "sweep_dirs",
}
"""Columns of the table, and where they stand in a verdict."""


def claims_section(evidence: Evidence, claims: Sequence[Claim] = CLAIMS) -> Section | None:
    """Say which of the practitioners' claims the runs support.

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
    ids = [verdict.claim.id for verdict in shown]
    return Section(
        title="What practitioners claim, and what these runs say",
        answer=[
            *_answer(shown, verdicts),
            *(f"{v.claim.id}: {v.verdict} ({v.context}). {v.explanation}" for v in settled),
        ],
        settle=[*_settle(shown)],
        tables=[_table(verdicts, shown)],
        pictures=claims_chart(claims_table(settled)),
        warnings=[*_warnings(settled)],
        headlines={
            f"claim_{v.claim.id.replace('-', '_')}": v.effect
            for v in shown
            if v.effect.is_identified and ids.count(v.claim.id) == 1
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
        `sweep_dirs`, joined by semicolons.
    """
    table = pd.DataFrame(
        [attrgetter(*_COLUMNS.values())(verdict) for verdict in verdicts], columns=[*_COLUMNS]
    )
    return table.assign(
        run_ids=table["run_ids"].map(";".join), sweep_dirs=table["sweep_dirs"].map(";".join)
    )


def shown_verdicts(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Choose what a page shows: for each claim the settled contexts, else the one with most runs.

    Returns
    -------
    list of Verdict
        In the order given.
    """
    shown = []
    for own in _by_claim(verdicts):
        settled = [verdict for verdict in own if verdict.verdict != OPEN]
        shown += settled or [max(own, key=lambda v: (v.effect.is_identified, v.n_runs))]
    return shown


def _by_claim(verdicts: Sequence[Verdict]) -> list[list[Verdict]]:
    return [list(own) for _, own in groupby(verdicts, attrgetter("claim.id"))]


def _answer(shown: Sequence[Verdict], verdicts: Sequence[Verdict]) -> Iterator[str]:
    found = [{verdict.verdict for verdict in own} for own in _by_claim(shown)]
    if found.count({OPEN}) == len(found):
        return
    numbers = {answer: found.count({answer}) for answer in (SUPPORTED, CONTRADICTED, OPEN)}
    counts = [f"{count} {answer}" for answer, count in numbers.items() if count]
    conflicting = sum(len(answers) > 1 for answers in found)
    differ = f", and {conflicting} that differ between contexts" if conflicting else ""
    yield f"Of {len(found)} claims, these runs leave {', '.join(counts)}{differ}."
    # What was tested and stayed open had its chance to be settled wrongly too.
    tested = sum(verdict.effect.is_identified for verdict in verdicts)
    yield (
        f"Each claim is tested at {_LEVEL_OF_A_CLAIM:.0%} on its own, with a correction for "
        f"its several comparisons but none for the number of claims: of {tested} verdicts with "
        f"an effect, about {tested * _LEVEL_OF_A_CLAIM:.2g} may be settled by chance. Runs of "
        "different hardware, precision, model or data are judged apart."
    )


def _settle(shown: Sequence[Verdict]) -> Iterator[str]:
    names = [verdict.claim.id for verdict in shown if verdict.verdict == OPEN]
    if names:
        yield (
            f"Not identified: {', '.join(names)}. The notes under the table give what would settle "
            "each: where these runs do not have what a claim needs, a study that ships with "
            "batchscape. It is of its own model, and on digits where the runs are: add your "
            "settings."
        )


def _warnings(settled: Sequence[Verdict]) -> Iterator[str]:
    for own in _by_claim(settled):
        if len({verdict.verdict for verdict in own}) > 1:
            places = "; ".join(f"{v.verdict} for {v.context}" for v in own)
            yield f"Contexts disagree on {own[0].claim.id}: {places}."
    names = [v.claim.id for v in settled if v.effect.note and "not tuned" in v.effect.note]
    if names:
        yield (
            f"Learning rates were not tuned for each global batch, which alone may decide: "
            f"{', '.join(dict.fromkeys(names))}."
        )


def _table(verdicts: Sequence[Verdict], shown: Sequence[Verdict]) -> Table:
    table = claims_table(verdicts)
    several = len({verdict.context for verdict in shown if verdict.context}) > 1
    effect = f"effect, {LEVEL:.0%} interval"
    return Table(
        "claims",
        "Claims",
        table,
        [
            Column("claim", is_left=True),
            Column("statement", "what it says", is_left=True),
            Column("verdict", is_left=True),
            *([Column("context", words={"": MISSING}, is_left=True)] if several else []),
            Column("effect", effect, "", 3, "low", "high", n="n", units="unit"),
            Column("n", texts=[str(n or MISSING) for n in table["n"]]),
            Column("n_runs", "runs"),
        ],
        [verdicts.index(verdict) for verdict in shown],
        footnotes=[list(map(_how_to_settle, verdicts))],
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
