"""Which of the allocator's figures count as the training's, on an allocator of a few lines.

What real devices report is held by tests/gpu.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from batchscape.measure import memory_cuda
from batchscape.measure.memory import CudaMemory

GIB = 2**30


@dataclass
class Allocator:
    """Keeps what it has reserved, and the peaks since the last reset, as CUDA's does."""

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    emptied: int = 0

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
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
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
