"""All that `make gpu` measures, most valuable first, as far as the time goes.

A part whose figures are there, whole, of this commit and this card is left out, so that the same
command goes on where the last one ended. Of a part that the limit ends, what it has saved stays.

    python benchmarks/gpu/measure.py [--limit-s 560] [PART ...]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
from results import is_whole

HERE = Path(__file__).parent
PARTS = {
    "tests": ("run_tests.py", "tests"),
    "runs": ("run_tests.py", "runs"),
    "recorder_overhead_cuda": ("recorder_overhead_cuda.py",),
    "variants": ("variants.py",),
    "peers_compiled": ("peers.py", "--compile"),
    "peers_eager": ("peers.py",),
    "gpt2_step_time": ("gpt2_step_time.py",),
    "training": ("training.py",),
    "adamw_kernels": ("adamw_kernels.py",),
    "critical_batch": ("critical_batch.py",),
}
"""Script and arguments by the name of its file of results."""
LIMIT_S = 560.0
STOP_S = 20.0
"""For a part to end in order, once it was told to."""


def run_part(command: tuple[str, ...], limit_s: float) -> int | None:
    """Return the exit code of a part; None where the limit ended it."""
    script, *arguments = command
    # A session of its own: what it has started ends with it.
    process = subprocess.Popen([sys.executable, HERE / script, *arguments], start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of all parts together")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART")
    options = parser.parse_args()
    end = time.monotonic() + options.limit_s
    states = {}
    for part in options.parts or PARTS:
        if not options.parts and torch.cuda.is_available() and is_whole(part):
            states[part] = "there, of this commit"
            continue
        rest_s = end - time.monotonic()
        if rest_s <= 0:
            states[part] = "left"
            continue
        code = run_part(PARTS[part], rest_s)
        by_code = {None: "ended by the limit", 0: "done"}
        states[part] = by_code.get(code, f"failed with code {code}")
    print("\n".join(f"{part}: {state}" for part, state in states.items()))
    if not set(states.values()) <= {"done", "there, of this commit"}:
        sys.exit("make gpu: not all is measured; the same command goes on")


if __name__ == "__main__":
    main()
