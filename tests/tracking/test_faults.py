"""Weights & Biases fails in every way there is: it costs a bounded wait, and nothing else.

The client is the real one, its server a small one that fails on purpose. Whatever happened,
`batchscape sync` sends everything afterwards, once: the rows of the server are the folder's.
"""

from __future__ import annotations

import errno
import itertools
import math
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Callable

import psutil
import pytest

from batchscape.cli import main
from batchscape.config import WandbTracker
from batchscape.launch import local
from batchscape.record.files import read_json
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.status import RunStatus, Status
from batchscape.record.tables import read_table
from batchscape.tracking.mirror import Mirror
from batchscape.tracking.state import MirrorState
from batchscape.tracking.watch import Order, patience_s, silence_s
from batchscape.tracking.worker import _mode, _RefusedError
from exact import assert_same_rows

ONLINE = WandbTracker(name="wandb", mode="online", project="geometry")
OFFLINE = WandbTracker(name="wandb", mode="offline", project="geometry")
KEY = "0123456789abcdef0123456789abcdef01234567"
LONG_S = 100.0
FAULTS = [
    # Requests that are tried again, then one that is refused for good.
    ("graphql", (500, 429, "cut", 404), "Weights & Biases cannot be used: "),
    ("UpsertBucket", ("garbage",), "W&B cannot be written to: "),
    ("file_stream", (429, 500, 401), "W&B cannot be written to: "),
]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def ended(training, steps: int = 5):
    training.begin()
    training.train(range(1, steps + 1))
    training.end(Status.COMPLETED)
    return training


def sync(sweep: SweepFolder, capsys) -> str:
    assert main(["sync", str(sweep.path)]) == 0
    captured = capsys.readouterr()
    return captured.out + captured.err


def check_all_there(server, folders, rows_of) -> None:
    """Every row once, and as the folder has it."""
    for folder in folders:
        run = server.run_of(folder.path.name)
        assert run.visible_history == rows_of(folder)
        assert run.lines_received == len(run.history)
        assert run.state == "finished"


def test_every_wait_has_a_bound(monkeypatch) -> None:
    monkeypatch.delenv("WANDB_INIT_TIMEOUT", raising=False)
    assert (patience_s(), silence_s()) == (20, 130)
    for given, expected in (("7", 7), ("inf", 600), ("soon", 20), ("-1", 20), ("nan", 20)):
        monkeypatch.setenv("WANDB_INIT_TIMEOUT", given)
        assert patience_s() == expected
        # W&B's own waits, two for each run, end before the worker is ended.
        assert 2 * patience_s() < silence_s() < math.inf


def test_run_folders_that_cannot_be_read_stop_nothing(sweep, fake_training, monkeypatch) -> None:
    ended(fake_training("run-a"))
    mirror = Mirror(OFFLINE, sweep, live=False)

    def fail(_: SweepFolder) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(SweepFolder, "run_folders", fail)
    assert mirror.finish(1, interrupted=True) == (
        f"What Weights & Biases lacks is not known: [Errno {errno.ESTALE}] Stale file handle. "
        f"`batchscape sync {sweep.path}` sends it."
    )
    assert mirror.standing() is None


@pytest.mark.usefixtures("sweep")
@pytest.mark.parametrize(("text", "said"), [("", "TimeoutError"), ("no route\nat all", "no route")])
def test_a_server_that_cannot_be_used_is_told_in_a_line(monkeypatch, text, said) -> None:
    def fail(**_: object) -> None:
        raise TimeoutError(text)

    monkeypatch.setattr("wandb.login", lambda **_: True)
    monkeypatch.setattr("wandb.Api", fail)
    with pytest.raises(_RefusedError, match=rf"cannot be used: {said}\. Check the network"):
        _mode(Order("sweep", "online"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("where", "kinds", "why"), FAULTS, ids=[why[0] for why in FAULTS])
def test_every_fault_of_the_server_leaves_all_for_sync(
    where,
    kinds,
    why,
    sweep,
    server,
    fake_training,
    mirrored,
    rows_of,
    fault_of,
    monkeypatch,
    capsys,
) -> None:
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "0.5")
    # W&B waits longer with each try, and a busy machine longer still.
    monkeypatch.setattr("batchscape.tracking.watch._STARTUP_S", 600.0)
    monkeypatch.setattr("batchscape.tracking.mirror._BASE_S", 600.0)
    folder = ended(fake_training("run-a")).folder
    server.fault = fault_of(kinds, where)
    said = mirrored(ONLINE)
    assert server.faults_met >= 1
    assert said is not None
    assert "Weights & Biases was not updated: " in said
    assert f"because {why}" in said
    assert f"`batchscape sync {sweep.path}` sends what it lacks" in said
    assert KEY not in said
    server.fault = None
    monkeypatch.delenv("WANDB_INIT_TIMEOUT")
    sync(sweep, capsys)
    check_all_there(server, [folder], rows_of)
    assert "nothing to upload" in sync(sweep, capsys)


