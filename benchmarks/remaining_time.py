"""How far the time that a sweep says it still takes is off, on shipped studies.

Each study is launched as a terminal would show it. What it says at a tenth, a quarter and a half of
its time is compared with the time that it then really took, its start included.

    python benchmarks/remaining_time.py [--studies fixed_global_batch fixed_global_batch_digits]
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import sys
import tempfile
import time

_LEFT = re.compile(rb"about ([^\x1b\r\n]*?) left")
_UNITS = {"h": 3600.0, "min": 60.0, "s": 1.0, "d": 86400.0}
_PARTS = (0.1, 0.25, 0.5)


def seconds(text: str) -> float:
    """Read a duration such as `1 min 20 s`."""
    return sum(
        float(number) * _UNITS[unit] for number, unit in re.findall(r"([\d.]+) ?(\w+)", text)
    )


def launched(study: str) -> tuple[float, list[tuple[float, float]]]:
    """Launch a study; return its time, and what was said when, in seconds since its begin."""
    said: list[tuple[float, float]] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "batchscape", "sweep", f"sweeps={study}", "tracker=none"]
        child, terminal = pty.fork()
        if child == 0:
            os.chdir(folder)
            os.environ["COLUMNS"] = "120"
            os.execv(command[0], command)  # noqa: S606  (ours)
        while True:
            try:
                content = os.read(terminal, 65536)
            except OSError:
                break
            if not content:
                break
            found = _LEFT.findall(content)
            if found:
                said.append((time.monotonic() - began, seconds(found[-1].decode())))
        _, code = os.waitpid(child, 0)
        if code:
            raise RuntimeError(f"{study} ended with {code}")
    return time.monotonic() - began, said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--studies", nargs="+", default=["fixed_global_batch_digits", "fewer_updates_digits"]
    )
    for study in parser.parse_args().studies:
        took_s, said = launched(study)
        print(f"{study}: {took_s:.0f} s; the first estimate came after {said[0][0]:.0f} s")
        for part in _PARTS:
            at_s, left_s = next(one for one in said if one[0] >= part * took_s)
            really_s = took_s - at_s
            off = 100 * (left_s / really_s - 1)
            print(f"  at {part:.0%}: said {left_s:.0f} s, took {really_s:.0f} s: {off:+.0f} %")


if __name__ == "__main__":
    main()
