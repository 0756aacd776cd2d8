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

_HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator|Cannot allocate memory|std::bad_alloc|in pin memory thread"
)
"""What libraries say in a plain RuntimeError where the memory of the host is out. Pinned memory is
the host's too: CUDA's message is that of device memory, torch's loader names its pinning thread."""

_ONEDNN = re.compile(r"could not (?:create|execute) a primitive")
"""What oneDNN says where memory is out, also for the code of its kernels. It says so of other
errors too, so that it counts only in a process that has a limit of memory."""

_CAUSES: dict[Cause, tuple[str, ...]] = {
    # What torch's DataLoader says of a worker process that SIGKILL ended.
    Cause.KILLED: ("is killed by signal: Killed",),
    # What gloo and NCCL say of ranks that they cannot reach.
    Cause.LOST_CONNECTION: (
        "Connection closed by peer",
        "Connection reset by peer",
        "Connection refused",
        "Broken pipe",
        "connectFullMesh failed",
        "Timed out waiting",
        "ncclRemoteError",
        "NCCL communicator was aborted",
    ),
    # What libraries say of a machine that is at fault.
    Cause.INFRASTRUCTURE: (
        "uncorrectable ECC error",
        "device(s) is/are busy or unavailable",
        "GPU is lost",
        "CUDA error: unknown error",
        "can't start new thread",
    ),
}
"""Words of a plain RuntimeError by which a cause is known; the first one that fits counts."""


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
    status, cause, reason = Status.FAILED, _cause_of(error), _first_line(error)
    peak_gib, method = None, None
    if is_out_of_memory(error, spec):
        on_device = device is not None and is_accelerator(device)
        is_host_memory = on_device and _tells_memory_is_out(error, _HOST_MEMORY)
        peak_gib, method = _peak_memory(None if is_host_memory else device)
        peak = "" if peak_gib is None else f"; peak until then: {peak_gib:.3g} GiB {method}"
        why_not_oom = _why_not_oom(where.phase, device, spec, is_host_memory=is_host_memory)
        reason = f"out of memory in {where}: {reason}{peak}{why_not_oom or ''}"
        cause = Cause.OTHER_MEMORY
        if why_not_oom is None:
            status, cause = Status.OOM, Cause.OUT_OF_MEMORY
    elif cause == Cause.DISK:
        status = Status.INTERRUPTED
    return Outcome(
        status,
        optimizer_step=optimizer_step,
        reason=reason,
        cause=cause,
        phase=str(where.phase),
        peak_memory_gib=peak_gib,
        peak_memory_method=method,
        at=at,
    )


def _cause_of(error: Exception) -> Cause:
    """Return the cause of an exception that does not say that memory is out."""
    if isinstance(error, DiskError):
        return Cause.DISK
    chain = list(causes_of(error))
    texts = "\n".join(str(e) for e in chain if isinstance(e, RuntimeError))
    evident = {
        Cause.LOST_CONNECTION: any(
            isinstance(e, dist.DistNetworkError | dist.DistStoreError) for e in chain
        ),
        Cause.INFRASTRUCTURE: any(map(is_fault_of_the_machine, chain)),
    }
    for cause, words in _CAUSES.items():
        if evident.get(cause) or any(word in texts for word in words):
            return cause
    if isinstance(error, RecordError | CheckpointError):
        return Cause.DAMAGED_RECORDS
    return Cause.EXCEPTION


def is_out_of_memory(error: BaseException, spec: RunSpec | None = None) -> bool:
    """Return whether an exception of a run, or what it was raised from, says that memory is out."""
    patterns = [OUT_OF_MEMORY]
    if spec is not None and spec.config.device.memory_limit_gib is not None:
        patterns.append(_ONEDNN)
    kinds = (isinstance(e, torch.OutOfMemoryError) for e in causes_of(error))
    return any(kinds) or _tells_memory_is_out(error, *patterns)


def _tells_memory_is_out(error: BaseException, *patterns: re.Pattern[str]) -> bool:
    """Whether the host refused memory, or a library says so in words of a pattern."""
    return any(
        isinstance(e, MemoryError)
        or (isinstance(e, OSError) and e.errno == errno.ENOMEM)
        or (isinstance(e, RuntimeError) and any(p.search(str(e)) for p in patterns))
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
    # A run that reached its own limit did so whatever else is on the device.
    has_limit = spec.config.device.memory_limit_gib is not None
    if has_limit or not (
        foreign_count := foreign_processes(device, spec.geometry.devices_per_node)
    ):
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


def _first_line(error: Exception) -> str:
    if isinstance(error, BatchscapeError):
        return str(error)
    if lacking_library := why_missing(error):
        return lacking_library
    lines = f"{type(error).__name__}: {error}".strip().splitlines() or [type(error).__name__]
    # NCCL's first line names only the kind of error; the error itself follows below.
    nccl_error = lines[lines.index("Last error:") + 1 :] if "Last error:" in lines else []
    return "; ".join([lines[0], *nccl_error[:1]])
