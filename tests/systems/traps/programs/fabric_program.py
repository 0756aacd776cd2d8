"""Loops of Lightning Fabric's users: what its documentation shows, and what is right."""

from __future__ import annotations

import warnings
from typing import Any

import problem
import torch
from lightning_fabric import Fabric
from torch import Tensor

MAX_NORM = 0.5


def accumulated(fabric: Fabric, how: str) -> Tensor:
    """Accumulate one global batch and return its gradient."""
    plain = problem.model()
    module, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for step, (x, y) in enumerate(problem.micro_batches()):
        last = step == problem.ACCUMULATION - 1
        with fabric.no_backward_sync(module, enabled=not last):
            loss = problem.loss_sum(module, x, y)
            if how == "mean of means":
                loss = loss / len(y) / problem.ACCUMULATION
            elif how == "not divided":
                loss = loss / len(y)
            else:
                loss = loss * fabric.world_size / sum(problem.COUNTS)
            fabric.backward(loss)
    if how == "clipped once":
        fabric.clip_gradients(module, optimizer, max_norm=MAX_NORM)
    gradient = plain.weight.grad
    assert gradient is not None
    return gradient


def main() -> None:
    """Try everything once."""
    warnings.simplefilter("ignore")
    # Under torchrun, Fabric takes ranks and rendezvous from the environment.
    fabric = Fabric(accelerator="cpu", devices=problem.RANKS, strategy="ddp", precision="64-true")
    fabric.launch()
    true = problem.whole_gradient()
    clipped = true * min(1.0, MAX_NORM / float(true.norm()))
    means = problem.mean_of_means()
    found: dict[str, Any] = {"accumulation": problem.ACCUMULATION}
    for how in ("right", "mean of means", "not divided", "clipped once"):
        gradient = accumulated(fabric, how)
        expected = clipped if how == "clipped once" else true
        found[how] = {
            "error": problem.apart(gradient, expected),
            "from mean of means": problem.apart(gradient, means),
        }
    problem.tell(**found)
    problem.leave()


main()
