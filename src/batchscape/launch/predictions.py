"""What the runs of a launch are predicted to take, asked for before the first of them begins."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from batchscape.config import Affects, Command, that_affect
from batchscape.errors import BatchscapeError
from batchscape.launch.child import Start
from batchscape.launch.processes import Processes
from batchscape.record.files import read_json
from batchscape.record.folder import SweepFolder
from batchscape.record.outcome import RankExit
from batchscape.record.spec import RunSpec

PREDICTOR = "batchscape.predictor:main"
"""What the process calls that predicts: its folder holds a `config.json` for each run."""

_LONGEST_S = 120.0
"""Time that predictions may take; what is not predicted by then goes unpredicted."""
_LOOK_S = 0.2
_NAME = "prediction"


def predict(
    specs: Iterable[RunSpec],
    missing: Iterable[RunSpec],
    sweep: SweepFolder,
    processes: Processes,
    scratch: Path,
    *,
    should_stop: Callable[[], bool],
) -> tuple[dict[str, Mapping[str, Any]], str | None]:
    """Predict what runs take, in a process of its own: models are code of others.

    Parameters
    ----------
    specs : iterable of RunSpec
        Of the sweep: what their folders hold of predictions is kept.
    missing : iterable of RunSpec
        Those that are to be launched.
    sweep : SweepFolder
    processes : Processes
        Nothing else was started yet.
    scratch : Path
        Empty folder on this machine.
    should_stop : callable
        Asked while it is waited for.

    Returns
    -------
    said : dict of str to mapping
        By run: what `prediction.json` holds. Runs of which nothing can be said are not in it.
    trouble : str or None
        Why nothing is said of those that were asked for. Runs come before what is said of them, so
        that the launch goes on.
    """
    said: dict[str, Mapping[str, Any]] = {}
    for spec in specs:
        with suppress(BatchscapeError):  # its launch will say what the matter is
            before = sweep.run(spec.run_id).prediction
            if before.exists():
                said[spec.run_id] = read_json(before)
    asked = [
        spec
        for spec in missing
        if spec.run_id not in said and not isinstance(spec.config.engine, Command)
    ]
    if not asked:
        return said, None
    folder = scratch / _NAME
    log = folder / "log.txt"
    try:
        folder.mkdir()
        (folder / "sweep").write_text(str(sweep.path.absolute()), encoding="utf-8")
        for spec in asked:
            spec.write(folder / f"{spec.run_id}.json")
        processes.start(Start(_NAME, str(folder), str(log), 1, PREDICTOR, {}))
        until = time.monotonic() + _LONGEST_S
        ended: list[RankExit] = []
        while not ended:
            if should_stop() or time.monotonic() > until:
                processes.signal(_NAME, signal.SIGKILL)
            ended = processes.wait(_LOOK_S)
        predictions = folder / "predictions"
        if predictions.exists():
            return said | read_json(predictions), None
        if should_stop():
            return said, None
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        why = next((line for line in reversed(lines) if line.strip()), f"exit code {ended[0].code}")
    except (BatchscapeError, OSError) as error:
        why = str(error)
    return said, f"Memory and time of the runs are not predicted: {why}"


def alike(
    specs: Iterable[RunSpec], others: Iterable[RunSpec], said: Mapping[str, Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """Return what is predicted of runs that cost what others do: it is not computed anew."""

    def key(spec: RunSpec) -> tuple[str, str, str]:
        stages = [(stage.samples, stage.geometry) for stage in spec.stages]
        return spec.time_key, str(that_affect(spec.config, Affects.MEMORY)), str(stages)

    known = {key(spec): said[spec.run_id] for spec in others if spec.run_id in said}
    return {spec.run_id: known[key(spec)] for spec in specs if key(spec) in known}


def foretold(predictions: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, float]]:
    """Return how whole runs were predicted, and what they should take, in seconds."""
    times = {run: said.get("run_time_s") for run, said in predictions.items()}
    return {
        run: (figure["method"], figure["value"])
        for run, figure in times.items()
        if figure is not None and figure["value"]
    }
