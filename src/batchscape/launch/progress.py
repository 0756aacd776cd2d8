"""What the user sees of a sweep while it runs, and at its end.

Training is timed on the same cores, so the display is drawn at most once a second, and reads only
the last row of each run.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.live import Live
from rich.text import Text

from batchscape.launch.attempt import ActiveRun
from batchscape.launch.result import RunResult, SweepResult
from batchscape.record.overview import remaining_s
from batchscape.record.spec import RunSpec
from batchscape.record.status import FAULTS, RunStatus, Status, StopReason
from batchscape.text import count_text, duration_text

_REFRESH_S = 1.0
_STYLES = {
    Status.COMPLETED: "green",
    Status.FAILED: "red",
    Status.OOM: "red",
    Status.TIMEOUT: "red",
    Status.DIVERGED: "yellow",
    Status.INTERRUPTED: "yellow",
}


class Progress:
    """Lines about runs as they begin and end; below them, on a terminal, what is running now.

    Parameters
    ----------
    console : Console
        Where to write; a terminal shows more than a file.
    total : int
        Runs of the sweep.
    values : mapping of str to str, optional
        Text beside the name of a run.
    """

    def __init__(
        self, console: Console, total: int, values: Mapping[str, str] | None = None
    ) -> None:
        self._console = console
        self._values = {} if values is None else values
        self._total = total
        self._n_over = 0
        self._n_failed = 0
        self._drawn_at = 0.0
        self._waiting_for = ""
        self._untimed_reasons: set[str] = set()
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with _ignore_closed_output():
            self._live.stop()

    def note(self, text: str, style: str = "") -> None:
        """Write a line that stays."""
        with _ignore_closed_output():
            self._console.print(Text(text, style=style), soft_wrap=True)

    def runs_skipped(self, results: Sequence[RunResult]) -> None:
        """Report runs that are not launched: sealed before, ended by a fault, or damaged."""
        skipped = [result for result in results if result.skipped]
        faults = Counter(str(result.status) for result in skipped if result.status in FAULTS)
        sealed = len(skipped) - faults.total()
        self._n_over += len(skipped)
        self._n_failed += faults.total()
        if sealed:
            self.note(f"{sealed} of {count_text(self._total, 'run')} done already, not run again")
        if faults:
            counts = ", ".join(f"{count} {status}" for status, count in sorted(faults.items()))
            self.note(
                f"{count_text(faults.total(), 'run')} ended by a fault before, not run again "
                f"({counts}); to run them again, add --retry {','.join(sorted(faults))}",
                "yellow",
            )
        for result in results:
            if not result.skipped:
                self.run_settled(result)

    def run_settled(self, result: RunResult) -> None:
        """Report a run that was not started, or that another launcher has by now."""
        reasons = [result.reason] if result.reason else []
        if result.by_another and result.status is not Status.INTERRUPTED:
            reasons.insert(0, "by another launcher")
        elif result.status.is_sealed:
            reasons.insert(0, "its rows were whole already")
        self._note_run(result.run_id, result.status, ", ".join(reasons))

    def warn(self, text: str) -> None:
        """Write a line that stays, in the colour of warnings."""
        self.note(text, "yellow")

    def note_waiting(self, text: str) -> None:
        """Report what the launcher waits for, once."""
        if text and text != self._waiting_for:
            self._waiting_for = text
            self.note(text)

    def run_started(self, run: ActiveRun) -> None:
        """Report a run that begins; a terminal shows it below the lines anyway."""
        if self._console.is_terminal:
            return
        attempt = len(run.status.attempts)
        attempt_text = f", attempt {attempt}" if attempt > 1 else ""
        ranks = count_text(run.spec.geometry.data_parallel_size, "rank")
        label = self._label(run.spec.run_id)
        self.note(f"[{self._n_over + 1}/{self._total}] {label} started ({ranks}{attempt_text})")

    def run_ended(
        self,
        spec: RunSpec,
        status: RunStatus,
        untimed_reason: str | None,
        took_s: float | None = None,
    ) -> None:
        """Report how a run ended; if its times do not count, report the reason, each reason once.

        Parameters
        ----------
        spec : RunSpec
        status : RunStatus
        untimed_reason : str or None
            Why its times do not count.
        took_s : float, optional
            Time of its last attempt, in seconds; None for the run of a job.
        """
        speed_unit = "tokens" if spec.data.task == "next_token" else "samples"
        end_text = _ended_text(status, speed_unit if untimed_reason is None else None)
        time_text = "" if took_s is None else f", {duration_text(round(took_s))}"
        self._note_run(spec.run_id, status.status, f"{end_text}{time_text}")
        if untimed_reason is not None and untimed_reason not in self._untimed_reasons:
            self._untimed_reasons.add(untimed_reason)
            self.note(f"Its losses and memory count, its times do not: {untimed_reason}", "yellow")

    def run_retried(self, run_id: str, reason: str) -> None:
        """Report a run that is tried again."""
        self.note(f"{run_id}: {reason}", "yellow")
        self._drawn_at = 0.0

    def _note_run(self, run_id: str, status: Status, description: str) -> None:
        # An interrupted run is not over.
        self._n_over += status is not Status.INTERRUPTED
        self._n_failed += status in FAULTS
        line = f"[{self._n_over}/{self._total}] {self._label(run_id)} {status}: {description}"
        self.note(line, _STYLES.get(status, ""))
        # The last drawing still shows the run.
        self._drawn_at = 0.0

    def update(self, active: Sequence[ActiveRun], left_s: Callable[[], float]) -> None:
        """Draw what is running, if it was not drawn in the last second.

        Parameters
        ----------
        active : sequence of ActiveRun
        left_s : callable
            Returns the time until the last run ends, in seconds; NaN where it is not known.
        """
        now = time.monotonic()
        if not self._console.is_terminal or now - self._drawn_at < _REFRESH_S:
            return
        self._drawn_at = now
        width = self._console.width
        failed = f", {self._n_failed} failed" if self._n_failed else ""
        rest_s = left_s()
        has_forecast = self._n_over < self._total and not math.isnan(rest_s)
        forecast = f", about {duration_text(round(rest_s))} left" if has_forecast else ""
        lines = [f"{self._n_over}/{self._total} runs done, {len(active)} running{failed}{forecast}"]
        lines += [f"  {self._label(run.spec.run_id)}  {_running_text(run)}" for run in active]
        # Lines are cut here: the layout of plain text costs a tenth of that of a table.
        text = "\n".join(line[: width - 1] for line in lines)
        with _ignore_closed_output():
            self._live.update(Text(text, no_wrap=True), refresh=True)

    def _label(self, run_id: str) -> str:
        values = self._values.get(run_id)
        return run_id if values is None else f"{run_id} ({values})"

    def summary(self, result: SweepResult) -> None:
        """Write how the sweep ended: counts, and each failure with its cause and its log."""
        counts = ", ".join(f"{count} {status}" for status, count in result.counts.items())
        self.note(f"{count_text(len(result.runs), 'run')}: {counts}")
        for run in result.failed:
            self.note(f"{self._label(run.run_id)} {run.status}: {run.reason}", "red")
            self.note(f"  log: {run.folder.log}")
        if result.why_stopped is not None:
            self.note(f"{result.why_stopped}: no more were started; the same command goes on")
        if result.interrupted:
            self.note("Stopped before the end; the same command goes on")
        if result.mirror_place is not None:
            self.note(result.mirror_place)
        if result.mirror_note is not None:
            self.note(result.mirror_note, "yellow")


def _running_text(run: ActiveRun) -> str:
    """Say how far a run is, by its last row."""
    row, steps = run.last_row, run.spec.optimizer_steps
    if (done := row.get("optimizer_step")) is None:
        return "starting"
    # A program may log no loss.
    loss = "" if row.get("loss") is None else f"  loss {row['loss']:.4f}"
    left_s = remaining_s(row, steps)
    rest = "" if left_s is None else f"  {duration_text(round(left_s))} left"
    return f"optimizer step {done}/{steps}{loss}{rest}"


def _ended_text(status: RunStatus, speed_unit: str | None) -> str:
    """Say how a run ended: figures, or the reason. Without `speed_unit` its times do not count."""
    if status.status is not Status.COMPLETED:
        return status.reason or "for an unknown reason"
    figures = status.summary
    spent_s = figures.get("processor_time_s") if speed_unit is None else None
    has_target = status.stop_reason is StopReason.TARGET
    values = {
        "loss {:.4f}": figures.get("final_loss"),
        "held-out loss {:.4f}": figures.get("final_eval_loss"),
        f"{{:,.0f}} {speed_unit}/s": figures.get(f"{speed_unit}_per_s"),
        "disturbed: {:.3g} ms of processor time a step": spent_s and 1000 * spent_s,
        "target reached at optimizer step {}": figures["optimizer_steps"] if has_target else None,
        "{}": status.reason,
    }
    parts = [text.format(value) for text, value in values.items() if value is not None]
    return ", ".join(parts) or "no steps"


@contextmanager
def _ignore_closed_output() -> Iterator[None]:
    """Ignore a closed terminal or pipe, for which Rich raises SystemExit."""
    with suppress(OSError, SystemExit):
        yield
