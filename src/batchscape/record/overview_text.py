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

from batchscape.record.commands import LaunchedRun, time_again
from batchscape.record.folder import SweepFolder
from batchscape.record.overview import Overview, advice_of
from batchscape.record.progress import RunProgress
from batchscape.record.state import UNREADABLE, Next
from batchscape.record.status import FAULTS, Cause, Status, StopReason
from batchscape.record.timing import untimed_text
from batchscape.record.trial_counts import TrialCounts
from batchscape.text import count_text, duration_text

_MOST_LISTED = 20
"""Runs that are listed in each section; `--json` has all."""
_STOPPED: dict[str | None, str] = {
    StopReason.TARGET: ", target reached",
    StopReason.TIMED: ", timed alone",
}


def overview_text(sweep: Overview) -> RenderableType:
    """Return the overview of a sweep for people, the most urgent part first."""
    by = f" (launchers: {', '.join(sweep.launchers)})" if sweep.launchers else ""
    headline = Text(f"{sweep.sweep_dir}: {sweep.state}{by}", style="bold")
    counts = dict(sweep.counts)
    rejected = counts.pop(str(Status.REJECTED), 0)
    listing = ", ".join(f"{n} {status}" for status, n in counts.items()) or "none"
    text = f"{count_text(sum(counts.values()), 'run')}: {listing}"
    text = f"{text}; {count_text(rejected, 'run')} rejected" if rejected else text
    parts: list[RenderableType] = [headline, Text(text)]
    if sweep.trials is not None:
        parts += map(Text, _trial_lines(sweep.trials))
    if untimed := Counter(run.untimed for run in sweep.runs if run.untimed is not None):
        parts.append(Text(_untimed_text(sweep, untimed)))
    if running := sweep.with_status(Status.RUNNING):
        parts += [_title("Running now"), _running_table(running)]
    parts += _fault_parts(sweep)
    if unread := sweep.with_status(UNREADABLE):
        parts += _section("Cannot be read", [f"{run.run_id}: {run.reason}" for run in unread])
        parts.append(_line(f"What to do: {advice_of(unread[0])}"))
    stopped = sweep.with_status(Status.INTERRUPTED)
    over = sweep.with_status(Status.DIVERGED, Status.PRUNED)
    reasons = Counter(run.reason for run in sweep.with_status(Status.REJECTED))
    completed = sweep.with_status(Status.COMPLETED)
    for title, lines in (
        ("Interrupted", [_interrupted_text(run) for run in stopped]),
        (
            "Over, without having reached their budget",
            [f"{run.run_id} {run.status}: {run.reason}" for run in over],
        ),
        (
            "Rejected runs",
            [
                f"{count}: {reason or 'for an unknown reason'}"
                for reason, count in reasons.most_common()
            ],
        ),
        ("Completed", [_completed_text(run) for run in completed]),
    ):
        parts += _section(title, lines)
    return Group(*parts, Text(""), Text(_next_text(sweep)))


def _section(title: str, lines: Sequence[str]) -> list[RenderableType]:
    if not lines:
        return []
    listed = [_line(line) for line in lines[:_MOST_LISTED]]
    return [_title(title), *listed, *_lines_left_out(len(lines))]


def _trial_lines(trials: TrialCounts) -> Iterator[str]:
    total = sum(trials.done.values())
    yield f"Trials: {total} of {total + trials.left} done"
    if trials.left:
        for study, done in trials.done.items():
            yield f"  {study}: {done} of {max(trials.asked, done)}"


def _untimed_text(sweep: Overview, untimed: Counter[str]) -> str:
    text = untimed_text(untimed, len(sweep.with_status(Status.COMPLETED)))
    folder = str(sweep.sweep_dir)
    launched = (LaunchedRun(folder, run.command, run.untimed) for run in sweep.runs)
    # There is no report of trials.
    if SweepFolder(sweep.sweep_dir).space.exists() or time_again(launched, {}) is None:
        return text
    report = shlex.join(["batchscape", "report", folder])
    return f"{text}; {report} has the command that measures them again"


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _line(text: str, indent: int = 2) -> Padding:
    return Padding(Text(text), (0, 0, 0, indent), expand=False)


