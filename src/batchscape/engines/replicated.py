"""What engines share whose ranks each hold the whole model, and exchange gradients through DDP."""

# Annotations stay objects here: DDP checks those of its hook by identity.

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from batchscape.config import InProcess, Optimizer
from batchscape.engines.plain import PlainEngine
from batchscape.engines.precision import autocast
from batchscape.engines.reach import unreached
from batchscape.errors import BatchscapeError
from batchscape.models.undisturbed import undisturbed
from batchscape.text import list_text

_PROBED_SAMPLES = 2
"""Samples of the first micro-batch that show whether a parameter may get no gradient. Few, because
many may together use every branch; two, because batch statistics need two."""


class ReplicatedEngine(PlainEngine):
    """One gradient exchange an optimizer step, overlapped with the last backward.

    The exchange sums gradients (its hook replaces DDP's own average): the loss is already
    divided by the global number of labels, so a sum over micro-steps and ranks is the gradient
    of the whole batch.

    DDP waits for every gradient, so where the first samples leave a parameter without one, zero
    times every parameter is added to the loss of the exchanging micro-step.
    """

    def __init__(
        self, module: nn.Module, config: InProcess, optimizer: Optimizer, precision: str
    ) -> None:
        if config.compile:
            # Micro-steps have few sizes (those of the stages, and parts of one where the noise is
            # sampled), each worth code of its own: one code for all would be slower in every step.
            module.compile(dynamic=False)
        super().__init__(module, optimizer, precision)
        self.exchange_is_whole = False
        """Whether the last bucket of this optimizer step was given to the exchange."""
        self._wrapped: DistributedDataParallel | None = None
        self._adds_zeros: bool | None = None

    def close(self) -> None:
        """Drop the wrapped model, so that the process group can be ended."""
        # The reducer of a live DDP module joins a gloo thread and may wait for it for ever.
        self._wrapped = None
        super().close()

    def _exchange_through(self, wrapped: DistributedDataParallel) -> None:
        """Let a DDP module sum gradients, count their bytes and set the marks."""
        wrapped.register_comm_hook(self, _sum_over_ranks)
        self._wrapped = wrapped
        self.gradient_bytes = sum(p.nbytes for p in self.module.parameters() if p.requires_grad)

    def _begin_micro_step(self, inputs: Tensor, labels: Tensor) -> None:
        """Learn from the first micro-batch whether a parameter may get no gradient."""
        if self._wrapped is not None and self._adds_zeros is None:
            first_samples = slice(_PROBED_SAMPLES)
            with undisturbed(self.module), autocast(self._device_type, self._precision):
                loss, _ = self.forward(inputs[first_samples], labels[first_samples])
            # All ranks add zeros where one has such a parameter.
            self._adds_zeros = self._is_so_anywhere(bool(unreached(self.module, loss)))
        self.exchange_is_whole = False

    def _reaching_all(self, loss: Tensor, *, last: bool) -> Tensor:
        """Add zero times every parameter to the loss of the exchanging micro-step, if needed."""
        if last and self._adds_zeros:
            for parameter in self.module.parameters():
                if parameter.requires_grad:
                    loss = loss + parameter.reshape(-1)[:0].sum()
        return loss

    def _end_micro_step(self, loss: Tensor, *, last: bool) -> None:
        """Set the marks that come after a backward."""
        if last and self._wrapped is None:
            self.marks.gradients_ready()
        elif last:
            if not self.exchange_is_whole:
                raise BatchscapeError(
                    "with several ranks, parameters that the first samples used must have a part "
                    "in the loss of the last micro-step of every optimizer step; on this rank "
                    f"these have none: {list_text(unreached(self.module, loss), 'and', 5)}. "
                    "Add zero times their sum to the model's loss, or train on one rank"
                )
            self.marks.exchange_ends()

    def _is_so_anywhere(self, here: bool) -> bool:
        """Return whether a condition holds on some rank; on all ranks together."""
        highest = self._one * float(here)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        return bool(highest)


def _sum_over_ranks(
    engine: ReplicatedEngine, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket over the ranks, as DDP's hook; count its bytes, mark the first and the last."""
    gradients = bucket.buffer()
    engine.exchanged_bytes += gradients.nbytes
    if bucket.index() == 0:
        engine.marks.exchange_begins()
    if bucket.is_last():
        engine.exchange_is_whole = True
        engine.marks.gradients_ready()
    work = dist.all_reduce(gradients, async_op=True)
    summed: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda future: future.value()[0]
    )
    return summed
