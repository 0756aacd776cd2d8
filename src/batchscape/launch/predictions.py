"""What the runs of a launch are predicted to take, asked for before the first of them begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from batchscape.config import Command
from batchscape.errors import BatchscapeError
from batchscape.launch.child import Start
from batchscape.launch.processes import Processes
from batchscape.record.files import read_json
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec

__all__ = ["PREDICTOR", "predict"]

PREDICTOR = "batchscape.predictor:main"
"""What the process calls that predicts: its folder holds a `config.json` for each run."""

_LONGEST_S = 120.0
"""Time that predictions may take; what is not predicted by then goes unpredicted."""
_LOOK_S = 0.2
_NAME = "prediction"


def predict(
    specs: Iterable[RunSpec],
    sweep: SweepFolder,
    processes: Processes,
    scratch: Path,
    should_stop: Callable[[], bool],
) -> dict[str, Mapping[str, Any]]:
    """Predict what runs take, in a process of its own: models are code of others.

    Parameters
    ----------
    specs : iterable of RunSpec
    sweep : SweepFolder
        Runs that it holds a prediction of keep that.
    processes : Processes
        Nothing else was started yet.
    scratch : Path
        Empty folder on this machine.
    should_stop : callable
        Asked while it is waited for.

    Returns
    -------
    dict of str to mapping
        By run: what `prediction.json` holds. Runs of which nothing can be said are not in it.
    """
    said: dict[str, Mapping[str, Any]] = {}
    asked = []
    for spec in specs:
        before = sweep.run(spec.run_id).prediction
        if before.exists():
            with suppress(BatchscapeError):  # its launch will say what the matter is
                said[spec.run_id] = read_json(before)
        elif not isinstance(spec.config.engine, Command):
            asked.append(spec)
    if not asked:
        return said
    folder = scratch / _NAME
    folder.mkdir()
    (folder / "sweep").write_text(str(sweep.path.absolute()), encoding="utf-8")
    for spec in asked:
        spec.write(folder / f"{spec.run_id}.json")
    start = Start(_NAME, str(folder), str(folder / "log.txt"), 1, PREDICTOR, {})
    until = time.monotonic() + _LONGEST_S
    try:
        processes.start(start)
        while not processes.wait(_LOOK_S):
            if should_stop() or time.monotonic() > until:
                processes.signal(_NAME, 9)
        predictions = folder / "predictions"
        return said | (read_json(predictions) if predictions.exists() else {})
    except BatchscapeError:
        # Runs come before what is said of them: whatever the matter is, they meet it themselves.
        return said
