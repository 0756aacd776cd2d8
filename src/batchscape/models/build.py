"""From a configuration to a module that returns a sum of losses."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from batchscape.config import Gpt, Mlp, RunConfig
from batchscape.models.gpt import GptModel
from batchscape.models.mlp import MlpModel
from batchscape.record.spec import DataIdentity

__all__ = ["LossModule", "build_model", "parameter_count"]


class LossModule(nn.Module):
    """A model and its loss, so that the wrapper of an engine sees one forward.

    The loss is the sum of the cross-entropies over the targets that are not padding: whoever
    sums over micro-steps and ranks divides once, by the global number of targets (never a mean
    of means).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses, and how many predictions were right; both scalars.

        Parameters
        ----------
        inputs : Tensor, shape (samples, ...)
        targets : Tensor, shape (samples,) or (samples, length)
            Class indices; negative ones are padding and bear no loss.
        """
        logits = self.model(inputs)
        flat, wanted = logits.flatten(0, -2), targets.flatten()
        # Autocast gives bfloat16 logits; their exponentials are summed in float32.
        if flat.dtype == torch.bfloat16:
            flat = flat.float()
        loss = functional.cross_entropy(flat, wanted, ignore_index=-100, reduction="sum")
        if self.training:
            return loss, loss.new_zeros(())
        return loss, (flat.argmax(-1) == wanted).sum()


def build_model(config: RunConfig, data: DataIdentity, precision: str) -> LossModule:
    """Build the model of a run on the CPU, the same for every geometry and device.

    Parameters are drawn in float32 from `init_seed`, then widened for float64.

    Parameters
    ----------
    config : RunConfig
    data : DataIdentity
        Tells the vocabulary or the classes, and what a sample is.
    precision : str
        `float32`, `bfloat16` (parameters stay float32) or `float64`.
    """
    torch.manual_seed(config.resolved_init_seed)
    model: nn.Module
    if isinstance(config.model, Gpt):
        if config.sequence_length is None:
            msg = "a transformer needs sequences"
            raise AssertionError(msg)
        model = GptModel(config.model, data.classes, config.sequence_length)
    elif isinstance(config.model, Mlp) and data.features is not None:
        model = MlpModel(config.model, data.features, data.classes)
    else:
        raise NotImplementedError
    if precision == "float64":
        model = model.double()
    return LossModule(model)


def parameter_count(module: nn.Module) -> int:
    """Return the number of parameters, tied ones once."""
    return sum(parameter.numel() for parameter in module.parameters())
