"""Python, processor, memory, disks and the driver: what is known without torch."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

import psutil
import pynvml

from batchscape.data.cache import cache_folder
from batchscape.doctor.finding import Finding
from batchscape.plan.machine import Machine, is_sliced

__all__ = ["cpu", "disk", "driver", "mig", "packages", "python", "shared_memory"]

_GIB = 2**30
_LEAST_MEMORY_GIB = 2.0
"""Two small ranks beside a fork server: about 0.4 GiB each with torch imported."""
_LEAST_DISK_GIB = 0.5
_SHARED = Path("/dev/shm")  # noqa: S108  (where Linux has it, not a file of ours)
_LEAST_SHARED_GIB = 1.0
"""What NVIDIA's containers are to be given; Docker gives 64 MiB. Source: "Shared memory" in the
troubleshooting of the NCCL user guide."""


def python() -> list[Finding]:
    """Examine the interpreter."""
    minimum = (3, 11)
    detail = f"{platform.python_version()}, {sys.executable}"
    if sys.version_info >= minimum:
        return [Finding("Python", "ok", detail, needed=True)]
    return [Finding("Python", "broken", detail, "install Python 3.11 or later", needed=True)]


def packages() -> list[Finding]:
    """Examine what this package depends on without any extra."""
    wanted = [line for line in metadata.requires("batchscape") or [] if "extra ==" not in line]
    names = [match[0] for line in wanted if (match := re.match(r"[A-Za-z0-9._-]+", line))]
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        repair = f"pip install {' '.join(missing)}"
        return [Finding("packages", "missing", ", ".join(missing), repair, needed=True)]
    return [Finding("packages", "ok", f"all {len(names)} that are always needed", needed=True)]


def cpu() -> list[Finding]:
    """Examine cores and memory."""
    machine = Machine.detect()
    logical = psutil.cpu_count(logical=True)
    cores = f"{machine.cpu_cores} usable of {logical} logical, {machine.cpu_name}"
    memory = psutil.virtual_memory()
    total, free = memory.total / _GIB, memory.available / _GIB
    detail = f"{total:.1f} GiB, {free:.1f} free"
    enough = free >= _LEAST_MEMORY_GIB
    least = f"free {_LEAST_MEMORY_GIB:g} GiB: two ranks and their server need that"
    return [
        Finding("CPU cores", "ok", cores, needed=True),
        Finding("memory", "ok", detail, needed=True)
        if enough
        else Finding("memory", "broken", detail, least, needed=True),
    ]


def shared_memory() -> list[Finding]:
    """Examine what loader workers hand samples over in, and NCCL gradients without peer access."""
    what = "shared memory"
    if not _SHARED.is_dir():
        return [Finding(what, "not needed", f"no {_SHARED} on this system")]
    usage = shutil.disk_usage(_SHARED)
    free = usage.free / _GIB
    detail = f"{usage.total / _GIB:.2f} GiB, {free:.2f} free, {_SHARED}"
    if free >= _LEAST_SHARED_GIB:
        return [Finding(what, "ok", detail)]
    repair = (
        "docker run --shm-size=8g (or --ipc=host), or room there; loader.workers=0 and a single "
        "device do without"
    )
    return [Finding(what, "broken", f"{detail}: little for loader workers and NCCL", repair)]


def disk(outputs: Path) -> list[Finding]:
    """Examine the disks that sweeps and prepared data are written to.

    Parameters
    ----------
    outputs : Path
        Where sweeps go; need not exist.
    """
    return [
        _disk("disk of outputs", outputs, "give a sweep_dir on another disk"),
        _disk("disk of the cache", cache_folder(), "set XDG_CACHE_HOME to another disk"),
    ]


def driver() -> list[Finding]:
    """Examine NVML, the view that the driver gives of its devices."""
    problem = Machine.detect().cuda_problem
    what, _, repair = (problem or "").partition("; ")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if problem is not None:
            return [Finding("NVML", "broken", what, repair, needed=True)]
        if isinstance(error, pynvml.NVMLError_LibraryNotFound):
            return [Finding("NVML", "not needed", "no NVIDIA driver on this machine")]
        return [Finding("NVML", "not needed", f"no NVIDIA device ({error})")]
    try:
        version = str(pynvml.nvmlSystemGetDriverVersion())
        count = pynvml.nvmlDeviceGetCount()
    finally:
        pynvml.nvmlShutdown()
    found = [Finding("NVML", "ok", f"driver {version}, {count} devices in the machine")]
    if problem is not None:
        found.append(Finding("CUDA_VISIBLE_DEVICES", "broken", what, repair, needed=True))
    return found


def mig() -> list[Finding]:
    """Examine whether devices are, or would be used, in slices."""
    if Machine.detect().asked_for_mig:
        repair = "name whole devices in CUDA_VISIBLE_DEVICES, or use launcher.device=cpu"
        return [Finding("MIG", "broken", "CUDA_VISIBLE_DEVICES names a slice", repair, needed=True)]
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [Finding("MIG", "not needed", "no CUDA device")]
    try:
        numbers = range(pynvml.nvmlDeviceGetCount())
        sliced = [number for number in numbers if _is_sliced(number)]
    finally:
        pynvml.nvmlShutdown()
    if sliced:
        listed = ", ".join(map(str, sliced))
        repair = f"nvidia-smi -i {listed} -mig 0, as root; or use launcher.device=cpu"
        return [Finding("MIG", "broken", f"switched on for device {listed}", repair)]
    return [Finding("MIG", "ok", "off: devices are whole")]


def _is_sliced(number: int) -> bool:
    try:
        return is_sliced(pynvml.nvmlDeviceGetHandleByIndex(number))
    except pynvml.NVMLError:  # it may not be opened
        return False


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _disk(what: str, folder: Path, repair: str) -> Finding:
    folder = folder.absolute()
    standing = next(path for path in (folder, *folder.parents) if path.exists())
    if not standing.is_dir() or not os.access(standing, os.W_OK | os.X_OK):
        return Finding(what, "broken", f"{standing} cannot be written to", repair, needed=True)
    free = shutil.disk_usage(standing).free / _GIB
    detail = f"{free:.1f} GiB free, {folder}"
    if free < _LEAST_DISK_GIB:
        return Finding(what, "broken", detail, repair, needed=True)
    return Finding(what, "ok", detail, needed=True)
