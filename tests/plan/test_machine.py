import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pynvml
import pytest

from batchscape.analysis.cost.capacity import device_memory, memory_of_ranks
from batchscape.config import Local
from batchscape.cuda_devices import CudaDevice
from batchscape.errors import ConfigError
from batchscape.launch.devices import Lease, launch_record
from batchscape.plan.machine import Machine, cgroup_cores


def cuda(count, capability=(9, 0)):
    devices = tuple(CudaDevice(i, "a GPU", capability, f"GPU-{i}") for i in range(count))
    return Machine(4, "a CPU", devices)


def test_this_machine():
    machine = Machine.detect()
    assert 1 <= machine.cpu_cores <= len(os.sched_getaffinity(0))
    assert machine.cpu_name


def test_affinity_counts():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from batchscape.plan.machine import Machine\n"
        "print(Machine.detect().cpu_cores)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_control_groups(files, expected, tmp_path):
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content + "\n")
    assert cgroup_cores(tmp_path) == expected


def test_device_type():
    auto, cpu, gpu = (Local("local", device=d) for d in ("auto", "cpu", "cuda"))
    assert [cuda(2).device_type(launcher) for launcher in (auto, cpu, gpu)] == [
        "cuda",
        "cpu",
        "cuda",
    ]
    assert [cuda(0).device_type(launcher) for launcher in (auto, cpu)] == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match="no CUDA device"):
        cuda(0).device_type(gpu)
    assert cuda(2).devices("cuda") == 2
    assert cuda(2).devices("cpu") == 4


@pytest.mark.parametrize("variable", ["0, MIG-0b1c", "MIG-GPU-aa11/1/0"])
def test_slices_of_a_device_are_refused_not_passed_over(variable, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    machine = Machine.detect()
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=r"MIG slice.*launcher\.device=cpu"):
            machine.device_type(Local("local", device=device))
    assert machine.device_type(Local("local", device="cpu")) == "cpu"


def test_cores_have_their_numbers():
    machine = Machine.detect()
    assert len(machine.core_numbers) == machine.cpu_cores
    assert set(machine.core_numbers) <= os.sched_getaffinity(0)
    assert Machine(3, "a CPU").core_numbers == (0, 1, 2)


@pytest.mark.gpu
def test_devices_as_torch_sees_them():
    import torch

    devices = Machine.detect().cuda_devices
    assert len(devices) == torch.cuda.device_count()
    for position, device in enumerate(devices):
        properties = torch.cuda.get_device_properties(position)
        assert device.name == properties.name
        assert device.compute_capability == (properties.major, properties.minor)
        assert device.uuid == f"GPU-{properties.uuid}"


class Nvml:
    """The driver's library with devices as these tests need them."""

    def __init__(self, monkeypatch, *, closed=()):
        self.closed = closed
        answers = {
            "nvmlInit": self.start,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: 3,
            "nvmlDeviceGetHandleByIndex": self.handle,
            "nvmlDeviceGetUUID": lambda index: f"GPU-{index}{index}",
            "nvmlDeviceGetName": lambda index: f"GPU of {index}",
            "nvmlDeviceGetMemoryInfo": lambda index: SimpleNamespace(total=(index + 1) * 2**30),
            "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
            "nvmlDeviceGetMigMode": self.mig_mode,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, answer)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        self.broken = False
        self.sliced = ()

    def mig_mode(self, index):
        if index == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return (int(index in self.sliced),) * 2

    def start(self):
        if self.broken:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    def handle(self, index):
        if index in self.closed:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return index


def test_devices_are_told_with_their_memory(monkeypatch):
    Nvml(monkeypatch)
    devices = Machine.detect().cuda_devices
    assert [device.memory_gib for device in devices] == [1.0, 2.0, 3.0]
    assert [device.uuid for device in devices] == ["GPU-00", "GPU-11", "GPU-22"]


def test_the_memory_of_its_devices_is_recorded_with_a_run_and_limits_what_is_recommended(
    monkeypatch, spec_of
):
    """From the driver's answer to the capacity that geometries are held against."""
    Nvml(monkeypatch)
    machine = Machine.detect()
    spec = replace(spec_of((2, 4, 1)), device_type="cuda")
    launch = launch_record(spec, Lease((1, 2)), machine, has_other_launchers=False)
    assert launch["device_memory_gib"] == 2.0
    runs = pd.json_normalize([{"device_type": "cuda", "data_parallel_size": 2, "launch": launch}])
    assert device_memory(runs) == 2.0
    assert memory_of_ranks(runs).tolist() == [2.0]


@pytest.mark.parametrize(
    ("variable", "closed", "text"),
    [
        (None, (), "device 1"),
        (None, (0,), "device 1"),  # its number stays the driver's
        ("GPU-11", (), "device 1"),
        ("0,2", (), None),
    ],
)
def test_slices_are_refused_where_nobody_names_them(monkeypatch, variable, closed, text):
    """CUDA would take the first slice of a device for the device."""
    Nvml(monkeypatch, closed=closed).sliced = (1,)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    machine = Machine.detect()
    assert machine.device_type(Local("local", device="cpu")) == "cpu"
    for device in ("auto", "cuda"):
        if text is None:
            assert machine.device_type(Local("local", device=device)) == "cuda"
            continue
        with pytest.raises(ConfigError, match=rf"MIG is switched on for {text}, .*-i 1 -mig 0"):
            machine.device_type(Local("local", device=device))


def test_a_device_that_may_not_be_opened_is_not_counted(monkeypatch):
    """As CUDA counts: the others move up."""
    Nvml(monkeypatch, closed=(1,))
    devices = Machine.detect().cuda_devices
    assert [(device.index, device.uuid) for device in devices] == [(0, "GPU-00"), (1, "GPU-22")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [device.uuid for device in Machine.detect().cuda_devices] == ["GPU-22"]


@pytest.mark.parametrize("closed", [(), (0, 1, 2)])
def test_devices_that_the_driver_does_not_tell_of_are_no_reason_to_train_on_the_cpu(
    closed, tmp_path, monkeypatch
):
    nvml = Nvml(monkeypatch, closed=closed)
    nvml.broken = not closed
    monkeypatch.setattr("batchscape.cuda_devices._DEVICE_FILES", tmp_path)
    (tmp_path / "nvidiactl").touch()
    auto, cpu = (Local("local", device=d) for d in ("auto", "cpu"))
    assert Machine.detect().device_type(auto) == "cpu", "no device file, no device"
    (tmp_path / "nvidia0").touch()
    machine = Machine.detect()
    with pytest.raises(ConfigError, match=r"NVIDIA devices \(nvidia0\).*NVML.*launcher.device=cpu"):
        machine.device_type(auto)
    assert machine.device_type(cpu) == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Machine.detect().device_type(auto) == "cpu", "hidden on purpose"
