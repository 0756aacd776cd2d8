"""Forwards that leave no trace in what a model trains from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["forgotten"]


@contextmanager
def forgotten(module: nn.Module) -> Iterator[None]:
    """Put random state and buffers back at the end, such as the statistics of a `BatchNorm`.

    Parameters
    ----------
    module : nn.Module
        Already on its device.
    """
    devices = {p.device.index for p in module.parameters() if p.device.type == "cuda"}
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
