"""Ranks on CUDA that are short of memory, or overflow."""

from __future__ import annotations

import torch
from torch import Tensor

from batchscape.engines.ddp import DdpEngine
from batchscape.train import worker

SHARE = 0.02
"""Of the device's memory that a cramped rank may take."""
OVERFLOWS_AT = 3
"""Optimizer step, from 0, in which a gradient is too large for float16."""


def cramped(run_dir: str, rank: int) -> int:
    """Train with a small share of the device's memory."""
    torch.cuda.set_per_process_memory_fraction(SHARE, 0)
    return worker.main(run_dir, rank)


def overflowing(run_dir: str, rank: int) -> int:
    """Scale a loss beyond float16, once."""
    real = DdpEngine.micro_step
    calls = 0

    def micro_step(
        self: DdpEngine, inputs: Tensor, labels: Tensor, weight: float, *, last: bool
    ) -> Tensor:
        nonlocal calls
        weight *= 1e30 if calls == OVERFLOWS_AT else 1.0
        calls += 1
        return real(self, inputs, labels, weight, last=last)

    DdpEngine.micro_step = micro_step  # type: ignore[method-assign]
    return worker.main(run_dir, rank)
