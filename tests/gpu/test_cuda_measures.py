"""Clock, memory and telemetry of a CUDA device against what is known about the work."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import time

import pytest
import torch

from batchscape.device import foreign_processes
from batchscape.measure.clock import DeviceClock
from batchscape.measure.memory_cuda import CudaMemory
from batchscape.measure.telemetry import CudaTelemetry

pytestmark = pytest.mark.gpu

MIB = 2**20
SMI = shutil.which("nvidia-smi")
CYCLES = 20_000_000
"""Of a kernel that does nothing; on the order of 10 ms."""


@pytest.fixture
def device():
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def sleep(times):
    torch.cuda._sleep(int(times * CYCLES))


@pytest.mark.usefixtures("device")
def test_parts_are_those_of_the_kernels():
    """Kernels of known ratio: parts add up to the step and stand in that ratio, within half."""
    sleep(1)
    torch.cuda.synchronize()
    clock = DeviceClock(torch.device("cuda"))
    clock.begin()
    sleep(2)
    clock.exchange_begins()
    sleep(2)
    clock.gradients_ready()
    sleep(8)
    clock.exchange_ends()
    sleep(16)
    clock.end()
    (times,) = clock.read(1)
    parts = times.forward_backward_s + times.exchange_s + times.optimizer_s
    assert parts == pytest.approx(times.step_time_s, abs=5e-6)
    unit = times.step_time_s / 28
    assert times.forward_backward_s == pytest.approx(4 * unit, rel=0.5)
    assert times.exchange_s == pytest.approx(8 * unit, rel=0.5)
    assert times.optimizer_s == pytest.approx(16 * unit, rel=0.5)
    assert times.exchange_span_s == pytest.approx(10 * unit, rel=0.5)
    assert times.forward_backward_s < times.exchange_s < times.optimizer_s


@pytest.mark.usefixtures("device")
def test_marking_waits_for_nothing_and_reading_for_its_own_steps_only():
    clock = DeviceClock(torch.device("cuda"))
    later = torch.cuda.Event()
    for length in (1, 400):
        clock.begin()
        sleep(length)
        clock.gradients_ready()
        clock.end()
    later.record()
    assert not later.query()
    (first,) = clock.read(1)
    assert not later.query(), "reading the first step waited for the second"
    (second,) = clock.read(1)
    assert second.step_time_s > 20 * first.step_time_s


def test_peaks_are_those_of_tensors_of_known_size(device):
    memory = CudaMemory(device)
    memory.phase("after_model")
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    memory.phase("first_backward")
    spike = torch.empty(256 * MIB, dtype=torch.uint8, device=device)
    del spike
    memory.phase("first_optimizer_step")
    state = torch.empty(32 * MIB, dtype=torch.uint8, device=device)
    memory.phase("steady")
    again = torch.empty(128 * MIB, dtype=torch.uint8, device=device)
    del again
    memory.phase("outside")
    evaluation = torch.empty(512 * MIB, dtype=torch.uint8, device=device)
    del evaluation
    before = torch.cuda.memory_allocated(device) - kept.nbytes - state.nbytes
    found = memory.report().as_columns()
    expected_mib = {
        "allocated_after_model_gib": 64,
        "peak_allocated_first_backward_gib": 64 + 256,
        "peak_allocated_first_optimizer_step_gib": 64 + 32,
        "peak_allocated_steady_gib": 64 + 32 + 128,
        "peak_allocated_gib": 64 + 256,
    }
    for name, size in expected_mib.items():
        assert found[name] * 2**30 - before == size * MIB, name
    assert found["peak_reserved_gib"] >= found["peak_allocated_gib"]


@pytest.mark.usefixtures("device")
def test_a_gap_is_what_the_host_keeps_the_device_waiting():
    clock = DeviceClock(torch.device("cuda"))
    for host_s in (0.0, 0.1):
        time.sleep(host_s)
        clock.begin()
        sleep(1)
        clock.gradients_ready()
        clock.end()
        torch.cuda.synchronize()
    first, second = clock.read(2)
    assert first.gap_s is None
    assert second.gap_s >= 0.099
    assert second.step_time_s < 0.1


def test_the_workspace_of_cublas_is_in_the_peak_and_told_apart(device):
    """Torch keeps one for each handle and stream that has multiplied, until told otherwise."""
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(device)
    matrix = torch.randn(256, 256, device=device)
    memory = CudaMemory(device)
    memory.phase("steady")
    matrix @ matrix
    found = memory.report()
    assert found.workspace_gib * 2**30 >= MIB
    assert found.peak_allocated_gib >= found.workspace_gib + matrix.nbytes / 2**30
    assert found.allocator_retries == 0
    assert torch.cuda.memory_allocated(device) == before + matrix.nbytes


def heat(device, seconds):
    """Multiply matrices for a time."""
    a = torch.randn(4096, 4096, device=device)
    ended = time.monotonic() + seconds
    while time.monotonic() < ended:
        for _ in range(5):
            a @ a
        torch.cuda.synchronize(device)


def asked_smi(device):
    """Return power in watts and clock in MHz as nvidia-smi prints them."""
    uuid = torch.cuda.get_device_properties(device).uuid
    printed = subprocess.run(
        [
            SMI,
            f"--id=GPU-{uuid}",
            "--query-gpu=power.draw,clocks.sm",
            "--format=csv,noheader,nounits",
        ],
        capture_output=True,
        check=True,
        text=True,
    )
    return [float(value) for value in printed.stdout.split(",")]


@pytest.mark.skipif(SMI is None, reason="no nvidia-smi")
def test_power_and_clock_are_those_of_nvidia_smi(device):
    """Under a load that is held while both are asked."""
    followed = CudaTelemetry(device, counts_energy=False, ranks_on_node=1)
    heat(device, 3)
    try:
        watts, mhz = asked_smi(device)
    except (ValueError, subprocess.CalledProcessError):
        pytest.skip("nvidia-smi tells no power here")
    heat(device, 1)
    sample = followed.sample()
    assert sample.power_w == pytest.approx(watts, rel=0.3)
    assert sample.clock_mhz == pytest.approx(mhz, rel=0.3)
    assert followed.totals().throttled in {True, False}


def test_the_counter_of_energy_agrees_with_the_integral_of_power(device):
    followed = CudaTelemetry(device, counts_energy=True, ranks_on_node=1)

    def look():
        return time.monotonic(), followed._look().power_w

    heat(device, 3)
    looks = [look()]
    followed.resume()
    for _ in range(8):
        heat(device, 0.5)
        looks.append(look())
    followed.pause()
    counted = followed.totals().energy_j
    if counted is None or looks[0][1] is None:
        pytest.skip("the driver tells no energy, or no power, here")
    pairs = itertools.pairwise(looks)
    integral = sum((t1 - t0) * (w0 + w1) / 2 for (t0, w0), (t1, w1) in pairs)
    assert counted == pytest.approx(integral, rel=0.25)
    heat(device, 1)
    assert followed.totals().energy_j == counted, "energy is counted while paused"


HOLDS = "import torch; held = torch.zeros(1, device='cuda'); print('there', flush=True); input()"
"""A process that has a context on the first device, until it is told to end."""


def test_a_process_beside_the_run_is_counted(device):
    """On a whole machine or in a container: one more than before, while it is there."""
    torch.zeros(1, device=device)
    before = foreign_processes(device, 1)
    if before is None:
        pytest.skip("the driver lists no processes here")
    followed = CudaTelemetry(device, counts_energy=False, ranks_on_node=1)
    followed.resume()
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    with other:
        assert other.stdout.readline() == "there\n"
        assert foreign_processes(device, 1) == before + 1
        assert followed.totals().foreign_processes == before + 1
        other.communicate("\n")
    assert foreign_processes(device, 1) == before


@pytest.mark.skipif(SMI is None, reason="no nvidia-smi")
def test_a_power_limit_below_the_default_is_told_as_nvidia_smi_tells_it(device):
    asked = "--query-gpu=power.limit,power.default_limit"
    uuid = torch.cuda.get_device_properties(device).uuid
    printed = subprocess.run(
        [SMI, f"--id=GPU-{uuid}", asked, "--format=csv,noheader,nounits"],
        capture_output=True,
        check=True,
        text=True,
    )
    try:
        limit, default = map(float, printed.stdout.split(","))
    except ValueError:
        pytest.skip("nvidia-smi tells no limit here")
    followed = CudaTelemetry(device, counts_energy=False, ranks_on_node=1)
    limits = followed.totals().device_limits or ""
    assert ("power limit" in limits) == (limit < default)
