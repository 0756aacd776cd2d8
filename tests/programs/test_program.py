"""A program under its guard, and how its end is told."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from batchscape.errors import LaunchError
from batchscape.programs.endings import ending, last_words
from batchscape.programs.program import Program

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
LEAVES_DEAF = (
    "import subprocess, sys; "
    f"subprocess.Popen([sys.executable, '-c', {DEAF!r}], start_new_session=True)"
)


def started(code: str, folder: Path) -> Program:
    return Program([sys.executable, "-c", code], folder, dict(os.environ))


def below(program: Program) -> list[psutil.Process]:
    return psutil.Process(program.guard_pid).children(recursive=True)


def test_exit_codes_arguments_and_environment(tmp_path: Path):
    """Arguments arrive one by one and as they are; nothing is read by a shell."""
    words = ["", "two words", "$HOME", "*", "a;b", "ü\n", '"']
    code = "import os, sys; sys.exit(7 * (sys.argv[1:] == eval(os.environ['WANTED'])))"
    environment = {**os.environ, "WANTED": repr(words)}
    program = Program([sys.executable, "-c", code, *words], tmp_path, environment)
    ended = program.wait(30)
    program.close()
    assert ended is not None
    assert (ended.code, ended.processes_left) == (7, 0)


def test_a_missing_program_and_folder_are_told(tmp_path: Path):
    with pytest.raises(LaunchError, match=r"no-such-program cannot be started: .*No such file"):
        Program(["no-such-program"], tmp_path, dict(os.environ))
    with pytest.raises(LaunchError, match="cannot be started in"):
        Program(["true"], tmp_path / "nowhere", dict(os.environ))
    text = tmp_path / "text"
    text.write_text("no program")
    with pytest.raises(LaunchError, match="Permission denied"):
        Program([str(text)], tmp_path, dict(os.environ))


@pytest.mark.parametrize("way", ["asked", "killed", "abandoned"])
def test_every_way_to_end_a_program_ends_all_of_it(tmp_path: Path, way: str):
    code = f"{LEAVES_DEAF}; import time; time.sleep(60)"
    program = started(code, tmp_path)
    deadline = time.monotonic() + 30
    while len(below(program)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    processes = below(program)
    if way == "asked":
        program.ask_to_end()
        program.wait(0.5)
    if way == "killed":
        program.kill()
        ended = program.wait(30)
        assert ended is not None
        assert ended.code == -9
    program.close()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", None),
        ("\n----\n\n", None),
        ("first\nlast\n=====\n", "last"),
        ("ValueError: 3 is odd\n", "ValueError: 3 is odd"),
        ("[rank1]: torch.OutOfMemoryError: CUDA\nW1 closing\n", "torch.OutOfMemoryError: CUDA"),
        (
            "RuntimeError: real\nTraceback\n"
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
            "subprocess.CalledProcessError: Command failed\n====\n",
            "RuntimeError: real",
        ),
        ("KeyError: 'old'\nValueError: newest\nexit\n", "ValueError: newest"),
    ],
)
def test_the_last_words_are_those_of_the_error(text, words):
    assert last_words(text) == words


def torchrun_footer(rank: int, code: int) -> str:
    """What torch 2.14 prints after the ranks, shortened."""
    agent = "torch/distributed/elastic/multiprocessing/api.py"
    return (
        f"W1122 02:50:34.986000 18598 {agent}:1028] Sending process 18632 closing signal SIGTERM\n"
        f"E1122 02:50:35.048000 18598 {agent}:1002] failed (exitcode: {code}) local_rank: {rank} "
        "(pid: 18634) of binary: python\n"
        "Traceback (most recent call last):\n"
        '  File "run.py", line 1032, in <module>\n    main()\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "=====\ntrain.py FAILED\n-----\nFailures:\n[1]:\n  rank      : 0 (local_rank: 0)\n"
        "  exitcode  : -15 (pid: 18632)  (SIGTERM)\n"
        "  traceback : Signal 15 (SIGTERM) received by PID 18632\n"
        f"-----\nRoot Cause (first observed failure):\n[0]:\n  host      : localhost\n"
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 18634) \n"
        "  error_file: <N/A>\n"
        "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
        "\n=====\n"
    )


def traceback_of(words: str, mark: str = "") -> str:
    lines = ["Traceback (most recent call last):", '  File "train.py", line 17', "    f()", words]
    return "".join(f"{mark}{line}\n" for line in lines)


@pytest.mark.parametrize(
    ("printed", "code", "words"),
    [
        (traceback_of("AssertionError"), 1, "AssertionError"),
        (
            traceback_of("my.Odd: 3", "[rank1]: ")
            + traceback_of("RuntimeError: Connection closed by peer", "[rank0]: "),
            1,
            "my.Odd: 3",
        ),
        (traceback_of("KeyError: 1") + traceback_of("ValueError: 2"), 1, "ValueError: 2"),
        ("step 1\n", 3, "step 1; then: rank 1 exited with code 3"),
        ("", -9, "rank 1 was killed by SIGKILL, which the launcher did not send"),
    ],
)
def test_of_a_failed_torchrun_the_words_are_those_of_the_first_rank(printed, code, words):
    assert last_words(printed + torchrun_footer(1, code)) == words


REFUSED = "usage: t.py [-h] [--x X]\n          [--how HOW]\nt.py: error: unrecognized: --mikro=4\n"
"""As argparse has it; both ranks print it."""
CALLED = traceback_of(
    "subprocess.CalledProcessError: Command '['t.py']' returned non-zero exit status 2."
)
"""The end of `accelerate launch` (1.15) after one process."""
DEEPSPEED = (
    "[2026-11-22 21:06:47,814] [INFO] [launch.py:253:sigkill_handler] Killing subprocess 14850\n"
    "[2026-11-22 21:06:47,835] [ERROR] [launch.py:259:sigkill_handler] ['python', '-u', 't.py'] "
    "exits with return code = 7\n"
)
"""The end of DeepSpeed's launcher (0.19)."""
OMP = "W1122 21:00:04.664000 11396 torch/distributed/run.py:874] ******\n"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (OMP + REFUSED + REFUSED + torchrun_footer(0, 2), "t.py: error: unrecognized: --mikro=4"),
        (REFUSED + CALLED, "t.py: error: unrecognized: --mikro=4"),
        (REFUSED + REFUSED + DEEPSPEED, "t.py: error: unrecognized: --mikro=4"),
        (
            "Usage: t.py [options]\n\nt.py: error: no such option: -x\n",
            "t.py: error: no such option: -x",
        ),
        (REFUSED + "again\n" + traceback_of("ValueError: 3"), "ValueError: 3"),
        # A loss of this name is none, whatever was explained above it.
        ("usage: t.py\nstep 1\neval: error: 0.3\nbye\n", "bye"),
        (
            OMP + "no data in /nowhere\n" + torchrun_footer(1, 1),
            "no data in /nowhere; then: rank 1 exited with code 1",
        ),
        (
            "no data in /nowhere\n" + CALLED,
            "no data in /nowhere; then: subprocess.CalledProcessError: Command '['t.py']' "
            "returned non-zero exit status 2.",
        ),
        ("no data in /nowhere\n" + DEEPSPEED, "no data in /nowhere"),
        (traceback_of("KeyError: 1") + DEEPSPEED, "KeyError: 1"),
        (OMP + torchrun_footer(1, 1), "rank 1 exited with code 1"),
        (
            traceback_of("RuntimeError: Connection closed by peer", "[rank0]: ")
            + torchrun_footer(1, -9),
            "rank 1 was killed by SIGKILL, which the launcher did not send; of another rank: "
            "RuntimeError: Connection closed by peer",
        ),
        (
            traceback_of("RuntimeError: Connection closed by peer", "[rank0]: ")
            + traceback_of("OSError: [Errno 28] No space left on device")
            + torchrun_footer(1, 1),
            "OSError: [Errno 28] No space left on device",
        ),
    ],
)
def test_the_line_that_tells_goes_before_what_a_launcher_says(log, words):
    assert last_words(log) == words


