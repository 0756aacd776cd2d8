"""Which run of a queue gets devices, with the settings and the machine of a launch."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from placing import Placer
from rich.console import Console
from sweeps_of_fakes import ENTRY, renamed, spec_named

from batchscape.cuda_devices import CudaDevice
from batchscape.launch.launcher import Launcher
from batchscape.launch.placement import Placement
from batchscape.plan.machine import Machine
from batchscape.record.files import read_json
from batchscape.record.folder import SweepFolder
from batchscape.record.status import Attempt, RunStatus, Status

FOUR = Machine(4, "x")


def test_one_at_a_time_in_the_order_of_the_launch() -> None:
    names = ["a-d1", "b-d4", "c-d2"]
    launcher = Placer(FOUR, *names, expected={"a-d1": 1.0, "b-d4": 9.0, "c-d2": 5.0})
    for name in names:
        assert launcher.start() == {name}
        launcher.end(name)
    assert launcher.start() == set()


def test_the_longest_first_where_several_go_at_once() -> None:
    expected = {"a-d1": 1.0, "b-d2": 9.0, "c-d2": 5.0, "d-d1": 2.0}
    launcher = Placer(FOUR, *expected, expected=expected, concurrent_runs=4)
    assert launcher.start() == {"b-d2", "c-d2"}
    assert sorted(launcher.devices) == [0, 1, 2, 3]
    launcher.end("c-d2")
    assert launcher.start() == {"b-d2", "a-d1", "d-d1"}


@pytest.mark.parametrize(("concurrent_runs", "left_s"), [(1, 9 + 5 + 2), (4, 9)])
def test_the_time_left_is_that_of_the_queue(concurrent_runs: int, left_s: float) -> None:
    """One after the other, or 9 s on two devices beside 5 s."""
    expected = {"b-d2": 9.0, "c-d2": 5.0, "d-d1": 2.0}
    launcher = Placer(FOUR, *expected, expected=expected, concurrent_runs=concurrent_runs)
    assert launcher.placement.left_s({}, launcher.queue) == pytest.approx(left_s)
    unknown = Placer(FOUR, "a-d1", expected={})
    assert math.isnan(unknown.placement.left_s({}, unknown.queue))
    assert math.isnan(unknown.placement.left_s({}, [*launcher.queue, *unknown.queue]))


def over(seconds: float, samples: int) -> RunStatus:
    attempts = [Attempt(100.0, 0, ended_at=100.0 + seconds)]
    return RunStatus(Status.COMPLETED, attempts=attempts, summary={"samples": samples})


def test_what_runs_took_tells_what_the_next_ones_take() -> None:
    """Of 12 samples a rank each; where they were predicted, that is scaled."""
    one, two, three = (spec_named(f"completes-d{ranks}") for ranks in (1, 2, 3))
    plain = Placer(FOUR, one).placement
    plain.learn(one, over(24.0, 12))
    plain.learn(two, RunStatus(Status.FAILED))
    assert plain.expected_s(two) == 48.0
    scaled = Placer(FOUR, one, expected={one.run_id: 10.0, three.run_id: 4.0}).placement
    assert scaled.expected_s(three) == 4.0
    scaled.learn(one, over(24.0, 12))
    assert (scaled.expected_s(three), scaled.expected_s(two)) == (pytest.approx(9.6), 48.0)


def test_what_was_measured_is_not_scaled_by_what_was_reckoned() -> None:
    """A sweep that goes on has both: runs that are over were predicted before any was."""
    one, two, three = (spec_named(f"completes-d{ranks}") for ranks in (1, 2, 3))
    predicted = {
        spec.run_id: {"run_time_s": {"method": method, "value": seconds}}
        for spec, method, seconds in (
            (one, "datasheet", 10.0),
            (two, "measured", 30.0),
            (three, "datasheet", 4.0),
        )
    }
    placement = Placement(one, FOUR, predicted, pytest.fail)
    placement.learn(one, over(24.0, 12))
    assert placement.expected_s(two) == 30.0
    assert placement.expected_s(three) == pytest.approx(9.6)


def test_a_run_that_could_not_begin_leaves_its_devices_to_the_next() -> None:
    launcher = Placer(FOUR, "a-d4", "b-d4")
    failed = launcher.placement.next(launcher.queue)
    assert failed is not None
    launcher.placement.release(failed[0])
    assert launcher.start() == {"b-d4"}


def test_cores_have_their_own_numbers() -> None:
    """Two launchers that may use some cores each meet only on those that both may use."""
    one = Placer(Machine(2, "x", cores=(3, 7)), "a-d2")
    two = Placer(Machine(2, "x", cores=(7, 9)), "b-d2", "c-d1")
    assert one.start() == {"a-d2"}
    assert one.devices == [3, 7]
    assert two.start() == set()
    assert "Waiting for cores" in str(two.placement.why_waiting)
    one.end("a-d2")
    assert one.start() == set()
    assert two.start() == {"b-d2"}
    two.end("b-d2")


def test_shared_devices_take_as_many_runs_as_allowed() -> None:
    devices = tuple(CudaDevice(i, "GPU", (9, 0), f"GPU-{i}") for i in range(2))
    machine = Machine(8, "x", devices)
    names = [f"n{i}-d1" for i in range(9)]
    launcher = Placer(machine, *names, concurrent_runs=9, oversubscribe=3)
    assert len(launcher.start()) == 6
    assert sorted(launcher.devices) == [0, 0, 0, 1, 1, 1]


def test_a_long_queue_is_decided_over_in_time() -> None:
    """A square of its length would pass the limit of a test."""
    one = spec_named("completes", concurrent_runs=4)
    expected = {f"n{i}": 1.0 + i % 97 for i in range(5000)}
    launcher = Placer(FOUR, *(renamed(one, name) for name in expected), expected=expected)
    for _ in range(3):
        begun = launcher.start()
        assert [expected[name] for name in begun] == [97.0] * 4
        for name in begun:
            launcher.end(name)


@pytest.mark.slow
def test_runs_share_a_device_by_config(tmp_path: Path) -> None:
    """Each completes only beside the two others, and there is one core."""
    sweep = SweepFolder(tmp_path)
    specs = [spec_named(f"together-{i}", concurrent_runs=3, oversubscribe=3) for i in range(3)]
    Launcher(
        sweep,
        Machine(1, "x"),
        specs,
        entry=ENTRY,
        method="spawn",
        console=Console(file=io.StringIO()),
    ).run()
    for spec in specs:
        folder = sweep.run(spec.run_id)
        assert RunStatus.read(folder.status).status is Status.COMPLETED
        record = read_json(folder.launch)
        assert (record["devices"], record["oversubscribed"]) == ([0], True)
        assert not record["timing_valid"]
        assert "up to 3 runs share a device" in record["timing_invalid_reason"]


def test_a_launcher_that_runs_pauses_for_one_that_waits() -> None:
    """Each of two launchers has plenty of runs for the one core, and both get on."""
    one = Placer(Machine(1, "x", cores=(30,)), *(f"a{i}-d1" for i in range(3)))
    two = Placer(Machine(1, "x", cores=(30,)), *(f"b{i}-d1" for i in range(3)))
    order = []
    for _ in range(6):
        for launcher in (one, two):
            order += sorted(launcher.start())
            if launcher.active:
                assert not (two if launcher is one else one).start()
                launcher.end(next(iter(launcher.active)))
                launcher.start()
    assert order == ["a0-d1", "b0-d1", "a1-d1", "b1-d1", "a2-d1", "b2-d1"]
