"""CUDA devices of the driver, and which of them are visible, without torch or CUDA.

The driver's library (NVML) is opened to list all devices and closed again, as a launcher forks
processes that list them too. A process that asks about one device (a rank, the watcher of a
program) opens it once until its end, so that a question costs no more than the driver's answer.

What `CUDA_VISIBLE_DEVICES` means is read as CUDA reads it. Source: CUDA C++ Programming Guide,
section "CUDA Environment Variables"; where it is silent (numbers with something behind them,
numbers beside UUIDs, repeated entries) what torch makes of it: `_parse_visible_devices` in
https://github.com/pytorch/pytorch/blob/main/torch/cuda/__init__.py
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from batchscape.system import GIB

T = TypeVar("T")

_DEVICE_FILES = Path("/dev")
_NUMBER = re.compile(r"[+-]?[0-9]+")
_NONE_ON_PURPOSE = {"", "-1", "none", "void", "nodevfiles"}
"""Values that hide every device on purpose."""


@dataclass(frozen=True)
class CudaDevice:
    """One CUDA device that is visible to this process."""

    index: int
    """Number in the driver's order (by PCI bus), among those that this process may open."""
    name: str
    compute_capability: tuple[int, int]
    uuid: str
    """Name for `CUDA_VISIBLE_DEVICES`, whatever the order of numbers."""
    memory_gib: float | None = None
    """Its whole memory, from NVML."""
    is_sliced: bool = False
    """Whether MIG is switched on for it."""


@contextmanager
def open_nvml() -> Iterator[Any]:
    """Yield `pynvml` with the driver's library open; NVMLError where there is no driver."""
    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


@cache
def handle_of(uuid: str) -> Any:  # noqa: ANN401
    """Return NVML's handle of a device by its UUID; None where there is none, asked only once."""
    with suppress(Exception):
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    return None


def ask_driver(uuid: str, question: Callable[[Any, Any], T]) -> T | None:
    """Return NVML's answer to a question, a function of `pynvml` and a device's handle.

    None stands for no answer: without permission, in slices of a device (MIG), on some systems, and
    where the bindings or the driver are too old or too new to know the question.
    """
    with suppress(Exception):
        handle = handle_of(uuid)
        return None if handle is None else question(pynvml, handle)
    return None


def processes_on(uuid: str) -> list[Any] | None:
    """Return the processes that compute on a device (`pid`, `usedGpuMemory`); None: not known.

    Source: `nvmlDeviceGetComputeRunningProcesses`, NVML API reference,
    https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html.
    """
    return ask_driver(uuid, lambda nvml, h: list(nvml.nvmlDeviceGetComputeRunningProcesses(h)))


def every_cuda_device() -> list[CudaDevice | None]:
    """Return all devices of this machine, by PCI bus; None stands for one that cannot be opened."""
    with open_nvml() as nvml:
        return [_open_device(index) for index in range(nvml.nvmlDeviceGetCount())]


def driver_and_devices() -> tuple[str | None, list[CudaDevice | None]]:
    """Return the driver's version and `every_cuda_device`; None and no device without a driver."""
    try:
        with open_nvml() as nvml:
            return nvml.nvmlSystemGetDriverVersion(), every_cuda_device()
    except pynvml.NVMLError:
        return None, []


def visible_cuda_devices(visible_setting: str | None) -> tuple[tuple[CudaDevice, ...], str | None]:
    """Return the visible CUDA devices, and the problem with using them; None: there is none."""
    if any(part.strip().startswith("MIG-") for part in (visible_setting or "").split(",")):
        return (), (
            "CUDA_VISIBLE_DEVICES names a MIG slice, which is not supported; name whole devices, "
            "or use launcher.device=cpu"
        )
    try:
        devices_or_none = every_cuda_device()
    except pynvml.NVMLError as error:
        return (), _unseen_problem(visible_setting, str(error))
    accessible = [device for device in devices_or_none if device is not None]
    if devices_or_none and not accessible:
        return (), _unseen_problem(visible_setting, "it opens none of them")
    devices = [replace(device, index=index) for index, device in enumerate(accessible)]
    uuids = [device.uuid for device in devices]
    visible = tuple(devices[index] for index in visible_indices(visible_setting, uuids))
    sliced = [str(accessible[device.index].index) for device in visible if device.is_sliced]
    if sliced:
        sliced_indices = ",".join(sliced)
        return visible, (
            f"MIG is switched on for device {sliced_indices}, and slices of devices are not "
            "supported: CUDA would take one of them; name whole devices in CUDA_VISIBLE_DEVICES, "
            f"or switch it off (nvidia-smi -i {sliced_indices} -mig 0, as root), or use "
            "launcher.device=cpu"
        )
    order = os.environ.get("CUDA_DEVICE_ORDER")
    names = [device.name for device in devices]
    return visible, visible_problem(visible_setting, names, uuids, order)