@pytest.mark.slow
def test_sync_says_within_its_bound_that_a_server_is_silent(
    sweep, server, fake_training, rows_of, fault_of, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "0.5")
    training = ended(fake_training("run-a"))
    server.fault = fault_of(("hang",))
    assert main(["sync", str(sweep.path)]) == 2
    assert server.faults_met
    assert "Weights & Biases cannot be used" in capsys.readouterr().err
    server.fault = None
    monkeypatch.delenv("WANDB_INIT_TIMEOUT")
    sync(sweep, capsys)
    check_all_there(server, [training.folder], rows_of)


@pytest.mark.slow
def test_a_mirror_that_does_not_answer_is_ended(
    sweep, server, fake_training, fault_of, rows_of, monkeypatch, capsys
) -> None:
    """One run hangs on its way to the server; the other, and the training, lose nothing by it."""
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "0.5")
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 4))
    mirror = Mirror(ONLINE, sweep, live=True)
    wait_until(lambda: _is_open(training.folder), "the run was not opened")
    server.fault = fault_of(("hang",))
    training.train(range(4, 6))
    training.end(Status.COMPLETED)
    other = ended(fake_training("run-b"))
    said = mirror.finish(10, interrupted=False)
    assert said is not None
    assert "it lacks 2 of 2 runs (run-a, run-b), because it did not answer for 13 s" in said
    server.fault = None
    monkeypatch.delenv("WANDB_INIT_TIMEOUT")
    assert "uploaded 2 runs" in sync(sweep, capsys)
    check_all_there(server, [training.folder, other.folder], rows_of)


@pytest.mark.slow
def test_killed_between_the_upload_and_its_note(
    sweep, server, fake_training, mirrored, workers, rows_of, capsys
) -> None:
    """The server has it all, the folder does not know: nothing is sent again."""
    training = ended(fake_training("run-a"))

    def kill(_: str) -> None:
        server.on_complete = None
        workers()[0].kill()

    server.on_complete = kill
    said = mirrored(ONLINE)
    assert said is not None
    assert "it lacks 1 of 1 runs (run-a), because it ended with exit code -9. " in said
    run = server.run_of("run-a")
    assert run.state == "finished"
    received = run.lines_received
    assert received == len(rows_of(training.folder))
    assert "uploaded 1 run" in sync(sweep, capsys)
    assert run.lines_received == received
    check_all_there(server, [training.folder], rows_of)


@pytest.mark.slow
def test_killed_helpers_of_wandb(sweep, server, fake_training, workers, rows_of) -> None:
    """The library's own process dies under an open run: the mirror ends, and another goes on."""
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 4))
    mirror = Mirror(ONLINE, sweep, live=True)
    wait_until(lambda: _is_open(training.folder), "the run was not opened")
    (worker,) = workers()
    for helper in worker.children(recursive=True):
        helper.kill()
    steps = itertools.count(4)

    def is_missed() -> bool:
        # A row may still be written to a process that is gone, so that the next one tells.
        training.train([next(steps)])
        return worker.status() == psutil.STATUS_ZOMBIE

    wait_until(is_missed, "W&B does not miss it")
    training.end(Status.COMPLETED)
    assert mirror.finish(10, interrupted=False) is None
    check_all_there(server, [training.folder], rows_of)


def _is_open(folder: RunFolder) -> bool:
    state = MirrorState.read(folder)
    return state is not None and state.is_cut_short_online


