"""Commands that are printed do what they say: each is taken apart by a shell, composed, and run."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from batchscape.analysis.claims.declared import CLAIMS, judge_claims
from batchscape.analysis.claims.evidence import Evidence
from batchscape.analysis.decisions.evidence import gather
from batchscape.analysis.decisions.recommend import Needs, recommend
from batchscape.analysis.report.write import Report, write_report
from batchscape.cli import main
from batchscape.compose import compose
from batchscape.config import RunConfig
from batchscape.launch.launch_record import OTHER_LAUNCHER
from batchscape.plan.build import Plan, make_plan
from batchscape.plan.machine import Machine
from batchscape.record.commands import Launched, again, command_of, more_seeds, time_again
from batchscape.record.files import read_json, write_json
from batchscape.record.folder import SweepFolder
from batchscape.record.status import RunStatus, Status
from batchscape.record.tables import load
from batchscape.record.timing import BUSY, why_untimed

TINY = [
    *("seed=0,1", "model=gpt_micro", "batch.data_parallel_size=1", "batch.global_batch_size=8"),
    *("batch.micro_batch_size=4,8", "launcher.device=cpu", "data.sequence_length=16"),
    *("budget.samples=160", "evaluation.every_samples=160", "evaluation.samples=16"),
    *("measure.memory=false", "tracker=none", "measure.warmup_optimizer_steps=2"),
]
IDENTITY = None


def planned(command: str) -> Plan:
    """What `batchscape plan` does, by the words that a shell makes of a command."""
    program, verb, *arguments = shlex.split(command)
    assert (program, verb) == ("batchscape", "sweep")
    grid = compose(arguments, "batchscape plan")
    assert grid is not None
    from batchscape.data import prepare

    return make_plan(grid, Machine.detect(), prepare)


def to_do(plan: Plan) -> list[str]:
    """Runs that a sweep of this plan would start."""
    sweep = SweepFolder(plan.sweep_dir)
    statuses = {spec.run_id: sweep.run(spec.run_id).status for spec in plan.specs}
    return [
        run_id
        for run_id, path in statuses.items()
        if not path.exists() or not RunStatus.read(path).status.is_sealed
    ]


def commands_in(text: str) -> list[str]:
    """Commands of sweeps in a text: each stands at the end of its sentence or line."""
    found = re.findall(r"batchscape sweep [^\n`]*", text)
    return [part for command in found for part in command.rstrip(". ").split(" && ")]


def printed(report: Report, *others: str) -> str:
    told = [line for section in report.sections for line in (*section.answer, *section.warnings)]
    notes = [
        note
        for section in report.sections
        for view in section.tables
        for note in view.grid.footnotes.values()
    ]
    return "\n".join([*told, *notes, *report.notes, *others])


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs the command line in an empty folder, and returns what it said."""
    monkeypatch.chdir(tmp_path)

    def call(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
        capsys.readouterr()
        assert main(arguments) == 0
        return capsys.readouterr().out

    return call


def test_the_printed_remedy_gives_times_or_says_why_not(
    sweep: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two at a time have no times; the command in the last line runs each once more, alone."""
    arguments = [*TINY, "launcher.concurrent_runs=2", "sweep_dir='my sweep, 1'"]
    said = sweep(["sweep", *arguments], capsys)
    last = said.rstrip().splitlines()[-1]
    assert last.startswith(
        "No times that count: 4 of 4 completed runs: up to 2 runs share the machine (4). "
    )
    (remedy,) = commands_in(last)
    recorded = [read_json(f.launch)["command"] for f in SweepFolder(Path("my sweep, 1")).run_folders()]
    assert recorded == [command_of(arguments)] * 4

    report = write_report([Path("my sweep, 1")], figures=False)
    (found,) = gather([Path("my sweep, 1")])
    chosen = recommend(found, Needs())
    assert chosen.geometry is None
    own = [
        *commands_in(chosen.headline),
        *(c for text in chosen.missing if "the time of a step" in text for c in commands_in(text)),
        *(command for note in report.notes for command in commands_in(note)),
    ]
    assert own == [remedy] * 3
    # Every command of the page composes and has runs to do.
    everything = commands_in(printed(report, chosen.headline, *chosen.missing))
    assert len(set(everything)) > 3
    for command in set(everything):
        assert to_do(planned(command)), command
    shown = report.grid
    assert any("disturbed: processor" in header for header in shown.headers)

    again_said = sweep(shlex.split(remedy)[1:], capsys)
    assert "4 runs: 4 completed" in again_said
    runs = load(Path("my sweep, 1")).runs
    assert sorted(runs["timing_repeat"]) == [0] * 4 + [1] * 4
    assert runs["sweep_name"].nunique() == 1
    repeated = write_report([Path("my sweep, 1")], figures=False).comparison
    second = [
        why_untimed(read_json(folder.launch), RunStatus.read(folder.status).summary)
        for folder in SweepFolder(Path("my sweep, 1")).run_folders()
        if read_json(folder.config)["config"]["timing_repeat"] == 1
    ]
    assert set(second) <= {None, BUSY, OTHER_LAUNCHER}
    assert repeated["step_time_s_n"].sum() == second.count(None)
    if any(second):
        # A machine that is not free now: said, with the next number.
        last = again_said.rstrip().splitlines()[-1]
        assert f"No times that count: {4 - second.count(None)} of 4 completed runs: " in last
        assert "timing_repeat=2" in last
    else:
        assert "No times that count" not in again_said