def _lines_left_out(count: int) -> list[Padding]:
    unlisted = count - _MOST_LISTED
    return [_line(f"and {unlisted} more; --json lists all")] if unlisted > 0 else []


def _running_table(runs: list[RunProgress]) -> Table:
    table = Table("run_id", "step", "loss", "left", "last row", "attempt", box=None)
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.no_wrap = True
    for run in runs:
        table.add_row(
            run.run_id,
            "starting" if run.optimizer_step is None else _step_text(run),
            "" if run.loss is None else f"{run.loss:.4f}",
            "" if run.left_s is None else duration_text(round(run.left_s)),
            "" if run.age_s is None else f"{duration_text(round(run.age_s))} ago",
            str(run.attempts),
        )
    return table


def _step_text(run: RunProgress) -> str:
    return f"{run.optimizer_step or 0}/{run.optimizer_steps}"


def _fault_parts(sweep: Overview) -> Iterator[RenderableType]:

    def kind(run: RunProgress) -> tuple[str, str, str]:
        return run.status, run.cause or "", advice_of(run)

    for (status, cause, what_to_do), group in groupby(
        sorted(sweep.with_status(*FAULTS), key=kind), kind
    ):
        runs = list(group)
        words = str(cause or status).replace("_", " ")
        failed = "Failed: " if cause and status == Status.FAILED else ""
        yield _title(f"{failed}{words if failed else words.capitalize()} ({len(runs)})")
        for run in runs[:_MOST_LISTED]:
            parts = [] if run.optimizer_step is None else [f"step {_step_text(run)}"]
            if run.rank is not None:
                parts.append(f"rank {run.rank}" + (f" in {run.phase}" if run.phase else ""))
            if run.attempts > 1:
                parts.append(f"{run.attempts} attempts")
            yield _line(f"{run.run_id}  {', '.join(parts)}")
            yield _line(run.reason or "for an unknown reason", indent=4)
        yield from _lines_left_out(len(runs))
        yield _line(f"What to do: {what_to_do}")


def _completed_text(run: RunProgress) -> str:
    loss = "" if run.loss is None else f", loss {run.loss:.4f}"
    why = _STOPPED.get(run.stop_reason, "")
    return f"{run.run_id}  step {_step_text(run)}{loss}{why}"


def _interrupted_text(run: RunProgress) -> str:
    if run.next is Next.SEAL:
        return (
            f"{run.run_id}  step {_step_text(run)}, trained to its end: it is sealed from its rows"
        )
    why = f"; {run.reason}" if run.cause == Cause.DISK else ""
    if run.next is Next.BEGIN:
        return f"{run.run_id}  step {_step_text(run)}, without a checkpoint: it begins again{why}"
    where = "" if run.checkpoint_step is None else f" from step {run.checkpoint_step}"
    return f"{run.run_id}  step {_step_text(run)}, goes on{where}{why}"


def _next_text(sweep: Overview) -> str:
    """Say what the same command would do."""
    texts = {
        "seal": "seals {} that only lacks its seal",
        "begin": "begins {}",
        "go_on": "goes on with {}",
        "wait": "leaves {} running to their launcher",
        "leave": "leaves {} alone",
        "skip": "skips {} done",
    }
    steps = sweep.next_steps
    parts = [text.format(steps[step]) for step, text in texts.items() if step in steps]
    trials = sweep.trials
    is_searching = trials is not None and (trials.left or trials.grid_is_left)
    text = f"The same command now {', '.join(parts)}." if parts else ""
    if not parts and not is_searching:
        return "The same command would do nothing."
    if trials is not None and is_searching:
        count = count_text(trials.left, "trial is", "trials are")
        tasks = [f"{count} left"] if trials.left else []
        tasks += ["the grid around the best is to be measured"] if trials.grid_is_left else []
        goes_on = "It goes on" if parts else "The same command goes on"
        text = f"{text} {goes_on} with the search: {', and '.join(tasks)}.".lstrip()
    faults = {run.status for run in sweep.with_status(*FAULTS) if run.next is Next.LEAVE}
    if faults:
        text += f" To repeat those that failed, add --retry {','.join(sorted(faults))}."
    return text
