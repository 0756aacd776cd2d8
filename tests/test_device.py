"""Which of torch's calls are made for a device; a CUDA device's are those of `torch.cuda`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch

from batchscape import device
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


def torch_that_sees(
    folder: Path, kind: str, *, build: str, cuda: str | None = None, hip: str | None = None
) -> Path:
    """Write what stands for torch: its build, and the accelerator that it sees."""
    package = folder / "torch"
    package.mkdir()
    (package / "version.py").write_text(
        "from typing import Optional\n\n"
        f"__version__ = {build!r}\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = {hip!r}\n"
    )
    (package / "__init__.py").write_text("from torch import accelerator, version\n")
    (package / "accelerator.py").write_text(
        "from pathlib import Path\nfrom types import SimpleNamespace\n\n\n"
        "def current_accelerator(check_available):\n    assert check_available\n"
        f"    Path({str(folder / 'asked')!r}).touch()\n    return SimpleNamespace(type={kind!r})\n"
    )
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
    ("kind", "build", "hip", "called"),
    [
        ("cuda", "2.9.0+rocm6.4", "6.4", r"an AMD device \(ROCm\)"),
        ("xpu", "2.9.0+xpu", None, r"an Intel device \(XPU\)"),
        ("mps", "2.9.0", None, r"an Apple GPU \(MPS\)"),
        ("npu", "2.9.0", None, "a device that it calls npu"),
    ],
)
@pytest.mark.parametrize("asked_for", ["auto", "cuda"])
def test_a_device_that_cannot_be_measured_is_refused_by_name(
    tmp_path: Path, kind: str, build: str, hip: str | None, called: str, asked_for: str
) -> None:
    """Where training on the CPU instead would be a guess."""
    torch_here = torch_that_sees(tmp_path, kind, build=build, hip=hip)
    done = plan(torch_here, f"launcher.device={asked_for}")
    assert done.returncode == 2
    words = f"torch sees {called} here.*allocator.*events.*NVML.*launcher.device=cpu trains on the"
    assert re.search(words, " ".join(done.stderr.split())), done.stderr


@needs_no_device
@pytest.mark.parametrize(
    ("build", "cuda", "settings"),
    [
        ("2.9.0+xpu", None, ["launcher.device=cpu"]),
        ("2.9.0", "13.0", []),
    ],
)
def test_torch_is_not_asked_where_the_answer_changes_nothing(
    tmp_path: Path, build: str, cuda: str | None, settings: list[str]
) -> None:
    done = plan(torch_that_sees(tmp_path, "xpu", build=build, cuda=cuda), *settings)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "asked").exists()
