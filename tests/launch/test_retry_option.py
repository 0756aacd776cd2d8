"""Repeating what failed, and stopping at a number of failures."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sweeps_of_fakes import ENTRY, MACHINE, spec_named

from batchscape.compose import compose
from batchscape.config import RunConfig
from batchscape.errors import ConfigError
from batchscape.launch.launcher import Launcher
from batchscape.launch.result import SweepResult
from batchscape.plan.expand import SweepCells
from batchscape.plan.identity import name_sweep
from batchscape.record.folder import SweepFolder
from batchscape.record.status import RunStatus, Status


class Sweep:
    """One folder, launched again and again."""

    def __init__(self, path: Path) -> None:
        self.folder = SweepFolder(path)
        self.printed = ""

    def run(self, *names: str, **launcher: Any) -> SweepResult:
        output = io.StringIO()
        result = Launcher(
            self.folder,
            MACHINE,
            [spec_named(name, **launcher) for name in names],
            entry=ENTRY,
            method="spawn",
            console=Console(file=output, width=300),
        ).run()
        self.printed = output.getvalue()
        return result

    def status(self, name: str) -> RunStatus:
        return RunStatus.read(self.folder.run(name).status)

    def attempts(self, *names: str) -> list[int]:
        return [len(self.status(name).attempts) for name in names]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep(tmp_path / "sweep")


@pytest.mark.slow
def test_faults_are_repeated_when_they_are_asked_for(sweep: Sweep) -> None:
    names = ("exits7", "runsout", "completes")
    sweep.run(*names)
    assert sweep.attempts(*names) == [1, 1, 1]
    result = sweep.run(*names)
    assert {run.run_id: run.status for run in result.failed} == {
        "exits7": Status.FAILED,
        "runsout": Status.OOM,
    }
    assert sweep.attempts(*names) == [1, 1, 1]
    assert "1 of 3 runs done already, not run again" in sweep.printed
    assert (
        "2 runs ended by a fault before, not run again (1 failed, 1 oom); to run them again, add "
        "--retry failed,oom"
    ) in sweep.printed
    # Their causes are told again, at the end.
    assert "runsout oom: out of memory" in sweep.printed
    sweep.run(*names, retry=["oom"])
    assert sweep.attempts(*names) == [1, 2, 1]
    assert "add --retry failed\n" in sweep.printed
    sweep.run(*names, retry=["all"])
    assert sweep.attempts(*names) == [2, 3, 1]


def test_no_more_are_started_after_so_many_failures(sweep: Sweep) -> None:
    names = [f"exits7-{number}" for number in range(4)]
    result = sweep.run(*names, max_failures=2)
    assert [run.status for run in result.runs] == [Status.FAILED] * 2 + [Status.PENDING] * 2
    assert result.why_stopped == "2 runs have failed, and launcher.max_failures is 2"
    assert f"{result.why_stopped}: no more were started; the same command goes on" in sweep.printed
    assert not result.interrupted
    # Failures of earlier launches do not count, or nothing would ever go on.
    result = sweep.run(*names, "completes-later", max_failures=3)
    assert result.why_stopped is None
    assert sweep.attempts(*names, "completes-later") == [1, 1, 1, 1, 1]
    assert sweep.status("completes-later").status is Status.COMPLETED


def test_what_runs_is_finished(sweep: Sweep) -> None:
    """The other run of a pair goes on to its end when one has failed."""
    names = ("exits7", "outlasts", "completes-later")
    result = sweep.run(*names, max_failures=1, concurrent_runs=2)
    statuses = {run.run_id: run.status for run in result.runs}
    assert statuses == {
        "exits7": Status.FAILED,
        "outlasts": Status.COMPLETED,
        "completes-later": Status.PENDING,
    }
    assert result.why_stopped == "1 run has failed, and launcher.max_failures is 1"


def cells(*arguments: str) -> SweepCells:
    grid = compose(["data=stdlib", *arguments], "batchscape sweep")
    assert grid is not None
    return grid


@pytest.mark.parametrize(
    "arguments",
    [
        ["--retry=failed,oom"],
        ["seed=0,1", "--retry", "failed,oom"],
    ],
)
def test_the_option_is_a_setting(arguments: list[str]) -> None:
    grid = cells(*arguments)
    for cell in grid.cells:
        config = RunConfig.from_mapping(cell.settings)
        assert config.launcher.retry == ["failed", "oom"]
    assert grid.axis_keys <= {"seed"}
    # The folder of the sweep is the same, with and without it.
    plain = cells(*(a for a in arguments if "retry" not in a and "," not in a))
    names = [
        name_sweep(
            RunConfig.from_mapping(g.cells[0].settings),
            sweep_file=None,
            swept_keys=["seed"],
            fixed=g.fixed,
        )
        for g in (grid, plain)
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    "arguments", [["--retry"], ["--retry", "completed"], ["--retry=failed,"], ["--retry", "seed=1"]]
)
def test_what_cannot_be_repeated_is_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--retry takes .*failed, oom, timeout, all"):
        cells(*arguments)


@pytest.mark.parametrize(("key", "value"), [("retry", ["diverged"]), ("max_failures", 0)])
def test_settings_are_checked(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"launcher.{key}"):
        spec_named("completes", **{key: value})


def test_a_sweep_whose_first_runs_fail_alike_is_stopped(sweep: Sweep) -> None:
    names = [f"exits7-{number}" for number in range(5)]
    result = sweep.run(*names)
    assert [run.status for run in result.runs] == [Status.FAILED] * 3 + [Status.PENDING] * 2
    assert result.why_stopped is not None
    assert result.why_stopped.startswith("all 3 runs failed alike (")
    assert str(result.runs[0].reason) in result.why_stopped
    assert "--retry failed runs these again, and launcher.max_failures=1000" in result.why_stopped
    # The same command goes on with the others, of which too few are left to tell.
    assert sweep.run(*names).why_stopped is None
    assert sweep.attempts(*names) == [1] * 5


@pytest.mark.parametrize(
    "names",
    [
        ("exits7-0", "exits7-1", "completes", "exits7-2", "exits7-3", "completes-later"),
        # Another exit code is another failure.
        ("exits7-0", "exits7-1", "exits9-0", "exits9-1", "completes-later"),
    ],
)
def test_runs_that_fail_otherwise_or_in_between_stop_nothing(
    sweep: Sweep, names: tuple[str, ...]
) -> None:
    assert sweep.run(*names).why_stopped is None
    assert sweep.attempts(*names) == [1] * len(names)


def test_failures_where_a_run_has_completed_before_stop_nothing(sweep: Sweep) -> None:
    sweep.run("completes")
    names = [f"exits7-{number}" for number in range(4)]
    assert sweep.run("completes", *names).why_stopped is None
    assert sweep.attempts(*names) == [1] * 4


def test_how_a_run_at_work_ends_decides(sweep: Sweep) -> None:
    """The long one completes once `exits7` has failed, which is the third."""
    names = ("outlasts", "exits7-2", "exits7-3", "exits7", "exits7-later", "completes-later")
    assert sweep.run(*names, concurrent_runs=2).why_stopped is None
    assert sweep.attempts(*names) == [1] * 6
