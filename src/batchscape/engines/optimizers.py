"""From a configuration to an optimizer."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from batchscape.config import AdamW as AdamWConfig
from batchscape.config import Sgd as SgdConfig

__all__ = ["build_optimizer", "clip_gradients"]


def build_optimizer(config: AdamWConfig | SgdConfig, module: nn.Module) -> Optimizer:
    """Build the optimizer of a run; only matrices decay."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if isinstance(config, AdamWConfig):
        return AdamW(
            groups,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )
    return SGD(
        groups,
        lr=config.learning_rate,
        momentum=config.momentum,
        nesterov=config.nesterov,
        fused=True,
    )


def clip_gradients(module: nn.Module, largest_norm: float | None) -> torch.Tensor:
    """Scale the gradient down to `largest_norm` where it is longer; return its norm before."""
    parameters = [p for p in module.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if largest_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, largest_norm, norm)
    return norm
