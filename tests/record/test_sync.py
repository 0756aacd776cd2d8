"""`batchscape sync`: the real client of W&B uploads to a small server that counts."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from batchscape.cli import main
from batchscape.config import WandbTracker
from batchscape.errors import DamageError
from batchscape.record import mirror
from batchscape.record.damage import set_aside
from batchscape.record.folder import FORMAT_VERSION, SweepFolder
from batchscape.record.mirror_state import MirrorState, content_of, id_of, wandb_folder
from batchscape.record.status import Status
from batchscape.record.sync import pending
from batchscape.record.wandb_run import WandbRun

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def three_runs(fake_training):
    """Two that ended, one that is still open."""
    found = []
    for name in ("run-a", "run-b", "run-c"):
        training = fake_training(name)
        training.begin()
        training.train(range(1, 6))
        found.append(training)
    found[0].end(Status.COMPLETED)
    found[1].end(Status.FAILED, "rank 1 died")
    return found


def sync(sweep: SweepFolder, capsys, *options: str) -> tuple[int, str]:
    code = main(["sync", str(sweep.path), *options])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return code, captured.out + captured.err


@pytest.mark.slow
def test_runs_without_a_tracker_are_uploaded_once(
    sweep, server, three_runs, rows_of, capsys
) -> None:
    code, said = sync(sweep, capsys, "--project", "geometry", "--entity", "lab")
    assert code == 0
    assert "uploaded 2 runs; 1 have not ended" in said
    assert len(server.runs) == 2
    for training, state in zip(three_runs[:2], ("finished", "failed"), strict=True):
        run = server.run_of(training.run_id)
        assert run.visible_history == rows_of(training.folder)
        assert run.state == state
        assert run.settings["project"] == "geometry"
        assert run.summary["status"] == training.status.status
        assert run.last_row["memory/peak_allocated_gib"] == 0.5
    assert not three_runs[2].folder.mirror.exists()
    received = {name: run.lines_received for name, run in server.runs.items()}

    assert sync(sweep, capsys) == (
        0,
        "Weights & Biases: nothing to upload; 2 had been uploaded before; 1 have not ended\n",
    )
    assert {name: run.lines_received for name, run in server.runs.items()} == received


@pytest.mark.slow
def test_what_changed_since_and_what_was_written_offline(
    sweep, server, three_runs, rows_of, capsys
) -> None:
    """Two were mirrored offline, one of them goes on later: the same W&B runs get the rest."""
    first, second, _ = three_runs
    offline = WandbTracker(name="wandb", mode="offline", tags=["paper"])
    assert mirror.start(sweep.path, offline, live=False).finish(100.0) is None
    before = MirrorState.read(first.folder)
    assert server.runs == {}
    assert pending(sweep.path).waiting == ["run-a", "run-b"]
    assert sync(sweep, capsys)[0] == 0
    assert pending(sweep.path).waiting == []
    # W&B's own upload heeds the marks.
    segments = sorted(wandb_folder(sweep.path).glob("offline-run-*"))
    command = [sys.executable, "-m", "wandb", "sync", *map(str, segments)]
    subprocess.run(command, capture_output=True, check=True)

    second.begin(after=4)
    second.train(range(5, 13))
    second.end(Status.COMPLETED)
    code, said = sync(sweep, capsys)
    assert code == 0
    assert "uploaded 1 run; 1 had been uploaded before" in said
    for training in (first, second):
        run = server.run_of(training.run_id)
        assert run.visible_history == rows_of(training.folder)
        assert run.lines_received == len(run.history)
    after = MirrorState.read(first.folder)
    assert before is not None
    assert after is not None
    assert before.id == after.id


@pytest.mark.slow
@pytest.mark.parametrize(
    "content", ["", json.dumps({"format_version": FORMAT_VERSION, "idd": "x"})]
)
def test_the_repair_of_a_damaged_state_works(
    content, sweep, server, three_runs, rows_of, capsys
) -> None:
    """What the message says, done as it says it: the same W&B run, and every row once."""
    first, second, _ = three_runs
    assert sync(sweep, capsys)[0] == 0
    known = MirrorState.read(first.folder)
    second.begin(after=4)
    second.train(range(5, 13))
    second.end(Status.COMPLETED)
    for training in (first, second):
        training.folder.mirror.write_text(content)
    code, said = sync(sweep, capsys)
    assert code == 1
    said = " ".join(said.split())
    for training in (first, second):
        assert f"{training.folder.mirror} is damaged" in said
    assert said.count(f"Delete this file; then `batchscape sync {sweep.path}` goes on") == 2

    for training in (first, second):
        training.folder.mirror.unlink()
    # On a busy machine the end may not show in time: the same command tries again.
    assert any(sync(sweep, capsys)[0] == 0 for _ in range(3))
    assert len(server.runs) == 2
    for training in (first, second):
        run = server.run_of(training.run_id)
        assert run.visible_history == rows_of(training.folder)
        assert run.lines_received == len(run.history)
        assert run.state == "finished"
    again = MirrorState.read(first.folder)
    assert known is not None
    assert again is not None
    assert known.id == again.id


@pytest.mark.slow
def test_without_a_key_nothing_is_marked(sweep, three_runs, silent_server, capsys) -> None:
    code, said = sync(sweep, capsys)
    assert code == 2
    assert "no API key" in said
    assert "wandb login" in said
    assert "WANDB_API_KEY" in said
    assert pending(sweep.path).waiting == ["run-a", "run-b"]
    assert not three_runs[0].folder.mirror.exists()
    with pytest.raises(BlockingIOError):
        silent_server.accept()


@pytest.mark.slow
@pytest.mark.usefixtures("three_runs")
def test_without_a_network_nothing_is_marked(sweep, monkeypatch, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("WANDB_BASE_URL", url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    code, said = sync(sweep, capsys)
    assert code == 2
    assert "cannot be used" in said
    assert url in said
    assert KEY not in said
    assert pending(sweep.path).waiting == ["run-a", "run-b"]


@pytest.mark.usefixtures("three_runs")
@pytest.mark.slow
def test_a_key_that_the_server_does_not_know(sweep, server, capsys) -> None:
    server.known_key = "another"
    code, said = sync(sweep, capsys)
    assert code == 2
    assert "cannot be used" in said
    assert KEY not in said
    assert server.runs == {}


@pytest.mark.slow
def test_a_failing_run_does_not_stop_the_others(
    sweep, three_runs, server, rows_of, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    server.refused["run-a"] = 403
    three_runs[2].end(Status.PRUNED)
    three_runs[2].folder.parquet("steps").write_bytes(b"not what was sealed")
    code, said = sync(sweep, capsys)
    assert code == 1
    assert "run-a: not uploaded: RuntimeError: W&B took the run and does not show its end" in said
    assert "run-c: not uploaded" in said
    assert "differs from what was sealed" in " ".join(said.split())
    assert "uploaded 1 run; 2 not uploaded: the same command tries again" in said
    assert server.run_of("run-b").visible_history == rows_of(three_runs[1].folder)
    assert pending(sweep.path).waiting == ["run-a", "run-c"]

    server.refused.clear()
    assert sync(sweep, capsys)[0] == 1
    assert server.run_of("run-a").visible_history == rows_of(three_runs[0].folder)


@pytest.mark.slow
def test_a_hanging_upload_is_cut_and_the_others_go_on(
    sweep, three_runs, server, rows_of, capsys
) -> None:
    server.refused["run-a"] = 500  # W&B's client tries again and again
    code, said = sync(sweep, capsys, "--timeout", "15")
    assert code == 1
    assert "run-a: not uploaded: no end after 15 s" in said
    assert server.run_of("run-b").visible_history == rows_of(three_runs[1].folder)
    server.refused.clear()
    assert sync(sweep, capsys)[0] == 0
    run = server.run_of("run-a")
    assert run.visible_history == rows_of(three_runs[0].folder)
    assert run.lines_received == len(run.history)


@pytest.mark.slow
def test_two_at_once_upload_once(sweep, three_runs, server, rows_of) -> None:
    command = [sys.executable, "-m", "batchscape", "sync", str(sweep.path)]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=100)[0] for process in both]
    codes = [process.returncode for process in both]
    assert 0 in codes, said
    for code, text in zip(codes, said, strict=True):
        assert code == 0 or "another process mirrors this sweep now" in text
    for training in three_runs[:2]:
        run = server.run_of(training.run_id)
        assert run.visible_history == rows_of(training.folder)
        assert run.lines_received == len(run.history)


@pytest.mark.slow
@pytest.mark.usefixtures("heeded_signals")
def test_killed_in_the_middle_and_called_again(sweep, three_runs, server, rows_of, capsys) -> None:
    server.refused["run-b"] = 500
    command = [sys.executable, "-m", "batchscape", "sync", str(sweep.path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True) as process:
        while len(pending(sweep.path).waiting) == 2 or len(server.runs) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    server.refused.clear()
    code, said = sync(sweep, capsys)
    assert code == 0
    assert "uploaded 1 run; 1 had been uploaded before" in said
    run = server.run_of("run-b")
    assert run.visible_history == rows_of(three_runs[1].folder)
    assert run.lines_received == len(run.history)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("closed", [True, False])
def test_an_upload_that_cannot_begin_leaves_the_run_waiting(
    sweep, three_runs, monkeypatch, error, closed
) -> None:
    """All of it was written offline before, and perhaps a part of a segment after that."""
    training = three_runs[0]
    whole, cut = (wandb_folder(sweep.path) / f"offline-run-{k}" for k in (1, 2))
    for segment in (whole, cut):
        segment.mkdir(parents=True)
        (segment / "run-a.wandb").touch()
    MirrorState(
        id="run-a-1",
        project="p",
        entity=None,
        mode="offline",
        last_step=11,
        segments=[whole.name] if closed else [whole.name, cut.name],
        closed=closed,
        status="completed",
        attempts=1,
        content=content_of(training.status),
    ).write(training.folder)

    def no_answer(**_: object) -> None:
        raise error

    monkeypatch.setattr("wandb.init", no_answer)
    for mode in ("online", "offline", "online"):
        with pytest.raises(error):
            WandbRun(
                training.folder,
                sweep.path,
                WandbTracker(name="wandb"),
                mode=mode,
                status=training.status,
                problem=None,
                patience_s=1.0,
            )
        assert pending(sweep.path).waiting == ["run-a", "run-b"]
        state = MirrorState.read(training.folder)
        assert state is not None
        # What is whole on the disk is kept, and may be gone on with offline.
        assert (state.id, state.segments) == ("run-a-1", [whole.name])
        assert (state.mode, state.closed, whole.is_dir()) == ("offline", True, True)
        assert cut.is_dir() == closed


def test_a_run_that_only_claims_to_be_online_is_uploaded(sweep, three_runs) -> None:
    training = three_runs[0]
    state = MirrorState("run-a-1", "p", None, "online", last_step=11, status="completed")
    state.attempts, state.content = 1, content_of(training.status)
    state.write(training.folder)
    assert pending(sweep.path).waiting == ["run-a", "run-b"]
    state.uploaded_step = 11
    state.write(training.folder)
    assert pending(sweep.path).uploaded == ["run-a"]


@pytest.mark.usefixtures("three_runs")
def test_a_crash_of_the_uploader_is_a_message(sweep, monkeypatch, tmp_path) -> None:
    """Here wandb cannot even be imported."""
    broken = tmp_path / "broken" / "wandb"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libnothing.so is missing')\n")
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    assert main(["sync", str(sweep.path)]) == 2
    assert pending(sweep.path).waiting == ["run-a", "run-b"]


@pytest.mark.parametrize("argv", [["nowhere"], ["nowhere", "--timeout", "10"]])
def test_a_folder_without_runs(argv, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sync", *argv]) == 2
    assert "holds no runs" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_a_timeout_is_a_positive_number(text, capsys) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["sync", "here", f"--timeout={text}"])
    assert leaving.value.code == 2
    assert "--timeout" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("server")
def test_a_damaged_config_names_the_file(sweep, three_runs, capsys) -> None:
    path = three_runs[0].folder.config
    path.write_text(json.dumps({"config": {"tracker": {"name": "wandb", "mode": "sideways"}}}))
    code, said = sync(sweep, capsys)
    assert code == 1
    assert f"{path} is damaged" in "".join(said.splitlines())
    assert "uploaded 1 run; 1 not uploaded" in said


def test_every_end_of_a_run_is_uploaded_and_only_ends(sweep, fake_training) -> None:
    for status in Status:
        training = fake_training(f"run-{status}")
        training.status.status = status
        training.status.write(training.folder.status)
    found = pending(sweep.path)
    ends = {"completed", "oom", "diverged", "timeout", "failed", "interrupted", "pruned"}
    assert set(found.waiting) == {f"run-{status}" for status in ends}
    assert set(found.open) == {"run-pending", "run-running"}
    assert (found.uploaded, found.damaged) == ([], {})


def test_what_is_there_already_is_counted_and_nothing_is_sent(sweep, fake_training, capsys) -> None:
    for name in ("run-a", "run-b"):
        training = fake_training(name)
        training.status.status = Status.COMPLETED
        training.status.write(training.folder.status)
        MirrorState(
            *("id", "geometry", None, "online"),
            status="completed",
            content=content_of(training.status),
        ).write(training.folder)
    fake_training("run-c")
    assert sync(sweep, capsys) == (
        0,
        "Weights & Biases: nothing to upload; 2 had been uploaded before; 1 have not ended\n",
    )


def test_a_run_begun_anew_is_another_one_of_wandb(sweep, fake_training) -> None:
    """The W&B run of its name has the steps of the damaged folder: they would be skipped."""
    run = fake_training("run-a")
    run.begin()
    segments = wandb_folder(sweep.path)
    segments.mkdir(parents=True)
    (segments / "run-20260101_000000-run-a-0123abcd").mkdir()
    (sweep.damaged / "run-a-x-1").mkdir(parents=True)  # of another run
    assert id_of(sweep.path, "run-a") == "run-a-0123abcd"
    set_aside(sweep, run.folder, "planted")
    drawn = id_of(sweep.path, "run-a")
    assert re.fullmatch("run-a-[0-9a-f]{8}", drawn)
    assert drawn != "run-a-0123abcd"


def test_the_repair_of_a_damaged_state_can_be_pasted(tmp_path) -> None:
    sweep = SweepFolder(tmp_path / "a b")
    sweep.run("x").mirror.parent.mkdir(parents=True)
    sweep.run("x").mirror.write_text("")
    with pytest.raises(DamageError, match=re.escape(f"`batchscape sync '{sweep.path}'` goes on")):
        MirrorState.read(sweep.run("x"))
