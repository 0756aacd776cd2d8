"""Loops of `accelerate` users: what is often written, and what is right."""

from __future__ import annotations

import warnings
from typing import Any

import problem
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

MAX_NORM = 0.5
STEPS = 5


def accelerator(accumulation: int, **settings: Any) -> Accelerator:
    """Return an accelerator that accumulates."""
    plugin = GradientAccumulationPlugin(num_steps=accumulation, **settings)
    made = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    # The state is shared by all accelerators of a process: what one loop left would count.
    made.gradient_state.plugin_kwargs = plugin.to_kwargs()
    made.gradient_state._set_sync_gradients(True)
    made.step = 0
    return made


def accumulated(how: str) -> Tensor:
    """Accumulate one global batch and return its gradient."""
    it = accelerator(problem.ACCUMULATION)
    module = it.prepare(problem.model())
    for x, y in problem.micro_batches():
        with it.accumulate(module):
            loss = problem.loss_sum(module, x, y)
            if how == "mean of means":
                loss = loss / len(y)
            else:
                # Undoes the mean over ranks and the division by the accumulation.
                loss = loss * it.num_processes * problem.ACCUMULATION / sum(problem.COUNTS)
            it.backward(loss)
            if how == "clipped in every micro-step" or (
                how == "clipped once" and it.sync_gradients
            ):
                it.clip_grad_norm_(module.parameters(), MAX_NORM)
    gradient = it.unwrap_model(module).weight.grad
    assert gradient is not None
    return gradient


def schedule(how: str) -> int:
    """Return the steps that a schedule has taken after some optimizer steps."""
    it = accelerator(problem.ACCUMULATION)
    plain = problem.model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda k: 1 / (1 + k))
    module, optimizer = it.prepare(plain, optimizer)
    used = it.prepare(scheduler) if how == "prepared" else scheduler
    for _ in range(STEPS):
        for x, y in problem.micro_batches():
            with it.accumulate(module):
                it.backward(problem.loss_sum(module, x, y) / len(y))
                optimizer.step()
                if how != "where gradients are exchanged" or it.sync_gradients:
                    used.step()
                optimizer.zero_grad()
    return int(scheduler.last_epoch)


def window(*, sync_with_dataloader: bool) -> dict[str, Any]:
    """Go twice over six micro-batches, four a step; return steps and the size of gradients."""
    it = accelerator(4, sync_with_dataloader=sync_with_dataloader)
    plain = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.0)
    ones = [torch.ones(1) for _ in range(6 * it.num_processes)]
    module, optimizer, loader = it.prepare(plain, optimizer, DataLoader(ones, batch_size=1))
    sizes = []
    for _ in range(2):
        for x in loader:
            with it.accumulate(module):
                it.backward(module(x).mean())
                if it.sync_gradients:
                    grad = it.unwrap_model(module).weight.grad
                    assert grad is not None
                    sizes.append(float(grad))
                optimizer.step()
                optimizer.zero_grad()
    return {"optimizer_steps": len(sizes), "gradients": sizes}


def main() -> None:
    """Try everything once."""
    warnings.simplefilter("ignore")
    true = problem.whole_gradient()
    clipped = true * min(1.0, MAX_NORM / float(true.norm()))
    found: dict[str, Any] = {"accumulation": problem.ACCUMULATION, "optimizer_steps": STEPS}
    for how in ("right", "mean of means", "clipped in every micro-step", "clipped once"):
        gradient = accumulated(how)
        expected = clipped if how.startswith("clipped") else true
        found[how] = {"error": problem.apart(gradient, expected)}
        if how == "mean of means":
            found[how]["as predicted"] = problem.apart(gradient, problem.mean_of_means())
    found["schedule"] = {
        how: schedule(how)
        for how in ("prepared", "in every micro-step", "where gradients are exchanged")
    }
    found["window"] = window(sync_with_dataloader=True)
    found["window off"] = window(sync_with_dataloader=False)
    problem.tell(**found)
    problem.leave()


main()
