"""What the built-in language models share: from hidden states to logits, and to a loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

IGNORED = -100
"""Target that bears no loss."""


class NextTokenModel(nn.Module, ABC):
    """Token ids of shape (samples, length) to logits of shape (samples, length, vocabulary)."""

    @property
    @abstractmethod
    def output_weight(self) -> Tensor:
        """Last matrix, of shape (vocabulary, width)."""

    @abstractmethod
    def hidden(self, tokens: Tensor) -> Tensor:
        """Return what the last matrix is applied to, of shape (samples, length, width)."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at every position."""
        return functional.linear(self.hidden(tokens), self.output_weight)

    def chunked_loss_sum(self, tokens: Tensor, labels: Tensor, chunk: int) -> Tensor:
        """Return the sum of the cross-entropies, whose logits exist for a part of the labels.

        The gradient of a part is computed with its loss, so that no product is computed twice;
        what stays for the backward is the gradient of the hidden states and of the last matrix.
        """
        hidden = self.hidden(tokens).flatten(0, -2)
        loss: Tensor = _cross_entropy_sum(hidden, self.output_weight, labels.flatten(), chunk)
        return loss


# What is compiled goes around it.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _cross_entropy_sum(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    loss: Tensor = _CrossEntropySum.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, chunk, torch.is_grad_enabled()
    )
    return loss


class _CrossEntropySum(torch.autograd.Function):
    """Sum of cross-entropies of a linear layer, part by part.

    PyTorch's own, `torch.nn.functional.linear_cross_entropy` (2.13), gives the sum of bfloat16
    inputs in bfloat16, two digits of a loss.
    """

    @staticmethod
    def forward(  # noqa: PLR0917  (torch passes no keywords)
        ctx: Any,  # noqa: ANN401  (torch has no type for it)
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        with_gradient: bool,
    ) -> Tensor:
        of_hidden = torch.empty_like(hidden) if with_gradient else None
        # Summed over the parts in no less than float32, whatever the products are in.
        wide = torch.promote_types(weight.dtype, torch.float32)
        of_weight = torch.zeros_like(weight, dtype=wide) if with_gradient else None
        parts = []
        for start in range(0, len(hidden), chunk):
            here = slice(start, start + chunk)
            logits = functional.linear(hidden[here], weight)
            product = logits.dtype
            logits = logits.to(torch.promote_types(product, torch.float32))
            log_p = functional.log_softmax(logits, -1)
            del logits
            parts.append(
                functional.nll_loss(log_p, labels[here], ignore_index=IGNORED, reduction="sum")
            )
            if of_hidden is not None and of_weight is not None:
                real = (labels[here] != IGNORED).unsqueeze(1)
                of_logits = log_p.exp_()
                of_logits.scatter_add_(
                    1, labels[here].clamp(min=0).unsqueeze(1), -real.to(of_logits.dtype)
                )
                of_logits *= real
                # As the backward of a linear layer does: in the type of its forward.
                of_logits = of_logits.to(product)
                of_hidden[here] = torch.mm(of_logits, weight)
                of_weight += torch.mm(of_logits.t(), hidden[here])
            del log_p
        ctx.save_for_backward(of_hidden, of_weight)
        return torch.stack(parts).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden * gradient, of_weight * gradient, None, None, None