def _open_device(index: int) -> CudaDevice | None:
    """Return a device; None where this process may not open it, or it has fallen off the bus.

    CUDA numbers the other devices as if this one did not exist.
    """
    memory_gib, is_sliced = None, False
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        with suppress(pynvml.NVMLError):  # not known of a device that is cut into slices
            memory_gib = float(pynvml.nvmlDeviceGetMemoryInfo(handle).total) / GIB
        with suppress(pynvml.NVMLError):  # a device that cannot be cut into slices
            mode = pynvml.nvmlDeviceGetMigMode(handle)[0]
            is_sliced = bool(mode == pynvml.NVML_DEVICE_MIG_ENABLE)
        return CudaDevice(
            index=index,
            name=str(pynvml.nvmlDeviceGetName(handle)),
            compute_capability=(major, minor),
            uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
            memory_gib=memory_gib,
            is_sliced=is_sliced,
        )
    except pynvml.NVMLError:
        return None


def _unseen_problem(visible_setting: str | None, error: str) -> str | None:
    """Say that there are devices which NVML does not list; None where there are none."""
    files = sorted(path.name for path in _DEVICE_FILES.glob("nvidia[0-9]*"))
    if not files or hides_all(visible_setting):
        return None
    return (
        f"this machine has NVIDIA devices ({', '.join(files)}), but the driver's library NVML "
        f"does not tell of them: {error}; mend the driver (nvidia-smi must list the devices), "
        "or use launcher.device=cpu"
    )


def visible_indices(visible_setting: str | None, uuids: Sequence[str]) -> list[int]:
    """Return the positions in `uuids` that `CUDA_VISIBLE_DEVICES` leaves visible, in its order.

    Entries are all numbers, or all unambiguous beginnings of a UUID; text behind a number is
    ignored. The list ends at the first entry that names no device. A repeated device leaves none
    visible.
    """
    if visible_setting is None:
        return list(range(len(uuids)))
    if visible_setting.startswith("GPU-"):
        names = [*takewhile(lambda e: e.startswith("GPU-"), visible_setting.split(","))]
        matches = [[i for i, uuid in enumerate(uuids) if uuid.startswith(name)] for name in names]
        is_repeated = len({*names}) < len(names)
    else:
        texts = (_NUMBER.match(entry.strip()) for entry in visible_setting.split(","))
        numbers = [*takewhile(lambda n: n >= 0, (int(text[0]) if text else -1 for text in texts))]
        matches = [[number] if number < len(uuids) else [] for number in numbers]
        is_repeated = len({*numbers}) < len(numbers)
    visible = [first for first, *_ in takewhile(lambda match: len(match) == 1, matches)]
    return [] if is_repeated or len({*visible}) < len(visible) else visible


def hides_all(visible_setting: str | None) -> bool:
    """Whether `CUDA_VISIBLE_DEVICES` hides every device on purpose."""
    return visible_setting is not None and visible_setting.strip().lower() in _NONE_ON_PURPOSE


def visible_problem(
    visible_setting: str | None, models: Sequence[str], uuids: Sequence[str], order: str | None
) -> str | None:
    """Say why devices cannot be chosen as `CUDA_VISIBLE_DEVICES` has it; None where they can.

    `models` and `uuids` are in the driver's order, by PCI bus; what is hidden on purpose is no
    problem.
    """
    if visible_setting is None or not uuids:
        return None
    visible = visible_indices(visible_setting, uuids)
    if not visible and not hides_all(visible_setting):
        last = len(uuids) - 1
        numbers = "is 0" if last == 0 else f"are 0 to {last}"
        return (
            f"CUDA_VISIBLE_DEVICES={visible_setting} names no CUDA device of this machine "
            f"(their numbers {numbers}; a repeated one hides all); name some, unset it, or use "
            "launcher.device=cpu"
        )
    by_number = not visible_setting.startswith("GPU-")
    if (
        by_number
        and order != "PCI_BUS_ID"
        and 0 < len(visible) < len(uuids)
        and len(set(models)) > 1
    ):
        return (
            f"CUDA_VISIBLE_DEVICES={visible_setting} counts devices by their speed, and there "
            f"are several models here ({', '.join(dict.fromkeys(models))}); set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID to count as nvidia-smi does, or name UUIDs "
            "(nvidia-smi -L), or use launcher.device=cpu"
        )
    return None
