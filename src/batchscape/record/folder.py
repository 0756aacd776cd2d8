"""Every path of a run, named in one place.

::

    runs/<run_id>/
        config.json          what the run is: identity, geometry, resolved settings (RunSpec)
        status.json          status, reason, attempts, summary, seal (RunStatus)
        environment.json     where it ran: versions, revision, hardware, threads
        prediction.json      memory and time that were predicted before it ran
        launch.json          how its processes were started: devices, threads, concurrency
        command.json         of engine=command: the command, and the batch that it really used
        program/             of engine=command: output of the program, `{run_dir}`
        gradient_sketch.npy  sketch of the first optimizer step's gradient, to measure distances by
        steps.jsonl          one row an optimizer step     -> steps.parquet when sealed
        evals.jsonl          one row an evaluation         -> evals.parquet
        ranks.jsonl          one row a rank and attempt    -> ranks.parquet
        outcome-<rank>.json  how a rank ended; folded into status.json by the launcher
        log.txt              output of its processes
        checkpoints/         state to go on from
        branches/step-<n>/   state and rows that other runs begin with, until all of them are over
        beginning/           copy of another run's branch point, where it began; until it is over
        wandb.json           record of the rows sent to Weights & Biases
        .claim.<n>           the holder of the run, or its release; gone once it is sealed
        .lock                held while a launcher or a rank works here; gone once it is sealed
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from batchscape.text import did_you_mean, near_names

_MAX_NAMES = 3


def no_runs(sweep_dir: Path) -> str:
    """Say that a folder holds no runs, and suggest sweep folders beside it.

    Parameters
    ----------
    sweep_dir : Path

    Returns
    -------
    str
        The message; folders whose name continues with a hash come first among the suggestions.
    """
    problem = "holds no runs" if sweep_dir.is_dir() else "is no folder"
    problem = problem if sweep_dir.exists() else "does not exist"
    text = f"{sweep_dir} {problem}; a sweep folder has a 'runs' folder with runs in it"
    sibling_names = {path.parent.name for path in sweep_dir.parent.glob("*/runs")}
    names = sorted(sibling_names - {sweep_dir.name})
    names_with_hash = [name for name in names if name.startswith(f"{sweep_dir.name}-")]
    near_names_first = dict.fromkeys(
        [*names_with_hash, *near_names(sweep_dir.name, names, _MAX_NAMES)]
    )
    folders = [str(sweep_dir.with_name(name)) for name in [*near_names_first][:_MAX_NAMES]]
    return text + did_you_mean(folders).removesuffix(".")


FORMAT_VERSION = 4
"""Version of the layout and of the columns; a reader refuses another one."""

CHECKPOINTS_KEPT = 2
"""Newest checkpoints of a run that is open; none are kept once it is sealed."""

TABLES = ("steps", "evals", "ranks")
"""Tables that every run folder holds."""

CHECKPOINT = re.compile(r"step-(\d+)-([0-9a-f]{16})\.pt")
"""Name of a checkpoint: optimizer steps done, first digits of its SHA-256."""


class _Below:
    """A path below the folder of a run or of a sweep, by its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder | SweepFolder, owner: object) -> Path:
        """Return the path in a folder."""
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    config = _Below("config.json")
    """Specification of the run (`record.spec`)."""
    status = _Below("status.json")
    """Status, attempts, summary and seal of the run."""
    environment = _Below("environment.json")
    """Software and hardware of the run."""
    prediction = _Below("prediction.json")
    """Memory and time that were predicted before the first attempt."""
    launch = _Below("launch.json")
    """How the processes of the latest attempt were started."""
    command = _Below("command.json")
    """Command of a program (`engine=command`), and the batch that it really used."""
    program = _Below("program")
    """Folder that a program (`engine=command`) writes to."""
    log = _Below("log.txt")
    """Output of its processes."""
    checkpoints = _Below("checkpoints")
    """Folder of the checkpoints."""
    branches = _Below("branches")
    """Folder of the branch points."""
    beginning = _Below("beginning")
    """Folder of the state and the rows of another run, from which it began."""
    mirror = _Below("wandb.json")
    """Record of the rows sent to Weights & Biases."""
    gradient_sketch = _Below("gradient_sketch.npy")
    """Sketch of the gradient of the first optimizer step."""
    lock = _Below(".lock")
    """Lock of the launcher that has begun the run, and of its ranks; `record.claims`."""

    @property
    def checkpoint_step(self) -> int | None:
        """Optimizer steps in the newest checkpoint, by its name; None without one."""
        if not self.checkpoints.is_dir():
            return None
        names = (CHECKPOINT.fullmatch(path.name) for path in self.checkpoints.iterdir())
        return max((int(name[1]) for name in names if name), default=None)

    def branch_point(self, optimizer_steps: int) -> Path:
        """Folder of the state, and of the rows, that other runs begin with."""
        return self.branches / f"step-{optimizer_steps:09d}"

    def branch_points(self) -> list[Path]:
        """Folders of the states that are there whole."""
        return sorted(self.branches.glob("step-*")) if self.branches.is_dir() else []

    def lines(self, table: str) -> Path:
        """Rows of a table while the run is open."""
        return self.path / f"{table}.jsonl"

    def parquet(self, table: str) -> Path:
        """Rows of a table once the run is sealed."""
        return self.path / f"{table}.parquet"

    @property
    def written_at(self) -> float:
        """When its processes last wrote a row or to the log; seconds since the epoch, 0: never."""
        paths = [self.log, *map(self.lines, TABLES)]
        return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)

    def outcome(self, rank: int) -> Path:
        """How a rank ended."""
        return self.path / f"outcome-{rank}.json"

    def outcomes(self) -> list[Path]:
        """All outcomes that ranks have left."""
        return list(self.path.glob("outcome-*.json"))


@dataclass(frozen=True)
class SweepFolder:
    """Paths of one sweep."""

    path: Path

    runs = _Below("runs")
    """Folder of the run folders."""
    lock = _Below(".lock")
    """Lock that the launchers at work share; see `record.locks`."""
    writing_lock = _Below(".writing.lock")
    """Lock that is held for moments, to write the plan or to add run folders."""
    plan = _Below("plan.csv")
    """The latest plan: every cell, launched or rejected. Derived from the run folders."""
    wandb = _Below("wandb")
    """Folder of everything that Weights & Biases writes for the sweep."""
    mirror = _Below("wandb.json")
    """Record of the report of the sweep sent to Weights & Biases."""
    report = _Below("report")
    """Folder of the tables, figures and the page that shows them."""
    slurm = _Below("slurm")
    """Folder of the orders for jobs of a cluster, and of their output."""

    @property
    def search(self) -> SweepFolder:
        """Sweep of the trials of a search, which no analysis pools."""
        return SweepFolder(self.path / "search")

    trials = _Below("trials.csv")
    """Trials of a search with their values and outcomes, derived from its storage."""
    grid_results = _Below("measured.json")
    """Results of the grid around the best trials of a search."""
    search_lock = _Below(".search.lock")
    """Lock that a search holds while it works here, also between its launches."""
    space = _Below("search.json")
    """Space of a search, which may not change, and its number of trials."""

    def run(self, run_id: str) -> RunFolder:
        """Folder of one run."""
        return RunFolder(self.runs / run_id)

    def run_folders(self) -> list[RunFolder]:
        """All run folders, by name."""
        if not self.runs.is_dir():
            return []
        with os.scandir(self.runs) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
        return [self.run(name) for name in names]
