"""`batchscape sync`: the real client of W&B uploads to a small server that counts."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time

import pytest

from batchscape.cli import main
from batchscape.config import WandbTracker
from batchscape.record.folder import FORMAT_VERSION
from batchscape.record.status import Status
from batchscape.tracking.labels import Label
from batchscape.tracking.run import WandbRun
from batchscape.tracking.state import MirrorState, content_of, id_of, standing_of

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


def waiting(sweep) -> list[str]:
    found = standing_of(sweep.path)
    return sorted([*found.offline, *found.lacking])


def sync(sweep, capsys, *options: str) -> tuple[int, str]:
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
    sweep, server, three_runs, mirrored, rows_of, capsys
) -> None:
    """Two were mirrored offline, one of them goes on later: the same W&B runs get the rest."""
    first, second, _ = three_runs
    offline = WandbTracker(name="wandb", mode="offline", tags=["paper"])
    assert mirrored(offline) is None
    assert server.runs == {}
    assert waiting(sweep) == ["run-a", "run-b"]
    assert sync(sweep, capsys)[0] == 0
    assert waiting(sweep) == []
    # W&B's own upload heeds the marks.
    segments = sorted(sweep.wandb.glob("offline-run-*"))
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "content", ["", json.dumps({"format_version": FORMAT_VERSION, "idd": "x"})]
)
def test_a_damaged_note_is_as_good_as_none(
    content, sweep, server, three_runs, rows_of, capsys
) -> None:
    """The same W&B run goes on, and every row is sent once."""
    first, second, _ = three_runs
    assert sync(sweep, capsys)[0] == 0
    second.begin(after=4)
    second.train(range(5, 13))
    second.end(Status.COMPLETED)
    for training in (first, second):
        training.folder.mirror.write_text(content)
    # On a busy machine the end may not show in time: the same command tries again.
    assert any(sync(sweep, capsys)[0] == 0 for _ in range(3))
    assert len(server.runs) == 2
    for training in (first, second):
        run = server.run_of(training.run_id)
        assert run.visible_history == rows_of(training.folder)
        assert run.lines_received == len(run.history)
        assert run.state == "finished"


@pytest.mark.slow
def test_without_a_key_nothing_is_marked(sweep, three_runs, silent_server, capsys) -> None:
    code, said = sync(sweep, capsys)
    assert code == 2
    assert "no API key" in said
    assert "wandb login" in said
    assert "WANDB_API_KEY" in said
    assert waiting(sweep) == ["run-a", "run-b"]
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
    assert waiting(sweep) == ["run-a", "run-b"]


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
    assert "run-a: not uploaded: W&B cannot be written to: TimeoutError: the server does" in said
    assert "run-c: not uploaded" in said
    assert "differs from what was sealed" in " ".join(said.split())
    assert "uploaded 1 run; 2 not uploaded: the same command tries again" in said
    assert server.run_of("run-b").visible_history == rows_of(three_runs[1].folder)
    assert waiting(sweep) == ["run-a", "run-c"]

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
    assert "run-a: not uploaded: it did not answer for 15 s" in said
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
        while len(waiting(sweep)) == 2 or len(server.runs) < 2:
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


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_an_upload_that_cannot_begin_leaves_the_run_waiting(
    sweep, three_runs, monkeypatch, mode
) -> None:
    """All of it was written offline before, and perhaps a part of a segment after that."""
    training = three_runs[0]
    name = id_of("run-a", training.status)
    whole, cut = (sweep.wandb / f"offline-run-{k}-{name}" for k in (1, 2))
    for segment in (whole, cut):
        segment.mkdir(parents=True)
        (segment / "run-a.wandb").touch()
    content = content_of(training.status)
    before = MirrorState("p", None, "offline", 11, [whole.name], content)
    before.write(training.folder)

    def no_answer(**_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr("wandb.init", no_answer)
    with pytest.raises(RuntimeError):
        WandbRun(
            training.folder,
            sweep.path,
            WandbTracker(name="wandb"),
            mode=mode,
            status=training.status,
            label=Label("2x8x2 s3", "2x8x2 (sweep)"),
            sweep_id="sweep",
            patience_s=1.0,
        )
    assert waiting(sweep) == ["run-a", "run-b"]
    # What is whole on the disk is kept, and may be gone on with offline.
    assert MirrorState.read(training.folder) == before
    assert list(sweep.wandb.iterdir()) == [whole]


@pytest.mark.usefixtures("three_runs")
def test_a_crash_of_the_uploader_is_a_message(sweep, monkeypatch, tmp_path) -> None:
    """Here wandb cannot even be imported."""
    broken = tmp_path / "broken" / "wandb"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libnothing.so is missing')\n")
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    assert main(["sync", str(sweep.path)]) == 2
    assert waiting(sweep) == ["run-a", "run-b"]


@pytest.mark.parametrize("argv", [["nowhere"], ["nowhere", "--timeout", "10"]])
def test_a_folder_without_runs(argv, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sync", *argv]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_a_timeout_is_a_positive_number(text, capsys) -> None:
    assert main(["sync", "here", f"--timeout={text}"]) == 2
    assert "--timeout" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("server")
def test_a_damaged_config_names_the_file(sweep, three_runs, capsys) -> None:
    path = three_runs[0].folder.config
    config = {"tracker": {"name": "wandb", "mode": "sideways"}}
    path.write_text(json.dumps({"format_version": FORMAT_VERSION, "config": config}))
    code, said = sync(sweep, capsys)
    assert code == 1
    assert f"{path} is damaged" in "".join(said.splitlines())
    assert "uploaded 1 run; 1 not uploaded" in said


def test_every_end_of_a_run_is_uploaded_and_only_ends(sweep, fake_training) -> None:
    for status in Status:
        training = fake_training(f"run-{status}")
        training.status.status = status
        training.status.write(training.folder.status)
    found = standing_of(sweep.path)
    ends = {"completed", "oom", "diverged", "timeout", "failed", "interrupted", "pruned"}
    assert set(found.lacking) == {f"run-{status}" for status in ends}
    assert set(found.open) == {"run-pending", "run-running"}
    assert (found.uploaded, found.damaged) == ([], {})


def test_what_is_there_already_is_counted_and_nothing_is_sent(sweep, fake_training, capsys) -> None:
    for name in ("run-a", "run-b"):
        training = fake_training(name)
        training.status.status = Status.COMPLETED
        training.status.write(training.folder.status)
        state = MirrorState("geometry", None, "online", content=content_of(training.status))
        state.write(training.folder)
    fake_training("run-c")
    assert sync(sweep, capsys) == (
        0,
        "Weights & Biases: nothing to upload; 2 had been uploaded before; 1 have not ended\n",
    )
