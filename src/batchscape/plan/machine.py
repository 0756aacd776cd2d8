"""Machines that runs are planned for: this one, or one that is declared.

This one is looked up without a CUDA context, and without torch where that knows but CUDA.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from batchscape.config import Cluster, LauncherSettings, Slurm
from batchscape.config.cluster import datasheet_of, known_devices
from batchscape.cuda_devices import CudaDevice, visible_cuda_devices
from batchscape.errors import ConfigError
from batchscape.system import processor_name

_CGROUP = Path("/sys/fs/cgroup")
_OTHER_BUILDS = {"hip": "AMD devices (ROCm)", "xpu": "Intel devices (XPU)"}
"""Accelerators by the name that has a version where torch is built for them."""


@dataclass(frozen=True)
class Machine:
    """Hardware that runs can be placed on."""

    cpu_cores: int
    """Cores that this process may use: its affinity, the quota of its control group, and what a
    job of Slurm has of its node."""
    cpu_name: str
    cuda_devices: tuple[CudaDevice, ...] = ()
    cores: tuple[int, ...] = ()
    """Numbers of those cores on the whole machine; empty: counted from 0."""
    cuda_problem: str | None = None
    """Why only CPUs can be taken; None where there is no reason."""
    nodes: int = 1
    """Nodes, with as many devices each."""
    cluster: Cluster = field(default_factory=Cluster)
    """Figures of its devices and links, as far as they are known."""

    @property
    def is_declared(self) -> bool:
        """Whether it is planned for only: nothing is launched on it."""
        return self.cluster.device is not None

    def is_like(self, hardware: str) -> bool:
        """Whether runs on some hardware, as `analysis` names it, tell the times of this machine."""
        if not self.cuda_devices:
            return hardware == f"{self.cpu_name}, {self.cpu_cores} cores"
        names = {device.name for device in self.cuda_devices}
        return hardware in names or self.cluster.is_called(hardware)

    @property
    def core_numbers(self) -> tuple[int, ...]:
        """Numbers of the cores, one each."""
        return self.cores or tuple(range(self.cpu_cores))

    @classmethod
    def of(cls, cluster: Cluster, launcher: LauncherSettings | None = None) -> Machine:
        """Return a declared machine, or this one with the figures of its devices."""
        if isinstance(launcher, Slurm) and cluster.device is None:
            if cluster.nodes is None or cluster.devices_per_node is None:
                raise ConfigError(
                    "with launcher=slurm the devices are those of the cluster, not of this "
                    f"machine, and must be given: cluster=NAME ({known_devices()}), or for runs "
                    "on CPUs cluster.nodes and cluster.devices_per_node (the cores of a node)"
                )
            cores = cluster.nodes * cluster.devices_per_node
            return cls(cores, "", nodes=cluster.nodes, cluster=cluster)
        if cluster.device is None:
            if cluster.devices_per_node or cluster.nodes:
                raise ConfigError(
                    "devices_per_node and nodes are of a declared machine, and "
                    "cluster=this_machine has the devices that it has; choose a device: "
                    f"{known_devices()}"
                )
            machine = cls.detect()
            names = {device.name for device in machine.cuda_devices}
            sheet = datasheet_of(names.pop()) if len(names) == 1 else None
            if sheet is not None:
                sheet = replace(sheet, device=None, devices_per_node=None, nodes=None)
                cluster = cluster.over(sheet)
            return replace(machine, cluster=cluster)
        major, minor = divmod(round(10 * (cluster.compute_capability or 0)), 10)
        nodes, each = cluster.nodes or 1, cluster.devices_per_node or 1
        devices = tuple(
            CudaDevice(i, cluster.device, (major, minor), f"declared {i}", cluster.memory_gib)
            for i in range(nodes * each)
        )
        return cls(0, "", devices, nodes=nodes, cluster=cluster)

    @classmethod
    def detect(cls) -> Machine:
        """Look at this machine, within `CUDA_VISIBLE_DEVICES`."""
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = tuple(
            sorted(os.sched_getaffinity(0) if has_affinity else range(os.cpu_count() or 1))
        )
        quota = cgroup_cores(_CGROUP)
        if quota is not None:
            # Part of a core runs no second rank, but the first one runs on any part.
            cores = cores[: max(1, int(quota))]
        # A job that Slurm binds to no cores sees all of the node, and has so many of them.
        cores = cores[: int(os.environ.get("SLURM_CPUS_ON_NODE", len(cores)))]
        devices, problem = visible_cuda_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return cls(
            cpu_cores=len(cores),
            cpu_name=processor_name(),
            cuda_devices=devices,
            cores=cores,
            cuda_problem=problem if problem or devices else _accelerator_problem(),
        )

    def device_type(self, launcher: LauncherSettings) -> str:
        """Return `cpu` or `cuda`, as the launcher's setting and this machine decide."""
        if self.cuda_problem is not None and launcher.device != "cpu":
            raise ConfigError(self.cuda_problem)
        if launcher.device == "auto":
            return "cuda" if self.cuda_devices else "cpu"
        if launcher.device == "cpu" and self.is_declared:
            raise ConfigError(
                f"launcher.device=cpu, but cluster declares {self.cluster.device}; use "
                "launcher.device=auto, or cluster=this_machine"
            )
        if launcher.device == "cuda" and not self.cuda_devices:
            raise ConfigError(
                "launcher.device=cuda, but no CUDA device is visible here; use cpu or auto"
            )
        return launcher.device

    def devices(self, device_type: str) -> int:
        """Return the number of devices of a type on all nodes; a CPU device is a core."""
        return self.cpu_cores if device_type == "cpu" else len(self.cuda_devices)


def cgroup_cores(root: Path) -> float | None:
    """Return the quota in cores that a control group sets."""
    unlimited = {"", "max", "-1"}
    quota, _, period = _read(root / "cpu.max").partition(" ")
    if quota in unlimited:
        quota = _read(root / "cpu" / "cpu.cfs_quota_us")
        period = _read(root / "cpu" / "cpu.cfs_period_us")
    return None if quota in unlimited or not period else int(quota) / int(period)


def _accelerator_problem() -> str | None:
    """Say that this machine has accelerators that cannot be measured; None where it has none.

    Only a torch that is built for them is imported and asked: that takes seconds.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = Path(spec.origin).with_name("version.py")
    kinds = [
        kind
        for name, kind in _OTHER_BUILDS.items()
        if re.search(rf"^{name}\b.*= '", _read(version), re.MULTILINE)
    ]
    if sys.platform == "darwin":
        kinds.append("Apple GPUs (MPS)")
    if not kinds or not _sees_accelerator():
        return None
    return (
        f"torch sees {kinds[0]} here, on which this tool cannot measure: it reads peaks of "
        "memory off CUDA's allocator, step times off CUDA's events, and power, clocks and "
        "foreign processes off NVIDIA's driver (NVML); launcher.device=cpu trains on the CPU"
    )


def _sees_accelerator() -> bool:
    """Return whether torch finds an accelerator, or fails to tell."""
    try:
        from batchscape.device import is_accelerator_here
    except Exception:  # noqa: BLE001  (a torch that cannot be imported: its run will say so)
        return False
    try:
        return is_accelerator_here()
    except RuntimeError:  # a driver that does not answer, say
        return True


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
