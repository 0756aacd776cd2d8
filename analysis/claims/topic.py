"""The section on claims: a verdict for each, and commands that would settle the open ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter

import pandas as pd

from batchscape.analysis.claims.claim import Claim, Verdict
from batchscape.analysis.claims.declared import CLAIMS, judge_claims
from batchscape.analysis.claims.evidence import Evidence
from batchscape.analysis.claims.rules import CONTRADICTED, OPEN, SUPPORTED
from batchscape.analysis.estimates import LEVEL
from batchscape.analysis.numbers import MISSING
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section

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
"""Columns of the table, and the attributes of a verdict that they hold."""


def claims_section(evidence: Evidence, claims: Sequence[Claim] = CLAIMS) -> Section | None:
    """Say which of the practitioners' claims the runs support; None if no run has completed."""
    if not evidence.cells.runs["status"].eq("completed").any():
        return None
    verdicts = judge_claims(evidence, claims)
    main = main_verdicts(verdicts)
    settled = [verdict for verdict in main if verdict.verdict != OPEN]
    open_ids = [verdict.claim.id for verdict in main if verdict.verdict == OPEN]
    ids = [verdict.claim.id for verdict in main]
    settle = (
        f"Not identified: {', '.join(open_ids)}. The notes under the table give what would settle "
        "each: where these runs do not have what a claim needs, a study that ships with "
        "batchscape. It is of its own model and data: add your settings."
    )
    return Section(
        title="What practitioners claim, and what these runs say",
        answer=[
            *_answer(main, verdicts),
            *(f"{v.claim.id}: {v.verdict} ({v.context}). {v.explanation}" for v in settled),
        ],
        settling_runs=[settle] if open_ids else [],
        tables=[_table(verdicts, main)],
        warnings=[*_warnings(settled)],
        headlines={
            f"claim_{v.claim.id.replace('-', '_')}": v.effect
            for v in main
            if v.effect.is_identified and ids.count(v.claim.id) == 1
        },
    )


def claims_table(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """Write verdicts as a table, one row a claim and context."""
    table = pd.DataFrame(
        [attrgetter(*_COLUMNS.values())(verdict) for verdict in verdicts], columns=[*_COLUMNS]
    )
    return table.assign(
        run_ids=table["run_ids"].map(";".join), sweep_dirs=table["sweep_dirs"].map(";".join)
    )


def main_verdicts(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Choose for each claim the settled contexts, or the one with the most runs."""
    main = []
    for group in _by_claim(verdicts):
        settled = [verdict for verdict in group if verdict.verdict != OPEN]
        main += settled or [max(group, key=lambda v: (v.effect.is_identified, v.n_runs))]
    return main


def _by_claim(verdicts: Sequence[Verdict]) -> list[list[Verdict]]:
    return [list(group) for _, group in groupby(verdicts, attrgetter("claim.id"))]


def _answer(main: Sequence[Verdict], verdicts: Sequence[Verdict]) -> Iterator[str]:
    answers = [{verdict.verdict for verdict in group} for group in _by_claim(main)]
    if answers.count({OPEN}) == len(answers):
        return
    numbers = {answer: answers.count({answer}) for answer in (SUPPORTED, CONTRADICTED, OPEN)}
    counts = [f"{count} {answer}" for answer, count in numbers.items() if count]
    differing = sum(len(of_claim) > 1 for of_claim in answers)
    more = f", and {differing} that differ between contexts" if differing else ""
    yield f"Of {len(answers)} claims, these runs leave {', '.join(counts)}{more}."
    # What was tested and stayed open had its chance to be settled wrongly too.
    tested = sum(verdict.effect.is_identified for verdict in verdicts)
    yield (
        f"Each claim is tested at {_LEVEL_OF_A_CLAIM:.0%} on its own, with a correction for "
        f"its several comparisons but none for the number of claims: of {tested} verdicts with "
        f"an effect, about {tested * _LEVEL_OF_A_CLAIM:.2g} may be settled by chance. Runs of "
        "different hardware, precision, model or data are judged apart."
    )


def _warnings(settled: Sequence[Verdict]) -> Iterator[str]:
    for group in _by_claim(settled):
        if len({verdict.verdict for verdict in group}) > 1:
            places = "; ".join(f"{v.verdict} for {v.context}" for v in group)
            yield f"Contexts disagree on {group[0].claim.id}: {places}."
    if names := [v.claim.id for v in settled if "not tuned" in (v.effect.note or "")]:
        yield (
            "Learning rates were not tuned for each global batch, which alone may decide: "
            f"{', '.join(dict.fromkeys(names))}."
        )


def _table(verdicts: Sequence[Verdict], main: Sequence[Verdict]) -> Table:
    table = claims_table(verdicts)
    several = len({verdict.context for verdict in main if verdict.context}) > 1
    effect = f"effect, {LEVEL:.0%} interval"
    sources = {True: "the same sweep again", False: "a study that ships with batchscape"}
    footnotes = [
        f"{v.explanation} To settle it, {sources[v.is_own]}: {v.settle}" if v.settle else None
        for v in verdicts
    ]
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
        [verdicts.index(verdict) for verdict in main],
        footnotes=[footnotes],
        notes=[
            "Sources, rules, definitions of the effects and run ids: claims.csv. An "
            "effect is the comparison that decides: the one nearest to, or farthest beyond, the "
            "rule's threshold. n: pairs of runs behind its interval (t-interval of the mean); of "
            "the best learning rate's exponent, global batches."
        ],
    )
