"""A claim: its statement, the result it rests on, and the rule that decides, fixed in advance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from batchscape.analysis.claims.evidence import Context, Evidence, View
from batchscape.analysis.claims.rules import CONTRADICTED, OPEN, SUPPORTED, Answer, Decision, Test
from batchscape.analysis.commands import seeds_command
from batchscape.analysis.comparing.pairs import Contrast
from batchscape.analysis.estimates import FEWEST, Estimate, too_few

_SEEDS = 10
"""Seeds of the sweep that would settle what an interval leaves open: at least twice as many."""
_MOST_SEEDS = 20

_FEW_PAIRS = (
    f" Judged from {{}} pairs of runs, as its rule allows; an interval is shown from {FEWEST} on."
)
_FEW_IN_SOME = " {} of {} comparisons: fewer than {} pairs of runs, and no part in it."

Rule = Callable[[Sequence[Contrast], float], Test]
"""Makes the test of some contrasts; the number is the margin of equivalence of their runs."""


@dataclass(frozen=True)
class Result:
    """The contrasts and facts that a topic computed from the runs of one context."""

    contrasts: Mapping[str, Sequence[Contrast]]
    """All contrasts, by the names of the claim's rules."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """Further values for the claim's sentence."""
    definition: str | None = None
    """Definition of the effect, in place of the claim's."""
    note: str | None = None
    """Reason to doubt the effect."""
    reason: str = ""
    """Why nothing is decided, whatever the contrasts are."""


@dataclass(frozen=True)
class Judgement:
    """The answer of the runs of one context."""

    verdict: Answer
    effect: Estimate
    run_ids: tuple[str, ...]
    """Runs behind it, sorted."""
    explanation: str
    """Why this is the answer: sentences of plain text."""
    is_compared: bool = False
    """Whether more runs of these cells would say more."""
    settle: str | None = None
    """Command that would settle an open claim, if possible by the sweeps of these runs."""

    @classmethod
    def undecided(
        cls,
        reason: str,
        definition: str,
        run_ids: tuple[str, ...] = (),
        *,
        n: int = 0,
        is_compared: bool = False,
    ) -> Judgement:
        """Return the judgement of runs that decide nothing, with a reason as half a sentence."""
        text = f"{reason[:1].upper()}{reason[1:]}."
        return cls(OPEN, Estimate.unknown(reason, n, definition), run_ids, text, is_compared)

    @property
    def n_runs(self) -> int:
        """Runs behind the verdict."""
        return len(self.run_ids)


@dataclass(frozen=True, kw_only=True)
class Verdict(Judgement):
    """A claim judged in one context."""

    claim: Claim
    context: str = ""
    """Hardware, precision, model, data and the other settings of the context; empty if no context
    has the runs that the claim needs."""
    sweep_dirs: tuple[str, ...] = ()
    """Folders of these runs: those of other contexts may have the same ids."""
    is_own: bool = False
    """Whether the command repeats the sweeps of these runs; else it names a shipped study."""


