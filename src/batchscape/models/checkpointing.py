"""Activation checkpointing: blocks keep their inputs only and compute the rest anew.

Source: Chen et al. 2016, arXiv 1604.06174; `torch.utils.checkpoint` without re-entrance.
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from batchscape.errors import ConfigError


def checkpoint_activations(module: nn.Module) -> None:
    """Let every block of a model recompute its activations in the backward, in place.

    Names of parameters stay as they are; losses and gradients too, dropout included.
    """
    blocks = blocks_of(module)
    if not blocks:
        raise ConfigError(
            "engine.activation_checkpointing recomputes block by block, and this model keeps no "
            "blocks in an nn.ModuleList; set it to false, or keep them in one"
        )
    for block in blocks:
        # An attribute of the instance: a wrapper would change the names of its parameters.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: the children of its outermost `nn.ModuleList`s.

    A list without a trained parameter holds no blocks.
    """
    if isinstance(module, nn.ModuleList):
        is_trained = any(parameter.requires_grad for parameter in module.parameters())
        return list(module) if is_trained else []
    return [block for child in module.children() for block in blocks_of(child)]
