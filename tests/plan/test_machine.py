from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchscape.config import Local
from batchscape.errors import ConfigError
from batchscape.plan.machine import CudaDevice, Machine, cgroup_cores


def cuda(count: int, capability: tuple[int, int] = (9, 0)) -> Machine:
    devices = tuple(CudaDevice(i, "a GPU", capability, f"GPU-{i}") for i in range(count))
    return Machine(4, "a CPU", devices)


def test_this_machine() -> None:
    machine = Machine.detect()
    assert 1 <= machine.cpu_cores <= len(os.sched_getaffinity(0))
    assert machine.cpu_name


def test_affinity_counts() -> None:
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
def test_control_groups(files: dict[str, str], expected: float | None, tmp_path: Path) -> None:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content + "\n")
    assert cgroup_cores(tmp_path) == expected


def test_device_type() -> None:
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


@pytest.mark.parametrize("variable", ["MIG-0b1c", "0, MIG-0b1c", "MIG-GPU-aa11/1/0"])
def test_slices_of_a_device_are_refused_not_passed_over(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    machine = Machine.detect()
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=r"MIG slice.*launcher\.device=cpu"):
            machine.device_type(Local("local", device=device))
    assert machine.device_type(Local("local", device="cpu")) == "cpu"


def test_a_choice_that_means_nothing_is_refused_not_guessed() -> None:
    machine = Machine(4, "a CPU", cuda_problem="CUDA_VISIBLE_DEVICES=7 names no CUDA device")
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match="names no CUDA device"):
            machine.device_type(Local("local", device=device))
    assert machine.device_type(Local("local", device="cpu")) == "cpu"


def test_cores_have_their_numbers() -> None:
    machine = Machine.detect()
    assert len(machine.core_numbers) == machine.cpu_cores
    assert set(machine.core_numbers) <= os.sched_getaffinity(0)
    assert Machine(3, "a CPU").core_numbers == (0, 1, 2)


@pytest.mark.gpu
def test_devices_as_torch_sees_them() -> None:
    import torch

    found = Machine.detect().cuda_devices
    assert len(found) == torch.cuda.device_count()
    for position, device in enumerate(found):
        properties = torch.cuda.get_device_properties(position)
        assert device.name == properties.name
        assert device.compute_capability == (properties.major, properties.minor)
        assert device.uuid == f"GPU-{properties.uuid}"
