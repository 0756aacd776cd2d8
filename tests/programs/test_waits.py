"""Times of programs on a machine that is not theirs alone."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchscape.analysis.hardware import add_machines
from batchscape.programs import rows as rows_module
from batchscape.programs.metrics import Log
from batchscape.programs.rows import RowWriter
from batchscape.record.files import read_json_lines
from batchscape.record.folder import RunFolder
from batchscape.record.status import Status
from batchscape.record.tables import load
from batchscape.record.timing import BUSY, BUSY_PCT

# Computes in a process that it starts, and sleeps itself.
SCRIPT = """
import os, subprocess, sys, time
from batchscape.recorder import Recorder
os.sched_setaffinity(0, {int(sys.argv[1])})
compute = "while True: input(); sum(range(2_000_000)); print(flush=True)"
pipe = subprocess.PIPE
worker = subprocess.Popen([sys.executable, "-S", "-c", compute], stdin=pipe, stdout=pipe, bufsize=0)
recorder = Recorder(world_size=1)
for step in range(1, 5):
    worker.stdin.write(b"\\n")
    worker.stdout.readline()
    recorder.step(step, loss=1 / step)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not tell")
def test_a_program_that_shares_its_core_has_no_valid_times(sweep):
    core = min(os.sched_getaffinity(0))
    loop = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    loops = [subprocess.Popen([sys.executable, "-S", "-c", loop]) for _ in range(3)]
    try:
        sweep.script(SCRIPT)
        result = sweep.run(sweep.settings(str(core)))
    finally:
        for process in loops:
            process.kill()
            process.wait()
    assert [run.status for run in result.runs] == [Status.COMPLETED]
    runs = load(sweep.folder.path).runs
    (waited,) = runs["core_wait_pct"]
    # Three others take three quarters of the core, and whatever else runs here only adds to it.
    assert 2 * BUSY_PCT < waited <= 100
    assert runs["processor_time_s"].item() > 0
    (run,) = add_machines(runs).to_dict("records")
    assert runs["launch.timing_valid"].item()
    assert not run["timing_valid"]
    assert run["timing_note"] == BUSY
    assert BUSY in sweep.printed


class Waits:
    """Waits for a core that began at an instant and went on, by a clock that is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.since_s = math.inf
        monkeypatch.setattr(rows_module.time, "monotonic", lambda: self.now_s)

    def processors_since(self, _: float) -> float:
        return 3.0

    def share_since(self, begin_s: float) -> float:
        assert begin_s < self.now_s
        return max(self.now_s - max(begin_s, self.since_s), 0.0) / (self.now_s - begin_s)


@pytest.fixture
def waits(monkeypatch) -> Waits:
    return Waits(monkeypatch)


@pytest.fixture
def writer(plan, settings, waits, tmp_path):
    (spec,) = plan(settings()).specs
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()

    def make(attempt: int = 0) -> RowWriter:
        made = RowWriter(folder, spec, attempt, goes_on=attempt > 0)
        made.waits = waits
        return made

    def read() -> list[float | None]:
        rows = list(read_json_lines(folder.lines("steps")))
        for row in rows:
            step_s = row.get("step_time_s")
            assert row["processor_time_s"] == (None if step_s is None else 3.0 * step_s)
        return [row["core_wait_s"] for row in rows]

    return make, read


def log_of(times_s: dict[int, float | None], evaluation_s: float | None = None) -> Log:
    steps = [
        {"optimizer_step": step} | ({} if took_s is None else {"step_time_s": took_s})
        for step, took_s in times_s.items()
    ]
    last = max(times_s)
    evals = [{"optimizer_step": last, "evaluation_s": evaluation_s}] if evaluation_s else []
    return Log(steps, evals)


def test_steps_have_the_share_of_the_time_in_which_they_came(writer, waits):
    make, read = writer
    rows = make()
    waits.since_s = 3.0
    waits.now_s = 2.0
    rows.write(log_of({1: 1.0, 2: 1.0}))
    waits.now_s = 4.0
    rows.write(log_of({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}))
    waits.now_s = 6.0
    rows.write(log_of({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 0.5, 6: 1.5}))
    assert read() == pytest.approx([0, 0, 0.5, 0.5, 0.5, 1.5])
    rows.write(log_of({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 0.5, 6: 1.5}))
    assert read() == pytest.approx([0, 0, 0.5, 0.5, 0.5, 1.5]), "what was measured stays"


@pytest.mark.parametrize(
    ("log", "waited"),
    [
        # 100 s of calm start-up, and 4 s of training that are disturbed.
        (log_of({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}), [1.0] * 4),
        # Every second step is logged: they took 8 s, of which the last 4 are disturbed.
        (log_of({2: 2.0, 4: 2.0}), [1.0] * 2),
        # So do those with the evaluation between them.
        (log_of({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}, evaluation_s=4.0), [0.5] * 4),
        # Where a time is not known, the whole time has to do: 4 of 104 s.
        (log_of({1: None, 2: 1.0}), [None, 4 / 104]),
    ],
)
def test_a_log_that_comes_whole_at_the_end_is_not_thinned_by_the_start(writer, waits, log, waited):
    make, read = writer
    rows = make()
    waits.now_s, waits.since_s = 104.0, 100.0
    rows.write(log)
    assert read() == pytest.approx(waited)


def test_steps_of_an_earlier_attempt_keep_their_waits(writer, waits):
    make, read = writer
    waits.now_s, waits.since_s = 2.0, 1.0
    rows = make()
    waits.now_s = 4.0
    rows.write(log_of({1: 1.0, 2: 1.0}))
    assert read() == pytest.approx([1.0, 1.0])
    waits.since_s = math.inf
    rows = make(attempt=1)
    waits.now_s = 6.0
    rows.write(log_of({1: 1.0, 2: 1.0, 3: 1.0}))
    assert read() == pytest.approx([1.0, 1.0, 0.0])
