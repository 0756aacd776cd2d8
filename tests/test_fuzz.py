"""Whatever a configuration says, there is a valid plan or a clear message, soon."""

import io
import random
import re
import resource
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from rich.console import Console

from batchscape.cli import main
from batchscape.config import RunConfig
from batchscape.data.corpus import prepare
from batchscape.errors import BatchscapeError
from batchscape.plan.build import make_plan
from batchscape.plan.forecast import SweepForecast
from batchscape.plan.machine import Machine
from batchscape.plan.table import plan_table
from fuzzing import Bases, mutated, random_line

FAULTS = Path(__file__).parent / "faults"
LONGEST_S = 20.0
"""CPU time of one case: each is a few milliseconds, unless it runs away."""
MOST_MEMORY_GIB = 1.0
"""That all cases together may add."""
RAW = re.compile(
    r"Traceback|object at 0x|Error\(|^'[^']*'$|NoneType|has no attribute|unsupported operand"
    r"|not subscriptable|unhashable|maximum recursion|codec can't"
)
"""What Python says to programmers, and not to users."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return Bases(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FAULTS)


def check_message(message):
    """A message has words in it, for a person."""
    assert len(message.strip()) > 10, message
    assert not RAW.search(message), message
    assert len(message) < 20_000, f"{len(message)} characters: {message[:300]}"


def plan_or_message(grid, machine):
    """Do what `batchscape plan` does with a grid but predict; return whether there is a plan."""
    try:
        plan = make_plan(grid, machine, prepare)
    except BatchscapeError as error:
        check_message(str(error))
        return False
    nothing = SweepForecast({}, len(plan.specs), len(plan.specs), None, None)
    output = plan_table(plan, nothing)
    Console(file=io.StringIO(), width=160).print(output)
    assert plan.specs
    assert len(plan.cells) + plan.repeated == len(grid.cells)
    for spec in plan.specs:
        steps = [stage.samples / stage.geometry.global_batch_size for stage in spec.stages]
        assert spec.optimizer_steps == sum(steps)
        assert spec.config == RunConfig.from_mapping(spec.config.to_mapping())
    for rejection in plan.rejections:
        check_message(rejection.reason)
    return True


def fuzz_configurations(bases, count, seed):
    """Try random configurations; return how many had a plan."""
    machine = Machine(cpu_cores=2, cpu_name="two cores")
    planned = 0
    for number in range(count):
        grid, changes = mutated(bases, random.Random(f"{seed} {number}"))
        began = time.process_time()
        try:
            planned += plan_or_message(grid, machine)
        except Exception as error:
            error.add_note(f"case {number} of seed {seed}: {changes}")
            raise
        assert time.process_time() - began < LONGEST_S, (number, changes)
    return planned


def fuzz_lines(bases, count, seed):
    """Try random command lines in this process; return how many had a plan."""
    planned = 0
    for number in range(count):
        lines = random_line(bases, random.Random(f"line {seed} {number}"))
        began = time.process_time()
        out, err = io.StringIO(), io.StringIO()
        try:
            with redirect_stdout(out), redirect_stderr(err):
                code = main(["plan", *lines])
        except SystemExit as leaving:
            code = leaving.code
        except Exception as error:
            error.add_note(f"line {number} of seed {seed}: {lines}")
            raise
        try:
            check_end(code, out.getvalue(), err.getvalue())
        except AssertionError as error:
            error.add_note(f"line {number} of seed {seed}: {lines}")
            raise
        assert time.process_time() - began < LONGEST_S, (number, lines)
        planned += code == 0
    return planned


def check_end(code, out, err):
    """A plan and code 0, or a message and code 2."""
    assert code in {0, 2}, (code, err)
    if code == 0:
        assert "Runs: " in out or "batchscape" in out
    else:
        check_message(err)


@pytest.mark.slow
def test_what_is_changed_at_random_can_be_planned(bases):
    machine = Machine(cpu_cores=2, cpu_name="two cores")
    assert all(plan_or_message(grid, machine) for grid in bases.grids)


@pytest.mark.slow
def test_random_configurations_and_command_lines(bases):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    planned = fuzz_configurations(bases, 1_000, seed=1) + fuzz_lines(bases, 20, seed=1)
    added_gib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    assert planned > 50
    assert added_gib < MOST_MEMORY_GIB
