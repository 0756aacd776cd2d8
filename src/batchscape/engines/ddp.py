"""PyTorch DistributedDataParallel, and a single rank without it."""

from __future__ import annotations

from contextlib import nullcontext

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from batchscape.config import Ddp, Optimizer
from batchscape.engines.base import Reported
from batchscape.engines.replicated import ReplicatedEngine
from batchscape.geometry import BatchGeometry
from batchscape.record.heartbeat import Phase, beat


class DdpEngine(ReplicatedEngine):
    """DDP around the model where there are several ranks, and nothing around it else."""

    def __init__(
        self,
        module: nn.Module,
        config: Ddp,
        optimizer: Optimizer,
        precision: str,
        geometry: BatchGeometry,
    ) -> None:
        super().__init__(module, config, optimizer, precision)
        if geometry.data_parallel_size > 1:
            wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
            self._exchange_through(wrapped)

    def micro_step(self, inputs: Tensor, labels: Tensor, weight: float, *, last: bool) -> Tensor:
        """Do one forward and backward; exchange in the last one only."""
        wrapped = self._wrapped
        self._begin_micro_step(inputs, labels)
        with nullcontext() if wrapped is None or last else wrapped.no_sync():
            with self._casts.forward(last=last):
                loss: Tensor = (wrapped or self.module)(inputs, labels)[0]
            self._casts.keep_order(loss)
            beat(Phase.BACKWARD)
            self._scaler.scale(self._reaching_all(loss * weight, last=last)).backward()
        self._end_micro_step(loss, last=last)
        return loss.detach()

    def reported(self) -> Reported:
        """Return the ranks of DDP's process group; it has no notion of a batch."""
        if self._wrapped is None:
            return Reported(data_parallel_size=1)
        return Reported(dist.get_world_size(self._wrapped.process_group))
