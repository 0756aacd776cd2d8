"""A claim: what is said, what would show it, and the rule that decides, fixed beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from batchscape.analysis.claims.contrasts import (
    OPEN,
    Answer,
    Contrast,
    Decision,
    effect,
    run_ids_of,
    said,
)
from batchscape.analysis.claims.evidence import Context, Evidence, View
from batchscape.analysis.commands import for_more_seeds, for_times
from batchscape.analysis.estimates import FEWEST, Estimate, too_few

__all__ = [
    "Claim",
    "ClaimResult",
    "Verdict",
    "by_rule",
    "few_pairs",
    "found",
    "nothing",
    "undecided",
]

_SWEEP = "batchscape sweep sweeps="
_ON_DIGITS = ("fixed_global_batch", "learning_rate", "vary_global_batch")
"""Sweeps that have a twin on images of digits."""
_SEEDS = 10
"""Seeds of the sweep that would settle what an interval leaves open: at least twice as many."""
_MOST_SEEDS = 20


@dataclass(frozen=True)
class ClaimResult:
    """What the runs of one context say about a claim."""

    answer: Answer
    effect: Estimate
    run_ids: tuple[str, ...]
    """Runs behind it, sorted."""
    explanation: str
    """Why this is the answer: sentences of plain text."""
    contrasts: tuple[Contrast, ...] = ()
    """Every difference that was looked at."""
    n_seeds: int | None = None
    """Seeds behind it, where they are not the units of the effect's interval."""
    settle: str | None = None
    """The command by which the very sweeps of these runs would settle it, where it is known."""


@dataclass(frozen=True)
class Verdict:
    """A claim judged in one context."""

    claim: Claim
    verdict: Answer
    effect: Estimate
    context: str
    """Hardware, precision, model and data, and what else tells contexts apart; empty where no
    context has anything to say."""
    run_ids: tuple[str, ...]
    sweep_dirs: tuple[str, ...]
    """Folders of these runs: those of other contexts may have the same ids."""
    explanation: str
    settle: str | None
    """The command that would settle it; None where it is settled."""
    contrasts: tuple[Contrast, ...] = ()
    is_own: bool = False
    """Whether that command is the one of these runs' own sweeps; else it names a shipped study."""

    @property
    def n_runs(self) -> int:
        """Runs behind the verdict."""
        return len(self.run_ids)


@dataclass(frozen=True)
class Claim:
    """One row of the list of claims, as a test."""

    id: str
    statement: str
    source: str
    needs: str
    """Which runs it needs."""
    effect: str
    """What its effect size is."""
    rule: str
    """What supports it, and what contradicts it."""
    settle: str
    """Command of the shipped study that would settle it, where no sweep of the user's can."""
    view: View
    """Which settings tell contexts apart."""
    decide: Callable[[Context], ClaimResult | None]
    """The rule. None: the context has none of the runs that it needs."""

    def judge(self, evidence: Evidence) -> list[Verdict]:
        """Judge the claim in every context that has something to say about it.

        Returns
        -------
        list of Verdict
            One a context, in order of the contexts; a single "not identified" where there is none.
            Runs of different hardware, precision or model are never pooled.
        """
        contexts = evidence.contexts(self.view)
        judged = [(context, self._found(context, evidence)) for context in contexts]
        verdicts = [self._verdict(context, finding) for context, finding in judged if finding]
        if verdicts:
            return verdicts
        missing = nothing(f"no context has the runs it needs: {self.needs}", self.effect)
        names = [name for context in contexts for name in context.data]
        return [
            Verdict(
                self, OPEN, missing.effect, "", (), (), missing.explanation, self.settle_on(names)
            )
        ]

    def _found(self, context: Context, evidence: Evidence) -> ClaimResult | None:
        """Decide; where valid times of these very runs would tell more, the command for them."""
        finding = self.decide(context)
        untimed = context.launched["timing_note"].notna() & context.runs["status"].eq("completed")
        if not untimed.any() or (finding is not None and finding.answer != OPEN):
            return finding
        free = {other.label: other for other in evidence.as_if_timed.contexts(self.view)}
        hoped = self.decide(free[context.label])
        if hoped is None or not hoped.contrasts:
            return finding
        if finding is not None and finding.effect.n >= hoped.effect.n > 0:
            return finding
        command = for_times(context.launched[untimed], evidence.cells.runs)
        if command is None:
            return finding
        if finding is None:
            why = "; ".join(sorted(set(context.launched.loc[untimed, "timing_note"])))
            reason = f"the times of {untimed.sum()} runs do not count ({why})"
            finding = nothing(reason, self.effect, hoped.run_ids)
        return replace(finding, settle=command)

    def settle_on(self, data: Iterable[str]) -> str:
        """Return the command for the data at hand.

        Parameters
        ----------
        data : iterable of str
            Names of the data.

        Returns
        -------
        str
            `settle`, with the sweep of the same question on digits where all runs are on them.
        """
        sweep, *others = self.settle.removeprefix(_SWEEP).split()
        on_digits = set(data) == {"digits"} and sweep in _ON_DIGITS
        return _SWEEP + " ".join([f"{sweep}_digits" if on_digits else sweep, *others])

    def _verdict(self, context: Context, finding: ClaimResult) -> Verdict:
        """Join a finding and the command, with more seeds where those that there are say little."""
        n = finding.effect.n if finding.n_seeds is None else finding.n_seeds
        seeds = range(min(max(_SEEDS, 2 * n), _MOST_SEEDS))
        own = finding.settle
        says_more = context.margin is not None or self.view == "cost"
        if own is None and finding.contrasts and says_more:
            own = for_more_seeds(context.launched, seeds)
        behind = context.runs.loc[context.runs["run_id"].isin(finding.run_ids), "sweep_dir"]
        shipped = self.settle_on(context.data)
        if n > 1:
            shipped += f" seed={','.join(map(str, seeds))}"
        return Verdict(
            self,
            finding.answer,
            finding.effect,
            context.label,
            finding.run_ids,
            tuple(behind.unique()),
            finding.explanation,
            (own or shipped) if finding.answer == OPEN else None,
            finding.contrasts,
            is_own=own is not None,
        )