@dataclass(frozen=True, eq=False)
class Claim:
    """One row of the list of claims, with its test."""

    id: str
    statement: str
    source: str
    needs: str
    """Runs that the claim needs."""
    effect: str
    """Effect size."""
    rule: str
    """Outcomes that support and that contradict the claim."""
    settle: str
    """Command of the shipped study that would settle it, where no sweep of the user's can."""
    view: View
    """Settings that separate contexts."""
    result: Callable[[Context], Result | None]
    """Computes the result of a context; None without the runs that the claim needs."""
    definition: str = ""
    """Definition of the effect, before the names of the compared sides."""
    rules: Mapping[str, Rule] = field(default_factory=dict)
    """Tests of the contrasts, by their names. All must hold; the effect is that of the first,
    unless another one contradicts."""
    says: str = ""
    """Format of the explanation: the deciding size of each rule by its name, the number of its
    contrasts by `n_` and the name, the margin and the facts."""
    unit: str = ""
    """Unit of the effect."""
    fewest: int = FEWEST
    """Least number of pairs of runs of a comparison that is judged."""

    def judge(self, evidence: Evidence) -> list[Verdict]:
        """Judge the claim in every context, or return one "not identified" if none has its runs."""
        verdicts = [
            self._verdict(context, judgement)
            for context in evidence.contexts(self.view)
            if (judgement := self._judge(context)) is not None
        ]
        if verdicts:
            return verdicts
        reason = f"no context has the runs it needs: {self.needs}"
        judgement = replace(Judgement.undecided(reason, self.effect), settle=self.settle)
        return [Verdict(**vars(judgement), claim=self)]

    def _decide(self, context: Context) -> Judgement | None:
        """Apply the rules to the result."""
        result = self.result(context)
        if result is None:
            return None
        margin, _ = context.margin
        contrasts = [*chain(*result.contrasts.values())]
        ids = tuple(sorted({run for contrast in contrasts for run in contrast.run_ids}))
        definition = result.definition or self.definition
        decisions: dict[str, Decision] = {}
        for name, rule in self.rules.items():
            group = result.contrasts[name]
            decision = None if result.reason else rule(group, margin)()
            if decision is None:
                most = max((len(contrast.values) for contrast in group), default=0)
                along = f"along the {name}, " if len(self.rules) > 1 else ""
                reason = result.reason or along + too_few(most, "pairs of runs", self.fewest)
                n = 0 if result.reason or along else most
                more = bool(group) and not result.reason
                return Judgement.undecided(reason, definition, ids, n=n, is_compared=more)
            decisions[name] = decision
        against = [each for each in decisions.values() if each.answer == CONTRADICTED]
        first = [*against[-1:], *decisions.values()][0]
        is_supported = all(each.answer == SUPPORTED for each in decisions.values())
        answer = CONTRADICTED if against else SUPPORTED if is_supported else OPEN
        kind = definition.partition(" ")[0]
        effect = first.deciding.estimate(definition, kind, self.unit, result.note)
        sizes = {name: decision.deciding.text(kind) for name, decision in decisions.items()}
        explanation = self._explain(result, sizes, margin, effect.n)
        return Judgement(answer, effect, ids, explanation, is_compared=True)

    def _explain(self, result: Result, sizes: Mapping[str, str], margin: float, n: int) -> str:
        """Fill in what the claim says of a result, and add what weakens it."""
        counts = {f"n_{name}": len(group) for name, group in result.contrasts.items()}
        says = self.says.format(margin=f"{margin:g}", **sizes, **counts, **result.facts)
        if result.note:
            says += f" Beware: {result.note}."
        if n < FEWEST:
            says += _FEW_PAIRS.format(n)
        pairs = [len(contrast.values) for contrast in chain(*result.contrasts.values())]
        if lacking := sum(count < self.fewest for count in pairs):
            says += _FEW_IN_SOME.format(lacking, len(pairs), self.fewest)
        return " ".join(says.split())

    def _judge(self, context: Context) -> Judgement | None:
        """Decide, and add the command for valid times where these would decide more."""
        judgement, command = self._decide(context), context.timing_command
        if command is None or (judgement is not None and judgement.verdict != OPEN):
            return judgement
        with_times = self._decide(context.as_if_timed)
        n = 0 if judgement is None else judgement.effect.n
        if with_times is None or with_times.effect.n <= n:
            return judgement
        if judgement is None:
            notes = context.runs.loc[context.runs["status"].eq("completed"), "timing_note"].dropna()
            why = "; ".join(sorted(set(notes)))
            reason = f"the times of {len(notes)} runs do not count ({why})"
            judgement = Judgement.undecided(reason, self.effect, with_times.run_ids)
        return replace(judgement, settle=command)

    def _verdict(self, context: Context, judgement: Judgement) -> Verdict:
        """Add the context, and a command for more seeds where these decide too little."""
        is_behind = context.runs["run_id"].isin(judgement.run_ids)
        n_seeds = context.runs.loc[is_behind, "seed_block"].nunique()
        seeds = range(min(max(_SEEDS, 2 * n_seeds), _MOST_SEEDS))
        command = judgement.settle
        if command is None and judgement.is_compared:
            command = seeds_command(context.runs, seeds)
        more = f" seed={','.join(map(str, seeds))}" if judgement.effect.n > 1 else ""
        settle = command or self.settle + more
        return Verdict(
            **{**vars(judgement), "settle": settle if judgement.verdict == OPEN else None},
            claim=self,
            context=context.label,
            sweep_dirs=tuple(context.runs.loc[is_behind, "sweep_dir"].unique()),
            is_own=command is not None,
        )
