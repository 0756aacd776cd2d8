"""DeepSpeed: what its configuration does with omitted numbers, and its own accumulation."""

from __future__ import annotations

import os
from typing import Any

import problem
import torch

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig


def resolved(**numbers: int) -> dict[str, Any]:
    """Return the batch that a configuration stands for, or what DeepSpeed says against it."""
    try:
        config = DeepSpeedConfig(dict(numbers))
    except AssertionError as error:
        return {"refused": str(error)}
    return {
        "train_batch_size": config.train_batch_size,
        "train_micro_batch_size_per_gpu": config.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
    }


def used_gradient(how: str, **settings: float) -> torch.Tensor:
    """Return the gradient that one optimizer step of plain descent used."""
    module = problem.model().float()
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        config={
            "train_micro_batch_size_per_gpu": problem.MICRO,
            "gradient_accumulation_steps": problem.ACCUMULATION,
            "zero_optimization": {"stage": 0},
            **settings,
        },
    )
    for x, y in problem.micro_batches():
        loss = problem.loss_sum(engine, x.float(), y.float())
        if how == "right":
            loss = loss * problem.RANKS * problem.ACCUMULATION / sum(problem.COUNTS)
        else:
            loss = loss / len(y)
        engine.backward(loss)
        engine.step()
    return (problem.START - module.weight.detach()).double()


def main() -> None:
    """Try everything once."""
    # Or it compiles a kernel for a minute, which only its inference uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    micro, batch = "train_micro_batch_size_per_gpu", "train_batch_size"
    found: dict[str, Any] = {
        "accumulation": problem.ACCUMULATION,
        "18 by 4": resolved(**{batch: 18, micro: 4}),
        "16 by 4": resolved(**{batch: 16, micro: 4}),
        "18 alone": resolved(**{batch: 18}),
    }
    true, means = problem.whole_gradient(), problem.mean_of_means()
    for how in ("right", "mean of means"):
        gradient = used_gradient(how, gradient_clipping=0.0)
        found[how] = {
            "error": problem.apart(gradient, true),
            "from mean of means": problem.apart(gradient, means),
        }
    found["norm"] = float(true.norm())
    found["norm by default"] = float(used_gradient("right").norm())
    found["norm told not to clip"] = float(used_gradient("right", gradient_clipping=0.0).norm())
    problem.tell(**found)
    problem.leave()


main()
