"""Lightning Fabric around the model and its optimizer."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision, Precision
from lightning_fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning_fabric.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from batchscape.config import Fabric as FabricConfig
from batchscape.config import Optimizer
from batchscape.engines.base import Reported
from batchscape.engines.environment import environment
from batchscape.engines.optimizers import clip_gradients
from batchscape.engines.replicated import ReplicatedEngine
from batchscape.geometry import BatchGeometry
from batchscape.record.heartbeat import Phase, beat


class FabricEngine(ReplicatedEngine):
    """The calls of a script that trains with Fabric: `setup`, `no_backward_sync`, `backward`.

    Fabric has no notion of accumulation: it divides nothing, and exchanges where the script says.
    """

    def __init__(
        self,
        module: nn.Module,
        config: FabricConfig,
        optimizer: Optimizer,
        precision: str,
        geometry: BatchGeometry,  # noqa: ARG002  (Fabric takes the process group alone)
    ) -> None:
        super().__init__(module, config, optimizer, precision)
        # `Precision` changes nothing. For float64 Fabric has "64-true", which would round loss and
        # gradients to PyTorch's default type, float32.
        self._plugin = Precision()
        if precision == "float16":
            self._plugin = _Autocast("16-mixed", self._device_type, self._scaler)
        elif precision == "bfloat16":
            self._plugin = _Autocast("bf16-mixed", self._device_type)
        self._plain_optimizer = self._optimizer
        # Fabric reads arguments from variables LT_*, and sets OMP_NUM_THREADS where it is not set.
        with environment({"OMP_NUM_THREADS": str(torch.get_num_threads())}, without=("LT_",)):
            strategy: Strategy
            if dist.is_initialized():
                # Fabric reads only the device at this rank's index.
                devices = [self._one.device] * dist.get_world_size()
                strategy = DDPStrategy(
                    parallel_devices=devices,
                    cluster_environment=_ProcessGroup(),
                    precision=self._plugin,
                )
                cluster = None
            else:
                strategy = SingleDeviceStrategy(self._one.device, precision=self._plugin)
                # No cluster counts that Fabric may detect, as that of a job.
                cluster = LightningEnvironment()
            self._fabric = Fabric(accelerator=self._device_type, strategy=strategy, plugins=cluster)
            self._fabric.launch()
            self._prepared, self._optimizer = self._fabric.setup(module, self._optimizer)
        wrapped = next(
            (m for m in self._prepared.modules() if isinstance(m, DistributedDataParallel)), None
        )
        if wrapped is not None:
            self._exchange_through(wrapped)

    def micro_step(self, inputs: Tensor, labels: Tensor, weight: float, *, last: bool) -> Tensor:
        """Do one forward and backward; exchange in the last one only."""
        self._begin_micro_step(inputs, labels)
        with self._fabric.no_backward_sync(self._prepared, enabled=not last):
            loss: Tensor = self._prepared(inputs, labels)[0]
            beat(Phase.BACKWARD)
            self._fabric.backward(self._reaching_all(loss * weight, last=last))
        self._end_micro_step(loss, last=last)
        return loss.detach()

    def reported(self) -> Reported:
        """Return Fabric's ranks, one where it wrapped no model; it has no notion of a batch."""
        return Reported(1 if self._wrapped is None else self._fabric.world_size)

    def close(self) -> None:
        """Drop the wrapped model, so that the process group can be ended."""
        super().close()
        del self._prepared, self._optimizer, self._plain_optimizer, self._fabric

    def _clip(self, largest_norm: float | None) -> Tensor:
        if largest_norm is None:
            self._plugin.unscale_gradients(self._plain_optimizer)
            return clip_gradients(self.module, None)
        norm = self._fabric.clip_gradients(
            self._prepared, self._optimizer, max_norm=largest_norm, error_if_nonfinite=False
        )
        return cast("Tensor", norm)  # None is for a clipped value

    def _update(self) -> None:
        self._optimizer.step()


class _Autocast(MixedPrecision):
    """Fabric's mixed precision, with the two differences that it takes to train like `ddp`."""

    def convert_input(self, data: Any) -> Any:  # noqa: ANN401  (as Fabric declares it)
        """Return a micro-batch as it is: Fabric would round labels that are not integers, too."""
        return data

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the scale of the loss out, from gradients of fused optimizers too.

        Fabric refuses those, because they could do it by themselves.
        """
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)


class _ProcessGroup(ClusterEnvironment):
    """The ranks of the process group, which exist already. All count as those of one node."""

    @property
    def creates_processes_externally(self) -> bool:
        """Whether Fabric is to start no process."""
        return True

    @property
    def main_address(self) -> str:
        """Where ranks would meet, had they not."""
        return "localhost"

    @property
    def main_port(self) -> int:
        """The port there; none."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Whether there is a process group."""
        return dist.is_initialized()

    def world_size(self) -> int:
        """Ranks of the process group."""
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        """Leave the process group as it is."""

    def global_rank(self) -> int:
        """Rank of this process."""
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        """Leave the process group as it is."""

    def local_rank(self) -> int:
        """Rank within the node: the same, as there is one."""
        return dist.get_rank()

    def node_rank(self) -> int:
        """The only node."""
        return 0
