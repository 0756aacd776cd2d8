"""A launcher that is interrupted or killed leaves no process, and a sweep that can go on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from launchers import Elsewhere
from sweeps_of_fakes import ENTRY, MACHINE, is_alive, spec_named, wait_until

from batchscape.launch.interrupts import noted_signals
from batchscape.launch.launcher import Launcher
from batchscape.record.claims import CLAIMS
from batchscape.record.folder import SweepFolder
from batchscape.record.locks import hold, is_held
from batchscape.record.status import Status
from batchscape.record.tables import verify_seal

pytestmark = pytest.mark.usefixtures("heeded_signals")


def resume(launcher: Elsewhere, *names: str) -> None:
    """Go on with the same runs, here."""
    result = Launcher(
        launcher.sweep,
        MACHINE,
        [spec_named(name) for name in names],
        entry=ENTRY,
        method="spawn",
    ).run()
    assert result.failed == ()


def test_one_signal_asks_the_ranks_to_stop(launch: Callable[..., Elsewhere]) -> None:
    launcher = launch("spawn", "polite-d2", "completes-later")
    pids = launcher.wait_for_pids("polite-d2", 2)
    # As a terminal does it: to the whole foreground group, which the ranks are not in.
    os.killpg(launcher.process.pid, signal.SIGINT)
    assert launcher.process.wait() == 130
    assert "2 runs: 1 pending, 1 interrupted" in launcher.printed
    status = launcher.status("polite-d2")
    assert (status.status, status.reason) == (Status.INTERRUPTED, "stopped by SIGINT")
    assert launcher.status("completes-later").status is Status.PENDING
    assert not any(map(is_alive, pids.values()))
    resume(launcher, "polite-d2", "completes-later")


@pytest.mark.slow
def test_what_the_shell_ignores_stays_ignored_and_sigterm_stops(
    launch: Callable[..., Elsewhere],
) -> None:
    """Under `nohup`, in the background of a script: who logs out ends nothing."""
    ignored = (signal.SIGINT, signal.SIGHUP)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    launcher = launch("spawn", "polite", "completes-later")
    pids = launcher.wait_for_pids("polite", 1)
    for number in ignored:
        os.killpg(launcher.process.pid, number)
    launcher.process.terminate()
    assert launcher.process.wait() == 130
    # The first signal that was heeded, and one only: ranks had their time for a checkpoint.
    status = launcher.status("polite")
    assert (status.status, status.reason) == (Status.INTERRUPTED, "stopped by SIGTERM")
    assert launcher.status("completes-later").status is Status.PENDING
    assert not any(map(is_alive, pids.values()))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_nothing_outlives_a_killed_launcher(launch: Callable[..., Elsewhere], method: str) -> None:
    launcher = launch(method, "stubborn-d2")
    pids = launcher.wait_for_pids("stubborn-d2", 6 if method == "fork" else 4)
    run = launcher.sweep.run("stubborn-d2")
    assert f"process {launcher.process.pid} on" in str(CLAIMS.holder(run))
    launcher.process.kill()
    launcher.process.wait()

    def is_unlocked() -> bool:
        taken = CLAIMS.claim(run)
        if taken is None:
            return False
        # A new launcher never meets a rank of the old one.
        assert not any(is_alive(pid) for name, pid in pids.items() if "rank" in name)
        taken.release()
        return True

    wait_until(is_unlocked, "the lock outlives the processes that held it")
    wait_until(lambda: not any(map(is_alive, pids.values())), "processes are left")
    assert launcher.status("stubborn-d2").status is Status.RUNNING


def test_signals_are_handed_back() -> None:
    """After a sweep Ctrl-C means what it meant before."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    names: list[str] = []
    with noted_signals(names):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: len(names) == 2, "the signals are not noted")
        assert names == ["SIGINT", "SIGTERM"]
    assert handlers == {number: signal.getsignal(number) for number in handlers}


