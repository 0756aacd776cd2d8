"""Telemetry against a recorded driver, of which every answer is known."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from batchscape import cuda_devices
from batchscape.device import ask_driver, foreign_processes
from batchscape.measure import telemetry
from batchscape.measure.telemetry import CpuTelemetry, CudaTelemetry, build_telemetry

CUDA = torch.device("cuda", 0)


class Time:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


class Driver:
    """NVML as `pynvml` shows it: a device of known power, with a counter of its energy or not."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self, time, *, has_counter=True, has_power=True, has_device=True):
        self.watts = 100.0
        self.clock = 1500
        self.reasons = 0
        self.inits = self.questions = 0
        self.pids = [os.getpid()]
        self.power_limit = self.default_power_limit = 700
        self.default_clock = self.highest_clock = 1980
        self._time = time
        self._has = {"counter": has_counter, "power": has_power, "device": has_device}
        self._joules, self._since = 5000.0, time.now

    def wait(self, seconds, watts=None):
        """Let time pass; then draw another power."""
        self._joules += seconds * self.watts
        self._time.now += seconds
        self.watts = self.watts if watts is None else watts

    def _tell(self, what, answer):
        self.questions += 1
        if not self._has[what]:
            raise self.NVMLError
        return answer

    def nvmlInit(self):  # noqa: N802
        self.inits += 1

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        assert uuid == "GPU-1234"
        return self._tell("device", "the device")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):  # noqa: N802
        assert handle == "the device"
        return self._tell("counter", int(self._joules * 1000))

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802
        assert handle == "the device"
        return self._tell("power", int(self.watts * 1000))

    def nvmlDeviceGetClockInfo(self, handle, which):  # noqa: N802
        assert (handle, which) == ("the device", 1)
        return self._tell("device", self.clock)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):  # noqa: N802
        assert handle == "the device"
        return self._tell("device", self.reasons)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        assert handle == "the device"
        listed = [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in self.pids]
        return self._tell("device", listed)

    def nvmlDeviceGetPowerManagementLimit(self, handle):  # noqa: N802
        assert handle == "the device"
        return self._tell("power", 1000 * self.power_limit)

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle):  # noqa: N802
        assert handle == "the device"
        return self._tell("power", 1000 * self.default_power_limit)

    def nvmlDeviceGetDefaultApplicationsClock(self, handle, which):  # noqa: N802
        assert (handle, which) == ("the device", 1)
        if self.default_clock is None:  # newer drivers know it no more
            raise self.NVMLError
        return self._tell("device", self.default_clock)

    def nvmlDeviceGetMaxClockInfo(self, handle, which):  # noqa: N802
        assert (handle, which) == ("the device", 1)
        return self._tell("device", self.highest_clock)


@pytest.fixture
def machine(monkeypatch):
    """A device under a driver of recorded answers."""
    made = []

    def make(**has):
        moved = Time()
        driver = Driver(moved, **has)
        monkeypatch.setattr(telemetry, "time", moved)
        monkeypatch.setattr(cuda_devices, "pynvml", driver)
        cuda_devices.handle_of.cache_clear()
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1234")
        )
        monkeypatch.setattr(torch.cuda, "synchronize", made.append)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        return driver

    yield make
    cuda_devices.handle_of.cache_clear()


def test_power_and_clock_at_most_once_a_second(machine):
    driver = machine()
    followed = CudaTelemetry(CUDA, counts_energy=True, ranks_on_node=1)
    driver.watts, driver.clock = 350.5, 1980
    assert followed.sample() == (350.5, 1980.0)
    for wait, counts in [(0.5, False), (0.4, False), (0.2, True), (0.9, False), (0.2, True)]:
        driver.wait(wait)
        assert (followed.sample() is not None) == counts


def test_a_look_that_takes_long_is_taken_rarely(machine):
    """A thousandth of the time at most."""
    driver = machine()
    followed = CudaTelemetry(CUDA, counts_energy=False, ranks_on_node=1)
    ask = driver.nvmlDeviceGetClockInfo

    def slow(handle, which):
        driver.wait(0.01)
        return ask(handle, which)

    driver.nvmlDeviceGetClockInfo = slow
    assert followed.sample() is not None
    driver.wait(9.9)
    assert followed.sample() is None
    driver.wait(0.2)
    assert followed.sample() is not None


def test_energy_is_that_between_resume_and_pause(machine):
    driver = machine()
    followed = CudaTelemetry(CUDA, counts_energy=True, ranks_on_node=1)
    driver.wait(10, watts=200)  # warm-up
    followed.resume()
    driver.wait(3)
    followed.resume()  # once more changes nothing
    driver.wait(2)
    followed.pause()
    driver.wait(50, watts=300)  # an evaluation
    followed.pause()
    followed.resume()
    driver.wait(1)
    totals = followed.totals()
    driver.wait(1)
    assert totals.energy_j == pytest.approx(5 * 200 + 1 * 300)
    assert totals.energy_source == "the device's energy counter"
    assert followed.totals().energy_j == totals.energy_j


