"""A smaller device, emulated: what a rank may take of its device's memory before it has run out.

What counts begins where the recorded peaks begin: right before the model is built, once a rank has
joined the others and opened its data. Loader workers are not limited.

* **CUDA**: the limit is on what torch's caching allocator holds, `peak_reserved_gib` (and so
  tensors, with what rounding and fragmentation add). Ranks that share a device share the limit
  evenly. The driver's context, the code of kernels and NCCL's buffers, about 0.5 to 1 GiB a
  process, lie outside: to emulate a card of 24 GiB, give what its allocator could have, about 23.
* **CPU** (a device is one rank): the limit is on the private writable memory that the process maps
  (`RLIMIT_DATA`) above what it had mapped at the beginning. That is every tensor, which
  `peak_allocated_gib` counts, and on top of it what libraries and Python allocate and stacks of
  threads: 5 to 30 MiB for small models. So a limit at `peak_allocated_gib` is a little too small.
  Files that are mapped, shared memory and code do not count. `peak_taken_gib` is the highest of
  it, as nearly as the kernel tells (`memory_process.PrivatePeak`). What compiling takes, and what
  evaluates the memory probe, is not charged.

  The C library would keep freed memory for later, more of it the larger what was freed, in all up
  to four times the tensors of small models. A device's allocator has no such habit, so under a
  limit memory of 128 KiB and more goes back to the system once it is freed. That takes time: steps
  of small models here took 1.2 to 1.5 times as long. Limits are part of what times depend on.

A limit changes no loss, and not which tensors a run that fits allocates.

Notes
-----
Sources: `torch.cuda.memory.set_per_process_memory_fraction`,
https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.set_per_process_memory_fraction.html;
`RLIMIT_DATA` in getrlimit(2), which counts private writable mappings since Linux 4.7, and `VmData`
in proc_pid_status(5), which is what it is held against. `M_MMAP_THRESHOLD` in mallopt(3), which
grows with what is freed unless it is set. `RLIMIT_AS` would count address space that
is merely reserved, such as 64 MiB for each thread that allocates, and every file that is mapped.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from batchscape.errors import ConfigError
from batchscape.system import GIB, reported_memory

if sys.platform != "win32":
    import resource


_NAME = "device.memory_limit_gib"
_M_MMAP_THRESHOLD = -3
"""Its number in malloc.h."""
_MAPPED_FROM = 128 * 1024
"""Bytes from which memory is mapped alone and goes back once freed; where the C library begins."""


class _Imposed:
    """The soft limit that this process had before ours; None where ours is not in force."""

    before: int | None = None


@contextmanager
def memory_limit(
    device: torch.device, limit_gib: float | None, *, ranks_on_device: int = 1
) -> Iterator[None]:
    """Let this process run out of memory as a smaller device would, until the block ends."""
    if limit_gib is None:
        yield
    elif device.type == "cuda":
        with _cuda_limit(device, limit_gib, ranks_on_device):
            yield
    else:
        with _cpu_limit(limit_gib):
            yield


@contextmanager
def not_charged() -> Iterator[None]:
    """Let this process take memory of a CPU that no limit counts, also what it keeps of it."""
    if _Imposed.before is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bytes_before = _private_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (_Imposed.before, hard))
    try:
        yield
    finally:
        bytes_kept = max(_private_bytes() - bytes_before, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (_at_most(soft + bytes_kept, hard), hard))


def lift_memory_limit() -> None:
    """Take the limit from this process for good; for one that a limited rank has forked."""
    if _Imposed.before is not None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (_Imposed.before, hard))
        _Imposed.before = None


@contextmanager
def _cuda_limit(device: torch.device, limit_gib: float, ranks_on_device: int) -> Iterator[None]:
    total = torch.cuda.get_device_properties(device).total_memory
    fraction = limit_gib * GIB / ranks_on_device / total
    if limit_gib * GIB > total:
        raise ConfigError(
            f"{_NAME} may be at most the memory of the device, {total / GIB:.4g} GiB of "
            f"{torch.cuda.get_device_name(device)}; given {limit_gib:g}"
        )
    # Code of the user's own, or PYTORCH_ALLOC_CONF, may have set one that is smaller.
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(fraction, before), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


@contextmanager
def _cpu_limit(limit_gib: float) -> Iterator[None]:
    if sys.platform != "linux":
        raise ConfigError(
            f"{_NAME} on a CPU needs Linux, which holds a process to it; leave it null"
        )
    # The first optimizer of a process imports it; a forked rank has it from the beginning.
    importlib.import_module("torch._dynamo")
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(limit_gib * GIB)
    resource.setrlimit(
        resource.RLIMIT_DATA, (_at_most(_at_most(_private_bytes() + limit, hard), soft), hard)
    )
    _Imposed.before = soft
    try:
        _check_enforced(limit)
        yield
    finally:
        # What handles an error and writes down how the run ended must have room.
        lift_memory_limit()


def _check_enforced(limit: int) -> None:
    """Map more than the limit, which costs nothing where nothing is written to it."""
    try:
        mmap.mmap(-1, limit + GIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, ValueError, OverflowError):
        return
    raise ConfigError(
        f"{_NAME}: this system does not hold a process to RLIMIT_DATA, as Linux does from 4.7 on; "
        "leave it null"
    )


def _private_bytes() -> int:
    """Return the private bytes of this process, which `RLIMIT_DATA` limits."""
    data_bytes = reported_memory().get("VmData")
    if data_bytes is None:
        raise ConfigError(
            f"{_NAME}: this system does not tell the memory of a process in /proc/self/status"
        )
    return data_bytes


def _at_most(value: int, limit: int) -> int:
    return value if limit == resource.RLIM_INFINITY else min(value, limit)
