"""A grid from a command line, and a machine of two cores."""

import pytest

from batchscape.compose import compose
from batchscape.plan.build import make_plan
from batchscape.plan.machine import Machine
from batchscape.record.spec import DataIdentity

TWO_CORES = Machine(cpu_cores=2, cpu_name="two cores")


def named_data(config):
    """Stand for prepared data: as large as the digits, with the name as its content."""
    return DataIdentity(
        manifest_hash=f"content of {config.name}",
        folder="nowhere",
        train_samples=1437,
        held_out_samples=360,
        classes=256,
        task="next_token",
    )


def grid_of(*arguments):
    """Compose a command line of the verb `sweep`."""
    grid = compose(arguments, "batchscape sweep")
    assert grid is not None
    return grid


def plan_of(*arguments, machine=TWO_CORES):
    """Plan a command line without touching a disk."""
    return make_plan(grid_of(*arguments), machine, named_data)


@pytest.fixture
def two_cores():
    """A machine of two cores and no CUDA device."""
    return TWO_CORES


@pytest.fixture
def grid():
    """`grid_of`."""
    return grid_of


@pytest.fixture
def plan():
    """`plan_of`."""
    return plan_of