def test_energy_of_a_shared_device_is_told_once(machine):
    driver = machine()
    samples = []
    for rank in range(3):
        followed = build_telemetry(CUDA, rank, 3)
        followed.resume()
        driver.wait(2)
        samples.append(followed.totals().energy_j)
    assert samples == [pytest.approx(200), None, None]


def test_energy_of_a_short_training_is_not_told(machine):
    """Neither the counter nor the power is fine enough."""
    driver = machine()
    followed = CudaTelemetry(CUDA, counts_energy=True, ranks_on_node=1)
    for _ in range(3):
        followed.resume()
        driver.wait(0.6)
        followed.pause()
        driver.wait(30)
    assert followed.totals().energy_j is None
    followed.resume()
    driver.wait(0.6)
    assert followed.totals().energy_j == pytest.approx(4 * 60)


def test_a_meter_that_fails_on_the_way_tells_no_energy(machine):
    driver = machine()
    followed = CudaTelemetry(CUDA, counts_energy=True, ranks_on_node=1)
    followed.resume()
    driver.wait(1)
    driver._has["counter"] = False
    followed.pause()
    driver._has["counter"] = True
    followed.resume()
    driver.wait(1)
    assert followed.totals().energy_j is None


@pytest.mark.parametrize(
    ("reasons", "throttled", "power_capped"),
    [
        (0x0, False, False),
        (0x1, False, False),  # idle
        (0x2, False, False),  # clocks that somebody chose
        (0x10, False, False),  # in step with another device
        (0x4, False, True),  # power cap: a full load
        (0x8, True, False),  # hardware slowdown
        (0x20, True, False),  # heat, by software
        (0x40, True, False),  # heat, by hardware
        (0x80, True, False),  # power brake
        (0x5, False, True),
        (0x24, True, True),
    ],
)
def test_throttled_is_any_sample_with_a_harmful_reason(machine, reasons, throttled, power_capped):
    driver = machine()
    followed = CudaTelemetry(CUDA, counts_energy=False, ranks_on_node=1)
    for mask in (0x0, reasons, 0x1):
        driver.reasons = mask
        followed.sample()
        driver.wait(2)
    totals = followed.totals()
    assert (totals.throttled, totals.power_capped) == (throttled, power_capped)


def test_what_the_warm_up_met_is_forgotten_as_its_times_are(machine):
    driver = machine()
    followed = CudaTelemetry(CUDA, counts_energy=False, ranks_on_node=1)
    driver.reasons, driver.pids = 0x8, [os.getpid(), 1]
    followed.sample()
    driver.reasons, driver.pids = 0x0, [os.getpid()]
    followed.resume()
    driver.wait(2)
    followed.sample()
    followed.resume()
    totals = followed.totals()
    assert (totals.throttled, totals.foreign_processes) == (False, 0)


@pytest.mark.parametrize("when", ["begin", "middle", "end"])
def test_whoever_computes_beside_the_timed_part_is_counted(machine, when):
    """At its begin, at a sample in between, and at its end, each time for that moment alone."""
    driver = machine()
    followed = CudaTelemetry(CUDA, counts_energy=False, ranks_on_node=1)

    def company(at):
        driver.pids = [os.getpid(), *([1] if at == when else [])]

    company("begin")
    followed.resume()
    company("middle")
    driver.wait(2)
    followed.sample()
    company("end")
    assert followed.totals().foreign_processes == 1


def test_processes_of_the_run_are_its_process_group_and_no_others(machine):
    driver = machine()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as process:
        other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, process_group=0)
        with other:
            driver.pids = [os.getpid(), process.pid]
            assert foreign_processes(CUDA, 2) == 0
            driver.pids += [other.pid, 2**22 + 1]  # the last one is in another namespace
            assert foreign_processes(CUDA, 2) == 2
            other.communicate(b"\n")
        process.communicate(b"\n")


@pytest.mark.parametrize(
    ("listed", "ranks", "devices", "foreign"),
    [
        (1, 1, 1, 0),
        (2, 1, 1, 1),
        (2, 2, 2, 1),  # one rank a device
        (3, 4, 2, 1),  # two ranks a device
        (2, 4, 2, 0),
        (0, 1, 1, None),  # a driver that hides even this process
        (1, 4, 2, None),
    ],
)
def test_in_a_container_processes_are_counted_as_their_numbers_are_the_hosts(
    machine, monkeypatch, listed, ranks, devices, foreign
):
    driver = machine()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    driver.pids = [2**22 + number for number in range(listed)]
    assert foreign_processes(CUDA, ranks) == foreign


def test_a_driver_that_does_not_tell_counts_nobody(machine):
    machine(has_device=False)
    assert foreign_processes(CUDA, 1) is None
    assert CudaTelemetry(CUDA, counts_energy=True, ranks_on_node=1).totals().throttled is None


