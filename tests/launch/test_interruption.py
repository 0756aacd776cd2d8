"""A launcher that is interrupted or killed leaves no process, and a sweep that can go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from launchers import Launcher
from sweeps_of_fakes import MACHINE, TARGET, is_alive, spec_named, wait_until

from batchscape.launch import run_sweep
from batchscape.launch.interrupts import Interrupts
from batchscape.record.locks import holder, take
from batchscape.record.status import Status


def resume(launcher: Launcher, *names: str) -> None:
    """Go on with the same runs, here."""
    result = run_sweep(
        [spec_named(name) for name in names],
        launcher.sweep,
        MACHINE,
        target=TARGET,
        method="spawn",
    )
    assert result.failed == ()


@pytest.mark.parametrize(
    ("method", "number"),
    [("fork", signal.SIGINT), ("spawn", signal.SIGTERM), ("spawn", signal.SIGHUP)],
)
def test_one_signal_asks_the_ranks_to_stop(
    launch: Callable[..., Launcher], method: str, number: signal.Signals
) -> None:
    launcher = launch(method, "polite-d2", "completes-later")
    pids = launcher.wait_for_pids("polite-d2", 2)
    # As a terminal does it: to the whole foreground group, which the ranks are not in.
    os.killpg(launcher.process.pid, number)
    assert launcher.process.wait(60) == 130
    assert "2 runs: 1 pending, 1 interrupted" in launcher.printed
    status = launcher.status("polite-d2")
    assert (status.status, status.reason) == (Status.INTERRUPTED, f"stopped by {number.name}")
    assert launcher.status("completes-later").status is Status.PENDING
    assert not any(map(is_alive, pids.values()))
    resume(launcher, "polite-d2", "completes-later")


@pytest.mark.slow
def test_a_second_signal_kills_at_once(launch: Callable[..., Launcher]) -> None:
    """The ranks ignore SIGTERM; the launcher would wait for them."""
    launcher = launch("spawn", "stubborn-d2")
    pids = launcher.wait_for_pids("stubborn-d2", 4)
    launcher.process.send_signal(signal.SIGINT)
    wait_until(lambda: "waiting up to 20 s" in launcher.printed, "the signal is not seen")
    assert all(map(is_alive, pids.values()))
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.process.wait(10) == 130
    wait_until(lambda: not any(map(is_alive, pids.values())), "processes are left")
    assert launcher.status("stubborn-d2").status is Status.INTERRUPTED


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_nothing_outlives_a_killed_launcher(launch: Callable[..., Launcher], method: str) -> None:
    launcher = launch(method, "stubborn-d2")
    pids = launcher.wait_for_pids("stubborn-d2", 6 if method == "fork" else 4)
    lock = launcher.sweep.run("stubborn-d2").lock
    assert holder(lock) == launcher.process.pid
    launcher.process.kill()
    launcher.process.wait()

    def is_unlocked() -> bool:
        taken = take(lock)
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
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: interrupts.count == 2, "the signals are not counted")
        assert interrupts.first == "SIGINT"
    assert handlers == {number: signal.getsignal(number) for number in handlers}
