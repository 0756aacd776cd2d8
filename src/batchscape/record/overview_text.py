"""An overview of a sweep as a person reads it, on a terminal of any width."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from batchscape.record.causes import Cause
from batchscape.record.commands import LaunchedRun, time_again
from batchscape.record.folder import SweepFolder
from batchscape.record.overview import Overview, advice_of, by_reason
from batchscape.record.progress import RunProgress
from batchscape.record.state import UNREADABLE, Next
from batchscape.record.status import FAULTS, Status, StopReason
from batchscape.record.timing import untimed_text
from batchscape.record.trial_counts import TrialCounts
from batchscape.text import count_text, duration_text

_MOST_LISTED = 20
"""Runs that are listed of a kind; `--json` has all."""


def overview_text(found: Overview) -> RenderableType:
    """Return what a person wants to know of a sweep, the most urgent first."""
    by = f" (launchers: {', '.join(found.launchers)})" if found.launchers else ""
    headline = Text(f"{found.sweep_dir}: {found.state}{by}", style="bold")
    parts: list[RenderableType] = [headline, Text(_counts(found))]
    if found.trials is not None:
        parts += map(Text, _trials(found.trials))
    if untimed := Counter(run.untimed for run in found.runs if run.untimed is not None):
        parts.append(Text(_without_times(found, untimed)))
    if running := found.with_status(Status.RUNNING):
        parts += [_title("Running now"), _running(running)]
    parts += _faults(found)
    if unread := found.with_status(UNREADABLE):
        parts += _section("Cannot be read", [f"{run.run_id}: {run.reason}" for run in unread])
        parts.append(_listed(f"What to do: {advice_of(unread[0])}"))
    stopped = found.with_status(Status.INTERRUPTED)
    over = found.with_status(Status.DIVERGED, Status.PRUNED)
    rejected = by_reason(found.with_status(Status.REJECTED))
    completed = found.with_status(Status.COMPLETED)
    for title, lines in (
        ("Interrupted", [_interrupted(run) for run in stopped]),
        (
            "Over, without having reached their budget",
            [f"{run.run_id} {run.status}: {run.reason}" for run in over],
        ),
        ("Rejected runs", [f"{count}: {reason}" for reason, count in rejected.items()]),
        ("Completed", [_completed(run) for run in completed]),
    ):
        parts += _section(title, lines)
    return Group(*parts, Text(""), Text(_next(found)))


def _section(title: str, lines: Sequence[str]) -> list[RenderableType]:
    if not lines:
        return []
    listed = [_listed(line) for line in lines[:_MOST_LISTED]]
    return [_title(title), *listed, *_more(len(lines))]


def _counts(found: Overview) -> str:
    counts = dict(found.counts)
    rejected = counts.pop(str(Status.REJECTED), 0)
    listed = ", ".join(f"{n} {status}" for status, n in counts.items()) or "none"
    text = f"{count_text(sum(counts.values()), 'run')}: {listed}"
    return f"{text}; {count_text(rejected, 'run')} rejected" if rejected else text


def _trials(found: TrialCounts) -> Iterator[str]:
    total = sum(found.done.values())
    yield f"Trials: {total} of {total + found.left} done"
    if found.left:
        for study, done in found.done.items():
            yield f"  {study}: {done} of {max(found.asked, done)}"


def _without_times(found: Overview, untimed: Counter[str]) -> str:
    text = untimed_text(untimed, len(found.with_status(Status.COMPLETED)))
    folder = str(found.sweep_dir)
    launched = (LaunchedRun(folder, run.command, run.untimed) for run in found.runs)
    # Of trials there is no report.
    if SweepFolder(found.sweep_dir).space.exists() or time_again(launched, {}) is None:
        return text
    report = shlex.join(["batchscape", "report", folder])
    return f"{text}; {report} has the command that measures them again"


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _listed(text: str, indent: int = 2) -> Padding:
    return Padding(Text(text), (0, 0, 0, indent), expand=False)


def _more(count: int) -> list[Padding]:
    left = count - _MOST_LISTED
    return [_listed(f"and {left} more; --json lists all")] if left > 0 else []


def _running(runs: list[RunProgress]) -> Table:
    table = Table("run_id", "step", "loss", "left", "last row", "attempt", "doing", box=None)
    table.columns[0].overflow = "fold"
    for column in table.columns[1:-1]:
        column.no_wrap = True
    for run in runs:
        table.add_row(
            run.run_id,
            "starting" if run.optimizer_step is None else _step(run),
            "" if run.loss is None else f"{run.loss:.4f}",
            "" if run.left_s is None else duration_text(round(run.left_s)),
            "" if run.age_s is None else f"{duration_text(round(run.age_s))} ago",
            str(run.attempts),
            run.doing or "",
        )
    return table


def _step(run: RunProgress) -> str:
    return f"{run.optimizer_step or 0}/{run.optimizer_steps}"


def _faults(found: Overview) -> Iterator[RenderableType]:

    def kind(run: RunProgress) -> tuple[str, str, str]:
        return run.status, run.cause or "", advice_of(run)

    for (status, cause, what_to_do), group in groupby(
        sorted(found.with_status(*FAULTS), key=kind), kind
    ):
        alike = list(group)
        words = str(cause or status).replace("_", " ")
        failed = "Failed: " if cause and status == Status.FAILED else ""
        yield _title(f"{failed}{words if failed else words.capitalize()} ({len(alike)})")
        for run in alike[:_MOST_LISTED]:
            yield _listed(_fault(run))
            yield _listed(run.reason or "for an unknown reason", indent=4)
        yield from _more(len(alike))
        yield _listed(f"What to do: {what_to_do}")


def _fault(run: RunProgress) -> str:
    parts = [] if run.optimizer_step is None else [f"step {_step(run)}"]
    if run.rank is not None:
        parts.append(f"rank {run.rank}" + (f" in {run.phase}" if run.phase else ""))
    if run.attempts > 1:
        parts.append(f"{run.attempts} attempts")
    return f"{run.run_id}  {', '.join(parts)}"


def _completed(run: RunProgress) -> str:
    loss = "" if run.loss is None else f", loss {run.loss:.4f}"
    why = ", target reached" if run.stop_reason == StopReason.TARGET else ""
    return f"{run.run_id}  step {_step(run)}{loss}{why}"


def _interrupted(run: RunProgress) -> str:
    if run.next is Next.SEAL:
        return f"{run.run_id}  step {_step(run)}, trained to its end: it is sealed from its rows"
    why = f"; {run.reason}" if run.cause == Cause.DISK else ""
    if run.next is Next.BEGIN:
        return f"{run.run_id}  step {_step(run)}, without a checkpoint: it begins again{why}"
    where = "" if run.checkpoint_step is None else f" from step {run.checkpoint_step}"
    return f"{run.run_id}  step {_step(run)}, goes on{where}{why}"


def _next(found: Overview) -> str:
    """Say what the same command would do."""
    said = {
        "seal": "seals {} that only lacks its seal",
        "begin": "begins {}",
        "go_on": "goes on with {}",
        "wait": "leaves {} running to their launcher",
        "leave": "leaves {} alone",
        "skip": "skips {} done",
    }
    steps = found.next_steps
    parts = [text.format(steps[step]) for step, text in said.items() if step in steps]
    trials = found.trials
    is_searching = trials is not None and (trials.left or trials.grid_is_left)
    text = f"The same command now {', '.join(parts)}." if parts else ""
    if not parts and not is_searching:
        return "The same command would do nothing."
    if trials is not None and is_searching:
        count = count_text(trials.left, "trial is", "trials are")
        of = [f"{count} left"] if trials.left else []
        of += ["the grid around the best is to be measured"] if trials.grid_is_left else []
        goes_on = "It goes on" if parts else "The same command goes on"
        text = f"{text} {goes_on} with the search: {', and '.join(of)}.".lstrip()
    left = {run.status for run in found.with_status(*FAULTS) if run.next is Next.LEAVE}
    if left:
        text += f" To repeat those that failed, add --retry {','.join(sorted(left))}."
    return text
