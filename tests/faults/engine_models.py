"""Models that an engine may stumble over."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SkipsABlock(nn.Module):
    """A chain of blocks whose last one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.head = nn.Linear(7, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(torch.tanh(self.blocks[0](self.tokens(tokens))))
        return logits


class HasAScale(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 8)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        return nn.functional.linear(self.tokens(tokens) * self.scale, self.tokens.weight)


class Normalises(nn.Module):
    """Running means, which every rank takes of its own samples; and buffers of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 256)
        self.register_buffer("known", torch.ones(3, dtype=torch.bool))
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.norm(self.tokens(tokens).transpose(1, 2)).transpose(1, 2))
        return logits
