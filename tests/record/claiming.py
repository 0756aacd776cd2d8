"""A launcher as far as claims go, on a node of its own: `claiming.py FOLDER NODE RUNS SECONDS`.

It claims what it can get, works on it for a moment, and writes down when it began and ended. Its
`fcntl.flock` fails with ENOLCK in the folder, and its file system is shared: patched here, in this
process alone. Silence counts in tenths of a second.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import sys
import time
from pathlib import Path

from batchscape.record import claims
from batchscape.record.folder import SweepFolder


def refuse(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def main(folder: Path, node: str, runs: int, seconds: float) -> None:
    fcntl.flock = refuse
    claims.is_of_this_machine = lambda _: False
    claims._BEAT_S, claims._SILENT_S, claims._GAP_S = 0.1, 2.0, 0.5
    sweep, rng, end = SweepFolder(folder), random.Random(node), time.monotonic() + seconds
    while time.monotonic() < end:
        run = sweep.run(f"run-{rng.randrange(runs)}")
        claim = claims.CLAIMS.claim(run)
        if claim is None:
            time.sleep(0.01)
            continue
        me = f"{node}.{os.getpid()}"
        note(folder, f"begin {run.path.name} {me}")
        held = all(wait_and_renew(claim) for _ in range(rng.randrange(1, 8)))
        note(folder, f"{'end' if held else 'lost'} {run.path.name} {me}")
        claim.release()


def wait_and_renew(claim: claims.RunClaim) -> bool:
    time.sleep(0.04)
    return claim.renew()


def note(folder: Path, line: str) -> None:
    """Append a line at once, with the time of the one clock that all processes share here."""
    descriptor = os.open(folder / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{time.monotonic_ns()} {line}\n".encode())
    os.close(descriptor)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
