"""What is read from a scheduler's answers, by commands that repeat what real ones were seen to say.

`recorded_slurm/22.05.8.json` holds the answers of Slurm 22.05.8 with accounting (slurmdbd) and
memory cgroups, about jobs that ended as their names say: once while the controller knew them, and
once when it had forgotten them (`MinJobAge`). Names of states that no recording has are those of
https://slurm.schedmd.com/squeue.html#SECTION_JOB-STATE-CODES and
https://slurm.schedmd.com/sacct.html#SECTION_JOB-STATE-CODES.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from batchscape import scheduler
from batchscape.errors import SchedulerError
from batchscape.scheduler import Job, JobState, NodeGroup, Partition

RECORDED = json.loads((Path(__file__).parent / "recorded_slurm" / "22.05.8.json").read_text())
ACCOUNTING_OFF = {"out": "", "err": "Slurm accounting storage is disabled\n", "code": 1}
EXPECTED = {
    "timeout": JobState.TIMEOUT,
    "preempted": JobState.PREEMPTED,
    "completed": JobState.COMPLETED,
    "failed": JobState.FAILED,
    "killed": JobState.FAILED,
    "cancelled": JobState.CANCELLED,
    "cancelled_pending": JobState.CANCELLED,
    "oom": JobState.OUT_OF_MEMORY,
    "oom_step": JobState.OUT_OF_MEMORY,
    "oom_step_completed": JobState.COMPLETED,
    "node_fail": JobState.NODE_FAIL,
}


class Commands:
    """Commands of a scheduler that say what they are told to, alone on the path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def say(self, program: str, out: str = "", err: str = "", code: int = 0, **_: Any) -> None:
        path = self._folder / program
        path.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$*" >> {self._folder}/{program}.calls\n'
            f"printf %s {shlex.quote(out)}\nprintf %s {shlex.quote(err)} >&2\nexit {code}\n"
        )
        path.chmod(0o755)

    def calls(self, program: str) -> list[str]:
        path = self._folder / f"{program}.calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setenv("PATH", str(tmp_path))
    return Commands(tmp_path)


def test_jobs_that_the_controller_knows(commands: Commands) -> None:
    queued, accounted = RECORDED["live"]
    commands.say("squeue", **queued)
    commands.say("sacct", **accounted)
    jobs = scheduler.jobs([*RECORDED["jobs"].values(), "1"])
    states = {name: jobs[job].state for name, job in RECORDED["jobs"].items() if name != "array"}
    assert states == {
        **EXPECTED,
        "running": JobState.RUNNING,
        "high": JobState.RUNNING,
        "pending": JobState.PENDING,
        "requeued": JobState.COMPLETED,
    }
    assert jobs["1"].state is JobState.UNKNOWN
    assert jobs["1"].reason == "the scheduler does not know the job, or has forgotten it"
    by_name = {name: jobs[job] for name, job in RECORDED["jobs"].items()}
    assert by_name["requeued"].restarts == 1
    assert by_name["completed"].restarts == 0
    assert by_name["failed"].reason == "FAILED, exit code 3"
    assert by_name["killed"].reason == "FAILED, signal 9"
    assert by_name["oom"].reason == "OUT_OF_MEMORY"
    assert by_name["oom_step"].reason == "OUT_OF_MEMORY in step 0"
    assert by_name["cancelled"].reason == "CANCELLED by 0"
    assert by_name["node_fail"].nodes == "127.0.0.2"
    # A sentence with commas and blanks, in full.
    assert by_name["pending"].reason.startswith("Nodes required for job are DOWN, DRAINED or")
    assert by_name["pending"].reason.endswith(" partitions")
    assert len(commands.calls("squeue")) == len(commands.calls("sacct")) == 1


def test_jobs_that_only_accounting_knows(commands: Commands) -> None:
    queued, accounted = RECORDED["forgotten"]
    commands.say("squeue", **queued)
    commands.say("sacct", **accounted)
    jobs = scheduler.jobs([*RECORDED["jobs"].values(), "1"])
    states = {name: jobs[RECORDED["jobs"][name]].state for name in EXPECTED}
    assert states == EXPECTED
    assert jobs[RECORDED["jobs"]["completed"]].restarts is None
    assert jobs["1"].state is JobState.UNKNOWN


def test_tasks_of_an_array_by_both_of_their_names(commands: Commands) -> None:
    array = RECORDED["jobs"]["array"]
    for queued, accounted in (RECORDED["live"], RECORDED["forgotten"]):
        commands.say("squeue", **queued)
        commands.say("sacct", **accounted)
        rows = [line.split("|") for line in accounted["out"].splitlines()]
        job_ids = {row[0]: row[1] for row in rows if row[0].startswith(f"{array}_")}
        job_ids = {name: job for name, job in job_ids.items() if "." not in name}  # no steps
        assert len(set(job_ids.values())) == 3
        expected = {f"{array}_0": "completed", f"{array}_1": "failed", f"{array}_2": "failed"}
        names = [*expected, *(job_ids[name] for name in expected)]
        jobs = scheduler.jobs(names)
        assert [jobs[name].state.value for name in names] == [*expected.values()] * 2
        assert [jobs[name].id for name in names] == names


