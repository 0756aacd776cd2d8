"""Which of torch's calls are made for a device; a CUDA device's are those of `torch.cuda`."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch

from batchscape import device
from batchscape.config import Local
from batchscape.errors import ConfigError
from batchscape.measure.clock import CpuClock, DeviceClock, build_clock
from batchscape.plan.machine import Machine
from batchscape.train.checkpoint import random_state, set_random_state

needs_no_device = pytest.mark.skipif(
    bool(Machine.detect().cuda_devices), reason="a CUDA device, which is measured"
)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


def test_the_module_of_cuda_is_torchs_own() -> None:
    assert device.module_of(CUDA) is torch.cuda
    assert isinstance(build_clock(CUDA), DeviceClock)
    assert isinstance(build_clock(CPU), CpuClock)


def test_ranks_take_the_devices_of_their_run_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    devices = [device.device_of_rank("cuda", rank, 2) for rank in range(5)]
    # Numbers within CUDA_VISIBLE_DEVICES, not those of the machine.
    assert [one.index for one in devices] == [0, 1, 0, 1, 0]
    assert chosen == devices
    assert device.device_of_rank("cpu", 1, 2) == CPU


def test_a_device_is_asked_by_its_number_and_a_processor_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = torch.ones(3, dtype=torch.uint8)
    calls = Mock()
    calls.get_rng_state.return_value = state
    for name in ("synchronize", "empty_cache", "get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, getattr(calls, name))
    for one in (CPU, CUDA):
        device.synchronize(one)
        device.empty_cache(one)
        set_random_state(one, random_state(one))
    assert calls.mock_calls[:3] == [
        call.synchronize(CUDA),
        call.empty_cache(),
        call.get_rng_state(CUDA),
    ]
    (name, (restored, one), _) = calls.mock_calls[3]
    assert (name, one, restored.tolist()) == ("set_rng_state", CUDA, state.tolist())
    assert len(random_state(CUDA)) == len(random_state(CPU)) + 3


def torch_built_for(folder: Path, *, sees_device: bool, **versions: str) -> Path:
    """Write what stands for torch: for what it is built, and whether it sees such a device."""
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("from torch import accelerator\n")
    answer = f"def is_available():\n    return {sees_device}\n"
    (package / "accelerator.py").write_text(answer)
    lines = (f"{name}: Optional[str] = {versions.get(name)!r}\n" for name in ("cuda", "hip", "xpu"))
    (package / "version.py").write_text("".join(["from typing import Optional\n\n", *lines]))
    return folder


def plan(folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """Plan a program, for which nothing else asks torch."""
    program = ["model=external", "data=external", "budget=optimizer_steps", "engine=command"]
    command = [sys.executable, "-m", "batchscape", "plan", *program, "engine.argv=[python,-c,pass]"]
    return subprocess.run(
        [*command, *settings],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@needs_no_device
@pytest.mark.parametrize(
    ("name", "called"),
    [("hip", r"AMD devices \(ROCm\)"), ("xpu", r"Intel devices \(XPU\)")],
)
@pytest.mark.parametrize("asked_for", ["auto", "cuda"])
def test_a_device_that_cannot_be_measured_is_refused_by_name(
    tmp_path: Path, name: str, called: str, asked_for: str
) -> None:
    """Where training on the CPU instead would be a guess."""
    torch = torch_built_for(tmp_path, sees_device=True, **{name: "6.4"})
    done = plan(torch, f"launcher.device={asked_for}")
    assert done.returncode == 2
    words = f"torch sees {called} here.*allocator.*events.*NVML.*launcher.device=cpu trains"
    assert re.search(words, " ".join(done.stderr.split())), done.stderr


def test_a_machine_without_torch_is_one_without_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "torch sees" not in str(Machine.detect().cuda_problem)


@needs_no_device
@pytest.mark.parametrize("sees_device", [True, False])
def test_an_apple_gpu_is_refused_by_name_and_a_mac_without_one_trains_on_its_cpu(
    monkeypatch: pytest.MonkeyPatch, sees_device: bool
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: sees_device)
    machine = Machine.detect()
    assert ("Apple GPUs (MPS)" in str(machine.cuda_problem)) == sees_device
    assert machine.device_type(Local("local", device="cpu")) == "cpu"
    if sees_device:
        with pytest.raises(ConfigError, match=r"launcher\.device=cpu trains"):
            machine.device_type(Local("local"))
    else:
        assert machine.device_type(Local("local")) == "cpu"


@needs_no_device
def test_a_driver_that_fails_is_not_taken_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep would train on the CPU without a word."""

    def fail() -> bool:
        raise RuntimeError("the driver does not answer")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(torch.accelerator, "is_available", fail)
    with pytest.raises(ConfigError, match=r"launcher\.device=cpu trains"):
        Machine.detect().device_type(Local("local"))


@needs_no_device
@pytest.mark.parametrize("name", ["hip", "xpu"])
def test_a_build_for_devices_that_are_not_there_trains_on_the_cpu(
    tmp_path: Path, name: str
) -> None:
    done = plan(torch_built_for(tmp_path, sees_device=False, **{name: "6.4"}))
    assert done.returncode == 0, done.stderr


@needs_no_device
def test_a_torch_that_cannot_be_imported_is_left_to_the_run_to_tell(tmp_path: Path) -> None:
    (torch_built_for(tmp_path, sees_device=True, hip="6.4") / "torch/__init__.py").write_text("1/0")
    done = plan(tmp_path)
    assert done.returncode == 0, done.stderr


@needs_no_device
@pytest.mark.parametrize(("name", "settings"), [("xpu", ["launcher.device=cpu"]), ("cuda", [])])
def test_other_builds_and_processors_are_no_problem(
    tmp_path: Path, name: str, settings: list[str]
) -> None:
    done = plan(torch_built_for(tmp_path, sees_device=True, **{name: "13.0"}), *settings)
    assert done.returncode == 0, done.stderr
