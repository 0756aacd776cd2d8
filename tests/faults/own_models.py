"""Modules of a user's own, good and bad, named by `_target_`."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

from batchscape.record.spec import DataIdentity


def seen(data: DataIdentity) -> None:
    """Be replaced by who wants to know."""


class Told(nn.Linear):
    """Shows what it is told of the data."""

    def __init__(self, data: DataIdentity) -> None:
        super().__init__(1, 1)
        seen(data)


class Bigram(nn.Module):
    """A table of logits: the shortest language model."""

    def __init__(self, data: DataIdentity, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(data.classes, width)
        self.head = nn.Linear(width, data.classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.tokens(inputs).tanh())


class Brier(nn.Module):
    """A classifier of vectors with a loss and a count of its own."""

    def __init__(self, data: DataIdentity, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(data.features or 0, hidden), nn.Tanh(), nn.Linear(hidden, data.classes)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs).softmax(-1)

    def loss_sum(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs - functional.one_hot(labels, outputs.shape[-1])).square().sum()

    def count_right(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs.gather(1, labels[:, None]) > 0.5).sum()


class Normalised(Bigram):
    """With batch normalisation."""

    def __init__(self, data: DataIdentity, width: int = 16) -> None:
        super().__init__(data, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.tokens(inputs).transpose(1, 2)).transpose(1, 2))


class Dropping(Bigram):
    """With dropout, as a function, which no layer tells of."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = functional.dropout(self.tokens(inputs).tanh(), 0.2, self.training)
        return self.head(hidden)


class Spare(Bigram):
    """With a layer that is never used."""

    def __init__(self, data: DataIdentity, width: int = 16) -> None:
        super().__init__(data, width)
        self.spare = nn.Linear(width, width)


class Routed(Bigram):
    """With an expert for sequences that begin with one token, absent from most micro-batches."""

    chosen = 101

    def __init__(self, data: DataIdentity, width: int = 16) -> None:
        super().__init__(data, width)
        self.expert = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.tokens(inputs).tanh()
        mine = inputs[:, :1, None] == self.chosen
        if mine.any():
            hidden = torch.where(mine, self.expert(hidden), hidden)
        return self.head(hidden)


class MeanLoss(Bigram):
    """With the mistake that everybody makes."""

    def loss_sum(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, -2), labels.flatten())


class Contrastive(Bigram):
    """With a loss that compares the samples of a batch."""

    def loss_sum(self, outputs: Tensor, labels: Tensor) -> Tensor:
        outputs = outputs.mean(1)
        similarities = outputs @ outputs.T
        own = torch.arange(len(outputs), device=outputs.device)
        return functional.cross_entropy(similarities, own, reduction="sum") + 0 * labels.sum()


class DroppingContrastive(Contrastive):
    """With both: dropout, and a loss that compares the samples of a batch."""

    def __init__(self, data: DataIdentity, width: int = 16) -> None:
        super().__init__(data, width)
        self.dropout = nn.Dropout(0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.dropout(self.tokens(inputs).tanh()))


class Vague(Bigram):
    """With a loss that is no scalar."""

    def loss_sum(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="none")


def tell_what_is_imported(_run_dir: str, _rank: int) -> int:
    """Be a rank that does nothing but say whether a slow library is there."""
    print(
        "transformers", "is" if "transformers.modeling_utils" in sys.modules else "is not", "there"
    )
    return 0


def halved(data: DataIdentity) -> nn.Module:
    """Return a module with parameters in bfloat16."""
    return Bigram(data).bfloat16()


def elsewhere(data: DataIdentity) -> nn.Module:
    """Return a module on another device."""
    return Bigram(data).to("meta")


def nothing_to_train() -> nn.Module:
    """Return a module without parameters."""
    return nn.Identity()


def no_module() -> str:
    """Return something else."""
    return "a model"


class Convolutions(nn.Module):
    """Convolutions with batch normalisation, and a loss of their own."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 3),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)

    def loss_sum(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs - functional.one_hot(labels, 3)).square().sum()


class Looking(Bigram):
    """Does what the numbers of its inputs say."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs if int(inputs.max()) > 3 else inputs + 1)


class NoisyGradients(nn.Module):
    """A classifier that adds noise to its gradients, drawn by call, which no forward shows."""

    def __init__(self, data: DataIdentity) -> None:
        super().__init__()
        self.layer = nn.Linear(data.features or 0, data.classes)
        self.layer.weight.register_hook(
            lambda gradient: gradient + 0.01 * torch.randn_like(gradient)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)
