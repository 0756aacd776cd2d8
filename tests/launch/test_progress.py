from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from sweeps_of_fakes import spec_named

from batchscape.errors import DamageError
from batchscape.launch.attempt import ActiveRun
from batchscape.launch.devices import OTHER_LAUNCHER
from batchscape.launch.hangs import HangWatch
from batchscape.launch.processes import Spawned
from batchscape.launch.progress import Progress
from batchscape.launch.result import RunResult, SweepResult
from batchscape.record.files import JsonLines, last_row, write_json
from batchscape.record.folder import FORMAT_VERSION, RunFolder, SweepFolder
from batchscape.record.overview import overview, overview_text
from batchscape.record.status import Attempt, RunStatus, Status
from batchscape.record.timing import BUSY, BUSY_PCT, why_untimed


def row(step: int, loss: float = 0.25) -> dict[str, float]:
    return {
        "optimizer_step": step,
        "samples": 8 * step,
        "train_time_s": 2.0 * step,
        "loss": loss,
    }


@pytest.fixture
def run(tmp_path: Path) -> ActiveRun:
    spec = spec_named("completes-d2")
    place = str(tmp_path / "meeting")
    return ActiveRun(
        spec=spec,
        folder=RunFolder(tmp_path),
        status=RunStatus(Status.RUNNING, attempts=[Attempt(0.0, 0), Attempt(1.0, 0)]),
        processes=Spawned(),
        log_offset=0,
        hangs=HangWatch(place, spec),
    )


def write(run: ActiveRun, *rows: dict[str, float]) -> None:
    lines = JsonLines(run.folder.lines("steps"))
    lines.append(rows)
    lines.close()


def unknown() -> float:
    return math.nan


@pytest.mark.parametrize(
    ("step_time_s", "grace_s"), [(None, 20.0), (0.1, 20.0), (2.5, 20.0), (30.0, 130.0)]
)
def test_slow_steps_have_time_to_stop(
    run: ActiveRun, step_time_s: float | None, grace_s: float
) -> None:
    """Ranks agree on a stop some steps later: four of them, and ten seconds to write."""
    if step_time_s is not None:
        write(run, row(1, 2.0) | {"step_time_s": 99.0}, row(2, 2.0) | {"step_time_s": step_time_s})
    assert run.stop_grace_s == grace_s


def ended(status: Status, **content: object) -> RunStatus:
    return RunStatus(status, **content)  # type: ignore[arg-type]  # fields of several types


@given(
    losses=st.lists(st.floats(0, 10), max_size=30),
    torn=st.sampled_from([b"", b"{", b'{"optimizer_step": 9', b"\x00\x00"]),
    tail=st.integers(1, 4000),
)
def test_the_last_row_is_the_last_whole_one(
    tmp_path_factory: pytest.TempPathFactory, losses: list[float], torn: bytes, tail: int
) -> None:
    """Against reading the whole file; empty only where the tail holds no whole row."""
    path = tmp_path_factory.mktemp("rows") / "steps.jsonl"
    lines = [json.dumps(row(k, loss)) for k, loss in enumerate(losses)]
    path.write_bytes("".join(line + "\n" for line in lines).encode() + torn)
    last = last_row(path, tail)
    if lines and tail > len(lines[-1]) + 1 + len(torn) + 1:
        assert last == json.loads(lines[-1])
    else:
        assert last in ({}, json.loads(lines[-1]) if lines else {})


def test_rows_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert last_row(path) == {}
    path.write_text("")
    assert last_row(path) == {}
    for content in ("3\n", "nonsense\n"):
        path.write_text(content)
        with pytest.raises(DamageError, match="damaged in its last line"):
            last_row(path)


