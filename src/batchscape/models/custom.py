"""The user's own module.

It is what `_target_` returns: an `nn.Module` with `forward(inputs) -> outputs`, and, where the
defaults of `batchscape.models.build.LossModule` do not suit it,

* `loss_sum(outputs, labels)`: a scalar tensor, the *sum* of the losses over the labels that bear
  one, never their mean;
* `count_right(outputs, labels)`: a scalar tensor, how many predictions were right (asked for in
  evaluations).

Where the signature of `_target_` names `data`, it is given the `DataIdentity`, from which it can
learn the vocabulary, the classes and the features of a sample.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import torch
from torch import nn

from batchscape.config import CustomModel
from batchscape.errors import ConfigError
from batchscape.models.vocabulary import data_vocabulary
from batchscape.record.spec import DataIdentity
from batchscape.user_code import call_by_path


def build_custom(config: CustomModel, data: DataIdentity) -> nn.Module:
    """Call the user's `_target_` and check what it returned.

    Raises
    ------
    ConfigError
        If it is not a module on the CPU with float32 parameters to train.
    """
    if data.task == "next_token":
        data = replace(data, vocabulary=data_vocabulary(data))
    model = call_by_path(config.target, config.arguments, optional_arguments={"data": data})
    where = f"_target_={config.target}"
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{where} must return a torch.nn.Module; it returned {type(model).__name__}"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"{where} returned a module without parameters to train")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.device.type != "cpu":
            raise ConfigError(
                f"{where} must build its module on the CPU, because only there every geometry "
                f"starts with the same weights; {name} is on {tensor.device}: leave the move to "
                "the engine"
            )
        if isinstance(tensor, nn.Parameter) and tensor.dtype != torch.float32:
            raise ConfigError(
                f"{where} must have float32 parameters, engine.precision decides the arithmetic; "
                f"{name} is {str(tensor.dtype).removeprefix('torch.')}"
            )
    return model
