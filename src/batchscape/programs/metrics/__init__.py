"""Reading the metrics of other people's programs.

`open_reader` returns a reader, whose `read` gives a `Log`: rows of the tables `steps` and
`evals`, what is said of the batch with a source for each number, and contradictions. A number
that a program does not log as the tables define it stays missing, with the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import assert_never

from batchscape.config.metrics import (
    JsonlMetrics,
    Metrics,
    RecorderMetrics,
    RegexMetrics,
    TrainerStateMetrics,
)
from batchscape.geometry import BatchGeometry
from batchscape.programs.metrics.columns import JsonlReader, RegexReader
from batchscape.programs.metrics.log import Log, Reader
from batchscape.programs.metrics.recorded import RecorderReader
from batchscape.programs.metrics.trainer_state import TrainerStateReader
from batchscape.recorder import FOLDER

__all__ = ["Log", "Reader", "open_reader"]

_PRINTED = "log.txt"


def open_reader(
    config: Metrics,
    run_dir: Path,
    geometry: BatchGeometry,
    sequence_length: int | None,
    *,
    printed: Path | None = None,
    printed_before: int = 0,
) -> Reader:
    """Return the reader of one run's metrics."""
    match config:
        case RecorderMetrics():
            return RecorderReader(run_dir / FOLDER, geometry, sequence_length)
        case TrainerStateMetrics():
            return TrainerStateReader(
                run_dir / config.path, geometry, sequence_length, config.eval_loss
            )
        case JsonlMetrics():
            return JsonlReader(config, run_dir / config.path, geometry, sequence_length)
        case RegexMetrics():
            path, begin = run_dir / config.path, 0
            if printed is not None and Path(config.path) == Path(_PRINTED):
                path, begin = printed, printed_before
            return RegexReader(config, path, geometry, sequence_length, begin)
    assert_never(config)
