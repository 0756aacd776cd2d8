"""When failures end a launch: as many as were allowed, or all runs alike from the first one on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from batchscape.launch.result import RunResult
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import FAULTS, RunStatus, Status
from batchscape.text import count_text

_ALIKE = 3
"""Runs that fail alike before any ends otherwise: the next ones would, too."""
_NUMBER = re.compile(r"(?<!code )\b\d+(?:\.\d+)?(?:e[+-]?\d+)?")
"""A number in a reason that may differ between runs that fail alike: not an exit code."""
_TRAINED = {Status.COMPLETED, Status.DIVERGED, Status.PRUNED}
"""How runs end whose program works."""


class Failures:
    """How the runs of one launch ended, as far as it decides whether more are started.

    Parameters
    ----------
    sweep : SweepFolder
    most : int or None
        Once so many runs have ended by a fault, no more are started.
    """

    def __init__(self, sweep: SweepFolder, most: int | None) -> None:
        self._sweep, self._most = sweep, most
        self._faults = 0
        self._ended: list[RunResult] = []
        self._failed: dict[str, RunSpec] = {}
        self._has_trained = False
        """Whether a run of the folder was seen that has ever trained, whoever launched it."""
        self._alike: str | None = None
        """What was said of the next runs since the last end; looking takes time from what runs."""

    def note(self, result: RunResult, failed: RunSpec | None = None) -> None:
        """Take note of how a run ended; `failed` is one that this launch has seen fail."""
        self._alike = None
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
        """Say why the next runs would fail as all did so far; empty where they may not."""
        if self._alike is None:
            self._alike = self._look(queue)
        return self._alike

    def _look(self, queue: Iterable[RunSpec]) -> str:
        if (
            self._has_trained
            or self._most is not None
            or len(self._failed) < _ALIKE
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
        # What they have in common may be why they fail.
        shared = set.intersection(*map(_settings, self._failed.values()))
        if not all(shared <= _settings(spec) for spec in queue):
            return ""
        stood = (RunStatus.if_readable(run.status) for run in self._sweep.run_folders())
        self._has_trained = any(status and status.status in _TRAINED for status in stood)
        if self._has_trained:
            return ""
        return (
            f"all {len(self._failed)} runs failed alike ({self._ended[0].reason}); --retry failed "
            "runs these again, and launcher.max_failures=1000 stops for a thousand failures alone"
        )


def _settings(spec: RunSpec) -> set[str]:
    """Return the settings of a run, as texts; a seed is none that makes it fail."""
    return {
        f"{group}.{name}={value!r}"
        for group, values in spec.config.to_mapping().items()
        if isinstance(values, Mapping)
        for name, value in values.items()
    }
