"""How a whole sweep stands: what is done, runs, failed, and is next; no table is loaded.

`batchscape status` shows it as a text for a terminal of any width, or as JSON.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from batchscape.errors import RecordError
from batchscape.outgoing import outgoing_json
from batchscape.record.disk import read_each
from batchscape.record.files import last_row, read_json
from batchscape.record.folder import RunFolder, SweepFolder, no_runs
from batchscape.record.instants import file_age_s
from batchscape.record.locks import is_held
from batchscape.record.state import Next, RunState, read_state
from batchscape.record.status import FAULTS, Cause, Status, StopReason
from batchscape.record.timing import untimed_text, why_run_untimed
from batchscape.text import count_text, duration_text

UNREADABLE = "unreadable"
"""Shown in place of a status that is damaged, of another format version, or cannot be read."""
_MOST_LISTED = 20
"""Runs that are listed in each section; `--json` has all."""
_STOP_TEXTS: dict[str | None, str] = {
    StopReason.TARGET: ", target reached",
    StopReason.TIMED: ", timed alone",
}

UNREADABLE_ADVICE = (
    "mend what the reason says, use the version of batchscape that wrote it, or delete the folder "
    "to run it again"
)
SEAL_ADVICE = "nothing: it was trained to its end, and the same command seals it from its rows"
"""Advice on a run that lacks only its seal, whatever its status."""

STATUS_ADVICE: dict[Status, str] = {
    Status.PENDING: "nothing: the same command starts it",
    Status.RUNNING: "wait; Ctrl-C in its launcher stops it with a checkpoint",
    Status.COMPLETED: "nothing: it is sealed, and the same command skips it",
    Status.OOM: "use a smaller micro-batch with more accumulation, which trains alike, or "
    "activation checkpointing; to try the same again: --retry oom",
    Status.DIVERGED: "nothing: it is a result; lower the learning rate for another one",
    Status.TIMEOUT: "raise launcher.timeout_s and add --retry timeout; it goes on from its "
    "checkpoint",
    Status.FAILED: "read the end of its log.txt, mend what it says, and add --retry failed",
    Status.INTERRUPTED: "nothing: the same command goes on with it",
    Status.PRUNED: "nothing: a stated rule cut it, and its targets are bounds",
    Status.REJECTED: "choose one of the geometries that its reason names",
}
"""Advice by status; of a run that ended by a fault, `CAUSE_ADVICE` says more."""

CAUSE_ADVICE: dict[Cause, str] = {
    Cause.OUT_OF_MEMORY: STATUS_ADVICE[Status.OOM],
    Cause.OTHER_MEMORY: "make room where its reason says that memory was out: end what others run "
    "on the device (nvidia-smi), or leave more to the host (fewer loader.workers); "
    "add --retry failed",
    Cause.DIVERGENCE: STATUS_ADVICE[Status.DIVERGED],
    Cause.HANG: "read the stacks of all ranks in its log.txt; where it is only that slow, raise "
    "launcher.hang_s; add --retry failed",
    Cause.TIME_LIMIT: STATUS_ADVICE[Status.TIMEOUT],
    Cause.EXCEPTION: STATUS_ADVICE[Status.FAILED],
    Cause.SIGNAL: "a native library crashed: read the stack in its log.txt; add --retry failed",
    Cause.KILLED: "mostly memory: look into the system's log (dmesg), run fewer at a time or with "
    "smaller micro-batches; add --retry failed",
    Cause.LOST_CONNECTION: "look at what the other ranks logged; add --retry failed",
    Cause.INFRASTRUCTURE: "look at the machine (limits of processes, file systems); add "
    "--retry failed",
    Cause.DISK: "make room on the disk, or lift what forbids writing; the same command goes on",
    Cause.INTERRUPTED: STATUS_ADVICE[Status.INTERRUPTED],
    Cause.DAMAGED_RECORDS: "mend what its reason says, and add --retry failed; where its rows are "
    "damaged, delete its folder to run it again",
    Cause.CONTRADICTION: "compare what the reason says with the settings or the command, mend it, "
    "and add --retry failed",
}
"""Advice by cause."""


_NOT_LAUNCHED = (
    "use a smaller micro-batch with more accumulation, which trains alike; to try it all the same: "
    "launcher.skip_unfit=false"
)
"""Advice on a run that was rejected because it cannot fit."""


@dataclass(frozen=True)
class RunProgress:
    """Progress of one run."""

    run_id: str
    status: str
    """A `Status`, or `unreadable`."""
    optimizer_step: int | None = None
    """Optimizer steps done."""
    optimizer_steps: int | None = None
    """Optimizer steps in all; None for a rejected cell."""
    loss: float | None = None
    """Latest training loss; of a sealed run, the loss over its last tenth."""
    age_s: float | None = None
    """Time since the last row of an open run."""
    reason: str | None = None
    cause: str | None = None
    """`Cause` of its end, where it did not complete."""
    stop_reason: str | None = None
    """Why a completed run stopped."""
    rank: int | None = None
    """The rank that raised the cause first."""
    phase: str | None = None
    """What that rank was doing."""
    attempts: int = 0
    """Starts of its processes so far."""
    checkpoint_step: int | None = None
    """Optimizer steps in the newest checkpoint of an open run; None without one."""
    left_s: float | None = None
    """Remaining time of a running run, see `remaining_s`."""
    launcher: str | None = None
    """Process id and machine of the launcher of a running run."""
    untimed: str | None = None
    """Why the times of a completed run do not count."""
    next: Next = Next.BEGIN
    """Next step of the same command."""

    @property
    def is_rejected_by_plan(self) -> bool:
        """Whether a plan rejected it; a launcher does where a smaller run was out of memory.

        What an earlier plan rejected, on a smaller machine, starts anew where a plan has it again;
        what a launcher rejected it will mostly reject again.
        """
        return self.status == Status.REJECTED and self.cause != Cause.OUT_OF_MEMORY

    @property
    def advice(self) -> str:
        """What to do about the run, in one line."""
        if self.next is Next.SEAL:
            return SEAL_ADVICE
        if self.status == UNREADABLE:
            return UNREADABLE_ADVICE
        status = Status(self.status)
        if status is Status.REJECTED and not self.is_rejected_by_plan:
            return _NOT_LAUNCHED
        has_ended = status.ended_after_launch and status is not Status.COMPLETED
        if has_ended and self.cause is not None:
            return CAUSE_ADVICE[Cause(self.cause)]
        return STATUS_ADVICE[status]


def run_progress(folder: RunFolder) -> RunProgress:
    """Read the progress of a run; read again where its launcher may have written meanwhile."""
    for _ in range(2):
        try:
            return _progress(read_state(folder))
        except (RecordError, OSError) as error:
            reason = str(error)
    return RunProgress(folder.path.name, UNREADABLE, reason=reason, next=Next.LEAVE)


def _progress(state: RunState) -> RunProgress:
    folder, record, end = state.folder, state.record, state.shown
    row = {} if record.seal else last_row(folder.lines("steps"))
    if record.seal:
        done, loss = (record.summary.get(name) for name in ("optimizer_steps", "final_loss"))
    else:
        done, loss = row.get("optimizer_step"), row.get("loss")
    steps = (state.config.get("resolved") or {}).get("optimizer_steps")
    is_running = end.status is Status.RUNNING
    return RunProgress(
        run_id=folder.path.name,
        status=str(end.status),
        optimizer_step=done,
        optimizer_steps=steps,
        loss=None if loss is None or math.isnan(loss) else loss,
        age_s=file_age_s(folder.lines("steps")) if row else None,
        reason=end.reason,
        cause=end.cause,
        stop_reason=end.stop_reason,
        rank=end.rank,
        phase=end.phase,
        attempts=len(record.attempts),
        checkpoint_step=None if record.seal else folder.checkpoint_step,
        left_s=remaining_s(row, steps) if is_running else None,
        launcher=state.holder if is_running else None,
        untimed=why_run_untimed(folder, record) if end.status is Status.COMPLETED else None,
        next=state.next_step(),
    )


def remaining_s(row: Mapping[str, Any], optimizer_steps: int | None) -> float | None:
    """Return the remaining time of a run at the time of its latest step, without evaluations.

    Parameters
    ----------
    row : mapping
        Latest row of its optimizer steps; may be empty.
    optimizer_steps : int or None
        Optimizer steps in all.

    Returns
    -------
    float or None
        In seconds. None during warm-up, whose steps differ in time, or where no time is known.
    """
    done, spent_s = row.get("optimizer_step"), row.get("train_time_s")
    if not done or spent_s is None or optimizer_steps is None or row.get("warmup"):
        return None
    # The mean, where a program logs no step times, includes the slow first step.
    step_s = row.get("step_time_s") or spent_s / done
    return max(0.0, float(step_s) * (optimizer_steps - int(done)))


FAILED_TRIALS = FAULTS - {Status.OOM}
"""Outcomes of trials without a result, which may be run again; out of memory is a result."""


@dataclass(frozen=True)
class TrialCounts:
    """Progress of the trials of a search."""

    asked: int
    """Number of trials for each study, by the latest command."""
    done: dict[str, int]
    """Number of trials that are over, by study, whatever their outcomes."""
    grid_is_left: bool
    """Whether a grid is to be measured around the best, and is not over."""

    @property
    def left(self) -> int:
        """Number of trials that are not over, or not begun."""
        return sum(max(0, self.asked - done) for done in self.done.values())

    @property
    def is_unfinished(self) -> bool:
        """Whether trials are left, or the grid around the best is."""
        return self.left > 0 or self.grid_is_left


def count_trials(sweep: SweepFolder) -> TrialCounts | None:
    """Count the trials of a search; None where there is none, or its files cannot be read.

    Parameters
    ----------
    sweep : SweepFolder
        Of the grid, or of the trials.
    """
    search = sweep if sweep.space.exists() else sweep.search
    done: Counter[str] = Counter()
    valid_trials: Counter[str] = Counter()
    studies_with_best = set()
    try:
        space = read_json(search.space)
        for row in _csv_rows(search.trials):
            study, outcome = row["study"], row["outcome"]
            done[study] += bool(outcome)
            valid_trials[study] += bool(outcome) and outcome not in FAILED_TRIALS
            if row["is_best"] == "True":
                studies_with_best.add(study)
        # A grid belongs to a number of trials: where there are more, another grid follows.
        grids = read_json(search.grid_results)["studies"] if search.grid_results.exists() else []
        trials_by_study = {study["study"]: study["trials"] for study in grids}
        return TrialCounts(
            asked=int(space["trials"]),
            done=dict(done),
            grid_is_left=int(space["grid_points"]) > 0
            and any(
                trials_by_study.get(study) != valid_trials[study] for study in studies_with_best
            ),
        )
    except (OSError, ValueError, TypeError, KeyError, csv.Error, RecordError):
        return None


def _csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


STATES = {
    "running": "a launcher is at work",
    "interrupted": "no launcher is at work, and the same command would go on",
    "finished": "the same command would do nothing more; some runs may have failed",
}
"""States of a sweep, and what they mean."""


@dataclass(frozen=True)
class Overview:
    """How a sweep stands."""

    sweep_dir: Path
    state: str
    """One of `STATES`."""
    launchers: tuple[str, ...]
    """Process ids and machines of the launchers that have runs now."""
    runs: tuple[RunProgress, ...]
    """By name; runs of the latest plan without a folder are pending."""
    trials: TrialCounts | None = None
    """Counts of the search that the sweep belongs to, as its trials or as its grid."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of runs of each status that occurs, `unreadable` among them."""
        return _ordered_counts((run.status for run in self.runs), [*Status, UNREADABLE])

    @property
    def next_steps(self) -> dict[str, int]:
        """Number of runs for each next step of the same command."""
        return _ordered_counts((run.next for run in self.runs), Next)

    def with_status(self, *statuses: str) -> list[RunProgress]:
        """Return the runs of some statuses."""
        return [run for run in self.runs if run.status in statuses]

    def as_json(self) -> str:
        """Return the overview as JSON; docs/statuses.md says what each name means."""
        content: dict[str, Any] = {
            "sweep_dir": str(self.sweep_dir),
            "state": self.state,
            "launchers": list(self.launchers),
            "counts": self.counts,
            "next": self.next_steps,
            "trials": self.trials and asdict(self.trials),
            "runs": [{**asdict(run), "advice": run.advice} for run in self.runs],
        }
        return json.dumps(outgoing_json(content), indent=2, allow_nan=False)


