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

_TIMED_VIEWS = ("cost", "reaching")
"""Views in which a claim may rest on times."""

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
    """Further values for the claim's sentence and definition."""
    note: str | None = None
    """Reason to doubt the effect."""
    reason: str = ""
    """Why nothing is decided, whatever the contrasts are."""


@dataclass(frozen=True)
class Verdict:
    """A claim judged in one context."""

    claim: Claim
    context: str
    """Hardware, precision, model, data and the other settings of the context; empty if no context
    has the runs that the claim needs."""
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
    sweep_dirs: tuple[str, ...] = ()
    """Folders of these runs: those of other contexts may have the same ids."""
    is_own: bool = False
    """Whether the command repeats the sweeps of these runs; else it names a shipped study."""

    @property
    def n_runs(self) -> int:
        """Runs behind the verdict."""
        return len(self.run_ids)


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
    """Format of the effect's definition, of the facts; before the names of the compared sides."""
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
        contexts = evidence.contexts(self.view)
        verdicts = [verdict for each in contexts if (verdict := self._judge(each)) is not None]
        reason = f"no context has the runs it needs: {self.needs}"
        return verdicts or [replace(self._open("", reason, self.effect), settle=self.settle)]

    def _open(
        self, context: str, reason: str, definition: str, run_ids: tuple[str, ...] = (), n: int = 0
    ) -> Verdict:
        """Leave the claim open, with a reason as half a sentence."""
        text = f"{reason[:1].upper()}{reason[1:]}."
        return Verdict(self, context, OPEN, Estimate.unknown(reason, n, definition), run_ids, text)

    def _decide(self, context: Context) -> Verdict | None:
        """Apply the rules to the result."""
        result = self.result(context)
        if result is None:
            return None
        margin, _ = context.margin
        ids = {run for contrast in chain(*result.contrasts.values()) for run in contrast.run_ids}
        label, run_ids = context.label, tuple(sorted(ids))
        definition = self.definition.format(**result.facts)
        lacking = [name for name in self.rules if not result.contrasts[name]]
        if result.reason or lacking:
            reason = result.reason or too_few(0, "pairs of runs", self.fewest)
            if not result.reason and len(self.rules) > 1:
                nothing = f"along the {lacking[0]}, nothing can be compared"
                reason = f"{nothing}: the claim needs {self.needs}"
            return self._open(label, reason, definition, run_ids)
        decisions: dict[str, Decision] = {}
        for name, rule in self.rules.items():
            group = result.contrasts[name]
            decision = rule(group, margin)()
            if decision is None:
                most = max(len(contrast.values) for contrast in group)
                along = f"along the {name}, " if len(self.rules) > 1 else ""
                reason = along + too_few(most, "pairs of runs", self.fewest)
                verdict = self._open(label, reason, definition, run_ids, 0 if along else most)
                return replace(verdict, is_compared=True)
            decisions[name] = decision
        against = [each for each in decisions.values() if each.answer == CONTRADICTED]
        first = [*against[-1:], *decisions.values()][0]
        is_supported = all(each.answer == SUPPORTED for each in decisions.values())
        answer = CONTRADICTED if against else SUPPORTED if is_supported else OPEN
        kind = definition.partition(" ")[0]
        effect = first.deciding.estimate(definition, kind, self.unit, result.note)
        sizes = {name: decision.deciding.text(kind) for name, decision in decisions.items()}
        says = self._explain(result, sizes, margin, effect.n)
        return Verdict(self, label, answer, effect, run_ids, says, is_compared=True)

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

    def _judge(self, context: Context) -> Verdict | None:
        """Decide; where that leaves the claim open, add the command that would settle it.

        That is the one for valid times where these would decide more, or for more seeds.
        """
        verdict, command = self._decide(context), None
        is_open = verdict is None or verdict.verdict == OPEN
        if is_open and self.view in _TIMED_VIEWS and context.timing_command is not None:
            with_times, n = self._decide(context.as_if_timed), verdict.effect.n if verdict else 0
            if with_times is not None and with_times.effect.n > n:
                command = context.timing_command
                verdict = verdict or self._untimed(context, with_times.run_ids)
        if verdict is None:
            return None
        is_behind = context.runs["run_id"].isin(verdict.run_ids)
        n_seeds = context.runs.loc[is_behind, "seed_block"].nunique()
        seeds = range(min(max(_SEEDS, 2 * n_seeds), _MOST_SEEDS))
        if command is None and is_open and verdict.is_compared:
            command = seeds_command(context.runs, seeds)
        more = f" seed={','.join(map(str, seeds))}" if verdict.effect.n > 1 else ""
        return replace(
            verdict,
            settle=command or self.settle + more if is_open else None,
            sweep_dirs=tuple(context.runs.loc[is_behind, "sweep_dir"].unique()),
            is_own=command is not None,
        )

    def _untimed(self, context: Context, run_ids: tuple[str, ...]) -> Verdict:
        """Leave open what times that do not count would decide."""
        notes = context.runs.loc[context.runs["status"].eq("completed"), "timing_note"].dropna()
        why = "; ".join(sorted(set(notes)))
        reason = f"the times of {len(notes)} runs do not count ({why})"
        return self._open(context.label, reason, self.effect, run_ids)