def test_a_file_gets_one_line_a_start_and_one_an_end(run: ActiveRun) -> None:
    output = io.StringIO()
    with Progress(Console(file=output, width=40), total=3) as progress:
        progress.run_started(run)
        progress.update([run], unknown)
        summary = {"final_loss": 1.5, "final_eval_loss": 2.0, "tokens_per_s": 12345.6}
        progress.run_ended(run.spec, ended(Status.COMPLETED, summary=summary), None, 0.0)
        progress.run_settled(RunResult(RunFolder(Path("b")), Status.FAILED, "too wide"))
        progress.run_ended(run.spec, ended(Status.DIVERGED, reason="not finite"), None, 0.0)
    assert output.getvalue().splitlines() == [
        "[1/3] completes-d2 started (2 ranks, attempt 2)",
        "[1/3] completes-d2 completed: loss 1.5000, held-out loss 2.0000, 12,346 tokens/s, 0 s",
        "[2/3] b failed: too wide",
        "[3/3] completes-d2 diverged: not finite, 0 s",
    ]


def test_what_is_no_text_is_counted_in_samples(run: ActiveRun) -> None:
    """What the metrics of a program lack is told beside."""
    run.spec = replace(run.spec, data=replace(run.spec.data, task="class"))
    output = io.StringIO()
    summary = {"final_loss": 1.5, "tokens_per_s": 12345.6, "samples_per_s": 678.9}
    with Progress(Console(file=output, width=200), total=1) as progress:
        status = ended(Status.COMPLETED, summary=summary, reason="they begin late")
        progress.run_ended(run.spec, status, None, 0.0)
    assert "completed: loss 1.5000, 679 samples/s, they begin late, 0 s" in output.getvalue()


def test_no_speed_is_told_that_the_report_leaves_out(run: ActiveRun) -> None:
    """What the processor spent is, labelled; and each reason once a launch."""
    output = io.StringIO()
    figures = {"final_loss": 1.5, "tokens_per_s": 12345.6, "processor_time_s": 0.00215}
    others = {"timing_valid": False, "timing_invalid_reason": OTHER_LAUNCHER}
    planned = {"timing_valid": False, "timing_invalid_reason": "up to 2 runs share the machine"}
    with Progress(Console(file=output, width=40), total=5) as progress:
        for launch, core_wait_pct in (
            *((others, 0.0), (others, 50.0), (planned, 50.0)),
            *(({"timing_valid": True}, BUSY_PCT + 1), ({"timing_valid": True}, BUSY_PCT)),
        ):
            summary = figures | {"core_wait_pct": core_wait_pct}
            status = ended(Status.COMPLETED, summary=summary)
            progress.run_ended(run.spec, status, why_untimed(launch, summary), 0.0)
    lines = output.getvalue().splitlines()
    assert [line.partition(" completed: ")[2] for line in lines if " completed: " in line] == [
        *["loss 1.5000, disturbed: 2.15 ms of processor time a step, 0 s"] * 4,
        "loss 1.5000, 12,346 tokens/s, 0 s",
    ]
    notes = [line for line in lines if " completed: " not in line]
    prefix = "Its losses and memory count, its times do not: "
    assert notes == [
        f"{prefix}{OTHER_LAUNCHER}",
        f"{prefix}up to 2 runs share the machine",
        f"{prefix}{BUSY}",
    ]


def test_a_terminal_shows_what_runs(run: ActiveRun) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80)
    with Progress(console, total=2) as progress:
        progress.update([run], unknown)
        assert "0/2 runs done, 1 running" in output.getvalue()
        assert "completes-d2  starting" in output.getvalue()
        # Not again within a second, whatever happens.
        before = output.getvalue()
        write(run, row(1), row(2, 0.125))
        progress.update([run], unknown)
        assert output.getvalue() == before
        # The end of a run is shown at once. 2 of 3 steps took 4 s: the third takes 2 s.
        progress.run_ended(run.spec, ended(Status.FAILED, reason="planted"), None, 0.0)
        progress.update([run], unknown)
        assert "completes-d2 failed: planted" in output.getvalue()
        assert "1/2 runs done, 1 running, 1 failed" in output.getvalue()
        assert "optimizer step 2/3  loss 0.1250  2 s left" in output.getvalue()
    # The cursor is back.
    assert output.getvalue().rindex("\x1b[?25h") > output.getvalue().rindex("\x1b[?25l")


