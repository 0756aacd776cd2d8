"""Predictions of the memory and time of runs, made before the first run of a launch begins."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from batchscape.config import Affects, that_affect
from batchscape.errors import BatchscapeError
from batchscape.launch.child import Start, last_line
from batchscape.launch.processes import Processes, ShouldStop
from batchscape.record.files import read_json
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import RankExit

PREDICTOR = "batchscape.predictor:main"
"""Entry point of the process that predicts; its folder holds a `config.json` for each run."""

_LONGEST_S = 120.0
"""Time that predictions may take; runs that are not reached by then have none."""
_LOOK_S = 0.2
_NAME = "prediction"

Predictions = dict[str, Mapping[str, Any]]
"""Content of `prediction.json`, by run."""


def predict(
    specs: Iterable[RunSpec],
    missing: Iterable[RunSpec],
    sweep: SweepFolder,
    processes: Processes,
    scratch: Path,
    *,
    should_stop: ShouldStop,
) -> tuple[Predictions, str | None]:
    """Predict memory and time of runs, in a process of its own: models may be code of the user.

    Parameters
    ----------
    specs : iterable of RunSpec
        All runs of the sweep; predictions in their folders are kept.
    missing : iterable of RunSpec
        Runs that are to be launched.
    sweep : SweepFolder
    processes : Processes
        Has started no ranks yet.
    scratch : Path
        Empty folder on this machine.
    should_stop : callable
        Called while the process predicts.

    Returns
    -------
    predictions : dict of str to mapping
        Content of `prediction.json`, by run; runs that cannot be predicted are not in it.
    trouble : str or None
        Why runs are not predicted; the launch goes on without.
    """
    predictions: Predictions = {}
    for spec in specs:
        with suppress(BatchscapeError):  # the launch of the run reports the error
            path = sweep.run(spec.run_id).prediction
            if path.exists():
                predictions[spec.run_id] = read_json(path)
    unpredicted_specs = [
        spec for spec in missing if spec.run_id not in predictions and not spec.is_program
    ]
    if not unpredicted_specs:
        return predictions, None
    folder = scratch / _NAME
    log = folder / "log.txt"
    try:
        folder.mkdir()
        (folder / "sweep").write_text(str(sweep.path.absolute()), encoding="utf-8")
        for spec in unpredicted_specs:
            spec.write(folder / f"{spec.run_id}.json")
        processes.start(Start(_NAME, str(folder), str(log), 1, PREDICTOR, {}))
        deadline = time.monotonic() + _LONGEST_S
        exits: list[RankExit] = []
        while not exits:
            if should_stop() or time.monotonic() > deadline:
                processes.signal(_NAME, signal.SIGKILL)
            exits = processes.wait(_LOOK_S)
        if (folder / "predictions").exists():
            return predictions | read_json(folder / "predictions"), None
        if should_stop():
            return predictions, None
        reason = last_line(log) or f"exit code {exits[0].code}"
    except (BatchscapeError, OSError) as error:
        reason = str(error)
    return predictions, f"Memory and time of the runs are not predicted: {reason}"


def predictions_of_equal_runs(
    specs: Iterable[RunSpec], other_specs: Iterable[RunSpec], predictions: Predictions
) -> Predictions:
    """Return predictions of runs, taken from other runs that need the same memory and time."""

    def key(spec: RunSpec) -> tuple[str, str, str]:
        stages = [(stage.samples, stage.geometry) for stage in spec.stages]
        return spec.time_key, str(that_affect(spec.config, Affects.MEMORY)), str(stages)

    by_key = {
        key(spec): predictions[spec.run_id] for spec in other_specs if spec.run_id in predictions
    }
    return {spec.run_id: by_key[key(spec)] for spec in specs if key(spec) in by_key}
