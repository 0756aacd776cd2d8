"""Which of the allocator's figures count as the training's, on an allocator of a few lines.

What real devices report is held by tests/gpu.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from batchscape.measure import memory_cuda
from batchscape.measure.memory_cuda import CudaMemory
from batchscape.measure.memory_limit import memory_limit

GIB = 2**30


@dataclass
class Allocator:
    """Keeps what it has reserved, and the peaks since the last reset, as CUDA's does."""

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    emptied: int = 0
    retries: int = 0
    workspace: int = 0
    """Part of what is allocated that cuBLAS works in."""

    def take(self, gib: int) -> None:
        """Allocate and release."""
        self.peak_allocated = max(self.peak_allocated, self.allocated + gib * GIB)
        self.reserved = max(self.reserved, self.allocated + gib * GIB)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def keep(self, gib: int) -> None:
        self.take(gib)
        self.allocated += gib * GIB

    def reset(self, _device: torch.device) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def empty(self) -> None:
        self.emptied += 1
        self.reserved = self.allocated

    def multiply(self, gib: int) -> None:
        """Multiply for the first time, for which cuBLAS is given a workspace."""
        self.keep(gib)
        self.workspace += gib * GIB

    def clear_workspaces(self) -> None:
        self.allocated -= self.workspace
        self.workspace = 0


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    answers = {
        "init": lambda: None,
        "reset_peak_memory_stats": made.reset,
        "max_memory_allocated": lambda _: made.peak_allocated,
        "memory_allocated": lambda _: made.allocated,
        "max_memory_reserved": lambda _: made.peak_reserved,
        "memory_reserved": lambda _: made.reserved,
        "empty_cache": made.empty,
        # As torch has it: nothing of that name before the first allocation.
        "memory_stats": lambda _: {"num_alloc_retries": made.retries} if made.reserved else {},
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", made.clear_workspaces, raising=False
    )
    monkeypatch.setattr(memory_cuda, "_used_by_this_process", lambda _: made.reserved + GIB)
    return made


def first_step(memory: CudaMemory, allocator: Allocator) -> None:
    memory.phase("after_model")
    allocator.keep(1)
    memory.phase("outside")
    allocator.take(50)  # the evaluation before the first step
    memory.phase("first_backward")
    allocator.take(4)
    memory.phase("first_optimizer_step")
    allocator.keep(2)


def test_an_evaluation_after_the_first_step_leaves_reserved_memory_to_the_training(
    allocator: Allocator,
) -> None:
    memory = CudaMemory(torch.device("cuda", 0))
    first_step(memory, allocator)
    memory.phase("outside")
    allocator.take(60)
    memory.phase("steady")
    allocator.take(7)
    report = memory.report()
    assert report.peak_allocated_gib == 3 + 7
    assert report.peak_reserved_gib == 3 + 7
    assert report.device_used_gib == 3 + 7 + 1
    assert allocator.emptied == 2


def test_steady_steps_keep_what_is_reserved_and_later_evaluations_do_not_count(
    allocator: Allocator,
) -> None:
    memory = CudaMemory(torch.device("cuda", 0))
    first_step(memory, allocator)
    memory.phase("steady")
    allocator.take(5)
    emptied = allocator.emptied
    memory.phase("outside")
    allocator.take(2)  # fits into what is reserved: the training is seen on
    memory.phase("steady")
    allocator.take(6)
    memory.phase("outside")
    allocator.take(70)
    memory.phase("steady")
    allocator.take(5)
    report = memory.report()
    assert report.peak_reserved_gib == 3 + 6
    assert report.device_used_gib == 3 + 6 + 1
    assert report.peak_allocated_gib == 3 + 6
    assert allocator.emptied == emptied, "a timed step had to reserve its memory anew"


def test_what_cublas_works_in_is_told_apart_and_stays_in_the_peaks(allocator: Allocator) -> None:
    memory = CudaMemory(torch.device("cuda", 0))
    first_step(memory, allocator)
    allocator.multiply(8)
    memory.phase("steady")
    allocator.take(5)
    report = memory.report()
    assert report.workspace_gib == 8
    assert report.peak_allocated_gib == 3 + 8 + 5
    assert report.as_columns()["workspace_gib"] == 8


def test_products_of_the_examination_are_no_part_of_the_model(allocator: Allocator) -> None:
    memory = CudaMemory(torch.device("cuda", 0))
    memory.phase("after_model")
    allocator.keep(1)
    memory.phase("outside")
    allocator.multiply(8)
    memory.phase("after_model")
    memory.phase("outside")
    assert memory.report().allocated_after_model_gib == 1


def test_a_torch_that_cannot_give_workspaces_back_tells_none(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces")
    memory = CudaMemory(torch.device("cuda", 0))
    first_step(memory, allocator)
    report = memory.report()
    assert report.workspace_gib is None
    assert report.peak_allocated_gib == 1 + 4


def test_retries_of_the_allocator_count_in_training_steps(allocator: Allocator) -> None:
    memory = CudaMemory(torch.device("cuda", 0))
    first_step(memory, allocator)
    allocator.retries += 1
    memory.phase("outside")
    allocator.retries += 10  # an evaluation of larger batches
    memory.phase("steady")
    allocator.retries += 2
    memory.phase("outside")
    memory.phase("steady")
    allocator.retries += 4
    assert memory.report().allocator_retries == 1 + 2 + 4


@pytest.mark.parametrize(("before", "within"), [(1.0, 0.25), (0.5, 0.25), (0.1, 0.1)])
def test_a_limit_leaves_the_fraction_that_somebody_had_set(
    monkeypatch: pytest.MonkeyPatch, before: float, within: float
) -> None:
    """20 GiB of a device of 80, on which somebody had allowed a share."""
    fractions = [before]
    answers = {
        "get_device_properties": lambda _: SimpleNamespace(total_memory=80 * GIB),
        "get_per_process_memory_fraction": lambda _: fractions[-1],
        "set_per_process_memory_fraction": lambda fraction, _: fractions.append(fraction),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    with memory_limit(torch.device("cuda", 0), 20.0):
        assert fractions[-1] == within
    assert fractions[-1] == before
