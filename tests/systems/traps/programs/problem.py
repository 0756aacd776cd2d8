"""A global batch of 8 samples with uneven counts of labels, and its gradient by plain torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

COUNTS = (2, 9, 3, 8, 2, 7, 4, 9)
"""Labels of each sample."""
MICRO = 2
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
ACCUMULATION = len(COUNTS) // MICRO // RANKS
START = torch.tensor([[0.5, -1.0, 2.0]], dtype=torch.float64)


def model() -> nn.Linear:
    """Return a linear model at its start."""
    module = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    module.weight.data.copy_(START)
    return module


def samples() -> list[tuple[Tensor, Tensor]]:
    """Return inputs and labels of each sample."""
    draw = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(n, 3, generator=draw, dtype=torch.float64),
            torch.randn(n, 1, generator=draw, dtype=torch.float64),
        )
        for n in COUNTS
    ]


def micro_batches(rank: int = RANK) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what a rank is given in its micro-steps."""
    everything = samples()
    for step in range(ACCUMULATION):
        first = (step * RANKS + rank) * MICRO
        own = everything[first : first + MICRO]
        yield torch.cat([x for x, _ in own]), torch.cat([y for _, y in own])


def loss_sum(module: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the squared errors."""
    return ((module(inputs) - labels) ** 2).sum()


def gradient_of(batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the gradient of the mean over all labels of some micro-batches, on one process."""
    alone = model()
    loss = sum(loss_sum(alone, x, y) for x, y in batches)
    (loss / sum(len(y) for _, y in batches)).backward()
    assert alone.weight.grad is not None
    return alone.weight.grad


def everyones() -> list[list[tuple[Tensor, Tensor]]]:
    """Return the micro-batches of every rank."""
    return [list(micro_batches(rank)) for rank in range(RANKS)]


def whole_gradient() -> Tensor:
    """Return the gradient of the mean over all labels of the global batch."""
    return gradient_of([batch for own in everyones() for batch in own])


def mean_of_means() -> Tensor:
    """Return the mean over ranks and micro-steps of the gradients of their own means."""
    each = [gradient_of([batch]) for own in everyones() for batch in own]
    return torch.stack(each).mean(dim=0)


def apart(found: Tensor, expected: Tensor) -> float:
    """Return the distance of two gradients over the norm of the second."""
    return float((found - expected).norm() / expected.norm())


def tell(**found: object) -> None:
    """Write what rank 0 found where the caller asked for it."""
    if RANK == 0:
        Path(sys.argv[1]).write_text(json.dumps({"ranks": RANKS, **found}))


def leave() -> NoReturn:
    """Leave the process group and end, without taking the interpreter down.

    Threads of a group that a wrapped model still holds may abort a process whose interpreter
    is being taken down.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)
