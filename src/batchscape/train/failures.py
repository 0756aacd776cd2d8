"""The outcome of a rank that raised: its status, its cause, and one line of reason."""

from __future__ import annotations

import errno
import re
from contextlib import suppress

import torch
import torch.distributed as dist

from batchscape.device import foreign_processes, is_accelerator, module_of
from batchscape.errors import BatchscapeError, CheckpointError, DiskError, RecordError
from batchscape.libraries import why_missing
from batchscape.measure.memory_process import process_memory
from batchscape.record.disk import causes_of, is_fault_of_the_machine
from batchscape.record.heartbeat import Phase, last_beat
from batchscape.record.instants import now
from batchscape.record.spec import RunSpec
from batchscape.record.status import OUT_OF_MEMORY, Cause, Outcome, Status
from batchscape.system import GIB
from batchscape.text import count_text

_KILLED_WORKER = "is killed by signal: Killed"
"""What torch's DataLoader says of a worker process that SIGKILL ended."""

_HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator|Cannot allocate memory|std::bad_alloc|in pin memory thread"
)
"""What libraries say in a plain RuntimeError where the memory of the host is out. Pinned memory is
the host's too: CUDA's message is that of device memory, torch's loader names its pinning thread."""

_ONEDNN = re.compile(r"could not (?:create|execute) a primitive")
"""What oneDNN says where memory is out, also for the code of its kernels. It says so of other
errors too, so that it counts only in a process that has a limit of memory."""

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


def failure_of(
    error: Exception,
    optimizer_step: int,
    device: torch.device | None,
    spec: RunSpec | None = None,
) -> Outcome:
    """Return the outcome of a rank that raised an exception.

    What it was raised from counts as well: a library may wrap an allocator's error in its own.
    """
    at, where = now(), last_beat()
    reason = _first_line(error)
    if is_out_of_memory(error, spec):
        is_host_memory = _is_out_of_host_memory(error, device)
        peak_gib, method = _peak_memory(None if is_host_memory else device)
        peak = "" if peak_gib is None else f"; peak until then: {peak_gib:.3g} GiB {method}"
        why_not_oom = _why_not_oom(where.phase, device, spec, is_host_memory=is_host_memory)
        return Outcome(
            Status.OOM if why_not_oom is None else Status.FAILED,
            optimizer_step=optimizer_step,
            reason=f"out of memory in {where}: {reason}{peak}{why_not_oom or ''}",
            cause=Cause.OUT_OF_MEMORY if why_not_oom is None else Cause.OTHER_MEMORY,
            phase=str(where.phase),
            peak_memory_gib=peak_gib,
            peak_memory_method=method,
            at=at,
        )
    chain = list(causes_of(error))
    texts = [str(e) for e in chain if isinstance(e, RuntimeError)]
    status = Status.FAILED
    if isinstance(error, DiskError):
        status, cause = Status.INTERRUPTED, Cause.DISK
    elif any(_KILLED_WORKER in text for text in texts):
        cause = Cause.KILLED
    elif any(isinstance(e, dist.DistNetworkError | dist.DistStoreError) for e in chain) or _has_any(
        texts, _LOST_CONNECTION
    ):
        cause = Cause.LOST_CONNECTION
    elif any(map(is_fault_of_the_machine, chain)) or _has_any(texts, _DEVICE_FAULTS):
        cause = Cause.INFRASTRUCTURE
    elif isinstance(error, RecordError | CheckpointError):
        cause = Cause.DAMAGED_RECORDS
    else:
        cause = Cause.EXCEPTION
    return Outcome(
        status,
        optimizer_step=optimizer_step,
        reason=reason,
        cause=cause,
        phase=str(where.phase),
        at=at,
    )


def is_out_of_memory(error: BaseException, spec: RunSpec | None = None) -> bool:
    """Return whether an exception of a run, or what it was raised from, says that memory is out."""
    limited = spec is not None and spec.config.device.memory_limit_gib is not None
    for e in causes_of(error):
        if isinstance(e, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(e, OSError) and e.errno == errno.ENOMEM:
            return True
        if isinstance(e, RuntimeError) and OUT_OF_MEMORY.search(str(e)):
            return True
        if limited and isinstance(e, RuntimeError) and _ONEDNN.search(str(e)):
            return True
    return False


def _is_out_of_host_memory(error: BaseException, device: torch.device | None) -> bool:
    """Whether the memory that is out is that of the host of a device."""
    if device is None or not is_accelerator(device):
        return False
    return any(
        isinstance(e, MemoryError)
        or (isinstance(e, OSError) and e.errno == errno.ENOMEM)
        or (isinstance(e, RuntimeError) and _HOST_MEMORY.search(str(e)) is not None)
        for e in causes_of(error)
    )


def _why_not_oom(
    phase: Phase, device: torch.device | None, spec: RunSpec | None, *, is_host_memory: bool
) -> str | None:
    """Return why an out-of-memory error does not count as `oom`; None where it does."""
    if is_host_memory:
        return "; that is the memory of the host, not of the device"
    if phase in {Phase.EVALUATION, Phase.CHECKPOINT}:
        return "; it was not in an optimizer step, so that it says nothing of what a training takes"
    if device is None or not is_accelerator(device) or spec is None:
        return None
    if spec.config.device.memory_limit_gib is not None:
        return None  # the run reached its own limit, whatever else is on the device
    foreign_count = foreign_processes(device, spec.geometry.devices_per_node)
    if not foreign_count:
        return None
    holders = count_text(foreign_count, "process of others holds", "processes of others hold")
    return f"; {holders} memory of the device, so that it says nothing of what a run takes"


def _peak_memory(device: torch.device | None) -> tuple[float | None, str | None]:
    """Return the peak of this rank until now in GiB, and what was counted.

    `allocated` on a device since the phase began; `resident` of the process on a CPU; nothing where
    even asking takes too much memory.
    """
    with suppress(Exception):
        if device is not None and is_accelerator(device):
            return module_of(device).max_memory_allocated(device) / GIB, "allocated"
        return process_memory().peak_rss_gib, "resident"
    return None, None


def _has_any(texts: list[str], words: tuple[str, ...]) -> bool:
    return any(word in text for word in words for text in texts)


def _first_line(error: Exception) -> str:
    if isinstance(error, BatchscapeError):
        return str(error)
    if lacking_library := why_missing(error):
        return lacking_library
    lines = f"{type(error).__name__}: {error}".strip().splitlines() or [type(error).__name__]
    # NCCL's first line names only the kind of error; the error itself follows below.
    nccl_error = lines[lines.index("Last error:") + 1 :] if "Last error:" in lines else []
    return "; ".join([lines[0], *nccl_error[:1]])
