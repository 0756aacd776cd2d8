from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.errors import RecordError
from batchscape.record.files import read_json, write_json
from batchscape.record.folder import RunFolder
from batchscape.record.state import SIGNAL_LAG_S, decide
from batchscape.record.status import Cause, Outcome, RankExit, RunEnd, Status, Stop, StopReason


def left(status: str, at: float = 100.0, reason: str | None = None) -> Outcome:
    ended = Status(status)
    stop = StopReason.BUDGET if ended is Status.COMPLETED else None
    return Outcome(ended, stop, reason, phase="steady", optimizer_step=3, at=at)


def gone(rank: int, code: int, at: float = 100.0) -> RankExit:
    return RankExit("run", rank, code, at)


def all_gone(ranks: int, code: int = 0) -> dict[int, RankExit]:
    return {rank: gone(rank, code) for rank in range(ranks)}


def test_completed_needs_every_rank() -> None:
    outcomes = {0: left("completed"), 1: left("completed")}
    verdict = decide(2, outcomes, all_gone(2))
    assert verdict == RunEnd(Status.COMPLETED, StopReason.BUDGET)
    verdict = decide(2, {0: outcomes[0]}, all_gone(2))
    assert (verdict.status, verdict.rank) == (Status.FAILED, 1)
    assert "rank 1 left no outcome and exited with code 0" in str(verdict.reason)


def test_a_completed_run_may_be_killed_in_its_teardown() -> None:
    outcomes = {0: left("completed"), 1: left("completed")}
    exits = {0: gone(0, -9), 1: gone(1, 0)}
    assert decide(2, outcomes, exits).status is Status.COMPLETED


def test_ranks_must_agree_on_why_they_stopped() -> None:
    target = Outcome(Status.COMPLETED, StopReason.TARGET, optimizer_step=3, at=1.0)
    verdict = decide(2, {0: left("completed"), 1: target}, all_gone(2))
    assert verdict.status is Status.FAILED
    assert verdict.reason == (
        "the ranks stopped for different reasons (rank 0: budget, rank 1: target)"
    )


@given(st.permutations(range(4)), st.sampled_from(["oom", "diverged", "failed", "interrupted"]))
def test_the_earliest_cause_decides(order: list[int], status: str) -> None:
    """Whatever the other ranks complain about later."""
    outcomes = {
        rank: left(status if place == 0 else "failed", 100.0 + place, f"cause {place}")
        for place, rank in enumerate(order)
    }
    verdict = decide(4, outcomes, all_gone(4, 1))
    assert (verdict.status, verdict.reason, verdict.rank) == (status, "cause 0", order[0])
    causes = {"oom": "out_of_memory", "diverged": "divergence", "failed": "exception"}
    assert verdict.cause == causes.get(status, "interrupted")


@pytest.mark.parametrize(
    ("code", "text", "cause"),
    [
        (-9, "killed, probably out of memory: rank 0 was killed by SIGKILL", Cause.KILLED),
        (-11, "killed by SIGSEGV; its log ends: last words", Cause.SIGNAL),
        (-35, "killed by signal 35", Cause.SIGNAL),
        (7, "exited with code 7; its log ends: last words", Cause.EXCEPTION),
    ],
)
def test_a_silent_death_is_described(code: int, text: str, cause: Cause) -> None:
    verdict = decide(1, {}, {0: gone(0, code)}, last_words="last words")
    assert (verdict.status, verdict.rank, verdict.cause) == (Status.FAILED, 0, cause)
    assert text in str(verdict.reason)


def test_a_kill_that_the_cgroup_counts_is_out_of_memory() -> None:
    verdict = decide(1, {}, {0: gone(0, -9)}, oom_kills=2)
    assert (verdict.status, verdict.cause) == (Status.OOM, Cause.OUT_OF_MEMORY)
    assert str(verdict.reason).endswith("counted 2 kills by the out-of-memory killer meanwhile")
    # It is the host that ran out, which is no device of CUDA.
    verdict = decide(1, {}, {0: gone(0, -9)}, oom_kills=1, device_type="cuda")
    assert (verdict.status, verdict.cause) == (Status.FAILED, Cause.OTHER_MEMORY)
    assert str(verdict.reason).endswith("the memory of the host, not of the device")
    # The count says nothing of a process that died of something else.
    assert decide(1, {}, {0: gone(0, -11)}, oom_kills=2).cause is Cause.SIGNAL
    # Nor does it make ours what the launcher has killed.
    outcomes = {0: left("failed", 100.0, "planted")}
    exits = {0: gone(0, 1), 1: gone(1, -9, 105.0)}
    verdict = decide(2, outcomes, exits, killed_at=104.9, oom_kills=1)
    assert (verdict.status, verdict.cause, verdict.rank) == (Status.FAILED, Cause.EXCEPTION, 0)


