"""`batchscape doctor`: why a run does not start on this machine, and how to repair that.

Questions that need torch are answered by a process of their own, as it may crash or hang:
`python -m batchscape.doctor QUESTION` prints its answer as one JSON object on the last line.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import psutil
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from batchscape import scheduler
from batchscape.data.fingerprints import cache_folder
from batchscape.errors import SchedulerError
from batchscape.outgoing import outgoing_json
from batchscape.plan.machine import Machine
from batchscape.record.disk import is_of_this_machine
from batchscape.system import GIB

_LEAST_MEMORY_GIB = 2.0
"""Two small ranks beside a fork server: about 0.4 GiB each with torch imported."""
_LEAST_DISK_GIB = 0.5
_SHARED = Path("/dev/shm")  # noqa: S108  (where Linux has it, not a file of ours)
_LEAST_SHARED_GIB = 1.0
"""NVIDIA's advice for containers; Docker gives 64 MiB. Source: "Shared memory" in the
troubleshooting of the NCCL user guide."""
_ANSWER_S = 60.0
_TORCH_INSTALL = "install torch for this driver: https://pytorch.org/get-started/locally"
FindingStatus = Literal["ok", "missing", "broken"]
_STYLES = {"ok": "green", "missing": "yellow", "broken": "red"}


@dataclass(frozen=True)
class Finding:
    """One line of the examination."""

    what: str
    status: FindingStatus
    """`missing`: not there; `broken`: there, and does not work."""
    detail: str
    repair: str | None = None
    """How to install or repair it, mostly a command."""
    needed: bool = False
    """Whether the default sweep cannot do without it."""

    @property
    def is_obstacle(self) -> bool:
        """Whether the default sweep fails because of it."""
        return self.needed and self.status != "ok"


def examine(outputs: Path) -> list[Finding]:
    """Examine this machine and the disk of outputs; all questions are asked at the same time."""
    machine = Machine.detect()
    probes: dict[str, Callable[[], Iterable[Finding]]] = {
        "processor": partial(processor, machine),
        "shared memory": shared_memory,
        "disk": partial(disk, outputs),
        "driver": partial(driver, machine),
        "torch": partial(torch_and_devices, machine),
        "gloo": gloo,
        "Slurm": partial(slurm, outputs),
    }
    with ThreadPoolExecutor(len(probes)) as pool:
        return [*chain.from_iterable(pool.map(_run_probe, probes, probes.values()))]


def is_fit(findings: list[Finding]) -> bool:
    """Whether nothing is missing that the default sweep needs."""
    return not any(finding.is_obstacle for finding in findings)


def as_json(findings: list[Finding]) -> str:
    """Return findings as JSON: `fit`, and `findings` with the fields of `Finding`."""
    content = {"fit": is_fit(findings), "findings": [asdict(finding) for finding in findings]}
    return json.dumps(outgoing_json(content), indent=2)


def as_table(findings: list[Finding]) -> Group:
    """Return the table and the verdict for a console."""
    table = Table("what", "status", "detail", "repair", box=box.SIMPLE_HEAD)
    for finding in findings:
        style = "bold red" if finding.is_obstacle else _STYLES[finding.status]
        table.add_row(
            finding.what, Text(finding.status, style), finding.detail, finding.repair or ""
        )
    obstacles = ", ".join(finding.what for finding in findings if finding.is_obstacle)
    verdict = "Nothing is missing that the default sweep needs."
    if obstacles:
        verdict = f"The default sweep cannot run here because of: {obstacles}"
    return Group(table, verdict)


def _run_probe(what: str, probe: Callable[[], Iterable[Finding]]) -> list[Finding]:
    try:
        return [*probe()]
    except Exception as error:  # noqa: BLE001  (whatever is broken here is to be shown)
        return [Finding(what, "broken", _in_one_line(error))]


def _in_one_line(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}".rstrip(": ")


def _room(
    what: str, amount: str, free_gib: float, least_gib: float, repair: str, *, needed: bool = True
) -> Finding:
    """Say whether there is enough memory or disk."""
    if free_gib >= least_gib:
        return Finding(what, "ok", amount, needed=needed)
    return Finding(what, "broken", f"{amount}: less than {least_gib:g} GiB", repair, needed=needed)


def processor(machine: Machine) -> Iterator[Finding]:
    """Examine cores and memory."""
    cores = f"{machine.cpu_cores} usable of {psutil.cpu_count()} logical, {machine.cpu_name}"
    memory = psutil.virtual_memory()
    free = memory.available / GIB
    amount = f"{memory.total / GIB:.1f} GiB, {free:.1f} free"
    repair = "free some: two ranks and their server need that"
    yield Finding("CPU cores", "ok", cores, needed=True)
    yield _room("memory", amount, free, _LEAST_MEMORY_GIB, repair)


def shared_memory() -> Iterator[Finding]:
    """Examine the memory by which loader workers pass samples, and NCCL without peer access."""
    if _SHARED.is_dir():
        usage = shutil.disk_usage(_SHARED)
        free = usage.free / GIB
        amount = f"{usage.total / GIB:.2f} GiB, {free:.2f} free, {_SHARED}"
        repair = (
            "docker run --shm-size=8g (or --ipc=host), or room there; loader.workers=0 and a "
            "single device do without"
        )
        yield _room("shared memory", amount, free, _LEAST_SHARED_GIB, repair, needed=False)


def disk(outputs: Path) -> Iterator[Finding]:
    """Examine the disks that sweeps and prepared data are written to."""
    for what, path, repair in (
        ("disk of outputs", outputs, "give a sweep_dir on another disk"),
        ("disk of the cache", cache_folder(), "set XDG_CACHE_HOME to another disk"),
    ):
        place = _nearest_existing(path)
        free = shutil.disk_usage(place).free / GIB
        amount = f"{free:.1f} GiB free, {place}"
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            free, amount = 0.0, f"{place} cannot be written to"
        yield _room(what, amount, free, _LEAST_DISK_GIB, repair)


def _nearest_existing(path: Path) -> Path:
    """Return a path, or the nearest of its parents that exists."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def driver(machine: Machine) -> Iterator[Finding]:
    """Examine the devices of the driver that a sweep would take."""
    if machine.cuda_problem is not None:
        problem, _, repair = machine.cuda_problem.partition("; ")
        yield Finding("CUDA driver", "broken", problem, repair, needed=True)
        return
    count = len(machine.cuda_devices)
    detail = f"{count} devices are visible" if count else "no device: runs use CPU cores"
    yield Finding("CUDA driver", "ok", detail, needed=True)


