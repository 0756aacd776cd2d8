"""Whom a chaos test may kill: processes of its own launcher, and what they are doing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from batchscape.record.files import last_row

__all__ = ["KINDS", "PHASES", "Victim", "find_victims", "phases_of"]

KINDS = ("launcher", "fork server", "worker", "rank")
"""A worker is the one process of a run of one rank; a rank is one of two or more."""
PHASES = ("boot", "start", "training", "checkpoint", "sealing")
"""Moments of a run; `boot` is before any run has a process."""


@dataclass(frozen=True)
class Victim:
    """A living process of the launcher's tree."""

    kind: str
    process: psutil.Process
    run: Path | None = None
    """Folder of the run that the process belongs to."""


def find_victims(launcher: int) -> list[Victim]:
    """Return the processes of one launcher that are known by what they are."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(launcher)
        if root.status() == psutil.STATUS_ZOMBIE:
            return []
        found.append(Victim("launcher", root))
        for process in _descendants(root):
            with contextlib.suppress(psutil.Error, OSError, ValueError):
                victim = _known(process, launcher)
                if victim is not None:
                    found.append(victim)
    return found


def _descendants(process: psutil.Process) -> Iterator[psutil.Process]:
    """Yield what `children` returns; that looks at every process of the machine."""
    for task in Path(f"/proc/{process.pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                yield (found := psutil.Process(child))
                yield from _descendants(found)


def _known(process: psutil.Process, launcher: int) -> Victim | None:
    if process.status() == psutil.STATUS_ZOMBIE:
        return None
    output = Path(f"/proc/{process.pid}/fd/1").readlink()
    if output.name == "log.txt" and output.parent.parent.name == "runs":
        ranks = json.loads((output.parent / "launch.json").read_text())["world_size"]
        return Victim("worker" if ranks == 1 else "rank", process, output.parent)
    is_server = "batchscape.launch.forkserver" in " ".join(process.cmdline())
    if is_server and process.ppid() == launcher:
        return Victim("fork server", process)
    return None


def phases_of(sweep: Path, victims: list[Victim]) -> dict[Path, str]:
    """Return what each run is doing that has a process, or is being sealed."""
    found = {}
    busy = {victim.run for victim in victims if victim.run is not None}
    with contextlib.suppress(OSError):
        for run in (sweep / "runs").iterdir():
            with contextlib.suppress(OSError, ValueError, KeyError):
                phase = _phase(run, has_process=run in busy)
                if phase is not None:
                    found[run] = phase
    return found


def _phase(run: Path, *, has_process: bool) -> str | None:
    names = {path.name for path in run.iterdir()}
    is_open = "steps.jsonl" in names
    if is_open and any(n.startswith("outcome-") or n.endswith(".parquet") for n in names):
        return "sealing"
    if not has_process:
        return None
    checkpoints = run / "checkpoints"
    if checkpoints.is_dir() and any(p.name.endswith(".tmp") for p in checkpoints.iterdir()):
        return "checkpoint"
    last = last_row(run / "steps.jsonl")
    attempt = json.loads((run / "launch.json").read_text())["attempt"]
    return "training" if last.get("attempt") == attempt else "start"