def test_what_became_of_the_server_or_of_a_fork_is_no_doing_of_the_rank() -> None:
    ended = RankExit("run", 1, -9, 100.0, outside_cause="the fork server died")
    verdict = decide(1, {}, {0: ended}, last_words="last words")
    assert verdict == RunEnd(
        Status.FAILED, reason="the fork server died", cause=Cause.INFRASTRUCTURE
    )


def test_a_lost_connection_is_a_cause_only_by_itself() -> None:
    """Whoever complains first: the peers of a rank that died lose it."""
    lost = replace(left("failed", 100.0, "connection reset"), cause=Cause.LOST_CONNECTION)
    died = decide(2, {0: lost}, {0: gone(0, 1), 1: gone(1, 7, 103.0)})
    assert (died.cause, died.rank) == (Cause.EXCEPTION, 1)
    alone = decide(2, {0: lost}, {0: gone(0, 1), 1: gone(1, -9, 105.0)}, killed_at=104.9)
    assert (alone.cause, alone.rank) == (Cause.LOST_CONNECTION, 0)
    both = decide(2, {0: lost, 1: replace(lost, at=99.0)}, all_gone(2, 1))
    assert (both.cause, both.rank) == (Cause.LOST_CONNECTION, 1)


def test_a_death_by_signal_precedes_the_complaints_of_its_peers() -> None:
    outcomes = {0: left("failed", 100.0, "connection closed by peer")}
    verdict = decide(2, outcomes, {0: gone(0, 1), 1: gone(1, -9, 100.0 + SIGNAL_LAG_S / 2)})
    assert verdict.rank == 1
    # Our own kill, after the peers' grace, is no cause.
    verdict = decide(2, outcomes, {0: gone(0, 1), 1: gone(1, -9, 105.0)})
    assert verdict.rank == 0


@pytest.mark.parametrize("status", [Status.INTERRUPTED, Status.TIMEOUT])
def test_what_follows_a_stop_is_its_effect(status: Status) -> None:
    stop = Stop(status, reason="asked to", cause=Cause.INTERRUPTED, at=50.0)
    outcomes = {0: left("interrupted", 51.0), 1: left("failed", 52.0)}
    exits = {**all_gone(2, 1), 2: gone(2, -9, 70.0), 3: gone(3, -15, 50.001)}
    assert decide(4, outcomes, exits, stop) == RunEnd(
        status, reason="asked to", cause=Cause.INTERRUPTED
    )
    # Even a stop comes too late for what had failed or ended before.
    outcomes[0] = left("oom", 49.9)
    assert decide(4, outcomes, exits, stop).status is Status.OOM
    done = {rank: left("completed", 60.0) for rank in range(4)}
    assert decide(4, done, exits, stop).status is Status.COMPLETED


def test_any_mixture_has_a_verdict() -> None:
    """Every combination for two ranks: completed if and only if both say so."""
    choices = [None, *("completed", "failed", "oom", "diverged", "interrupted")]
    late = Stop(Status.TIMEOUT, reason="late", cause=Cause.TIME_LIMIT, at=50.0)
    stops = [None, late, replace(late, at=150.0)]
    for pair, stop in itertools.product(itertools.product(choices, repeat=2), stops):
        outcomes = {rank: left(name) for rank, name in enumerate(pair) if name is not None}
        verdict = decide(2, outcomes, all_gone(2, 1), stop)
        assert (verdict.status is Status.COMPLETED) == (pair == ("completed", "completed"))
        if stop is not None and stop.at == 50.0 and verdict.status is not Status.COMPLETED:
            assert verdict.status is Status.TIMEOUT


def test_what_a_rank_leaves_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    outcome = replace(left("oom", reason="out"), cause=Cause.OUT_OF_MEMORY, peak_memory_gib=1.5)
    outcome.write(folder, 0)
    assert Outcome.read(folder, 0) == outcome
    assert Outcome.read(folder, 1) is None
    for wrong in ({"status": "gone"}, {"at": None, "node": 3}):
        write_json(folder.outcome(1), read_json(folder.outcome(0)) | wrong)
        with pytest.raises(RecordError, match="damaged"):
            Outcome.read(folder, 1)


def test_a_rank_killed_at_the_instant_of_our_own_signal_is_ours() -> None:
    """The clock is coarse: the death may carry the time of the signal."""
    ended = RankExit("run", 0, -9, 100.0)
    outcome = Outcome(Status.FAILED, reason="it raised", optimizer_step=3, at=100.2)
    verdict = decide(2, {1: outcome}, {0: ended, 1: RankExit("run", 1, 1, 100.3)}, killed_at=100.0)
    assert (verdict.rank, verdict.reason) == (1, "it raised")
    verdict = decide(2, {1: outcome}, {0: ended, 1: RankExit("run", 1, 1, 100.3)}, killed_at=100.1)
    assert verdict.cause is Cause.KILLED
