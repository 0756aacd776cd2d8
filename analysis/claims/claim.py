"""A claim: what is said, the result it rests on, and the rule that decides, fixed beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from batchscape.analysis.claims.evidence import Context, Evidence, View
from batchscape.analysis.claims.rules import CONTRADICTED, OPEN, SUPPORTED, Answer, Decision, Test
from batchscape.analysis.commands import for_more_seeds, for_times
from batchscape.analysis.comparing.pairs import Contrast
from batchscape.analysis.estimates import FEWEST, Estimate, too_few

__all__ = ["Claim", "Finding", "Result", "Rule", "Verdict", "run_ids_of"]

_SWEEP = "batchscape sweep sweeps="
_ON_DIGITS = ("fixed_global_batch", "learning_rate", "vary_global_batch")
"""Sweeps that have a twin on images of digits."""
_SEEDS = 10
"""Seeds of the sweep that would settle what an interval leaves open: at least twice as many."""
_MOST_SEEDS = 20

_FEW_PAIRS = (
    f" Judged from {{}} pairs of runs, as its rule allows; an interval is shown from {FEWEST} on."
)
_FEW_IN_SOME = " Of {} comparisons {} {} fewer than {} pairs of runs and no part in it."

Rule = Callable[[Sequence[Contrast], float], Test]
"""Makes the test of some contrasts; the number is the margin of equivalence of their runs."""


@dataclass(frozen=True)
class Result:
    """What a topic computed of the runs of one context."""

    contrasts: Mapping[str, Sequence[Contrast]]
    """By the names that the claim's rules have for them; every one that was looked at."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """What else the claim's sentence has a place for."""
    definition: str | None = None
    """Of the effect, where it is not the claim's."""
    note: str | None = None
    """What weakens the effect."""
    reason: str = ""
    """Why nothing is decided, whatever the contrasts are."""
    beside: str = ""
    """What is said beside there being too few pairs."""
    shown: bool = False
    """Whether the claim holds by what is no contrast."""
    withheld: Answer | None = None
    """The answer that these runs cannot give, whatever the contrasts are."""
    unless_supported: str = ""
    """What is said where the answer is another than "supported", as a sentence."""


@dataclass(frozen=True)
class Finding:
    """What the runs of one context say about a claim."""

    verdict: Answer
    effect: Estimate
    run_ids: tuple[str, ...]
    """Runs behind it, sorted."""
    explanation: str
    """Why this is the answer: sentences of plain text."""
    is_compared: bool = False
    """Whether more runs of these cells would say more."""
    n_seeds: int | None = None
    """Seeds behind it, where they are not the units of the effect's interval."""
    settle: str | None = None
    """The command that would settle it: at first by the very sweeps of these runs, where it is
    known; None where it is settled."""

    @classmethod
    def none(
        cls,
        reason: str,
        definition: str,
        run_ids: Iterable[str] = (),
        *,
        n: int = 0,
        is_compared: bool = False,
    ) -> Finding:
        """Return the finding of runs that say nothing, with the reason as half a sentence."""
        text = f"{reason[:1].upper()}{reason[1:]}."
        ids = tuple(sorted(set(run_ids)))
        return cls(OPEN, Estimate.unknown(reason, n, definition), ids, text, is_compared)

    @property
    def n_runs(self) -> int:
        """Runs behind the verdict."""
        return len(self.run_ids)


@dataclass(frozen=True, kw_only=True)
class Verdict(Finding):
    """A claim judged in one context."""

    claim: Claim
    context: str = ""
    """Hardware, precision, model and data, and what else tells contexts apart; empty where no
    context has anything to say."""
    sweep_dirs: tuple[str, ...] = ()
    """Folders of these runs: those of other contexts may have the same ids."""
    is_own: bool = False
    """Whether the command is the one of these runs' own sweeps; else it names a shipped study."""


