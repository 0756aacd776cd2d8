"""Workers that sample the noise of the gradient wrongly, or refuse to."""

from __future__ import annotations

import torch
from torch import nn

from batchscape.engines import plain
from batchscape.measure.noise_scale import GradientSquares, NoiseSample
from batchscape.train import loop, worker


def forgotten_count(run_dir: str, rank: int) -> int:
    """Take the summands of the gradient for mean gradients."""

    def sample(small_batch_size: int, _: int, square_sum: torch.Tensor) -> NoiseSample:
        return NoiseSample(small_batch_size, 1, square_sum)

    loop.NoiseSample = sample  # type: ignore[misc,assignment]  # a planted fault
    return worker.main(run_dir, rank)


def after_clipping(run_dir: str, rank: int) -> int:
    """Record the norm of the gradient as it is after clipping."""
    real = plain.clip_gradients

    def clip_gradients(module: nn.Module, largest_norm: float | None) -> torch.Tensor:
        real(module, largest_norm)
        return real(module, None)

    plain.clip_gradients = clip_gradients  # type: ignore[attr-defined]  # a planted fault
    return worker.main(run_dir, rank)


def late_compilation(run_dir: str, rank: int) -> int:
    """Fail where a model is compiled anew in an optimizer step."""
    real = loop.Training._step

    def step(self: loop.Training, k: int) -> None:
        torch._dynamo.config.error_on_recompile = True  # type: ignore[attr-defined]
        real(self, k)

    loop.Training._step = step  # type: ignore[method-assign]  # a planted check
    return worker.main(run_dir, rank)


def accumulated(run_dir: str, rank: int) -> int:
    """Look at the gradient that has been accumulated so far, instead of the micro-step's."""

    def enter(self: GradientSquares) -> GradientSquares:
        self._norms = []
        self._hooks = [
            p.register_post_accumulate_grad_hook(lambda p: self._add(p.grad))
            for p in self._parameters
        ]
        return self

    GradientSquares.__enter__ = enter  # type: ignore[method-assign]  # a planted fault
    return worker.main(run_dir, rank)
