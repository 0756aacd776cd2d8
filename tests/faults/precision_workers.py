"""Ranks that overflow, or tell of their arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from batchscape.engines.ddp import DdpEngine
from batchscape.train import worker

OVERFLOWS_AT = 3
"""Optimizer step, from 0, in which a gradient is too large for float16."""


def overflowing(run_dir: str, rank: int) -> int:
    """Scale a loss of the last rank beyond float16, once."""
    real = DdpEngine.micro_step
    calls = 0

    def micro_step(
        self: DdpEngine, inputs: Tensor, labels: Tensor, weight: float, *, last: bool
    ) -> Tensor:
        nonlocal calls
        if calls == OVERFLOWS_AT and (rank == 1 or self._wrapped is None):
            weight *= 1e30
        calls += 1
        return real(self, inputs, labels, weight, last=last)

    DdpEngine.micro_step = micro_step  # type: ignore[method-assign]
    return worker.main(run_dir, rank)


def telling(run_dir: str, rank: int) -> int:
    """Train, then print how float32 matrices are multiplied."""
    code = worker.main(run_dir, rank)
    print(f"float32 products: {torch.get_float32_matmul_precision()}")
    return code