@dataclass(frozen=True, eq=False)
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
    result: Callable[[Context], Result | Finding | None]
    """What it rests on. None: the context has none of the runs that it needs."""
    definition: str = ""
    """Of the effect, before what is compared."""
    rules: Mapping[str, Rule] = field(default_factory=dict)
    """What contrasts must show, by their name. All must hold; the effect is that of the first,
    unless another one contradicts."""
    says: str = ""
    """The sentence behind a verdict, with places for the size that decides each rule (its name),
    the number of its contrasts (`n_` and the name), the margin and the facts."""
    unit: str = ""
    """Of the effect."""
    fewest: int = FEWEST
    """Pairs of runs from which the rules judge a comparison."""

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
        none = Finding.none(f"no context has the runs it needs: {self.needs}", self.effect)
        settle = self.settle_on(name for context in contexts for name in context.data)
        return [Verdict(**vars(replace(none, settle=settle)), claim=self)]

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

    def _decide(self, context: Context) -> Finding | None:
        """Put the claim's questions to its result."""
        result = self.result(context)
        if not isinstance(result, Result):
            return result
        margin, _ = context.stated
        looked_at = [*chain(*result.contrasts.values())]
        ids, definition = run_ids_of(looked_at), result.definition or self.definition
        pairs = {
            name: max((len(contrast.values) for contrast in own), default=0)
            for name, own in result.contrasts.items()
        }
        decisions: dict[str, Decision] = {}
        for name in sorted(self.rules, key=lambda name: pairs[name]):
            rule = self.rules[name](result.contrasts[name], margin)
            if result.reason or (decided := rule()) is None:
                along = f"along the {name}, " if len(self.rules) > 1 else ""
                few = f"{along}{too_few(pairs[name], 'pairs of runs', self.fewest)}{result.beside}"
                n = 0 if result.reason or along or result.beside else pairs[name]
                reason, is_compared = result.reason or few, bool(looked_at)
                return Finding.none(reason, definition, ids, n=n, is_compared=is_compared)
            decisions[name] = decided
        decisions = {name: decisions[name] for name in self.rules}
        against = [one for one in decisions.values() if one.answer == CONTRADICTED]
        first = [*against[-1:], *decisions.values()][0]
        answers = [one.answer for one in decisions.values()]
        answer = next((one for one in (CONTRADICTED, OPEN) if one in answers), SUPPORTED)
        answer = SUPPORTED if result.shown else OPEN if answer == result.withheld else answer
        kind = definition.partition(" ")[0]
        effect = first.deciding.estimate(definition, kind, self.unit, result.note)
        sizes = {name: one.deciding.text(kind) for name, one in decisions.items()}
        counts = {f"n_{name}": len(own) for name, own in result.contrasts.items()}
        says = self.says.format(margin=f"{margin:g}", **sizes, **counts, **result.facts)
        if answer != SUPPORTED:
            says += f" {result.unless_supported}"
        if result.note:
            says += f" Beware: {result.note}."
        lacking = sum(len(contrast.values) < self.fewest for contrast in looked_at)
        if effect.n < FEWEST:
            says += _FEW_PAIRS.format(effect.n)
        if lacking:
            has = "has" if lacking == 1 else "have"
            says += _FEW_IN_SOME.format(len(looked_at), lacking, has, self.fewest)
        return Finding(answer, effect, ids, " ".join(says.split()), is_compared=True)

    def _found(self, context: Context, evidence: Evidence) -> Finding | None:
        """Decide; where valid times of these very runs would tell more, the command for them."""
        finding = self._decide(context)
        untimed = context.launched["timing_note"].notna() & context.runs["status"].eq("completed")
        if not untimed.any() or (finding is not None and finding.verdict != OPEN):
            return finding
        free = {other.label: other for other in evidence.as_if_timed.contexts(self.view)}
        hoped = self._decide(free[context.label])
        n = 0 if finding is None else finding.effect.n
        if hoped is None or not hoped.is_compared or n >= hoped.effect.n > 0:
            return finding
        command = for_times(context.launched[untimed], evidence.cells.runs)
        if command is None:
            return finding
        if finding is None:
            why = "; ".join(sorted(set(context.launched.loc[untimed, "timing_note"])))
            reason = f"the times of {untimed.sum()} runs do not count ({why})"
            finding = Finding.none(reason, self.effect, hoped.run_ids)
        return replace(finding, settle=command)

    def _verdict(self, context: Context, finding: Finding) -> Verdict:
        """Join a finding and the command, with more seeds where those that there are say little."""
        n = finding.effect.n if finding.n_seeds is None else finding.n_seeds
        seeds = range(min(max(_SEEDS, 2 * n), _MOST_SEEDS))
        own, (_, several) = finding.settle, context.stated
        if own is None and finding.is_compared and (not several or self.view == "cost"):
            own = for_more_seeds(context.launched, seeds)
        more = f" seed={','.join(map(str, seeds))}" if n > 1 else ""
        settle = own or self.settle_on(context.data) + more
        found = replace(finding, settle=settle if finding.verdict == OPEN else None)
        behind = context.runs.loc[context.runs["run_id"].isin(finding.run_ids), "sweep_dir"]
        folders, is_own = tuple(behind.unique()), own is not None
        return Verdict(
            **vars(found), claim=self, context=context.label, sweep_dirs=folders, is_own=is_own
        )


def run_ids_of(contrasts: Sequence[Contrast]) -> tuple[str, ...]:
    """Return the runs behind some contrasts, sorted."""
    return tuple(sorted({run for contrast in contrasts for run in contrast.run_ids}))
