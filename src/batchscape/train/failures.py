"""What an exception says of the end of a rank: its status, its cause, and one line of reason."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from batchscape.errors import BatchscapeError, CheckpointError, DiskError, RecordError
from batchscape.measure.memory_process import process_memory
from batchscape.record.causes import Cause, is_fault_of_the_machine
from batchscape.record.heartbeat import last_beat
from batchscape.record.status import Status

__all__ = ["Failure", "PeakMemory", "failure_of", "is_out_of_memory", "peak_memory"]

_GIB = 2.0**30
_LONGEST_CHAIN = 10
"""Exceptions that raised each other; a loop of them has no end."""

_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate",
    "DefaultCPUAllocator: not enough memory",
    "out of memory",  # the driver, the runtime, NCCL and Triton, each in its own words around it
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Failed to CUDA calloc",
    "std::bad_alloc",
    "Cannot allocate memory",
)
"""What libraries say when memory is out and they raise a plain RuntimeError."""

_KILLED = "is killed by signal: Killed"
"""What torch's DataLoader says of a worker process that SIGKILL ended."""

_LOST_CONNECTION = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "connectFullMesh failed",
    "Timed out waiting",
    "ncclRemoteError",
    "NCCL communicator was aborted",
)
"""What gloo and NCCL say in a plain RuntimeError of ranks that they cannot reach."""

_DEVICE_FAULTS = (
    "uncorrectable ECC error",
    "device(s) is/are busy or unavailable",
    "GPU is lost",
    "CUDA error: unknown error",
    "can't start new thread",
)
"""What libraries say in a plain RuntimeError of a machine that is at fault."""


class Failure(NamedTuple):
    """How a rank ended that raised."""

    status: Status
    cause: Cause
    reason: str


class PeakMemory(NamedTuple):
    """Most memory that this rank has held so far."""

    gib: float | None
    method: str | None
    """`allocated` on a device since the phase began; `resident` of the process on a CPU."""


def failure_of(error: Exception) -> Failure:
    """Say what an exception means for the run.

    What it was raised from counts as well: a library may wrap an allocator's error in its own.

    Parameters
    ----------
    error : Exception
    """
    reason = _first_line(error)
    if is_out_of_memory(error):
        return Failure(Status.OOM, Cause.OUT_OF_MEMORY, f"out of memory in {last_beat()}: {reason}")
    chain = list(_chain(error))
    texts = [str(e) for e in chain if isinstance(e, RuntimeError)]
    if isinstance(error, DiskError):
        cause = Cause.DISK
    elif any(_KILLED in text for text in texts):
        cause = Cause.KILLED
    elif any(isinstance(e, dist.DistNetworkError | dist.DistStoreError) for e in chain) or _says(
        texts, _LOST_CONNECTION
    ):
        cause = Cause.LOST_CONNECTION
    elif any(map(is_fault_of_the_machine, chain)) or _says(texts, _DEVICE_FAULTS):
        cause = Cause.INFRASTRUCTURE
    elif isinstance(error, RecordError | CheckpointError):
        cause = Cause.DAMAGED_RECORDS
    else:
        cause = Cause.EXCEPTION
    return Failure(Status.FAILED, cause, reason)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception, or one that it was raised from, says that memory is out."""
    return any(_is_out_of_memory(e) for e in _chain(error))


def peak_memory(device: torch.device | None) -> PeakMemory:
    """Return the peak of this rank until now; nothing where even asking takes too much memory."""
    with suppress(Exception):
        if device is not None and device.type == "cuda":
            return PeakMemory(torch.cuda.max_memory_allocated(device) / _GIB, "allocated")
        return PeakMemory(process_memory().peak_rss_gib, "resident")
    return PeakMemory(None, None)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _says([str(error)], _OUT_OF_MEMORY)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that it was raised from, or while they were handled."""
    found: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if found is None:
            return
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _says(texts: list[str], words: tuple[str, ...]) -> bool:
    return any(word in text for word in words for text in texts)


def _first_line(error: Exception) -> str:
    if isinstance(error, BatchscapeError):
        return str(error)
    lines = f"{type(error).__name__}: {error}".strip().splitlines() or [type(error).__name__]
    # NCCL's first line names a kind of error alone; what it met is below.
    met = lines[lines.index("Last error:") + 1 :] if "Last error:" in lines else []
    return "; ".join([lines[0], *met[:1]])
