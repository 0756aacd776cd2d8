"""`batchscape sync`: the real client of W&B uploads to a small server that counts."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time

import pytest

from batchscape.cli import main
from batchscape.config import WandbTracker
from batchscape.record.figures import TIMES
from batchscape.record.folder import FORMAT_VERSION
from batchscape.record.status import RunStatus, Status
from batchscape.record.timing import BUSY
from batchscape.tracking.mirror import Mirror
from batchscape.tracking.state import MirrorState, digest_of_end, id_of, uploads_of

ONLINE = WandbTracker(name="wandb", mode="online", project="geometry", tags=["paper"])
OFFLINE = WandbTracker(name="wandb", mode="offline", tags=["paper"])


@pytest.fixture
def three_runs(fake_training):
    """Two that ended, one that is still open."""
    trainings = []
    for name in ("run-a", "run-b", "run-c"):
        training = fake_training(name)
        training.begin()
        training.train(range(1, 6))
        trainings.append(training)
    trainings[0].end(Status.COMPLETED)
    trainings[1].end(Status.FAILED, "rank 1 died")
    return trainings


def waiting(sweep) -> list[str]:
    uploads = uploads_of(sweep.path)
    return sorted([*uploads.offline, *uploads.missing_runs])


def sync(sweep, capsys, *options: str) -> tuple[int, str]:
    code = main(["sync", str(sweep.path), *options])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return code, captured.out + captured.err


def check_all_there(server, trainings, rows_of) -> None:
    """Every row once, and as the folder has it."""
    for training in trainings:
        run = server.run_of(training.run_id)
        assert run.visible_history == rows_of(training.folder)
        assert run.lines_received == len(run.history)


@pytest.mark.slow
def test_runs_without_a_tracker_are_uploaded_once(
    sweep, server, three_runs, rows_of, capsys
) -> None:
    code, printed = sync(sweep, capsys, "--project", "geometry", "--entity", "lab")
    assert code == 0
    assert "uploaded 2 runs; 1 have not ended" in printed
    assert len(server.runs) == 2
    check_all_there(server, three_runs[:2], rows_of)
    for training, state in zip(three_runs[:2], ("finished", "failed"), strict=True):
        run = server.run_of(training.run_id)
        assert run.state == state
        assert run.settings["project"] == "geometry"
        assert run.summary["status"] == training.status.status
        assert run.summary["peak_allocated_gib"] == 0.5
    assert not three_runs[2].folder.mirror.exists()

    assert sync(sweep, capsys) == (
        0,
        "Weights & Biases: nothing to upload; 2 had been uploaded before; 1 have not ended\n",
    )
    check_all_there(server, three_runs[:2], rows_of)


@pytest.mark.slow
@pytest.mark.parametrize("by_hand", [False, True])
def test_what_was_written_offline_and_what_changed_since(
    by_hand, sweep, server, three_runs, mirrored, rows_of, capsys
) -> None:
    """Both were mirrored offline, one of them goes on later: the same W&B runs get the rest."""
    first, second, _ = three_runs
    assert mirrored(OFFLINE) is None
    assert server.runs == {}
    assert waiting(sweep) == ["run-a", "run-b"]
    segments = sorted(sweep.wandb.glob("offline-run-*"))
    if by_hand:
        command = [sys.executable, "-m", "wandb", "sync", *map(str, segments)]
        subprocess.run(command, capture_output=True, check=True)
        check_all_there(server, [first, second], rows_of)
    assert sync(sweep, capsys)[0] == 0
    assert waiting(sweep) == []
    # What is left there would be taken for new by `wandb sync`.
    assert not list(sweep.wandb.glob("offline-run-*"))

    second.begin(after=4)
    second.train(range(5, 13))
    second.end(Status.COMPLETED)
    code, printed = sync(sweep, capsys)
    assert code == 0
    assert "uploaded 1 run; 1 had been uploaded before" in printed
    check_all_there(server, [first, second], rows_of)


@pytest.mark.slow
def test_a_damaged_note_is_as_good_as_none(sweep, server, three_runs, rows_of, capsys) -> None:
    """The same W&B run goes on, and every row is sent once."""
    first, second, _ = three_runs
    assert sync(sweep, capsys)[0] == 0
    second.begin(after=4)
    second.train(range(5, 13))
    second.end(Status.COMPLETED)
    unknown = {"format_version": FORMAT_VERSION, "idd": "x"}
    for training, content in ((first, ""), (second, json.dumps(unknown))):
        training.folder.mirror.write_text(content)
    # On a busy machine the end may not show in time: the same command tries again.
    assert any(sync(sweep, capsys)[0] == 0 for _ in range(3))
    assert len(server.runs) == 2
    check_all_there(server, [first, second], rows_of)


@pytest.mark.slow
def test_an_online_run_is_gone_on_with_where_the_server_stands(
    sweep, server, fake_training, workers, rows_of
) -> None:
    """The mirror is killed while it follows, and nobody noted which rows had arrived."""
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 6))
    mirror = Mirror(ONLINE, sweep, live=True)
    while not (server.runs and server.run_of("run-a").history):
        time.sleep(0.05)
    workers()[0].kill()
    training.train(range(6, 13))
    training.end(Status.COMPLETED)
    assert mirror.finish(interrupted=False) is None
    check_all_there(server, [training], rows_of)
    run = server.run_of("run-a")
    assert run.settings["tags"] == ["paper", "completed"]
    assert run.state == "finished"
    assert run.summary["final_loss"] == training.status.summary["final_loss"]


@pytest.mark.slow
def test_killed_between_the_upload_and_its_note(
    sweep, server, fake_training, mirrored, workers, rows_of, capsys
) -> None:
    """The server has it all, the folder does not know: nothing is sent again."""
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 6))
    training.end(Status.COMPLETED)

    def kill(_: str) -> None:
        server.on_complete = None
        workers()[0].kill()

    server.on_complete = kill
    note = mirrored(ONLINE)
    assert note is not None
    assert "it lacks 1 of 1 runs (run-a), because it ended with exit code -9. " in note
    check_all_there(server, [training], rows_of)
    assert "uploaded 1 run" in sync(sweep, capsys)[1]
    check_all_there(server, [training], rows_of)
    assert server.run_of("run-a").state == "finished"


@pytest.mark.slow
def test_a_run_that_goes_on_disturbed_takes_its_times_back(
    sweep, server, fake_training, mirrored, capsys
) -> None:
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 9))
    training.end(Status.INTERRUPTED, "stopped by SIGINT")
    assert mirrored(ONLINE) is None
    run = server.run_of("run-a")
    assert run.summary["step_time_s"] == 0.125

    training.begin(after=4)
    training.core_wait_s = 0.09
    training.train(range(5, 13))
    training.end(Status.COMPLETED)
    assert sync(sweep, capsys)[0] == 0
    assert {run.summary.get(name) for name in TIMES} == {None}
    assert run.summary["timing_invalid_reason"] == BUSY
    # Those of the tracker are of the run's own settings, which have none.
    assert run.settings["tags"] == ["completed", "timing_invalid"]
    assert run.summary["final_loss"] == training.status.summary["final_loss"]


@pytest.mark.slow
def test_without_a_key_nothing_is_marked(sweep, three_runs, silent_server, capsys) -> None:
    code, printed = sync(sweep, capsys)
    assert code == 2
    assert "no API key" in printed
    assert "wandb login" in printed
    assert "WANDB_API_KEY" in printed
    assert waiting(sweep) == ["run-a", "run-b"]
    assert not three_runs[0].folder.mirror.exists()
    with pytest.raises(BlockingIOError):
        silent_server.accept()


@pytest.mark.slow
@pytest.mark.usefixtures("three_runs")
def test_a_key_that_is_none_is_said_to_be(sweep, monkeypatch, capsys) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "short")
    code, printed = sync(sweep, capsys)
    assert code == 2
    assert "WANDB_API_KEY invalid" in printed
    assert "gives another" in printed
    assert waiting(sweep) == ["run-a", "run-b"]


@pytest.mark.slow
def test_a_failing_run_does_not_stop_the_others(
    sweep, three_runs, server, rows_of, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    server.refused["run-a"] = 403
    three_runs[2].end(Status.PRUNED)
    three_runs[2].folder.parquet("steps").write_bytes(b"not what was sealed")
    code, printed = sync(sweep, capsys)
    assert code == 1
    assert "run-a: not uploaded: W&B cannot be written to: TimeoutError: the server does" in printed
    assert "run-c: not uploaded" in printed
    assert "differs from what was sealed" in " ".join(printed.split())
    assert "uploaded 1 run; 2 not uploaded: the same command tries again" in printed
    check_all_there(server, three_runs[1:2], rows_of)
    assert waiting(sweep) == ["run-a", "run-c"]

    server.refused.clear()
    assert sync(sweep, capsys)[0] == 1
    assert waiting(sweep) == ["run-c"]
    assert server.run_of("run-a").visible_history == rows_of(three_runs[0].folder)


@pytest.mark.slow
def test_a_hanging_upload_is_cut_and_the_others_go_on(
    sweep, three_runs, server, rows_of, capsys
) -> None:
    server.refused["run-a"] = 500  # W&B's client tries again and again
    code, printed = sync(sweep, capsys, "--timeout", "20")
    assert code == 1
    assert "run-a: not uploaded: " in printed
    check_all_there(server, three_runs[1:2], rows_of)
    server.refused.clear()
    assert sync(sweep, capsys)[0] == 0
    check_all_there(server, three_runs[:2], rows_of)


@pytest.mark.slow
def test_two_at_once_upload_once(sweep, three_runs, server, rows_of) -> None:
    command = [sys.executable, "-m", "batchscape", "sync", str(sweep.path)]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=100)[0] for process in both]
    codes = [process.returncode for process in both]
    assert 0 in codes, outputs
    for code, text in zip(codes, outputs, strict=True):
        assert code == 0 or "another process mirrors this sweep now" in text
    check_all_there(server, three_runs[:2], rows_of)


@pytest.mark.slow
@pytest.mark.usefixtures("heeded_signals")
def test_killed_in_the_middle_and_called_again(sweep, three_runs, server, rows_of, capsys) -> None:
    server.refused["run-b"] = 500
    command = [sys.executable, "-m", "batchscape", "sync", str(sweep.path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True) as process:
        while len(waiting(sweep)) == 2 or len(server.runs) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    server.refused.clear()
    code, printed = sync(sweep, capsys)
    assert code == 0
    assert "uploaded 1 run; 1 had been uploaded before" in printed
    check_all_there(server, three_runs[:2], rows_of)


@pytest.mark.usefixtures("three_runs")
def test_a_crash_of_the_uploader_is_a_message(sweep, monkeypatch, tmp_path) -> None:
    """Here wandb cannot even be imported."""
    broken = tmp_path / "broken" / "wandb"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libnothing.so is missing')\n")
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    assert main(["sync", str(sweep.path)]) == 2
    assert waiting(sweep) == ["run-a", "run-b"]


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_a_timeout_is_a_positive_number(text, capsys) -> None:
    assert main(["sync", "here", f"--timeout={text}"]) == 2
    assert "--timeout" in capsys.readouterr().err


def test_every_end_of_a_run_is_uploaded_and_only_ends(sweep, fake_training) -> None:
    for status in Status:
        training = fake_training(f"run-{status}")
        training.status.status = status
        training.status.write(training.folder.status)
    uploads = uploads_of(sweep.path)
    ends = {"completed", "oom", "diverged", "timeout", "failed", "interrupted", "pruned"}
    assert set(uploads.missing_runs) == {f"run-{status}" for status in ends}
    assert set(uploads.open) == {"run-pending", "run-running"}
    assert (uploads.uploaded, uploads.damaged) == ([], {})


def test_what_counts_as_uploaded(sweep, fake_training) -> None:
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 3))
    training.end(Status.COMPLETED)

    def stands(state: MirrorState) -> str:
        state.write(training.folder)
        assert MirrorState.read(training.folder) == state
        uploads = uploads_of(sweep.path)
        places = "uploaded", "offline", "missing_runs"
        (place,) = (place for place in places if "run-a" in getattr(uploads, place))
        return place

    content = digest_of_end(training.status)
    other = RunStatus.read(training.folder.status)
    other.summary["final_loss"] = 7.0
    assert stands(MirrorState("p", None, "online", content)) == "uploaded"
    assert stands(MirrorState("p", None, "offline", content)) == "offline"
    for mode in ("online", "offline"):
        # Its end was never seen.
        assert stands(MirrorState("p", None, mode, None)) == "missing_runs"
        assert stands(MirrorState("p", None, mode, digest_of_end(other))) == "missing_runs"


def test_a_run_begun_anew_is_another_one_of_wandb(fake_training) -> None:
    """The W&B run of its name has the steps of the damaged folder: they would be skipped."""
    run = fake_training("run-a")
    run.begin()
    name = id_of("run-a", run.status)
    assert re.fullmatch("run-a-[0-9a-f]{8}", name)
    run.begin(after=2)
    assert id_of("run-a", run.status) == name
    run.status.attempts.clear()
    run.begin()
    assert id_of("run-a", run.status) != name
