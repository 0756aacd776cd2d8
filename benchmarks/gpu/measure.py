"""All that `make gpu` measures, most valuable first, as far as the time goes.

A part that ended well at this commit on this card is left out, so that the same command goes on
where the last one ended; one that was begun before comes after those that were not. What a part has
saved when the limit ends it lies beside its results, in a file of the same name ending in
`.so_far.json`.

    python benchmarks/gpu/measure.py [--limit-s 560] [PART ...]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
PARTS = {
    "tests": ("run_tests.py", "tests"),
    "runs": ("run_tests.py", "runs"),
    "step_costs_compiled": ("step_costs.py",),
    "step_kernels_compiled": ("step_kernels.py",),
    "variants": ("variants.py",),
    "peers_compiled": ("peers.py", "--compile"),
    "peers_eager": ("peers.py",),
    "gpt2_step_time": ("gpt2_step_time.py",),
    "training": ("training.py",),
    "step_costs_eager": ("step_costs.py", "--eager"),
    "adamw_kernels": ("adamw_kernels.py",),
    "critical_batch": ("critical_batch.py",),
}
"""Script and arguments by the name of its file of results."""
LIMIT_S = 560.0
STOP_S = 20.0
"""For a part and all that it has started to end in order, once they were told to."""


def states_of(parts: list[str]) -> dict[str, str]:
    """Return `done`, `begun` or `new` of each part; no parts where there is no device.

    A process of its own asks: nothing but a part may hold a context on the device.
    """
    code = "import json, sys, results; print(json.dumps(results.states(sys.argv[1:])))"
    command = [sys.executable, "-c", code, *parts]
    answer = subprocess.check_output(command, cwd=HERE, text=True)
    states: dict[str, str] = json.loads(answer.splitlines()[-1])
    return states


def run_part(command: tuple[str, ...], limit_s: float) -> int | None:
    """Return the exit code of a part; None where the limit ended it, with all that it started."""
    script, *arguments = command
    process = subprocess.Popen([sys.executable, HERE / script, *arguments], start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            end = time.monotonic() + STOP_S
            while time.monotonic() < end:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.1)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of all parts together")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    options = parser.parse_args()
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    # Whoever ends this command ends the part that runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    end = time.monotonic() + options.limit_s
    before = states_of(list(PARTS))
    parts = options.parts or sorted(PARTS, key=lambda part: before.get(part) == "begun")
    missing = []
    for part in parts:
        if before.get(part) == "done" and not options.parts:
            print(f"{part}: done before, at this commit on this card", flush=True)
            continue
        rest_s = end - time.monotonic()
        code = run_part(PARTS[part], rest_s) if rest_s > 0 else None
        if before:
            note = "import results, sys; results.note_end(*sys.argv[1:])"
            subprocess.run([sys.executable, "-c", note, part, str(code)], cwd=HERE, check=True)
        if code != 0:
            missing.append(part)
        by_code = {None: "not done within the limit", 0: "done" if before else "nothing to do"}
        print(f"{part}: {by_code.get(code, f'failed with code {code}')}", flush=True)
    if missing:
        sys.exit(f"make gpu: not done: {', '.join(missing)}; the same command goes on")


if __name__ == "__main__":
    main()
