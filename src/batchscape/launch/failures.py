"""When failures end a launch: the number allowed is reached, or all runs so far failed alike."""

from __future__ import annotations

import re
from collections.abc import Iterable

from batchscape.launch.result import RunResult
from batchscape.record.folder import SweepFolder
from batchscape.record.status import FAULTS, RunStatus, Status
from batchscape.text import count_text

_EQUAL_FAILURES = 3
"""This many runs that fail alike, and none that ends otherwise: the next ones would fail, too."""
_NUMBER = re.compile(r"(?<!code )\b\d+(?:\.\d+)?(?:e[+-]?\d+)?")
"""A number in a reason, which may differ between runs that fail alike; an exit code may not."""


def too_many_failures(results: Iterable[RunResult], max_failures: int) -> str | None:
    """Say why no more runs are started: too many have failed; None where they are.

    Parameters
    ----------
    results : iterable of RunResult
        Of the runs that have ended in this launch.
    max_failures : int
        From this number of faults on, no run is started.
    """
    faults = sum(run.status in FAULTS and not run.by_another for run in results)
    if faults < max_failures:
        return None
    count = count_text(faults, "run has", "runs have")
    return f"{count} failed, and launcher.max_failures is {max_failures}"


def equal_failures(results: Iterable[RunResult], sweep: SweepFolder) -> str | None:
    """Say why the next runs would fail like all so far; None where they may succeed."""
    ended_runs = [run for run in results if run.status is not Status.REJECTED]
    if len(ended_runs) < _EQUAL_FAILURES or any(
        run.status is not Status.FAILED for run in ended_runs
    ):
        return None
    if len({_NUMBER.sub("", str(run.reason).replace(run.run_id, "")) for run in ended_runs}) > 1:
        return None
    statuses = (RunStatus.if_readable(run.status) for run in sweep.run_folders())
    if any(status and status.status.is_sealed for status in statuses):
        return None  # the program of a sealed run works
    return (
        f"all {len(ended_runs)} runs failed alike ({ended_runs[0].reason}); --retry failed runs "
        "these again, and launcher.max_failures=1000 stops for a thousand failures alone"
    )
