"""Runs that are added while others are at work, and runs that are cut."""

from __future__ import annotations

import io
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
from rich.console import Console
from sweeps_of_fakes import ENTRY, MACHINE, spec_named

from batchscape.launch.launcher import Launcher
from batchscape.launch.result import SweepResult
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus, Status


@dataclass
class Steers:
    """Adds each list of runs once the one before it is over; cuts runs by name."""

    waves: list[list[RunSpec]]
    cuts: str = "nothing"
    calls: list[frozenset[str]] = field(default_factory=list)

    @property
    def runs(self) -> int:
        return 9

    def next_runs(self, settled_run_ids: Collection[str]) -> list[RunSpec]:
        self.calls.append(frozenset(settled_run_ids))
        return self.waves.pop(0) if self.waves else []

    def reason_to_cut(self, spec: RunSpec) -> str | None:
        return "it was to be cut" if spec.run_id.startswith(self.cuts) else None


def launched(sweep: SweepFolder, steers: Steers, *specs: RunSpec) -> tuple[SweepResult, str]:
    output = io.StringIO()
    result = Launcher(
        sweep, MACHINE, specs, entry=ENTRY, console=Console(file=output), steering=steers
    ).run()
    return result, output.getvalue()


def statuses(result: SweepResult) -> dict[str, Status]:
    return {run.run_id: run.status for run in result.runs}


@pytest.mark.slow
def test_runs_are_added_until_there_are_no_more(tmp_path) -> None:
    sweep = SweepFolder(tmp_path)
    waves = [[], [spec_named("completes-b"), spec_named("diverges-c")], [spec_named("completes-d")]]
    steers = Steers(waves)
    result, printed = launched(sweep, steers, spec_named("completes-a"))
    assert statuses(result) == {
        "completes-a": Status.COMPLETED,
        "completes-b": Status.COMPLETED,
        "diverges-c": Status.DIVERGED,
        "completes-d": Status.COMPLETED,
    }
    # It is asked before the first run, and after each end: nothing is added twice.
    assert steers.calls[0] == frozenset()
    assert {"completes-a"} in steers.calls
    assert steers.calls[-1] == frozenset(statuses(result))
    assert "[4/9] " in printed


@pytest.mark.slow
def test_added_runs_that_are_over_are_known_at_once(tmp_path) -> None:
    sweep = SweepFolder(tmp_path)
    launched(sweep, Steers([]), spec_named("completes-b"))
    before = sweep.run("completes-b").path.stat().st_mtime_ns
    steers = Steers([[], [spec_named("completes-b")], [spec_named("completes-c")]])
    result, _ = launched(sweep, steers, spec_named("completes-a"))
    assert set(statuses(result).values()) == {Status.COMPLETED}
    assert {"completes-a", "completes-b"} in steers.calls
    assert sweep.run("completes-b").path.stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_run_that_is_cut_is_sealed_as_pruned(tmp_path) -> None:
    sweep = SweepFolder(tmp_path)
    steers = Steers([], cuts="polite")
    result, _ = launched(sweep, steers, spec_named("polite"), spec_named("completes"))
    assert statuses(result) == {"polite": Status.PRUNED, "completes": Status.COMPLETED}
    status = RunStatus.read(sweep.run("polite").status)
    assert status.reason == "it was to be cut"
    assert status.seal
    again, _ = launched(sweep, Steers([]), spec_named("polite"), spec_named("completes"))
    assert statuses(again) == statuses(result)
