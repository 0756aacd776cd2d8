"""Reading the metrics of other people's programs, and the batch that they really used.

`open_reader` returns a reader, whose `read` gives a `Log`: rows of the tables `steps` and
`evals`, the batch as observed with a source for each number, and contradictions. A number that
a program does not log as the tables define it stays missing, with the reason.
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
from batchscape.programs.metrics.log import Log, Observed, Reader
from batchscape.programs.metrics.recorded import RecorderReader
from batchscape.programs.metrics.trainer_state import TrainerStateReader

__all__ = ["Log", "Observed", "Reader", "open_reader"]

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
    printed = run_dir / _PRINTED if printed is None else printed
    match config:
        case RecorderMetrics():
            return RecorderReader(run_dir, geometry, sequence_length)
        case TrainerStateMetrics(path=path, eval_loss=key):
            return TrainerStateReader(run_dir / path, geometry, sequence_length, eval_loss=key)
        case JsonlMetrics(path=path):
            return JsonlReader(config, run_dir / path, geometry, sequence_length)
        case RegexMetrics(path=path):
            is_printed = Path(path) == Path(_PRINTED)
            return RegexReader(
                config,
                printed if is_printed else run_dir / path,
                geometry,
                sequence_length,
                begin=printed_before if is_printed else 0,
            )
    assert_never(config)