SMALL = [
    "model=mlp",
    "data=digits",
    "batch.global_batch_size=32",
    "batch.micro_batch_size=32",
    "budget.samples=320",
    "launcher.device=cpu",
    "tracker=none",
]


def wait_for_reader(fifo: Path) -> int:
    """Wait until somebody reads a pipe; return the end that keeps the reader waiting."""
    pids: list[int] = []

    def is_read() -> bool:
        with contextlib.suppress(OSError):
            pids.append(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        return bool(pids)

    wait_until(is_read, "nobody reads")
    return pids[0]


@pytest.mark.slow
def test_a_signal_while_planning(tmp_path: Path) -> None:
    """The plan waits for another launcher that writes its own."""
    sweep = SweepFolder(tmp_path / "sweep")
    command = [sys.executable, "-m", "batchscape", "run", f"sweep_dir='{sweep.path}'", *SMALL]
    with hold(sweep.writing_lock):
        planning = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert planning.stdout is not None
        assert "Runs: 1" in planning.stdout.readline()
        planning.send_signal(signal.SIGINT)
        printed, _ = planning.communicate(timeout=60)
    assert (planning.returncode, printed) == (130, "Stopped\n")
    assert not sweep.plan.exists()
    assert sweep.run_folders() == []


@pytest.mark.slow
def test_a_signal_while_waiting_for_another_launcher(
    launch: Callable[..., Elsewhere], tmp_path: Path
) -> None:
    folder = SweepFolder(tmp_path / "sweep").run("completes")
    claim = CLAIMS.claim(folder)
    assert claim is not None
    launcher = launch("spawn", "completes")
    wait_until(lambda: "Waiting for 1 run of another" in launcher.printed, "it does not wait")
    assert f"launcher (process {os.getpid()} on" in launcher.printed
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.process.wait() == 130
    assert "1 run: 1 pending" in launcher.printed
    assert "Stopped before the end; the same command goes on" in launcher.printed
    assert "Traceback" not in launcher.printed
    assert CLAIMS.holder(folder) is not None
    claim.release()
    assert not is_held(launcher.sweep.lock)


@pytest.mark.slow
def test_a_signal_while_sealing(launch: Callable[..., Elsewhere]) -> None:
    """What has ended is sealed; nothing more is begun."""
    launcher = launch("spawn", "blocks", "completes-later")
    folder = launcher.sweep.run("blocks")
    wait_until(folder.lines("evals").exists, "the run does not start")
    end = wait_for_reader(folder.lines("evals"))
    launcher.process.send_signal(signal.SIGINT)
    empty = folder.path / "empty"
    empty.touch()
    empty.replace(folder.lines("evals"))
    os.close(end)
    assert launcher.process.wait() == 130
    assert "2 runs: 1 pending, 1 completed" in launcher.printed
    assert "Traceback" not in launcher.printed
    status = launcher.status("blocks")
    assert status.status is Status.COMPLETED
    verify_seal(folder, status)
    assert not is_held(folder.lock)


@pytest.mark.slow
def test_a_signal_in_the_mirror(
    launch: Callable[..., Elsewhere], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs are done, and only Weights & Biases lacks them."""
    wandb = tmp_path / "sweep" / "wandb"
    wandb.mkdir(parents=True)
    with hold(wandb / "mirror.lock"):
        monkeypatch.setenv("LAUNCH_WITH_MIRROR", "offline")
        launcher = launch("spawn", "completes")
        wait_until((wandb / "mirror.log").exists, "the mirror does not start")
        mirrors = psutil.Process(launcher.process.pid).children(recursive=True)
        launcher.process.send_signal(signal.SIGINT)
        launcher.process.wait()
    assert "Weights & Biases" in launcher.printed
    assert "1 run: 1 completed" in launcher.printed
    assert "Traceback" not in launcher.printed
    wait_until(lambda: not any(map(psutil.Process.is_running, mirrors)), "a mirror is left")
