"""Reading the metrics of other people's programs.

`open_reader` returns a reader, whose `read` gives a `Log`: rows of the tables `steps` and
`evals`, what is said of the batch with a source for each number, and contradictions. A number
that a program does not log as the tables define it stays missing, with the reason.
"""

from __future__ import annotations

from pathlib import Path

from batchscape.config.metrics import Metrics, RegexMetrics
from batchscape.geometry import BatchGeometry
from batchscape.programs.metrics.columns import JsonlReader, RegexReader
from batchscape.programs.metrics.log import Log, Reader
from batchscape.programs.metrics.recorded import RecorderReader
from batchscape.programs.metrics.trainer_state import TrainerStateReader
from batchscape.recorder import FOLDER

__all__ = ["Log", "Reader", "open_reader"]

_PRINTED = Path("log.txt")
_READERS: dict[str, type[Reader]] = {
    "recorder": RecorderReader,
    "trainer_state": TrainerStateReader,
    "jsonl": JsonlReader,
    "regex": RegexReader,
}
"""By `kind` of the metrics."""


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
    path, begin = run_dir / getattr(config, "path", FOLDER), 0
    if isinstance(config, RegexMetrics) and printed is not None and Path(config.path) == _PRINTED:
        path, begin = printed, printed_before
    return _READERS[config.kind](config, path, geometry, sequence_length, begin)