def _ordered_counts(words: Iterable[str], order: Iterable[str]) -> dict[str, int]:
    counts = Counter(words)
    return {str(word): counts[word] for word in order if counts[word]}


def overview(sweep: SweepFolder) -> Overview:
    """Read the state of a sweep; no table is loaded.

    Raises
    ------
    RecordError
        If the folder is no sweep.
    """
    try:
        rows = _csv_rows(sweep.plan)
        launched_ids = [row["run_id"] for row in rows if row["planned"] == "launch"]
    except (OSError, ValueError, KeyError, csv.Error):
        launched_ids = []  # the plan is derived: a damaged one counts for nothing
    folders = sweep.run_folders()
    if not folders and not launched_ids:
        raise RecordError(no_runs(sweep.path))
    runs = read_each(run_progress, folders, sweep.path)
    folder_ids = {run.run_id for run in runs}
    runs += [
        RunProgress(name, str(Status.PENDING)) for name in launched_ids if name not in folder_ids
    ]
    # A search holds its lock between launches; the runs of its trials are in sweep.search.
    locks = (sweep.lock, sweep.search.search_lock, sweep.search_lock)
    is_at_work = any(map(is_held, locks)) or any(run.status == Status.RUNNING for run in runs)
    trials = count_trials(sweep)
    is_searching = trials is not None and trials.is_unfinished
    is_unfinished = is_searching or any(run.next.is_work for run in runs)
    return Overview(
        sweep_dir=sweep.path,
        state="running" if is_at_work else "interrupted" if is_unfinished else "finished",
        launchers=tuple(sorted({run.launcher for run in runs if run.launcher is not None})),
        runs=tuple(sorted(runs, key=lambda run: run.run_id)),
        trials=trials,
    )