def test_without_accounting_what_the_controller_has_forgotten_is_unknown(
    commands: Commands,
) -> None:
    commands.say("squeue", **RECORDED["live"][0])
    commands.say("sacct", **ACCOUNTING_OFF)
    ids = RECORDED["jobs"]
    jobs = scheduler.jobs(ids.values())
    # Memory that ran out in a step alone cannot be known.
    states = {name: jobs[ids[name]].state for name in EXPECTED}
    assert states == {**EXPECTED, "oom_step": JobState.FAILED}
    commands.say("squeue", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    assert scheduler.jobs([ids["failed"]])[ids["failed"]].state is JobState.UNKNOWN


def test_accounting_that_is_behind_does_not_revive_a_job(commands: Commands) -> None:
    name = RECORDED["jobs"]["failed"]
    commands.say("squeue", **RECORDED["live"][0])
    commands.say("sacct", out=f"{name}|{name}|RUNNING|0:0|127.0.0.1\n")
    job = scheduler.jobs([name])[name]
    assert (job.state, job.reason) == (JobState.FAILED, "NonZeroExitCode")


def test_accounting_that_is_down_takes_nothing_from_what_the_controller_says(
    commands: Commands,
) -> None:
    commands.say("squeue", **RECORDED["live"][0])
    names = [RECORDED["jobs"]["running"], RECORDED["jobs"]["failed"], "1"]
    answers = [{"err": "sacct: error: Problem talking to the database\n", "code": 1}, None]
    for answer in answers:
        if answer is None:
            (Path(os.environ["PATH"]) / "sacct").unlink()
        else:
            commands.say("sacct", **answer)
        jobs = scheduler.jobs(names)
        expected = [JobState.RUNNING, JobState.FAILED, JobState.UNKNOWN]
        assert [jobs[name].state for name in names] == expected


def test_a_job_that_accounting_alone_calls_alive_is_not(commands: Commands) -> None:
    """A runaway job: its end was never told to the database."""
    commands.say("squeue", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    commands.say("sacct", out="9|9|RUNNING|0:0|node1\n9.batch|9.batch|RUNNING|0:0|node1\n")
    assert scheduler.jobs(["9"])["9"].state is JobState.UNKNOWN


def test_accounting_is_not_asked_about_jobs_that_live(commands: Commands) -> None:
    commands.say("squeue", **RECORDED["live"][0])
    commands.say("sacct", code=1, err="must not be asked")
    name = RECORDED["jobs"]["running"]
    expected = Job(name, JobState.RUNNING, "", 0, "127.0.0.1")
    assert scheduler.jobs([name]) == {name: expected}
    assert scheduler.jobs([]) == {}
    assert not commands.calls("sacct")


# All that the manuals of releases 22.05 to 25.05 name.
DOCUMENTED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "CONFIGURING", "COMPLETING", "DEADLINE", "FAILED"),
    *("LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PENDING", "PREEMPTED", "REQUEUED"),
    *("REQUEUE_FED", "REQUEUE_HOLD", "RESIZING", "RESV_DEL_HOLD", "REVOKED", "RUNNING"),
    *("SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "SUSPENDED", "TIMEOUT"),
)


def test_every_documented_state_means_something(commands: Commands) -> None:
    names = {str(number): name for number, name in enumerate(DOCUMENTED, 7)}
    lines = [
        f"{job:32}{job:32}{name:32}{'0':8}{'':512}{'None':256}\n" for job, name in names.items()
    ]
    commands.say("squeue", out="".join(lines))
    commands.say("sacct", **ACCOUNTING_OFF)
    over = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "TIMEOUT"}
    over |= {"OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "LAUNCH_FAILED"}
    for job, found in scheduler.jobs(names).items():
        assert found.state.is_over == (names[job] in over), names[job]
        assert found.state is not JobState.UNKNOWN, names[job]


def test_a_state_that_is_not_known_is_no_guess(commands: Commands) -> None:
    commands.say("squeue", out=f"{'7':32}{'7':32}{'NEW':32}{'0':8}{'':512}{'None':256}\n")
    with pytest.raises(SchedulerError, match="state 'NEW', which this release of batchscape does"):
        scheduler.jobs(["7"])


def test_partitions(commands: Commands) -> None:
    commands.say(
        "sinfo",
        # As https://slurm.schedmd.com/sinfo.html describes the fields.
        out="main*|up|2|64|gpu:a100:4(S:0-1),gpu:v100:2,mps:400\n"
        "main*|up|1|64|(null)\n"
        "debug|down|0|0|(null)\n"
        "free|up|1|8|gpu:4\n",
    )
    main, debug, free = scheduler.partitions()
    first, second = NodeGroup(2, 64, 6), NodeGroup(1, 64, 0)
    assert main == Partition("main", True, True, [first, second])
    assert debug == Partition("debug", False, False, [])
    assert free.groups[0].gpus == 4


def test_without_slurm(commands: Commands) -> None:
    assert not scheduler.is_available()
    says = r"Slurm's command squeue is not on the PATH, or .*; run batchscape where it is"
    with pytest.raises(SchedulerError, match=says):
        scheduler.jobs(["7"])
    commands.say("squeue")
    assert scheduler.is_available()


def test_a_scheduler_that_is_down(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    error = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    commands.say("squeue", err=f"{error}\n", code=1)
    with pytest.raises(SchedulerError) as raised:
        scheduler.jobs(["7"])
    assert str(raised.value) == f"squeue failed: {error}"
    (Path(os.environ["PATH"]) / "squeue").write_text("#!/bin/sh\nread never < /dev/zero\n")
    monkeypatch.setattr(scheduler, "_ANSWER_LIMIT_S", 0.3)
    with pytest.raises(SchedulerError, match="squeue took more than 0 s"):
        scheduler.jobs(["7"])


def test_what_users_choose_for_themselves_does_not_matter(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.say("squeue")
    commands.say("sacct", **ACCOUNTING_OFF)
    (Path(os.environ["PATH"]) / "squeue").write_text(
        '#!/bin/sh\n[ -z "$SQUEUE_STATES$SQUEUE_PARTITION" ] || exit 9\n'
    )
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    assert scheduler.jobs(["7"])["7"].state is JobState.UNKNOWN
