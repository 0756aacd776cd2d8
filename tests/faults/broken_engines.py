"""Engines that break the contract, each in one respect: planted in the process of a rank."""

# mypy: disable-error-code="method-assign, assignment"

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from batchscape.config import Ddp, Optimizer
from batchscape.engines.base import Reported
from batchscape.engines.ddp import DdpEngine
from batchscape.engines.fsdp import FsdpEngine
from batchscape.geometry import BatchGeometry
from batchscape.models.build import LossModule
from batchscape.train import loop
from batchscape.train.examination import ModelColumns


def undeclared_exchange() -> None:
    """Exchange in every micro-step, and say so nowhere; the count is honest."""
    exchange = FSDPModule.set_requires_gradient_sync

    def always(self: FSDPModule, _last: bool, **more: Any) -> None:
        exchange(self, True, **more)

    FSDPModule.set_requires_gradient_sync = always


def hidden_exchange() -> None:
    """Exchange in every micro-step, say so nowhere, and count the last one only."""
    undeclared_exchange()
    count = FsdpEngine._count

    def counts_last(self: FsdpEngine, exchanged: int) -> None:
        before = self.exchanged_bytes
        count(self, exchanged)
        if not self._is_last:
            self.exchanged_bytes = before

    FsdpEngine._count = counts_last


def mean_of_means() -> None:
    """Average over the labels of each micro-batch, then over micro-batches and ranks."""
    parts = int(os.environ["PARTS"])
    real = DdpEngine.micro_step

    def forward(self: LossModule, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(inputs)
        loss = functional.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="mean"
        )
        return loss, loss.new_zeros(())

    def micro_step(
        self: DdpEngine, inputs: Tensor, labels: Tensor, weight: float, *, last: bool
    ) -> Tensor:
        return real(self, inputs, labels, 1.0 / parts, last=last) / parts / weight

    # Such a loss is refused before the first step; here the curves alone must tell.
    loop.examine = lambda *_args, **_settings: ModelColumns()  # type: ignore[attr-defined]
    LossModule.forward = forward
    DdpEngine.micro_step = micro_step


def alone() -> None:
    """Let every rank train by itself, and say so."""
    _build_for_one_rank()


def alone_and_lying() -> None:
    """Let every rank train by itself, and report the ranks that were asked for."""
    ranks_given = _build_for_one_rank()
    DdpEngine.reported = lambda self: Reported(ranks_given[id(self)])


def _build_for_one_rank() -> dict[int, int]:
    real = DdpEngine.__init__
    ranks_given: dict[int, int] = {}

    def build(
        self: DdpEngine,
        module: nn.Module,
        config: Ddp,
        optimizer: Optimizer,
        precision: str,
        geometry: BatchGeometry,
    ) -> None:
        ranks_given[id(self)] = geometry.data_parallel_size
        one = BatchGeometry(1, 1, geometry.micro_batch_size, geometry.gradient_accumulation_steps)
        real(self, module, config, optimizer, precision, one)

    DdpEngine.__init__ = build
    return ranks_given


def clips_its_part() -> None:
    """Clip each rank's part of the gradient by the norm of that part; report the whole norm."""
    real = FsdpEngine._clip

    def clip(self: FsdpEngine, largest_norm: float | None) -> Tensor:
        norm = real(self, None)
        parts = [p.grad.to_local() for p in self._trained]
        norm_of_part = torch.nn.utils.get_total_norm(parts)
        if largest_norm is not None:
            for part in parts:
                part.mul_(torch.clamp(largest_norm / (norm_of_part + 1e-6), max=1.0))
        return norm

    FsdpEngine._clip = clip


def forgets_moments() -> None:
    """Leave the optimizer's moments out of what is restored."""
    real = FsdpEngine.restore

    def restore(self: FsdpEngine, state: dict[str, Any]) -> None:
        real(self, state)
        self._optimizer.state.clear()

    FsdpEngine.restore = restore