@pytest.mark.slow
def test_a_real_torchrun_that_is_refused_an_argument_says_which(tmp_path: Path):
    script = tmp_path / "t.py"
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    with (tmp_path / "log.txt").open("w") as log:
        code = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
             str(script), "--mikro=4"],
            stdout=log, stderr=log, check=False,
        ).returncode  # fmt: skip
    how = ending(code, tmp_path / "log.txt", 0)
    assert how is not None
    assert str(how.reason).endswith("its log ends: t.py: error: unrecognized arguments: --mikro=4")


HANDLED = traceback_of("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    ("code", "text", "status", "cause", "reason"),
    [
        (3, "bye", "failed", "exception", "exited with code 3; its log ends: bye"),
        (1, "", "failed", "exception", "exited with code 1"),
        (-11, "", "failed", "signal", "was killed by SIGSEGV"),
        (-9, "", "failed", "killed", "was killed by SIGKILL, which the launcher did not send"),
        (137, "", "failed", "killed", "exited with code 137"),
        (
            1,
            HANDLED + "more",
            "oom",
            "out_of_memory",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        ),
        # A launcher below it only says that its task has ended.
        (
            1,
            HANDLED + "srun: error: node1: task 0: Exited with exit code 1\n",
            "oom",
            "out_of_memory",
            "torch.OutOfMemoryError",
        ),
        (1, traceback_of("MemoryError"), "oom", "out_of_memory", "its log ends: MemoryError"),
        (
            1,
            "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8 EiB",
            "oom",
            "out_of_memory",
            "8 EiB",
        ),
        (
            1,
            traceback_of(
                "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: "
                "can't allocate memory: you tried to allocate 4 bytes. Error code 12"
            ),
            "oom",
            "out_of_memory",
            "DefaultCPUAllocator",
        ),
        (
            -6,
            "terminate called after throwing an instance of 'std::bad_alloc'\n"
            "  what():  std::bad_alloc\n",
            "oom",
            "out_of_memory",
            "std::bad_alloc",
        ),
        (
            1,
            "[rank0]: torch.distributed.DistBackendError: NCCL error in: ncclUtils.hpp:1\n"
            "[rank0]: ncclUnhandledCudaError: Call to CUDA function failed.\n"
            "[rank0]: Last error:\n[rank0]: Cuda failure 2 'out of memory'\n",
            "oom",
            "out_of_memory",
            "ncclUnhandledCudaError",
        ),
        # Below a rank that the system's allocator ended there is the launcher's summary.
        (
            1,
            "terminate called after throwing an instance of 'std::bad_alloc'\n"
            "  what():  std::bad_alloc\n" + torchrun_footer(1, -6),
            "oom",
            "out_of_memory",
            "rank 1 was killed by SIGABRT",
        ),
        # What was caught, or is only spoken of, is not what the program died of.
        (1, HANDLED + "smaller\n" + traceback_of("KeyError: 1"), "failed", "exception", "KeyError"),
        (1, "ValueError: the plan says that it runs out of memory", "failed", "exception", "plan"),
        (1, "WARNING: CUDA out of memory last time\nbye", "failed", "exception", "bye"),
        (1, "MemoryError\n" + "step\n" * 20 + "bye", "failed", "exception", "bye"),
    ],
)
def test_endings(tmp_path: Path, code, text, status, cause, reason):
    log = tmp_path / "log.txt"
    before = "MemoryError: of an earlier attempt\n"
    log.write_text(before + text)
    how = ending(code, log, len(before))
    assert how is not None
    assert (how.status, how.cause) == (status, cause)
    assert str(how.reason).startswith("the program ")
    assert reason in str(how.reason)


def test_an_exit_code_of_zero_is_no_bad_ending(tmp_path: Path):
    (tmp_path / "log.txt").write_text("MemoryError")
    assert ending(0, tmp_path / "log.txt", 0) is None
