"""When failures end a launch: the number allowed is reached, or all runs so far failed alike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from batchscape.launch.result import RunResult
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import FAULTS, RunStatus, Status
from batchscape.text import count_text

_EQUAL_FAILURES = 3
"""Runs that fail alike, and none ends otherwise: the next ones would fail, too."""
_NUMBER = re.compile(r"(?<!code )\b\d+(?:\.\d+)?(?:e[+-]?\d+)?")
"""A number in a reason, which may differ between runs that fail alike; an exit code may not."""


class Failures:
    """Decides by the ends of the runs of one launch whether more are started.

    Parameters
    ----------
    sweep : SweepFolder
    most : int or None
        Number of faults from which on no more runs are started.
    """

    def __init__(self, sweep: SweepFolder, most: int | None) -> None:
        self._sweep, self._most = sweep, most
        self._faults = 0
        self._ended: list[RunResult] = []
        self._failed: dict[str, RunSpec] = {}
        self._has_trained = False
        """Whether a run of the folder has trained, whoever launched it."""
        self._reason_to_stop: str | None = None
        """Answer of `why_next` since the last end; computing it costs the runs at work time."""

    def note(self, result: RunResult, failed: RunSpec | None = None) -> None:
        """Note how a run ended; `failed` is its spec where this launch has seen it fail."""
        self._reason_to_stop = None
        self._faults += result.status in FAULTS and not result.by_another
        if result.status is not Status.REJECTED:
            self._ended.append(result)
        if failed is not None:
            self._failed[failed.run_id] = failed

    @property
    def too_many(self) -> str | None:
        """Why no more runs are started, whatever they are."""
        if self._most is None or self._faults < self._most:
            return None
        count = count_text(self._faults, "run has", "runs have")
        return f"{count} failed, and launcher.max_failures is {self._most}"

    def why_next(self, queue: Iterable[RunSpec]) -> str:
        """Say why the next runs would fail as all have so far; empty where they may not."""
        if self._reason_to_stop is None:
            self._reason_to_stop = self._find_common_cause(queue)
        return self._reason_to_stop

    def _find_common_cause(self, queue: Iterable[RunSpec]) -> str:
        if (
            self._has_trained
            or self._most is not None
            or len(self._failed) < _EQUAL_FAILURES
            or any(run.status is not Status.FAILED for run in self._ended)
        ):
            return ""
        reasons = {
            _NUMBER.sub("", str(run.reason).replace(run.run_id, ""))
            for run in self._ended
            if run.run_id in self._failed
        }
        if len(reasons) > 1:
            return ""
        # A setting that all have in common may be the cause.
        shared = set.intersection(*map(_settings, self._failed.values()))
        if not all(shared <= _settings(spec) for spec in queue):
            return ""
        statuses = (RunStatus.if_readable(run.status) for run in self._sweep.run_folders())
        # The program of a sealed run works.
        self._has_trained = any(status and status.status.is_sealed for status in statuses)
        if self._has_trained:
            return ""
        return (
            f"all {len(self._failed)} runs failed alike ({self._ended[0].reason}); --retry failed "
            "runs these again, and launcher.max_failures=1000 stops for a thousand failures alone"
        )


def _settings(spec: RunSpec) -> set[str]:
    """Return the settings of a run as texts, without the seeds, which make no run fail."""
    return {
        f"{group}.{name}={value!r}"
        for group, values in spec.config.to_mapping().items()
        if isinstance(values, Mapping)
        for name, value in values.items()
    }
