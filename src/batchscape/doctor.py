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
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
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
FindingStatus = Literal["ok", "missing", "broken", "not needed"]
_STYLES = {"ok": "green", "missing": "yellow", "broken": "red", "not needed": "dim"}


@dataclass(frozen=True)
class Finding:
    """One line of the examination."""

    what: str
    status: FindingStatus
    """`missing`: not installed; `broken`: installed, and does not work; `not needed`: of no use."""
    detail: str
    repair: str | None = None
    """How to install or repair it, mostly a command."""
    needed: bool = False
    """Whether the default sweep cannot do without it."""

    @property
    def is_obstacle(self) -> bool:
        """Whether the default sweep fails because of it."""
        return self.needed and self.status in {"missing", "broken"}


def examine(outputs: Path) -> list[Finding]:
    """Examine this machine and the disk of outputs; all questions are asked at the same time."""
    machine = Machine.detect()
    probes: dict[str, Callable[[], list[Finding]]] = {
        "processor": partial(processor, machine),
        "shared memory": shared_memory,
        "disk": partial(disk, outputs),
        "driver": partial(driver, machine),
        "torch": partial(torch_and_devices, machine),
        "gloo": gloo,
        "Slurm": partial(slurm, outputs),
    }
    with ThreadPoolExecutor(len(probes)) as pool:
        futures = [pool.submit(_run_probe, what, probe) for what, probe in probes.items()]
        return [finding for future in futures for finding in future.result()]


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