def overview_text(sweep_overview: Overview) -> RenderableType:
    """Return the overview of a sweep for people, the most urgent part first."""
    headline = f"{sweep_overview.sweep_dir}: {sweep_overview.state}"
    if sweep_overview.launchers:
        headline += f" (launchers: {', '.join(sweep_overview.launchers)})"
    parts: list[RenderableType] = [
        Text(headline, style="bold"),
        *map(Text, _summary(sweep_overview)),
    ]
    if running := sweep_overview.with_status(Status.RUNNING):
        parts += [_title("Running now"), _running_table(running)]
    for title, lines, advice in _sections(sweep_overview):
        if not lines:
            continue
        listed = [text for line in lines[:_MOST_LISTED] for text in line.split("\n")]
        if len(lines) > _MOST_LISTED:
            listed.append(f"and {len(lines) - _MOST_LISTED} more; --json lists all")
        if advice:
            listed.append(f"What to do: {advice}")
        indented = (Padding(Text(text), (0, 0, 0, 2), expand=False) for text in listed)
        parts += [_title(title), *indented]
    return Group(*parts, Text(""), Text(_next_text(sweep_overview)))


def _summary(sweep_overview: Overview) -> Iterator[str]:
    """Yield the lines about all runs: counts, trials, and whether times count."""
    counts = dict(sweep_overview.counts)
    rejected = counts.pop(str(Status.REJECTED), 0)
    listing = ", ".join(f"{n} {status}" for status, n in counts.items()) or "none"
    rejected_text = f"; {count_text(rejected, 'run')} rejected" if rejected else ""
    yield f"{count_text(sum(counts.values()), 'run')}: {listing}{rejected_text}"
    if (trials := sweep_overview.trials) is not None:
        total = sum(trials.done.values())
        yield f"Trials: {total} of {total + trials.left} done"
        if trials.left:
            for study, done in trials.done.items():
                yield f"  {study}: {done} of {max(trials.asked, done)}"
    if reasons := Counter(run.untimed for run in sweep_overview.runs if run.untimed is not None):
        yield untimed_text(reasons, sweep_overview.counts[Status.COMPLETED])


