"""Ranks of a program as torchrun starts them, forked from a process that has imported once.

Every rank that Python starts imports torch for seconds, and transformers for more.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

PRELOAD = "FORKED_RANKS_PRELOAD"
"""In the environment: the modules to import once, and room for what the ranks have there."""


def preload(modules: Sequence[str]) -> None:
    """Import what the ranks would import."""
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_ranks(script: str, arguments: Sequence[str], ranks: int, port: int) -> int:
    """Run a script on some ranks of this machine; return 0, or 1 where one has failed."""
    living = {}
    for rank in range(ranks):
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _be_rank(script, arguments, rank, ranks, port)
        living[pid] = rank
    failed = False
    while living:
        pid, status = os.wait()
        if living.pop(pid, None) is not None and status and not failed:
            failed = True
            for other in living:
                os.kill(other, signal.SIGTERM)
    return int(failed)


def _be_rank(script: str, arguments: Sequence[str], rank: int, ranks: int, port: int) -> NoReturn:
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.environ |= own
    _show_others(own)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except Exception:  # noqa: BLE001  (a script raises what it will, and the rank has failed)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _show_others(own: dict[str, str]) -> None:
    """Have /proc show what is new in the environment of a rank, as it does of a started one."""
    start, end = (int(field) for field in Path("/proc/self/stat").read_text().split()[49:51])
    shown = ctypes.string_at(start, end - start)
    first = shown.find(f"{PRELOAD}=".encode())
    if first < 0:
        return
    room = shown.index(b"\0", first) - first
    text = b"\0".join(f"{name}={value}".encode() for name, value in own.items())
    assert len(text) <= room, "there is no room for the environment of a rank"
    ctypes.memmove(start + first, text.ljust(room, b"\0"), room)


def main() -> int:
    """Do what `torch.distributed.run` does with these options, on this machine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc_per_node", type=int, required=True)
    parser.add_argument("--master_port", type=int, required=True)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    preload(os.environ[PRELOAD].split())
    return run_ranks(args.script, args.arguments, args.nproc_per_node, args.master_port)


if __name__ == "__main__":
    sys.exit(main())
