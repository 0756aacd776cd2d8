"""A multi-layer perceptron for classification."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from batchscape.config import Mlp


class MlpModel(nn.Module):
    """Vectors of shape (samples, features) to logits of shape (samples, classes)."""

    def __init__(self, config: Mlp, features: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for wide_in, wide_out in pairwise([features, *config.hidden_sizes]):
            layers += [nn.Linear(wide_in, wide_out), nn.GELU(), nn.Dropout(config.dropout)]
        last = config.hidden_sizes[-1] if config.hidden_sizes else features
        self.layers = nn.Sequential(*layers, nn.Linear(last, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        out: Tensor = self.layers(x)
        return out