def _sections(sweep_overview: Overview) -> Iterator[tuple[str, list[str], str]]:
    """Yield title, lines and advice of each section, the most urgent first; some have no lines."""

    def kind(run: RunProgress) -> tuple[str, str, str]:
        return run.status, run.cause or "", run.advice

    faults = sorted(sweep_overview.with_status(*FAULTS), key=kind)
    for (status, cause, advice), group in groupby(faults, kind):
        lines = list(map(_fault_text, group))
        words = str(cause or status).replace("_", " ")
        is_failed = cause and status == Status.FAILED
        title = f"Failed: {words}" if is_failed else words.capitalize()
        yield f"{title} ({len(lines)})", lines, advice
    lines = [f"{run.run_id}: {run.reason}" for run in sweep_overview.with_status(UNREADABLE)]
    yield "Cannot be read", lines, UNREADABLE_ADVICE
    lines = list(map(_interrupted_text, sweep_overview.with_status(Status.INTERRUPTED)))
    yield "Interrupted", lines, ""
    ended_runs = sweep_overview.with_status(Status.DIVERGED, Status.PRUNED)
    lines = [f"{run.run_id} {run.status}: {run.reason}" for run in ended_runs]
    yield "Over, without having reached their budget", lines, ""
    reasons = Counter(run.reason for run in sweep_overview.with_status(Status.REJECTED))
    lines = [f"{n}: {reason or 'for an unknown reason'}" for reason, n in reasons.most_common()]
    yield "Rejected runs", lines, ""
    yield "Completed", list(map(_completed_text, sweep_overview.with_status(Status.COMPLETED))), ""


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


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


