"""Hugging Face accelerate: an `Accelerator` around the model and its optimizer."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from batchscape.config import Accelerate, Optimizer
from batchscape.engines.base import Reported
from batchscape.engines.environment import environment
from batchscape.engines.optimizers import clip_gradients
from batchscape.engines.replicated import ReplicatedEngine
from batchscape.errors import ConfigError
from batchscape.geometry import BatchGeometry
from batchscape.record.heartbeat import Phase, beat

_MIXED_PRECISION = {"bfloat16": "bf16", "float16": "fp16"}
"""Accelerate's names; it leaves other precisions to the model."""

_LAUNCHER_PREFIXES = ("ACCELERATE_", "FSDP_", "PMI_", "OMPI_COMM_", "MV2_COMM_", "MPI_LOCAL")
"""Prefixes of variables that accelerate reads settings, or ranks in place of torchrun's, from."""
_RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class AccelerateEngine(ReplicatedEngine):
    """The calls of a script that trains with accelerate: `prepare`, `accumulate`, `backward`.

    `Accelerator.backward` divides by its number of accumulation steps; the loss is multiplied by
    the same number before.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Accelerate,
        optimizer: Optimizer,
        precision: str,
        geometry: BatchGeometry,
    ) -> None:
        super().__init__(module, config, optimizer, precision)
        if precision == "float16" and self._device_type == "cpu":
            raise ConfigError(
                "engine=accelerate cannot train with engine.precision=float16 on a CPU: accelerate "
                "would train in float32 there; use bfloat16 or float32, or engine=ddp"
            )
        _forget_states()
        with environment(
            _rank_variables(self._one.device), without=_LAUNCHER_PREFIXES + _RANK_NAMES
        ):
            self._accelerator = Accelerator(
                mixed_precision=_MIXED_PRECISION.get(precision, "no"),
                cpu=self._device_type == "cpu",
                gradient_accumulation_plugin=GradientAccumulationPlugin(
                    num_steps=geometry.gradient_accumulation_steps, sync_with_dataloader=False
                ),
            )
            self._prepared, self._optimizer = self._accelerator.prepare(module, self._optimizer)
        if self._accelerator.scaler is not None:
            self._scaler = self._accelerator.scaler
        if isinstance(self._prepared, DistributedDataParallel):
            self._exchange_through(self._prepared)

    def micro_step(self, inputs: Tensor, labels: Tensor, weight: float, *, last: bool) -> Tensor:
        """Do one forward and backward; exchange in the last one only."""
        accelerator = self._accelerator
        divisor = accelerator.gradient_accumulation_steps
        self._begin_micro_step(inputs, labels)
        if last:
            # Accelerate exchanges in every `divisor`th micro-step that it counts. A rehearsed step
            # has fewer, and a step that samples the noise may have more.
            accelerator.step = divisor - 1
        exchange_context = nullcontext() if last else accelerator.no_sync(self._prepared)
        with exchange_context, accelerator.accumulate(self._prepared):
            loss: Tensor = self._prepared(inputs, labels)[0]
            weighted = self._reaching_all(loss * (weight * divisor), last=last)
            beat(Phase.BACKWARD)
            accelerator.backward(weighted)
        self._end_micro_step(loss, last=last)
        return loss.detach()

    def forget_gradients(self) -> None:
        """Drop the gradients of the micro-steps since the last optimizer step, and their count."""
        super().forget_gradients()
        self._accelerator.step = 0

    def reported(self) -> Reported:
        """Return accelerate's processes and accumulation; one rank where it wrapped no model."""
        accelerator = self._accelerator
        return Reported(
            data_parallel_size=1 if self._wrapped is None else accelerator.num_processes,
            gradient_accumulation_steps=accelerator.gradient_accumulation_steps,
        )

    def close(self) -> None:
        """Drop the wrapped model and what accelerate keeps for the whole process."""
        super().close()
        del self._prepared, self._optimizer
        self._accelerator.free_memory()
        _forget_states()

    def _clip(self, largest_norm: float | None) -> Tensor:
        if largest_norm is None:
            self._accelerator.unscale_gradients()
            return clip_gradients(self.module, None)
        norm: Tensor = self._accelerator.clip_grad_norm_(self.module.parameters(), largest_norm)
        return norm

    def _update(self) -> None:
        self._optimizer.step()


def _rank_variables(device: torch.device) -> dict[str, str]:
    """Return the variables that tell accelerate of the process group.

    Accelerate learns from them whether there is a group to join, and trains alone without them.
    """
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # else accelerate sets it
    if not dist.is_initialized():
        return threads
    rank, size = dist.get_rank(), dist.get_world_size()
    local_rank = rank if device.index is None else device.index
    ranks = zip(_RANK_NAMES, (rank, size, local_rank, size), strict=True)
    return threads | {"MASTER_ADDR": "localhost"} | {name: str(value) for name, value in ranks}


def _forget_states() -> None:
    """Reset the states that all accelerators of a process share."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
