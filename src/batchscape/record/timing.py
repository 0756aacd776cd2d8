"""Whether the times of a run count, for report, status, terminal and W&B."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from batchscape.record.figures import TIMES
from batchscape.record.files import read_json_if_there
from batchscape.record.folder import RunFolder
from batchscape.record.status import RunStatus
from batchscape.text import count_text

BUSY_PCT = 10.0
"""Share of the step time that a rank may wait for a core before its times do not count."""
BUSY = f"other work took the core for more than {BUSY_PCT:g} % of the step time"
"""Reason of a run whose ranks waited longer."""
SHARED_DEVICE = "processes of others computed on a device of the run"
"""Reason of a run that shared a device."""
THROTTLED = "heat or the hardware's protection held the clock of a device down"
"""Reason of a run with a device that could not keep its clock."""
LET_IT_LOG = (
    "let it log the time of each step: step_time_s in a pattern or in columns, or "
    "batchscape.recorder, a Trainer by BatchscapeCallback of batchscape.transformers_callback, or "
    "by --include_num_input_tokens_seen=yes and --logging_steps=1"
)
"""Advice where a program logs no step times."""
_NOT_LOGGED = f"the program logs no step times (what helps: {LET_IT_LOG})"
SEEN_BETWEEN_ROWS = (
    "the program logs no step times, and these are the wall clock between its rows as the launcher "
    "saw them, evaluations and checkpoints included"
)
"""Reason of times that the launcher took: a row may come late, or with many others."""
_NOT_MEASURED = (
    "no optimizer step was measured: all were warm-up, or sampled the gradient's noise (what "
    "helps: more optimizer steps, or a smaller measure.warmup_optimizer_steps)"
)
_NO_LAUNCH = "no record of how it was launched"
_NO_REASON = "marked as not valid, without a reason"
_SHARE = " share "
_RUNS_SHARE = " runs" + _SHARE

VERDICT = ("timing_valid", "timing_invalid_reason")
"""Entries of `launch.json` about the machine during the run; only a part of the answer."""


def why_untimed(launch: Mapping[str, Any] | None, summary: Mapping[str, Any]) -> str | None:
    """Say why the times of a run do not count.

    Parameters
    ----------
    launch : mapping or None
        Content of `launch.json`; None or empty where the run was not launched.
    summary : mapping
        Figures of the run, those of `record.summary`; empty while it runs.

    Returns
    -------
    str or None
        None where they count.
    """
    if not launch:
        return _NO_LAUNCH
    # These come first, as they hold on any machine.
    if summary.get("optimizer_steps") and summary.get("measured_optimizer_steps") is None:
        return _NOT_LOGGED
    if summary.get("measured_optimizer_steps") == 0:
        return _NOT_MEASURED
    if not launch.get("timing_valid"):
        return launch.get("timing_invalid_reason") or _NO_REASON
    reasons = {
        BUSY: (summary.get("core_wait_pct") or 0.0) > BUSY_PCT,
        SHARED_DEVICE: summary.get("foreign_processes"),
        THROTTLED: summary.get("throttled"),
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds) or None


def invalidate_times(launch: dict[str, Any], reason: str) -> None:
    """Add a reason why the times of a run cannot be compared, once."""
    text = launch["timing_invalid_reason"]
    reasons = dict.fromkeys([*(text.split("; ") if text else ()), reason])
    launch |= {"timing_valid": False, "timing_invalid_reason": "; ".join(reasons)}


def runs_share(runs: int, what: str) -> str:
    """Return the reason that runs of a sweep share a device or the machine."""
    return f"up to {runs}{_RUNS_SHARE}{what}"


def processes_share(processes: str, places: str) -> str:
    """Return the reason that a run has more processes than devices or cores."""
    return f"{processes}{_SHARE}{places}"


def is_beside_others(reason: str) -> bool:
    """Whether a reason, or one of several in a text, is of `runs_share`."""
    return _RUNS_SHARE in reason


def is_mended_by_repeating(reason: str) -> bool:
    """Whether the same run would have valid times alone on a free machine."""
    if reason in {_NOT_LOGGED, _NOT_MEASURED} or SEEN_BETWEEN_ROWS in reason:
        return False
    return all(is_beside_others(part) or _SHARE not in part for part in reason.split("; "))


def why_run_untimed(folder: RunFolder, status: RunStatus) -> str | None:
    """Say why the times of a run do not count, by its folder.

    Raises
    ------
    RecordError
        If its record of the launch is damaged.
    """
    return why_untimed(read_json_if_there(folder.launch), status.summary)


def untimed_text(reasons: Counter[str], completed: int) -> str:
    """Say how many of the completed runs have no valid times, and why."""
    listed = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
    have = count_text(completed, "completed run has", "completed runs have")
    return f"{reasons.total()} of {have} no times that count: {listed}"


def timed_figures(summary: Mapping[str, Any], untimed_reason: str | None) -> dict[str, Any]:
    """Return the figures of a summary that count.

    Parameters
    ----------
    summary : mapping
    untimed_reason : str or None
        As `why_untimed` returns it.
    """
    return {name: v for name, v in summary.items() if untimed_reason is None or name not in TIMES}
