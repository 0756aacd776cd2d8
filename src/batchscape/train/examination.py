"""What is found out about a model before it is trained, on a few real samples."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from batchscape.data.datasets import Dataset
from batchscape.measure.flops import model_flops
from batchscape.models.checkpointing import without_recomputation
from batchscape.models.invariance import PROBED_SAMPLES, why_not_invariant
from batchscape.train.batches import to_device

__all__ = ["ModelFacts", "examine"]


class ModelFacts(NamedTuple):
    """Columns of a row of `ranks` that follow from the model and the shape of a sample."""

    not_invariant: str | None = None
    """Why decompositions may train unlike one another."""
    model_flops_per_sample: float | None = None
    """Operations on a sample, forward and backward, padding included."""


def examine(
    module: nn.Module, dataset: Dataset, device: torch.device, precision: str
) -> ModelFacts:
    """Look at a model as it is about to be trained; nothing of it changes.

    Parameters
    ----------
    module : nn.Module
        Returns a sum of losses first; in training mode, on the device.
    dataset : Dataset
        Training samples; the first ones are used.
    device : torch.device
    precision : str
        Of the run.

    Raises
    ------
    ConfigError
        If the loss is a mean instead of a sum.
    """
    indices = np.arange(PROBED_SAMPLES, dtype=np.int64) % dataset.num_samples
    batch = to_device(dataset.batch(indices), device, precision)
    with without_recomputation(module):
        operations = model_flops(module, *batch)
        return ModelFacts(
            not_invariant=why_not_invariant(module, batch),
            model_flops_per_sample=None if operations is None else operations / PROBED_SAMPLES,
        )
