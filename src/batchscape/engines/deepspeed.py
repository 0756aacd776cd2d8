"""DeepSpeed with ZeRO."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from batchscape.config import DeepSpeed, Optimizer
from batchscape.engines.base import Reported
from batchscape.engines.deepspeed_setup import deepspeed_on
from batchscape.engines.distributed import follow_first_rank
from batchscape.engines.optimizers import build_optimizer, clip_gradients, set_hyperparameters
from batchscape.engines.zero import (
    Arrivals,
    bytes_of_exchange,
    gather_state,
    observed,
    restore_state,
)
from batchscape.geometry import BatchGeometry
from batchscape.interop.write import deepspeed_config
from batchscape.measure.clock import NoMarks, StepMarks
from batchscape.record.heartbeat import Phase, beat

if find_spec("deepspeed") is None:
    # It is imported later, once the device is known; a missing one is reported now.
    raise ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed")


class DeepSpeedEngine:
    """A step of DeepSpeed's own engine, with the last micro-step set by the loop.

    Its divisions are kept out: neither by micro-steps nor by ranks, as the loss is already divided
    by the global number of labels. Stage 3 cannot do without the one by ranks: there the loss is
    multiplied by their number.

    Stages 0 and 1 exchange gradients once an optimizer step, stages 2 and 3 in every micro-step,
    as no rank keeps a whole gradient until the next. Counted is what each rank gives to the sum of
    gradients: all of them, and in stage 3 the padding to a multiple of the ranks. That stages 1
    and 2 gather parameters after every optimizer step, and stage 3 in every forward and backward,
    is no exchange of gradients and is not counted.

    ZeRO keeps the weights that it updates in float32, so float64 has no place in it.

    In stages 2 and 3 gradients are exchanged in the order in which they arrive, and sums of ranks
    that differ in it are wrong without an error: there every parameter must have a gradient in
    every micro-step. In stages 0 and 1 one without is given zeros.

    An update whose gradient is not finite is skipped in stages 1 to 3: so the library does it.
    """

    def __init__(
        self,
        module: nn.Module,
        config: DeepSpeed,
        optimizer: Optimizer,
        precision: str,
        geometry: BatchGeometry,
    ) -> None:
        self.module = module
        self.exchanged_bytes = 0
        self.marks: StepMarks = NoMarks()
        self.skipped: Tensor | None = None
        self._stage = stage = config.zero_stage
        self._ranks = geometry.data_parallel_size
        self._alone = self._ranks == 1
        self._precision = precision
        self._device = next(module.parameters()).device
        self.gradient_bytes = 0 if self._alone else bytes_of_exchange(module, stage, self._ranks)
        self.exchanges_every_micro_step = stage >= 2 and not self._alone
        self.gradients_are_whole = stage == 0
        self.micro_gradients_are_whole = True
        self.state_is_whole = stage < 3
        self.gradient_scale = float(self._ranks) if stage == 3 else 1.0
        self._sent = 0
        """Gradient bytes given to the exchange in this micro-step."""
        self._last: bool | None = None
        """Whether this micro-step is the last; None outside of backwards."""
        self._begins = True
        """Whether the next micro-step is the first of an optimizer step."""
        self._arrivals = Arrivals(module, stage) if stage >= 2 else None
        with ExitStack() as opening:
            self._library = opening.enter_context(deepspeed_on(self._device, alone=self._alone))
            self._optimizer = build_optimizer(optimizer, module)
            self._engine = self._library.initialize(
                model=module,
                optimizer=self._optimizer,
                config=self._settings(geometry, optimizer),
                dist_init_required=False,
            )[0]
            self._wrap_collectives(opening)
            self._opened = opening.pop_all()

    def micro_step(self, inputs: Tensor, labels: Tensor, weight: float, *, last: bool) -> Tensor:
        """Do one forward and backward."""
        if self._begins and not self._alone:
            follow_first_rank(self.module)
        self._begins = last
        self._engine.set_gradient_accumulation_boundary(last)
        loss: Tensor = self._engine(inputs, labels)[0]
        self._sent, self._last = 0, last
        beat(Phase.BACKWARD)
        self._engine.backward(loss * (weight * self.gradient_scale), scale_wrt_gas=False)
        self._last = None
        if last and not self._alone:
            self.marks.exchange_ends()
        return loss.detach()

    def optimizer_step(self, settings: Optimizer, factor: float) -> Tensor:
        """Clip the whole gradient, update the parameters, clear the gradients."""
        set_hyperparameters(self._optimizer, settings, factor)
        if self._stage == 0:
            self._complete_gradients()
            norm = clip_gradients(self.module, settings.gradient_clip_norm)
            self._engine.step()
            return norm
        self._engine.optimizer.clip_grad = settings.gradient_clip_norm or 0.0
        self._engine.step()
        self.skipped = torch.tensor(not self._engine.was_step_applied(), device=self._device)
        return torch.as_tensor(self._engine.get_global_grad_norm(), device=self._device)

    def forward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses and the right predictions.

        In stage 3 ranks give each other the parameters as they go, and must go the same way.
        """
        # A call, for the hooks that gather parameters.
        loss, right = self.module(inputs, labels)
        return loss, right

    def forget_gradients(self) -> None:
        """Drop the gradients of the micro-steps since the last optimizer step."""
        if self._stage == 0:
            self.module.zero_grad(set_to_none=True)
            return
        zero = self._engine.optimizer
        zero.zero_grad(set_to_none=True)
        if self._stage < 3:
            for group in list(zero.all_grad_tensors):
                zero.all_grad_tensors[group] = None
            for group in list(zero.averaged_gradients):
                zero.averaged_gradients[group] = None

    def reported(self) -> Reported:
        """Return the geometry that DeepSpeed has."""
        return Reported(
            data_parallel_size=self._engine.dp_world_size,
            micro_batch_size=self._engine.train_micro_batch_size_per_gpu(),
            gradient_accumulation_steps=self._engine.gradient_accumulation_steps(),
            global_batch_size=self._engine.train_batch_size(),
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds; ranks give rank 0 their parts of the optimizer."""
        return gather_state(self._library, self._engine, self.module, self._stage)

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, on as many ranks."""
        restore_state(self._library, self._engine, self.module, self._stage, state)

    def close(self) -> None:
        """Drop the model and DeepSpeed's engine, and undo what they changed elsewhere."""
        self._engine.destroy()
        del self._engine, self._optimizer
        self.module = nn.Identity()
        self.marks = NoMarks()
        self._opened.close()

    def _settings(self, geometry: BatchGeometry, optimizer: Optimizer) -> dict[str, Any]:
        """Return the generated configuration, with what only this loop may ask for."""
        settings = deepspeed_config(
            geometry,
            zero_stage=self._stage,
            precision=self._precision,
            # Without ZeRO it clips, but does not tell the norm.
            gradient_clip_norm=optimizer.gradient_clip_norm if self._stage else None,
        )
        zero = settings["zero_optimization"]
        # No buffer needs to be larger than the model.
        elements = sum(p.numel() for p in self._trained())
        zero["reduce_bucket_size"] = min(zero["reduce_bucket_size"], elements)
        # Or the linear layers of every model in this process would be another function for ever.
        zero["memory_efficient_linear"] = False
        if self._stage < 3:
            settings["gradient_allreduce_op"] = "sum"
        return settings

    def _wrap_collectives(self, opening: ExitStack) -> None:
        """Count the gradients that collectives exchange, and mark the end of a backward."""
        backend = self._library.comm.comm.cdb
        for name in ("all_reduce", "reduce_scatter_tensor"):
            setattr(backend, name, observed(getattr(backend, name), self._count_gradients))
            # Back to the method of its class.
            opening.callback(delattr, backend, name)
        reduce = self._engine.allreduce_gradients

        def after_backward(*arguments: object, **keywords: object) -> None:
            """Replace the engine's own method, which ends a backward with the exchange."""
            if self._arrivals is not None:
                self._arrivals.check()
            if self._last:
                self._complete_gradients()
                self.marks.gradients_ready()
            reduce(*arguments, **keywords)

        self._engine.allreduce_gradients = after_backward

    def _count_gradients(self, gradients: Tensor) -> None:
        """Count what a collective is given during a backward."""
        if self._last is None:
            return
        if not self._alone:
            if self._last and not self._sent:
                self.marks.exchange_begins()
            self.exchanged_bytes += gradients.nbytes
        self._sent += gradients.nbytes

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def _complete_gradients(self) -> None:
        """Give a gradient of zero to trained parameters without one, where all keep theirs."""
        if self._stage < 2:
            for parameter in self._trained():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
