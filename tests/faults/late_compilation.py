"""A worker that refuses to compile anew once it trains."""

from __future__ import annotations

import torch

from batchscape.train import loop, worker


def refused(run_dir: str, rank: int) -> int:
    """Fail where a model is compiled anew in an optimizer step."""
    real = loop.Training._step

    def step(self: loop.Training, k: int) -> None:
        torch._dynamo.config.error_on_recompile = True
        real(self, k)

    loop.Training._step = step  # a planted check
    return worker.main(run_dir, rank)
