"""Every error that batchscape raises on purpose.

::

    BatchscapeError                  base: the message alone is the whole answer for the user
    |-- ConfigError (ValueError)     a setting is unknown, of a wrong type, or breaks a stated rule
    |   `-- GeometryError            the batch cannot be cut that way; carries what would work
    |-- AnalysisError (ValueError)   a table lacks what an estimate needs, or contradicts itself
    |-- RecordError                  a run folder cannot be read: of another format version, say
    |   `-- DamageError              a file of it is not what was written
    |-- DiskError (OSError)          a disk takes no more: full, over a quota, read-only, failing
    |-- CheckpointError              a checkpoint cannot be loaded, or belongs to another run
    |   `-- DamagedCheckpointError   it, or the rows before it, are not what was written
    `-- LaunchError                  processes or devices could not be had
        `-- SchedulerError           the scheduler of a cluster is not there, or does not answer

The command line prints the message of a `BatchscapeError` and exits with code 2; any other
exception is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchscape.geometry import BatchGeometry

__all__ = [
    "AnalysisError",
    "BatchscapeError",
    "CheckpointError",
    "ConfigError",
    "DamageError",
    "DamagedCheckpointError",
    "DiskError",
    "GeometryError",
    "LaunchError",
    "RecordError",
    "SchedulerError",
]


class BatchscapeError(Exception):
    """Base of all errors that carry a complete message for the user."""


class ConfigError(BatchscapeError, ValueError):
    """A setting is unknown, of a wrong type, or breaks a rule that the message states."""


class GeometryError(ConfigError):
    """A batch cannot be cut as asked.

    Parameters
    ----------
    message : str
        The rule that was broken and the values that broke it.
    nearest : sequence of BatchGeometry
        Geometries close to what was asked that would work; may be empty.
    """

    def __init__(self, message: str, nearest: tuple[BatchGeometry, ...] = ()) -> None:
        super().__init__(message)
        self.nearest = nearest


class AnalysisError(BatchscapeError, ValueError):
    """A table lacks what an estimate needs, or contradicts itself."""


class RecordError(BatchscapeError):
    """A run folder cannot be read: it is damaged, or written by another format version."""


class DamageError(RecordError):
    """A file of a run folder is not what was written: cut short, changed, or gone."""


class DiskError(BatchscapeError, OSError):
    """A disk takes no more: it is full, over a quota, read-only, or fails."""


class CheckpointError(BatchscapeError):
    """A checkpoint cannot be loaded here, or belongs to another run."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint, or the rows before it, are not what was written."""


class LaunchError(BatchscapeError):
    """Processes or devices for a run could not be had."""


class SchedulerError(LaunchError):
    """The scheduler of a cluster is not there, does not answer, or refuses."""
