"""Forwards that change neither buffers nor random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Buffer:
    """A buffer as it was."""

    owner: nn.Module
    name: str
    full_name: str
    """Its name in the whole model."""
    tensor: Tensor
    content: Tensor

    def has_changed(self) -> bool:
        """Whether its owner has another content by this name now."""
        current, before = getattr(self.owner, self.name, None), self.content
        if current is None or current.shape != before.shape or current.dtype != before.dtype:
            return True
        return not bool(((current == before) | (current.isnan() & before.isnan())).all())

    def restore(self) -> None:
        """Put tensor and content back; a forward may have assigned another tensor."""
        with torch.no_grad():
            self.tensor.copy_(self.content)
        setattr(self.owner, self.name, self.tensor)


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[list[Buffer]]:
    """Yield the buffers as they are; put random state and buffers back at the end."""
    devices = {p.device.index for p in module.parameters() if p.device.type == "cuda"}
    buffers = [
        Buffer(owner, name, f"{owner_name}.{name}".lstrip("."), tensor, tensor.detach().clone())
        for owner_name, owner in module.named_modules()
        for name, tensor in owner.named_buffers(recurse=False, remove_duplicate=False)
    ]
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield buffers
        finally:
            for buffer in buffers:
                buffer.restore()