def torch_and_devices(machine: Machine) -> Iterator[Finding]:
    """Examine torch and the devices that it sees."""
    try:
        build = ask("torch")
    except RuntimeError as error:
        yield Finding("torch", "broken", str(error), _TORCH_INSTALL, needed=True)
        return
    kind = f"CUDA {build['cuda_build']}" if build["cuda_build"] else "CPU only"
    yield Finding("torch", "ok", f"{build['version']} ({kind})", needed=True)
    for index, device in enumerate(build["devices"]):
        yield Finding(f"CUDA {index}", "ok", device, needed=True)
    if machine.cuda_devices and not build["devices"]:
        detail = (
            f"{len(machine.cuda_devices)} visible to the driver, none to torch: "
            f"{build['problem'] or 'this build of torch knows no CUDA'}"
        )
        yield Finding("CUDA", "broken", detail, _TORCH_INSTALL, needed=True)


def gloo() -> Iterator[Finding]:
    """Form a group of two ranks on this machine, as runs on CPU do."""
    try:
        detail = f"two ranks met and summed in {ask('gloo')['seconds']:.2f} s"
        yield Finding("gloo", "ok", detail, needed=True)
    except RuntimeError as error:
        repair = "export GLOO_SOCKET_IFNAME=lo, where the host's name leads nowhere"
        yield Finding("gloo", "broken", str(error), repair, needed=True)


def slurm(outputs: Path) -> Iterator[Finding]:
    """Examine the scheduler and the folder of sweeps; nothing where there is no Slurm."""
    if not scheduler.is_available():
        return
    try:
        partitions = [partition for partition in scheduler.partitions() if partition.is_up]
    except SchedulerError as error:
        repair = (
            "try `scontrol ping`; from another machine SLURM_CONF and munge must be the cluster's"
        )
        yield Finding("Slurm", "broken", str(error), repair)
        return
    names = ", ".join(f"{partition.name}{'*' * partition.is_default}" for partition in partitions)
    if names:
        yield Finding("Slurm", "ok", f"partitions: {names}")
    else:
        yield Finding("Slurm", "broken", "no partition is up", "ask who runs it; sinfo -R")
    place = _nearest_existing(outputs)
    if is_of_this_machine(place):
        detail = f"{place} is on a disk of this machine"
        repair = "a sweep of jobs needs a sweep_dir that all nodes see, under this path"
        yield Finding("shared folder", "missing", detail, repair)


def ask(question: str) -> dict[str, Any]:
    """Return the answer of one of `QUESTIONS`, from a process that is killed after a minute.

    A RuntimeError has the last line of a process that gave none.
    """
    # -P: a module in the current folder must not stand in for one of a library.
    command = [sys.executable, "-P", "-m", "batchscape.doctor", question]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no answer within {_ANSWER_S:g} s") from None
    with suppress(ValueError, IndexError):
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if "error" not in answer:
            return answer
        raise RuntimeError(answer["error"])
    code = done.returncode
    ending = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    raise RuntimeError((done.stderr.strip().splitlines() or [ending])[-1])


def _torch_build() -> dict[str, Any]:
    import torch

    answer = {"version": torch.__version__, "cuda_build": torch.version.cuda}
    devices: list[str] = []
    problem = None
    try:
        if torch.version.cuda is not None:
            torch.cuda.init()
            for index in range(torch.cuda.device_count()):
                device = torch.cuda.get_device_properties(index)
                lacks = "" if device.major >= 8 else ", no bfloat16"
                devices.append(f"{device.name}, {device.total_memory / GIB:.0f} GiB{lacks}")
    except Exception as error:  # noqa: BLE001  (drivers fail in many ways)
        problem = str(error).splitlines()[0]
    return answer | {"devices": devices, "problem": problem}


def _gloo_group() -> dict[str, Any]:
    """Form a group of two ranks, which are threads here, and sum a number over them."""
    import torch
    from torch import distributed

    started, store = time.monotonic(), distributed.HashStore()

    def total(rank: int) -> float:
        # Its stub has no collectives.
        group: Any = distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
        number = torch.tensor([rank + 1.0])
        group.allreduce([number]).wait()
        return float(number)

    with ThreadPoolExecutor(2) as pool:
        totals = [*pool.map(total, range(2))]
    if totals != [3.0, 3.0]:
        raise ArithmeticError(f"1 + 2 over two ranks gave {totals}")
    return {"seconds": time.monotonic() - started}


QUESTIONS = {"torch": _torch_build, "gloo": _gloo_group}
"""Questions by name."""


def main() -> None:
    """Answer the question that the command line names."""
    warnings.simplefilter("ignore")
    try:
        answer = QUESTIONS[sys.argv[1]]()
    except Exception as error:  # noqa: BLE001  (the error is the answer)
        answer = {"error": _in_one_line(error)}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
