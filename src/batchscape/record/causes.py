"""Causes of the end of a run that did not complete, each a word that other programs can use."""

from __future__ import annotations

import errno
import re
from enum import StrEnum

_MACHINE_FAULTS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EROFS,
    errno.ESTALE,
    errno.ENFILE,
    errno.EMFILE,
    errno.EAGAIN,
}
"""Errors of the system that its disks and limits cause, and not the settings of a run."""

OUT_OF_MEMORY = re.compile(
    r"CUDA out of memory|CUDA (?:driver )?error: out of memory"
    r"|Triton Error \[CUDA\]: out of memory|RESOURCE_EXHAUSTED: Out of memory"
    r"|Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA calloc"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|Cannot allocate memory|std::bad_alloc"
)
"""Messages of torch, driver, runtime, Triton, JAX, NCCL, cuBLAS, cuDNN, the system and C++ when
memory is out, in an exception or in the log of a program."""


class Cause(StrEnum):
    """The first cause of the end of a run; the reason says it in words."""

    OUT_OF_MEMORY = "out_of_memory"
    """An allocator refused, or the system's out-of-memory killer struck a process of the run."""
    OTHER_MEMORY = "other_memory"
    """Memory was out that is not the training's alone: that of the host of a device, that of a
    device which other processes share, or memory outside of optimizer steps."""
    DIVERGENCE = "divergence"
    """A loss or a gradient was not finite, or the loss exploded; see `train.divergence`."""
    HANG = "hang"
    """No rank made progress for as long as the rule of `launch.hangs` allows."""
    TIME_LIMIT = "time_limit"
    """The run was not done after `launcher.timeout_s`."""
    EXCEPTION = "exception"
    """A rank or a program raised an error of its own, or left with an exit code that is not 0."""
    SIGNAL = "signal"
    """A signal that batchscape did not send ended a rank: SIGSEGV, SIGBUS, SIGABRT."""
    KILLED = "killed"
    """SIGKILL that batchscape did not send, and no cgroup says that memory was out."""
    LOST_CONNECTION = "lost_connection"
    """A rank lost the others, or never found them, and none of them failed."""
    INFRASTRUCTURE = "infrastructure"
    """The machine: the fork server died, a file system fails, no process can be started."""
    DISK = "disk"
    """The disk of the sweep is full, over a quota, read-only, or fails. The run is interrupted, and
    no more runs begin: the next call of the same command goes on."""
    INTERRUPTED = "interrupted"
    """Ctrl-C, a signal to the launcher or to a rank, or the death of the launcher."""
    DAMAGED_RECORDS = "damaged_records"
    """The records of the ranks cannot be read."""
    CONTRADICTION = "contradiction"
    """The training contradicts the plan: ranks that ended differently, a program that used another
    batch, ended early, or logged what its `metrics` do not describe."""

    @property
    def is_of_the_machine(self) -> bool:
        """Whether the same run may succeed when it is tried again."""
        return self in _OF_THE_MACHINE


_OF_THE_MACHINE = {
    Cause.OTHER_MEMORY,
    Cause.HANG,
    Cause.SIGNAL,
    Cause.KILLED,
    Cause.LOST_CONNECTION,
    Cause.INFRASTRUCTURE,
}


def is_fault_of_the_machine(error: BaseException) -> bool:
    """Return whether the machine caused an exception: a full or failing disk, or a network."""
    if isinstance(error, ConnectionError):
        return True
    return isinstance(error, OSError) and error.errno in _MACHINE_FAULTS