def by_rule(
    contrasts: Sequence[Contrast],
    rule: Callable[[Sequence[Contrast]], Decision | None],
    definition: str,
    explain: Callable[[str], str],
) -> ClaimResult | None:
    """Judge ratios by one rule.

    Parameters
    ----------
    contrasts : sequence of Contrast
        Of logarithms.
    rule : callable
        One of the questions of `contrasts`, with its threshold.
    definition : str
        Of the effect.
    explain : callable
        Makes the explanation of the size that decides.

    Returns
    -------
    ClaimResult or None
        None without any contrast.
    """
    if not contrasts:
        return None
    decision = rule(contrasts)
    if decision is None:
        return undecided(contrasts, definition)
    explanation = explain(said(decision.deciding, "ratio"))
    return found(decision.answer, decision.deciding, contrasts, explanation, definition, ratio=True)


def found(
    answer: Answer,
    deciding: Contrast,
    contrasts: Sequence[Contrast],
    explanation: str,
    definition: str,
    *,
    ratio: bool,
    unit: str = "",
    note: str | None = None,
    fewest: int = FEWEST,
) -> ClaimResult:
    """Return the finding that some contrasts lead to.

    Parameters
    ----------
    deciding : Contrast
        The one whose size is reported.
    contrasts : sequence of Contrast
        All that were looked at.
    definition, ratio, unit, note
        As for `contrasts.effect`.
    fewest : int
        Pairs of runs from which the rule judges a comparison.
    """
    estimate = effect(deciding, definition, ratio=ratio, unit=unit, note=note)
    if len(deciding.values) < FEWEST:
        explanation += (
            f" Judged from {len(deciding.values)} pairs of runs, as its rule allows; "
            f"an interval is shown from {FEWEST} on."
        )
    few = sum(len(contrast.values) < fewest for contrast in contrasts)
    if few:
        explanation = (
            f"{explanation.strip()} Of {len(contrasts)} comparisons {few} "
            f"{'has' if few == 1 else 'have'} fewer than {fewest} pairs of runs and no part in it."
        )
    return ClaimResult(
        answer, estimate, run_ids_of(contrasts), explanation.strip(), tuple(contrasts)
    )


def nothing(
    reason: str, definition: str, run_ids: Iterable[str] = (), contrasts: Sequence[Contrast] = ()
) -> ClaimResult:
    """Return the finding of runs that say nothing, with the reason.

    Parameters
    ----------
    reason : str
        Why, as half a sentence.
    definition : str
        What the effect would have been.
    run_ids : iterable of str
        Runs that were looked at.
    contrasts : sequence of Contrast
        Differences that were found, without an interval.
    """
    estimate = Estimate.unknown(reason, 0, definition)
    ids = tuple(sorted(set(run_ids)))
    return ClaimResult(OPEN, estimate, ids, f"{reason[:1].upper()}{reason[1:]}.", tuple(contrasts))


def undecided(
    contrasts: Sequence[Contrast],
    definition: str,
    reason: str | None = None,
    *,
    fewest: int = FEWEST,
) -> ClaimResult:
    """Return the finding of contrasts that decide nothing: by default, for want of pairs."""
    why = reason or few_pairs(contrasts, fewest)
    finding = nothing(why, definition, run_ids_of(contrasts), contrasts)
    n = 0 if reason else _most_pairs(contrasts)
    return replace(finding, effect=replace(finding.effect, n=n))


def few_pairs(contrasts: Sequence[Contrast], fewest: int = FEWEST) -> str:
    """Say how many pairs of runs the comparisons have at most, and how many they need."""
    return too_few(_most_pairs(contrasts), "pairs of runs", fewest)


def _most_pairs(contrasts: Sequence[Contrast]) -> int:
    return max((len(contrast.values) for contrast in contrasts), default=0)