def _run_probe(what: str, probe: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return probe()
    except Exception as error:  # noqa: BLE001  (whatever is broken here is to be shown)
        return [Finding(what, "broken", _in_one_line(error))]


def _in_one_line(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}".rstrip(": ")


def processor(machine: Machine) -> list[Finding]:
    """Examine cores and memory."""
    cores = f"{machine.cpu_cores} usable of {psutil.cpu_count()} logical, {machine.cpu_name}"
    memory = psutil.virtual_memory()
    free = memory.available / GIB
    detail = f"{memory.total / GIB:.1f} GiB, {free:.1f} free"
    cpu = Finding("CPU cores", "ok", cores, needed=True)
    if free >= _LEAST_MEMORY_GIB:
        return [cpu, Finding("memory", "ok", detail, needed=True)]
    repair = f"free {_LEAST_MEMORY_GIB:g} GiB: two ranks and their server need that"
    return [cpu, Finding("memory", "broken", detail, repair, needed=True)]


def shared_memory() -> list[Finding]:
    """Examine the memory by which loader workers pass samples, and NCCL without peer access."""
    what = "shared memory"
    if not _SHARED.is_dir():
        return [Finding(what, "not needed", f"no {_SHARED} on this system")]
    usage = shutil.disk_usage(_SHARED)
    detail = f"{usage.total / GIB:.2f} GiB, {usage.free / GIB:.2f} free, {_SHARED}"
    if usage.free / GIB >= _LEAST_SHARED_GIB:
        return [Finding(what, "ok", detail)]
    repair = (
        "docker run --shm-size=8g (or --ipc=host), or room there; loader.workers=0 and a single "
        "device do without"
    )
    return [Finding(what, "broken", f"{detail}: little for loader workers and NCCL", repair)]


def disk(outputs: Path) -> list[Finding]:
    """Examine the disks that sweeps and prepared data are written to."""
    places = {
        "disk of outputs": (outputs, "give a sweep_dir on another disk"),
        "disk of the cache": (cache_folder(), "set XDG_CACHE_HOME to another disk"),
    }
    findings = []
    for what, (path, repair) in places.items():
        place = _nearest_existing(path)
        free = shutil.disk_usage(place).free / GIB
        detail = f"{free:.1f} GiB free, {place}"
        is_usable = free >= _LEAST_DISK_GIB
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            is_usable, detail = False, f"{place} cannot be written to"
        status: FindingStatus = "ok" if is_usable else "broken"
        findings.append(Finding(what, status, detail, None if is_usable else repair, needed=True))
    return findings


def _nearest_existing(path: Path) -> Path:
    """Return a path, or the nearest of its parents that exists."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def driver(machine: Machine) -> list[Finding]:
    """Examine the devices of the driver that a sweep would take."""
    if machine.cuda_problem is not None:
        problem, _, repair = machine.cuda_problem.partition("; ")
        return [Finding("CUDA driver", "broken", problem, repair, needed=True)]
    count = len(machine.cuda_devices)
    if not count:
        return [Finding("CUDA driver", "not needed", "no device: runs use CPU cores")]
    return [Finding("CUDA driver", "ok", f"{count} devices are visible", needed=True)]


def torch_and_devices(machine: Machine) -> list[Finding]:
    """Examine torch and the devices that it sees."""
    try:
        build = ask("torch")
    except RuntimeError as error:
        return [Finding("torch", "broken", str(error), _TORCH_INSTALL, needed=True)]
    kind = f"CUDA {build['cuda_build']}" if build["cuda_build"] else "CPU only"
    findings = [Finding("torch", "ok", f"{build['version']} ({kind})", needed=True)]
    devices = build["devices"]
    if machine.cuda_devices and not devices:
        detail = (
            f"{len(machine.cuda_devices)} visible to the driver, none to torch: "
            f"{build['problem'] or 'this build of torch knows no CUDA'}"
        )
        return [*findings, Finding("CUDA", "broken", detail, _TORCH_INSTALL, needed=True)]
    for index, device in enumerate(devices):
        findings.append(Finding(f"CUDA {index}", "ok", device, needed=True))
    if devices and not build["nccl"]:
        several = len(devices) > 1
        lacking = Finding("NCCL", "missing", "not in this torch", _TORCH_INSTALL, needed=several)
        findings.append(lacking)
    return findings


def gloo() -> list[Finding]:
    """Form a group of two ranks on this machine, as runs on CPU do."""
    try:
        answer = ask("gloo")
    except RuntimeError as error:
        repair = "export GLOO_SOCKET_IFNAME=lo, where the host's name leads nowhere"
        return [Finding("gloo", "broken", str(error), repair, needed=True)]
    detail = f"two ranks met and summed in {answer['seconds']:.2f} s"
    return [Finding("gloo", "ok", detail, needed=True)]


def slurm(outputs: Path) -> list[Finding]:
    """Examine the scheduler and the folder of sweeps; nothing where there is no Slurm."""
    if not scheduler.is_available():
        return []
    try:
        partitions = [partition for partition in scheduler.partitions() if partition.is_up]
    except SchedulerError as error:
        repair = (
            "try `scontrol ping`; from another machine SLURM_CONF and munge must be the cluster's"
        )
        return [Finding("Slurm", "broken", str(error), repair)]
    names = ", ".join(f"{partition.name}{'*' * partition.is_default}" for partition in partitions)
    findings = [Finding("Slurm", "ok", f"partitions: {names}")]
    if not names:
        findings = [Finding("Slurm", "broken", "no partition is up", "ask who runs it; sinfo -R")]
    place = _nearest_existing(outputs)
    if is_of_this_machine(place):
        detail = f"{place} is on a disk of this machine"
        repair = "a sweep of jobs needs a sweep_dir that all nodes see, under this path"
        findings.append(Finding("shared folder", "missing", detail, repair))
    return findings


def ask(question: str) -> dict[str, Any]:
    """Return the answer of one of `QUESTIONS`, from a process that is killed after a minute.

    A RuntimeError has the last line of a process that gave none.
    """
    # -P: a module in the current folder must not stand in for one of a library.
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "batchscape.doctor", question],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            printed, errors = process.communicate(timeout=_ANSWER_S)
        except subprocess.TimeoutExpired:
            msg = f"no answer within {_ANSWER_S:g} s"
            raise RuntimeError(msg) from None
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    with suppress(ValueError, IndexError):
        answer: dict[str, Any] = json.loads(printed.splitlines()[-1])
        if "error" not in answer:
            return answer
        raise RuntimeError(answer["error"])
    code = process.returncode
    ending = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    raise RuntimeError((errors.strip().splitlines() or [ending])[-1])


def _torch_build() -> dict[str, Any]:
    import torch

    answer: dict[str, Any] = {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "nccl": torch.distributed.is_nccl_available(),
        "devices": [],
        "problem": None,
    }
    if torch.version.cuda is None:
        return answer
    try:
        torch.cuda.init()
    except Exception as error:  # noqa: BLE001  (drivers fail in many ways)
        return answer | {"problem": str(error).splitlines()[0]}
    devices = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        with torch.cuda.device(index):
            has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        devices.append(
            f"{device.name}, {device.total_memory / GIB:.0f} GiB, compute capability "
            f"{device.major}.{device.minor}{'' if has_bfloat16 else ', no bfloat16'}"
        )
    return answer | {"devices": devices}


def _gloo_group() -> dict[str, Any]:
    """Form a group of two ranks, sum a number over them."""
    import torch
    from torch import distributed

    with tempfile.TemporaryDirectory(prefix="batchscape-doctor-") as folder:
        started = time.monotonic()
        other = os.fork()
        rank = 0 if other else 1
        try:
            store = distributed.FileStore(str(Path(folder) / "store"), 2)
            distributed.init_process_group(
                "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20)
            )
            total = torch.tensor([rank + 1.0])
            distributed.all_reduce(total)
            distributed.destroy_process_group()
        except BaseException:
            if rank:
                os._exit(1)
            # It may have only begun, and would wait for a store that is gone.
            os.kill(other, signal.SIGKILL)
            raise
        if rank:
            os._exit(0)
        os.waitpid(other, 0)
    if total.item() != 3.0:
        msg = f"1 + 2 over two ranks gave {total.item()}"
        raise ArithmeticError(msg)
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