@pytest.mark.parametrize("error", [AttributeError, TypeError, RuntimeError])
def test_a_question_that_bindings_or_driver_do_not_know_ends_no_run(machine, error):
    """A missing name, another signature, a library of another version."""
    driver = machine()

    def unknown(*_):
        raise error

    driver.nvmlDeviceGetCurrentClocksThrottleReasons = unknown
    driver.nvmlDeviceGetComputeRunningProcesses = unknown
    assert ask_driver(CUDA, lambda nvml, handle: nvml.nvmlOfAnotherVersion(handle)) is None
    followed = CudaTelemetry(CUDA, counts_energy=True, ranks_on_node=1)
    assert followed.sample() == (100.0, 1500.0)
    totals = followed.totals()
    assert (totals.throttled, totals.foreign_processes, totals.clock_mhz) == (None, None, 1500.0)


@pytest.mark.parametrize(
    ("limit", "reasons", "clock", "default_clock", "limits"),
    [
        (700, 0x0, 1500, 1980, None),
        (800, 0x0, 1500, 1980, None),
        (500, 0x0, 1500, 1980, "power limit 500 W of 700 W"),
        (700, 0x2, 1200, 1980, "clocks held down by a setting"),
        (700, 0x2, 1200, None, "clocks held down by a setting"),
        (700, 0x2, 1312, 1312, None),  # by default, as a V100 has it
        (700, 0x2, 1980, 1312, None),  # set to the highest
        (700, 0x6, 1200, 1980, None),  # the power holds it lower still
        (700, 0x1, 210, 1980, None),  # idle
        (450, 0x2, 900, 1312, "power limit 450 W of 700 W; clocks held down by a setting"),
    ],
)
def test_what_somebody_set_a_device_to_is_told(
    machine, limit, reasons, clock, default_clock, limits
):
    driver = machine()
    driver.power_limit, driver.default_clock = limit, default_clock
    driver.reasons, driver.clock = reasons, clock
    followed = CudaTelemetry(CUDA, counts_energy=False, ranks_on_node=1)
    followed.sample()
    driver.reasons, driver.clock = 0x1, 210
    assert followed.totals().device_limits == limits


def test_reasons_are_those_of_the_bindings():
    """The numbers of nvml.h, as NVIDIA's own Python bindings have them."""
    import pynvml

    names = ("HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
    values = [getattr(pynvml, f"nvmlClocksThrottleReason{name}") for name in names]
    assert sum(values) == telemetry._THROTTLE
    assert pynvml.nvmlClocksThrottleReasonSwPowerCap == telemetry._POWER_CAP
    assert pynvml.nvmlClocksEventReasonApplicationsClocksSetting == telemetry._CLOCKS_SETTING


@pytest.mark.parametrize("has", [{"has_device": False}, {"has_power": False, "has_counter": False}])
def test_what_the_driver_does_not_tell_is_missing(machine, has):
    driver = machine(**has)
    followed = CudaTelemetry(CUDA, counts_energy=True, ranks_on_node=1)
    followed.resume()
    driver.wait(1)
    sample = followed.sample()
    totals = followed.totals()
    assert sample.power_w is None
    assert (totals.energy_j, totals.energy_source) == (None, None)
    there = has.get("has_device", True)
    assert sample.clock_mhz == totals.clock_mhz == (1500.0 if there else None)
    assert totals.throttled is (False if there else None)


def test_the_library_is_opened_once_also_when_it_has_no_device(machine):
    for has_device in (True, False):
        driver = machine(has_device=has_device)
        for _ in range(3):
            CudaTelemetry(CUDA, counts_energy=True, ranks_on_node=1).totals()
        assert driver.inits == 1


def test_the_device_is_waited_for_at_the_edges_only(machine, monkeypatch):
    driver = machine()
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    followed = CudaTelemetry(CUDA, counts_energy=True, ranks_on_node=1)
    for _ in range(5):
        followed.resume()
        driver.wait(2)
        followed.sample()
    followed.pause()
    followed.pause()
    assert waits == [CUDA, CUDA]


def test_cpu_clock_is_that_of_the_system():
    followed = CpuTelemetry()
    followed.resume()
    sample = followed.sample()
    assert followed.sample() is None  # at most once a second
    followed.pause()
    totals = followed.totals()
    assert (totals.energy_j, totals.throttled, sample.power_w) == (None, None, None)
    frequency = psutil.cpu_freq()
    if frequency is None:
        assert totals.clock_mhz is sample.clock_mhz is None
    else:
        # Clocks move between two looks.
        assert totals.clock_mhz == pytest.approx(frequency.current, rel=0.9)


@pytest.mark.parametrize("error", [OSError, NotImplementedError])
def test_a_system_that_tells_no_clock_leaves_it_missing(monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr(psutil, "cpu_freq", fail)
    assert CpuTelemetry().totals().clock_mhz is None


@pytest.mark.slow
def test_rows_of_a_run_carry_the_clock_where_the_system_tells_it(trainer, steps, tmp_path):
    spec = trainer.make_spec((2, 8, 2), budget__optimizer_steps=4)
    folder = trainer.train(spec, tmp_path)
    has_frequency = psutil.cpu_freq() is not None
    from batchscape.record.tables import read_table

    assert steps(folder)["clock_mhz"].notna().any() == has_frequency
    assert steps(folder)["power_w"].isna().all()
    ranks = read_table(folder, "ranks")
    assert ranks["clock_mhz"].notna().all() == has_frequency
    assert ranks[["energy_j", "throttled"]].isna().all(axis=None)
