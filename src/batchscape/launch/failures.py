"""When failures end a launch: the number allowed is reached, or all runs so far failed alike."""

from __future__ import annotations

import re
from collections.abc import Iterable

from batchscape.launch.result import RunResult
from batchscape.record.folder import SweepFolder
from batchscape.record.status import FAULTS, RunStatus, Status
from batchscape.text import count_text

_EQUAL_FAILURES = 3
"""Runs that fail alike, and none ends otherwise: the next ones would fail, too."""
_NUMBER = re.compile(r"(?<!code )\b\d+(?:\.\d+)?(?:e[+-]?\d+)?")
"""A number in a reason, which may differ between runs that fail alike; an exit code may not."""


def too_many_failures(results: Iterable[RunResult], most: int | None) -> str | None:
    """Say why no more runs are started, whatever they are; None where they are.

    Parameters
    ----------
    results : iterable of RunResult
        Of the runs that have ended in this launch.
    most : int or None
        Number of faults from which on no more runs are started.
    """
    faults = sum(run.status in FAULTS and not run.by_another for run in results)
    if most is None or faults < most:
        return None
    count = count_text(faults, "run has", "runs have")
    return f"{count} failed, and launcher.max_failures is {most}"


def equal_failures(results: Iterable[RunResult], sweep: SweepFolder) -> str | None:
    """Say why the next runs would fail as all have so far; None where they may not."""
    ended = [run for run in results if run.status is not Status.REJECTED]
    if len(ended) < _EQUAL_FAILURES or any(run.status is not Status.FAILED for run in ended):
        return None
    if len({_NUMBER.sub("", str(run.reason).replace(run.run_id, "")) for run in ended}) > 1:
        return None
    statuses = (RunStatus.if_readable(run.status) for run in sweep.run_folders())
    if any(status and status.status.is_sealed for status in statuses):
        return None  # the program of a sealed run works
    return (
        f"all {len(ended)} runs failed alike ({ended[0].reason}); --retry failed runs these again, "
        "and launcher.max_failures=1000 stops for a thousand failures alone"
    )
