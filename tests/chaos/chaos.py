"""Kill what runs a sweep, again and again, and look at what is left: `make chaos`.

A sweep of short runs of one and two ranks is launched by the real command. At random moments the
launcher, the fork server, a worker or a rank is killed with SIGKILL, and the same command is given
again. Half of the runs begin as another one and go on from its state. In the end every cell has one
sealed record with the curve of an undisturbed sweep in which each run trains all of its steps, bit
for bit, and nothing else is left: no process, no held lock, no scratch, no half-written file.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import getpass
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from chaos_data import DELAY  # noqa: E402
from victims import KINDS, PHASES, Victim, find_victims, phases_of  # noqa: E402

from batchscape.record.folder import SweepFolder  # noqa: E402
from batchscape.record.status import RunStatus, Status  # noqa: E402
from batchscape.record.tables import load, read_table, verify_seal  # noqa: E402
from exact import assert_same_rows  # noqa: E402

SWEEP = (
    "data=custom",
    "data._target_=chaos_data.Points",
    "model=mlp",
    "model.hidden_sizes=[8]",
    "model.dropout=0.1",
    "engine.precision=float32",
    "batch.global_batch_size=16",
    "batch.data_parallel_size=1,2",
    "batch.micro_batch_size=8",
    "batch.gradient_accumulation_steps=null",
    "schedule=constant",
    "budget.samples=192,384",
    "measure.warmup_optimizer_steps=1",
    "evaluation.every_samples=64",
    "evaluation.samples=16",
    "measure.memory=false",
    "measure.noise_scale_every=null",
    "checkpoint.every_s=0.0",
    "launcher.device=cpu",
    "launcher.share_beginnings=true",
    "launcher.concurrent_runs=2",
    "tracker=none",
    # A killed rank that the launcher does not try again is a fault that stands otherwise.
    "--retry",
    "failed",
)
"""Four runs a seed, of 12 or 24 optimizer steps, with a checkpoint every four."""
CURVES = {
    "steps": ["optimizer_step", "samples", "tokens", "loss", "learning_rate", "gradient_norm"],
    "evals": ["optimizer_step", "samples", "eval_loss", "eval_accuracy", "eval_labels"],
}
_LOCK_FOLDERS = {"batchscape-launchers", "batchscape-devices"}
"""Stay among the temporary files of a machine, for launchers to come; nothing in them is held."""
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_LAUNCH_S = 300.0
_MOST_LAUNCHES_WITHOUT_PROGRESS = 20
_POLL_S = 0.02
_LONGEST_SEARCH_S = 60.0
"""Then a victim is taken in any moment: the one that was wanted has not come."""


@dataclass
class Counts:
    """What was done, and what came of it."""

    kills: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    sweeps: int = 0
    launches: int = 0
    reruns: int = 0
    sealed_runs: int = 0
    attempts: Counter[int] = field(default_factory=Counter)
    """Runs, by number of attempts."""
    from_checkpoint: int = 0
    """Runs with an attempt that went on from a checkpoint."""
    begun_again: int = 0
    """Runs with a later attempt that had to begin at step 0."""
    from_trunk: int = 0
    """Runs that began as another one."""

    def table(self) -> str:
        """Return the counts as lines of text."""
        by_kind = ", ".join(f"{self.kills[kind]} {kind}" for kind in KINDS)
        by_moment = ", ".join(f"{self.moments[phase]} {phase}" for phase in PHASES)
        attempts = ", ".join(f"{runs} with {n}" for n, runs in sorted(self.attempts.items()))
        return "\n".join(
            [
                f"kills: {self.kills.total()} ({by_kind})",
                f"moments of the kills: {by_moment}",
                f"sweeps: {self.sweeps}; launches: {self.launches}, of them reruns: {self.reruns}",
                f"runs sealed and verified: {self.sealed_runs}; attempts: {attempts}",
                f"runs that went on from a checkpoint: {self.from_checkpoint}; "
                f"begun again without one: {self.begun_again}; begun as another run: "
                f"{self.from_trunk}",
            ]
        )


class Chaos:
    """Launches, kills, launches again, and checks."""

    def __init__(self, root: Path, kills: int, seed: int, delay_s: float, seeds: int) -> None:
        self._root = root
        self._wanted = kills
        self._random = random.Random(seed)
        self._delay_s = delay_s
        self._seeds = seeds
        self._temporary = root / "tmp"
        self._temporary.mkdir()
        self._children: list[psutil.Process] = []
        self._deck: list[tuple[str, str]] = []
        self.counts = Counts()

    def run(self) -> Counts:
        """Do all of it."""
        undisturbed = self._root / "undisturbed"
        launched = self._launch(undisturbed, "launcher.share_beginnings=false", delay_s=0.0)
        self._await_end(launched, undisturbed)
        assert launched.returncode == 0, self._printed(undisturbed)
        self.counts.launches = 0
        while self.counts.kills.total() < self._wanted:
            sweep = self._root / f"sweep-{self.counts.sweeps}"
            self._disturb(sweep)
            self.counts.sweeps += 1
            self._check(sweep, undisturbed)
            shutil.rmtree(sweep)
        return self.counts

    def _disturb(self, sweep: Path) -> None:
        """Launch one sweep, with kills, until every run is sealed."""
        idle, sealed = 0, 0
        while True:
            launched = self._launch(sweep, delay_s=self._delay_s)
            while launched.poll() is None and self.counts.kills.total() < self._wanted:
                self._kill_something(launched, sweep)
            self._await_end(launched, sweep)
            before, sealed = sealed, _sealed(sweep)
            # One that was killed after its last seal may have left what the next clears away.
            if sealed == 4 * self._seeds and launched.returncode == 0:
                return
            self.counts.reruns += 1
            idle = idle + 1 if sealed == before else 0
            assert idle < _MOST_LAUNCHES_WITHOUT_PROGRESS, self._printed(sweep)

    def _launch(self, sweep: Path, *settings: str, delay_s: float) -> subprocess.Popen:
        self.counts.launches += 1
        environment = {
            **os.environ,
            DELAY: str(delay_s),
            "PYTHONPATH": str(HERE),
            "TMPDIR": str(self._temporary),
            "XDG_CACHE_HOME": str(self._root / "cache"),
        }
        varied = (f"seed=range(0,{self._seeds})", f"sweep_dir='{sweep}'", *settings)
        with (self._root / f"{sweep.name}.txt").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "batchscape", "sweep", *SWEEP, *varied],
                cwd=self._root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _kill_something(self, launched: subprocess.Popen, sweep: Path) -> None:
        """Wait for a random moment, and kill a random victim of it."""
        if not self._deck:
            # Each kind at each moment once, before any comes again.
            self._deck = [(kind, moment) for kind in KINDS for moment in ("any", *PHASES[1:])]
            self._random.shuffle(self._deck)
        kind, moment = self._deck[-1]
        pause_s = self._random.uniform(0.05, 4.0 if moment == "any" else 0.03)
        if moment == "any":
            _wait(launched, pause_s)
        deadline = time.monotonic() + _LONGEST_SEARCH_S
        while launched.poll() is None:
            victims = find_victims(launched.pid)
            phases = phases_of(sweep, victims)
            late = time.monotonic() > deadline
            wanted = "any" if late else moment
            chosen = [v for v in victims if v.kind == kind and _suits(v, wanted, phases)]
            if chosen:
                if moment != "any":
                    time.sleep(pause_s)
                self._kill(self._random.choice(chosen), phases)
                self._deck.pop()
                return
            time.sleep(_POLL_S)

    def _kill(self, victim: Victim, phases: dict[Path, str]) -> None:
        if victim.run is not None:
            phase = phases.get(victim.run, "start")
        else:
            # Of all runs that it carries, the one that is in the rarest moment.
            phase = max(phases.values(), key=PHASES.index, default="boot")
        with contextlib.suppress(psutil.NoSuchProcess):
            self._children += victim.process.children(recursive=True)
            victim.process.kill()
            self.counts.kills[victim.kind] += 1
            self.counts.moments[phase] += 1

    def _await_end(self, launched: subprocess.Popen, sweep: Path) -> None:
        try:
            launched.wait(_LONGEST_LAUNCH_S)
        except subprocess.TimeoutExpired:
            launched.kill()
            msg = f"the launcher hangs:\n{self._printed(sweep)}"
            raise AssertionError(msg) from None

    def _printed(self, sweep: Path) -> str:
        return (self._root / f"{sweep.name}.txt").read_text(errors="replace")[-4000:]

    def _check(self, sweep: Path, undisturbed: Path) -> None:
        self._check_processes()
        self._check_leftovers(sweep)
        self._check_records(sweep, undisturbed)

    def _check_processes(self) -> None:
        # This process adopts all orphans, so that whatever is left is below it.
        left = {*self._children, *psutil.Process().children(recursive=True)}
        _, alive = psutil.wait_procs(left, timeout=20)
        self._children.clear()
        assert not alive, f"processes are left: {[(p.pid, p.cmdline()) for p in alive]}"

    def _check_leftovers(self, sweep: Path) -> None:
        kept = {*_LOCK_FOLDERS, f"torchinductor_{getpass.getuser()}"}
        scratch = [path.name for path in self._temporary.iterdir() if path.name not in kept]
        assert not scratch, f"scratch is left: {scratch}"
        left = list((self._temporary / "batchscape-launchers").iterdir())
        assert not left, f"launchers are still announced: {left}"
        locks = [path for path in sweep.rglob("*") if path.name.endswith("lock")]
        for lock in [*locks, *(self._temporary / "batchscape-devices").iterdir()]:
            with lock.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        names = [str(path.relative_to(sweep)) for path in sweep.rglob("*")]
        wrong = [
            name
            for name in names
            if name.endswith((".tmp", ".jsonl", "/.lock"))
            or "/outcome-" in name
            or any(part in name for part in ("checkpoints", "branches", "beginning"))
        ]
        assert not wrong, f"files are left: {wrong}"

    def _check_records(self, sweep: Path, undisturbed: Path) -> None:
        folders = SweepFolder(sweep).run_folders()
        names = [folder.path.name for folder in folders]
        assert names == [f.path.name for f in SweepFolder(undisturbed).run_folders()]
        assert len(names) == 4 * self._seeds
        tables = load(sweep)
        assert not tables.damaged
        assert tables.runs["run_id"].tolist() == names
        for folder in folders:
            status = RunStatus.read(folder.status)
            assert status.status is Status.COMPLETED, (folder.path.name, status.reason)
            assert set(status.seal) >= {"steps.parquet", "evals.parquet", "ranks.parquet"}
            verify_seal(folder, status)
            expected = SweepFolder(undisturbed).run(folder.path.name)
            for table, columns in CURVES.items():
                ours, theirs = read_table(folder, table), read_table(expected, table)
                try:
                    assert_same_rows(ours[columns], theirs[columns])
                except AssertionError as error:
                    msg = f"{table} of {folder.path.name}: {error}"
                    raise AssertionError(msg) from None
            self._count(status)

    def _count(self, status: RunStatus) -> None:
        self.counts.sealed_runs += 1
        self.counts.attempts[len(status.attempts)] += 1
        self.counts.from_trunk += status.attempts[0].from_optimizer_step > 0
        later = [attempt.from_optimizer_step for attempt in status.attempts[1:]]
        self.counts.from_checkpoint += any(step > 0 for step in later)
        self.counts.begun_again += bool(later) and not all(step > 0 for step in later)


def _suits(victim: Victim, moment: str, phases: dict[Path, str]) -> bool:
    if moment == "any":
        return True
    if victim.run is not None:
        # A rank that seals is gone: the last that can be killed of it is a checkpoint.
        return phases.get(victim.run) == ("checkpoint" if moment == "sealing" else moment)
    return moment in phases.values()


def _wait(launched: subprocess.Popen, timeout_s: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        launched.wait(timeout_s)


def _sealed(sweep: Path) -> int:
    count = 0
    for folder in SweepFolder(sweep).run_folders():
        if folder.status.exists():
            count += RunStatus.read(folder.status).status.is_sealed
    return count


def main() -> None:
    """Run the test as a command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.004, help="seconds a sample")
    parser.add_argument("--seeds", type=int, default=6, help="of the runs of a sweep, 4 each")
    parser.add_argument("--dir", type=Path, help="new folder; default: a temporary one")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    parsed = parser.parse_args()
    # Orphans come to this process, and are found.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    root = parsed.dir or Path(tempfile.mkdtemp(prefix="batchscape-chaos-"))
    root.mkdir(exist_ok=True)
    began = time.monotonic()
    counts = Chaos(root, parsed.kills, parsed.seed, parsed.delay, parsed.seeds).run()
    shutil.rmtree(root)
    if parsed.json:
        print(json.dumps(vars(counts)))
    else:
        print(counts.table())
        print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