@pytest.mark.slow
def test_killed_at_random_again_and_again(
    sweep, server, fake_training, workers, rows_of, capsys
) -> None:
    folders = [ended(fake_training(f"run-{name}"), steps=9).folder for name in "abc"]
    seed = random.SystemRandom().randrange(2**32)
    print(f"moments of seed {seed}")  # shown where the test fails
    moments = random.Random(seed)
    for _ in range(3):
        mirror = Mirror(ONLINE, sweep, live=True)
        (worker,) = workers()
        time.sleep(moments.uniform(0.8, 4.0))
        helpers = worker.children()
        worker.kill()
        mirror.finish(1, interrupted=True)
        _, alive = psutil.wait_procs(helpers, timeout=LONG_S)
        assert not alive
    sync(sweep, capsys)
    check_all_there(server, folders, rows_of)
    assert "nothing to upload" in sync(sweep, capsys)


@pytest.mark.slow
def test_a_full_disk_of_the_mirror_is_told_and_mended(
    sweep, server, fake_training, workers, rows_of, capsys
) -> None:
    """No note of a run can be written: no run is taken for mirrored, and none is sent twice."""
    folders = [ended(fake_training(f"run-{name}")).folder for name in "ab"]
    for tracker in (ONLINE, OFFLINE):
        mirror = Mirror(tracker, sweep, live=True)
        resource.prlimit(workers()[0].pid, resource.RLIMIT_FSIZE, (64, 64))
        said = mirror.finish(1, interrupted=True)
        assert said is not None
        assert "Weights & Biases was not updated: it lacks 2 of 2 runs (run-a, run-b)" in said
        assert [MirrorState.read(folder) for folder in folders] == [None, None]
    assert "uploaded 2 runs" in sync(sweep, capsys)
    check_all_there(server, folders, rows_of)


@pytest.mark.slow
def test_what_wandb_wrote_may_be_deleted(sweep, server, fake_training, rows_of, capsys) -> None:
    training = ended(fake_training("run-a"))
    mirror = Mirror(OFFLINE, sweep, live=False)
    assert mirror.finish(10, interrupted=False) is None
    shutil.rmtree(sweep.path / "wandb")
    # It is not taken for uploaded because nothing is left to upload.
    assert "1 offline, upload: batchscape sync" in str(mirror.standing())
    assert "uploaded 1 run" in sync(sweep, capsys)
    check_all_there(server, [training.folder], rows_of)
    assert "offline" not in str(mirror.standing())


TABLES = {
    "steps": ["optimizer_step", "samples", "tokens", "loss", "gradient_norm", "learning_rate"],
    "evals": ["optimizer_step", "samples", "eval_loss", "eval_labels"],
}


@pytest.mark.slow
@pytest.mark.usefixtures("sweep")
def test_training_beside_a_failing_mirror_is_the_same_bit_for_bit(
    tmp_path, server, rows_of, fault_of, monkeypatch, capsys
) -> None:
    """The mirror follows the runs while they train, and hangs, and everything is kept."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # no other launcher of this machine
    monkeypatch.setattr(local, "may_mirror_live", lambda *_: True)
    settings = [
        *("sweep", "seed=0,1", "model=gpt_micro", "batch.micro_batch_size=8"),
        *("batch.global_batch_size=16", "launcher.device=cpu", "data.sequence_length=16"),
        *("budget.samples=640", "evaluation.every_samples=160", "evaluation.samples=16"),
        "measure.memory=false",
    ]
    assert main([*settings, "tracker=none", "sweep_dir=plain"]) == 0
    plain, tracked = SweepFolder(tmp_path / "plain"), SweepFolder(tmp_path / "hanging")
    capsys.readouterr()
    server.runs.clear()
    server.fault = fault_of(("hang",))
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "0.5")
    code = main([*settings, "tracker=wandb", "tracker.mode=online", "sweep_dir='hanging'"])
    assert code == 0, capsys.readouterr().err
    assert "was not updated" in capsys.readouterr().out
    server.fault = None
    monkeypatch.delenv("WANDB_INIT_TIMEOUT")
    _same(plain, tracked)
    sync(tracked, capsys)
    check_all_there(server, tracked.run_folders(), rows_of)


def _same(plain: SweepFolder, tracked: SweepFolder) -> None:
    names = [folder.path.name for folder in plain.run_folders()]
    assert len(names) == 2
    assert [folder.path.name for folder in tracked.run_folders()] == names
    for name in names:
        one, other = plain.run(name), tracked.run(name)
        assert RunStatus.read(other.status).status is Status.COMPLETED
        assert read_json(other.launch)["timing_valid"]
        for table, columns in TABLES.items():
            rows, others = (read_table(folder, table)[columns] for folder in (one, other))
            assert len(rows) > 2
            assert_same_rows(others, rows)