def test_time_left_is_told_where_it_is_known(run: ActiveRun) -> None:
    output = io.StringIO()
    with Progress(Console(file=output, force_terminal=True, width=80), total=4) as progress:
        write(run, row(2) | {"warmup": False, "step_time_s": 0.5})
        progress.update([run], lambda: 27.4)
        assert "0/4 runs done, 1 running, about 27 s left" in output.getvalue()
        # Not the mean of 2 s, which holds the first step.
        assert "optimizer step 2/3  loss 0.2500  0 s left" in output.getvalue()


def test_the_terminal_is_restored_after_an_error(run: ActiveRun) -> None:
    output = io.StringIO()

    def fail() -> None:
        console = Console(file=output, force_terminal=True)
        with Progress(console, total=1) as progress:
            progress.update([run], unknown)
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail()
    assert output.getvalue().rindex("\x1b[?25h") > output.getvalue().rindex("\x1b[?25l")


def test_the_summary_counts_and_explains() -> None:
    output = io.StringIO()
    runs = (
        RunResult(RunFolder(Path("runs/a")), Status.COMPLETED, None, skipped=True),
        RunResult(RunFolder(Path("runs/b")), Status.OOM, "out of [memory]"),
        RunResult(RunFolder(Path("runs/c")), Status.COMPLETED, None),
        RunResult(RunFolder(Path("runs/d")), Status.DIVERGED, "not finite"),
    )
    result = SweepResult(runs, interrupted=False, mirror_note="1 run is not mirrored")
    Progress(Console(file=output), total=4).summary(result)
    assert output.getvalue().splitlines() == [
        "4 runs: 2 completed, 1 oom, 1 diverged",
        "b oom: out of [memory]",
        "  log: runs/b/log.txt",
        "1 run is not mirrored",
    ]


def test_an_interrupted_run_is_a_fault_where_the_sweep_was_not() -> None:
    runs = tuple(
        RunResult(RunFolder(Path(status)), status, None)
        for status in (Status.COMPLETED, Status.INTERRUPTED, Status.OOM, Status.PENDING)
    )
    ours, theirs = (SweepResult(runs, interrupted=interrupted) for interrupted in (True, False))
    assert [run.status for run in ours.failed] == [Status.OOM]
    assert [run.status for run in theirs.failed] == [Status.INTERRUPTED, Status.OOM]


def test_a_status_says_which_runs_have_no_times(tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path / "my sweep")
    for name, wait_pct, status in (
        ("a", 72.0, Status.COMPLETED),
        ("b", 3.0, Status.COMPLETED),
        ("c", 72.0, Status.FAILED),
    ):
        folder = sweep.run(name)
        write_json(folder.config, {"format_version": FORMAT_VERSION, "resolved": {}})
        write_json(folder.launch, {"timing_valid": True})
        RunStatus(status, summary={"core_wait_pct": wait_pct}).write(folder.status)
    for launch, reason in (
        ({"timing_valid": True}, BUSY),
        (
            {"timing_valid": False, "timing_invalid_reason": "4 ranks share 2 cores"},
            "4 ranks share 2 cores",
        ),
    ):
        write_json(sweep.run("a").launch, launch)
        progress = overview(sweep)
        assert [run.untimed for run in progress.runs] == [reason, None, None]
        output = io.StringIO()
        Console(file=output, width=400).print(overview_text(progress))
        (line,) = [line for line in output.getvalue().splitlines() if "no times" in line]
        assert line.rstrip() == f"1 of 2 completed runs have no times that count: {reason} (1)"
