"""How a run stands and what happens next with it: of every status, and where no end was written."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from batchscape.record.files import JsonLines, write_json
from batchscape.record.folder import FORMAT_VERSION, RunFolder, SweepFolder
from batchscape.record.overview import run_progress
from batchscape.record.state import Next, RunState, final_end
from batchscape.record.status import FAULTS, Attempt, Cause, Outcome, RunStatus, Status, StopReason

SEALED = {Status.COMPLETED, Status.DIVERGED, Status.PRUNED}
CHECKPOINT = "step-000000002-0123456789abcdef.pt"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = SweepFolder(tmp_path).run("a")
    folder.path.mkdir(parents=True)
    return folder


def train(
    folder: RunFolder,
    *statuses: Status,
    steps: int = 3,
    completes: StopReason = StopReason.BUDGET,
) -> None:
    """Leave what ranks leave that end after three optimizer steps, and so many rows."""
    for rank, status in enumerate(statuses):
        stop_reason = completes if status is Status.COMPLETED else None
        Outcome(status, stop_reason, optimizer_step=3).write(folder, rank)
    lines = JsonLines(folder.lines("steps"))
    lines.append({"optimizer_step": k + 1, "attempt": 0} for k in range(steps))
    lines.close()


@pytest.mark.parametrize("status", list(Status))
@pytest.mark.parametrize("cause", [None, Cause.EXCEPTION, Cause.DISK, Cause.DAMAGED_RECORDS])
def test_every_status(folder: RunFolder, status: Status, cause: Cause | None) -> None:
    record = RunStatus(status, cause=cause, attempts=[Attempt(1.0, 0)])
    for retry, is_held, has_checkpoint in itertools.product(
        ((), {Status.OOM}, FAULTS), (False, True), (False, True)
    ):
        if status in SEALED:
            expected = Next.SKIP
        elif is_held:
            expected = Next.WAIT
        elif status is Status.REJECTED:
            expected = Next.REJECT
        elif status in FAULTS - set(retry):
            expected = Next.LEAVE
        else:
            expected = Next.GO_ON if has_checkpoint else Next.BEGIN
        if has_checkpoint:
            folder.checkpoints.mkdir(exist_ok=True)
            (folder.checkpoints / CHECKPOINT).touch()
        else:
            (folder.checkpoints / CHECKPOINT).unlink(missing_ok=True)
        state = RunState(folder, record, "somebody" if is_held else None)
        assert state.next_step(retry) is expected, (retry, is_held, has_checkpoint)


def test_which_runs_have_an_end_and_which_of_these_were_launched() -> None:
    assert {status for status in Status if not status.has_end} == {Status.PENDING, Status.RUNNING}
    ends = {status for status in Status if status.has_end}
    assert {status for status in ends if not status.ended_after_launch} == {Status.REJECTED}


def test_a_lost_run_ended_when_it_last_wrote_and_never_before_it_began(folder: RunFolder) -> None:
    train(folder, Status.INTERRUPTED)
    for began, ended in ((1.0, folder.written_at), (1e12, 1e12)):
        state = RunState(folder, RunStatus(Status.RUNNING, attempts=[Attempt(began, 0)]))
        assert state.is_lost
        assert state.lost_at == ended
    assert not replace(state, holder="somebody").is_lost


@pytest.mark.parametrize("status", [s for s in Status if s not in SEALED | {Status.REJECTED}])
def test_what_was_trained_to_its_end_is_sealed_whatever_its_status(
    folder: RunFolder, status: Status
) -> None:
    train(folder, Status.COMPLETED, Status.COMPLETED)
    record = RunStatus(status, attempts=[Attempt(1.0, 0)])
    state = RunState(folder, record, processes=2)
    for retry in ((), FAULTS):
        assert state.next_step(retry) is Next.SEAL
    assert replace(state, holder="somebody").next_step() is Next.WAIT


@pytest.mark.parametrize(
    ("statuses", "steps", "is_final"),
    [
        ((Status.COMPLETED, Status.COMPLETED), 3, True),
        ((Status.DIVERGED, Status.DIVERGED), 3, True),
        ((Status.COMPLETED,), 3, False),
        ((Status.COMPLETED, Status.COMPLETED), 2, False),
        ((Status.COMPLETED, Status.FAILED), 3, False),
        ((Status.INTERRUPTED, Status.INTERRUPTED), 3, False),
    ],
)
def test_an_end_is_final_where_all_ranks_and_all_rows_say_so(
    folder: RunFolder, statuses: tuple[Status, ...], steps: int, is_final: bool
) -> None:
    train(folder, *statuses, steps=steps)
    assert (final_end(folder, 2) is not None) == is_final
    # Neither what is damaged.
    folder.outcome(0).write_text("{")
    assert final_end(folder, 2) is None


@pytest.mark.parametrize("resumable", [False, True])
def test_a_program_is_one_process_and_may_go_on_by_itself(
    folder: RunFolder, resumable: bool
) -> None:
    """As `batchscape status` reads it: two devices, one outcome, no checkpoint of ours."""
    write_json(
        folder.config,
        {
            "format_version": FORMAT_VERSION,
            "run_id": "a",
            "geometry": {"data_parallel_size": 2},
            "resolved": {"optimizer_steps": 3},
            "config": {"engine": {"name": "command", "resumable": resumable}},
        },
    )
    RunStatus(Status.INTERRUPTED, attempts=[Attempt(1.0, 0)]).write(folder.status)
    assert run_progress(folder).next is (Next.GO_ON if resumable else Next.BEGIN)
    train(folder, Status.COMPLETED)
    assert run_progress(folder).next is Next.SEAL