def _fault_text(run: RunProgress) -> str:
    parts = [] if run.optimizer_step is None else [f"step {_step_text(run)}"]
    if run.rank is not None:
        parts.append(f"rank {run.rank}" + (f" in {run.phase}" if run.phase else ""))
    if run.attempts > 1:
        parts.append(f"{run.attempts} attempts")
    return f"{run.run_id}  {', '.join(parts)}\n  {run.reason or 'for an unknown reason'}"


def _completed_text(run: RunProgress) -> str:
    loss = "" if run.loss is None else f", loss {run.loss:.4f}"
    why = _STOP_TEXTS.get(run.stop_reason, "")
    return f"{run.run_id}  step {_step_text(run)}{loss}{why}"


def _interrupted_text(run: RunProgress) -> str:
    where = "" if run.checkpoint_step is None else f" from step {run.checkpoint_step}"
    how = {
        Next.SEAL: "trained to its end: it is sealed from its rows",
        Next.BEGIN: "without a checkpoint: it begins again",
    }.get(run.next, f"goes on{where}")
    why = f"; {run.reason}" if run.cause == Cause.DISK else ""
    return f"{run.run_id}  step {_step_text(run)}, {how}{why}"


def _next_text(sweep_overview: Overview) -> str:
    """Say what the same command would do."""
    texts = {
        "seal": "seals {} that only lacks its seal",
        "begin": "begins {}",
        "go_on": "goes on with {}",
        "wait": "leaves {} running to their launcher",
        "leave": "leaves {} alone",
        "skip": "skips {} done",
    }
    steps = sweep_overview.next_steps
    parts = [text.format(steps[step]) for step, text in texts.items() if step in steps]
    sentences = [f"The same command now {', '.join(parts)}."] if parts else []
    trials = sweep_overview.trials
    if trials is not None and trials.is_unfinished:
        count = count_text(trials.left, "trial is", "trials are")
        tasks = [f"{count} left"] if trials.left else []
        tasks += ["the grid around the best is to be measured"] if trials.grid_is_left else []
        who = "It" if parts else "The same command"
        sentences.append(f"{who} goes on with the search: {', and '.join(tasks)}.")
    elif not parts:
        return "The same command would do nothing."
    faults = {run.status for run in sweep_overview.with_status(*FAULTS) if run.next is Next.LEAVE}
    if faults:
        sentences.append(f"To repeat those that failed, add --retry {','.join(sorted(faults))}.")
    return " ".join(sentences)
