"""Programs of torchrun in forks of a process that has imported their libraries once.

Every rank that Python starts imports torch for seconds, and transformers for more.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import IO, Any, NoReturn
from unittest.mock import patch

import warm_interpreter
from batchscape.programs import guard, program
from warm_interpreter import ForkedInterpreter, WarmInterpreter

_ROOM = "FORKED_PROGRAMS_ROOM"
"""In the environment of the warm process: room for what the ranks have in theirs."""
_LIBRARIES = (
    "transformers.trainer",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # compiled when the first ZeRO optimizer is made
    "lightning_fabric",
)
_GUARD = [sys.executable, "-P", "-m", guard.__name__]
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def warm_libraries() -> WarmInterpreter:
    """Return a process from which fork servers are forked that fork programs of torchrun."""
    environment = {_ROOM: " " * 200, "DS_ACCELERATOR": "cpu"}
    return WarmInterpreter(__name__, environment)


def main() -> None:
    """Be that process."""
    # What the workers of programs, and the guards that these start, know as `subprocess`.
    names = {"PIPE": subprocess.PIPE, "DEVNULL": subprocess.DEVNULL}
    names["SubprocessError"] = subprocess.SubprocessError
    for module, start in ((program, _start_guard), (guard, _start_program)):
        patch.object(module, "subprocess", SimpleNamespace(Popen=start, **names)).start()
    warm_interpreter.main((*warm_interpreter.TRAINING, *_LIBRARIES))


def run_torchrun(
    warm: WarmInterpreter,
    script: Path,
    *arguments: str,
    ranks: int,
    folder: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run a script on some ranks; what it printed shows where it fails."""
    options = [f"--nproc_per_node={ranks}", f"--master_port={_free_port()}"]
    _call(warm, be_torchrun, [*options, str(script), *arguments], folder, environment)


def run_script(warm: WarmInterpreter, script: Path, *arguments: str, folder: Path) -> str:
    """Run a script; return what it printed."""
    return _call(warm, be_script, [str(script), *arguments], folder, {})


def _call(
    warm: WarmInterpreter,
    function: Callable[[Sequence[str]], NoReturn],
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
) -> str:
    with tempfile.TemporaryFile() as output:
        started = warm.call(
            f"{__name__}:{function.__name__}",
            arguments,
            output=output,
            environment={**os.environ, **environment},
            folder=folder,
        )
        code = started.wait()
        output.seek(0)
        printed = output.read().decode()
    assert code == 0, printed[-4000:]
    return printed


def be_script(arguments: Sequence[str]) -> NoReturn:
    """Do what Python does with a script and its arguments."""
    _live(_run_script, arguments)


def _run_script(arguments: Sequence[str]) -> NoReturn:
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")
    sys.exit(0)


def be_torchrun(arguments: Sequence[str]) -> NoReturn:
    """Do what `torch.distributed.run` does with these options, on this machine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc_per_node", type=int, required=True)
    parser.add_argument("--master_port", type=int, required=True)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args(arguments)
    ranks = range(args.nproc_per_node)
    own = {
        "WORLD_SIZE": str(len(ranks)),
        "LOCAL_WORLD_SIZE": str(len(ranks)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(args.master_port),
    }
    living = {
        _fork(_be_rank, args.script, args.arguments, {"RANK": str(k), "LOCAL_RANK": str(k), **own})
        for k in ranks
    }
    failed = False
    while living:
        pid, status = os.wait()
        living.discard(pid)
        if status and not failed:
            failed = True
            for other in living:
                os.kill(other, signal.SIGTERM)
    os._exit(int(failed))


def _be_rank(script: str, arguments: Sequence[str], own: dict[str, str]) -> NoReturn:
    os.environ |= own
    _show_others(own)
    _run_script([script, *arguments])


def _show_others(own: dict[str, str]) -> None:
    """Have /proc show what is new in the environment of a rank, as it does of a started one."""
    start, end = (int(field) for field in Path("/proc/self/stat").read_text().split()[49:51])
    shown = ctypes.string_at(start, end - start)
    first = shown.index(f"{_ROOM}=".encode())
    room = shown.index(b"\0", first) - first
    text = b"\0".join(f"{name}={value}".encode() for name, value in own.items())
    assert len(text) <= room, "there is no room for the environment of a rank"
    ctypes.memmove(start + first, text.ljust(room, b"\0"), room)


def _start_guard(
    argv: Sequence[str],
    *,
    stdin: int,
    stdout: int,
    cwd: Path,
    env: dict[str, str],
    start_new_session: bool,
) -> _ForkedGuard:
    """Do as the `Popen` of a guard does."""
    assert list(argv[:4]) == _GUARD
    assert stdin == stdout == subprocess.PIPE
    assert start_new_session
    (heard, tell), (hear, told) = os.pipe(), os.pipe()

    def be_guard() -> NoReturn:
        os.setsid()
        os.dup2(heard, 0)
        os.dup2(told, 1)
        _close_others()
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        sys.exit(guard.main(list(argv[4:])))

    pid = _fork(be_guard)
    os.close(heard)
    os.close(told)
    return _ForkedGuard(pid, os.fdopen(tell, "wb"), os.fdopen(hear, "rb"))


class _ForkedGuard(ForkedInterpreter):
    """What its watcher asks of the `Popen` of a guard."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        super().__init__(pid)
        self.stdin, self.stdout = stdin, stdout


def _start_program(
    argv: Sequence[str], **options: Any
) -> subprocess.Popen[bytes] | ForkedInterpreter:
    """Do as the `Popen` of a program does."""
    if list(argv[:3]) != _TORCHRUN:
        return subprocess.Popen(argv, **options)
    prepare = options.pop("preexec_fn")
    expected = {"stdin": subprocess.DEVNULL, "stdout": 2}
    assert options == {**expected, "restore_signals": True, "start_new_session": True}

    def be_program() -> NoReturn:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        _close_others()
        prepare()
        be_torchrun(argv[3:])

    return ForkedInterpreter(_fork(be_program))


def _close_others() -> None:
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def _fork(be: Callable[..., NoReturn], *arguments: Any) -> int:
    """Return the number of a process that does something, and ends as Python ends a script."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _live(be, *arguments)
    return pid


def _live(be: Callable[..., NoReturn], *arguments: Any) -> NoReturn:
    code = 1
    try:
        be(*arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    finally:
        if error := sys.exception():
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
