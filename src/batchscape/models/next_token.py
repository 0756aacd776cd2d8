"""What the built-in language models share: layers that they draw, attention, and their loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from batchscape.config.data import IGNORED

_SHORT_CONTEXT = 128
"""Context up to which the CPU's bfloat16 flash backward is far slower than the float32 one."""
_DRAWS = {nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_}
"""What linear layers and embeddings draw their parameters with."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Mix values by scaled dot products of queries and earlier keys."""
    shares_keys = k.shape[1] != q.shape[1]
    if v.device.type == "cpu" and v.dtype == torch.bfloat16 and v.shape[2] <= _SHORT_CONTEXT:
        with torch.autocast("cpu", enabled=False):
            return functional.scaled_dot_product_attention(
                *(q.float(), k.float(), v.float()),
                dropout_p=dropout,
                is_causal=True,
                enable_gqa=shares_keys,
            )
    return functional.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=shares_keys
    )


class Undrawn(TorchFunctionMode):
    """Layers built in this context leave their parameters unset, for the model to draw.

    One thread draws some 150 million numbers a second: to draw parameters twice would take seconds
    more for each billion.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401  (as torch declares it)
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Do what is called, but draw nothing."""
        kwargs = kwargs or {}
        if func in _DRAWS:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


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
        hidden_gradient = torch.empty_like(hidden) if with_gradient else None
        # Summed over the parts in no less than float32, whatever the products are in.
        sum_type = torch.promote_types(weight.dtype, torch.float32)
        weight_gradient = torch.zeros_like(weight, dtype=sum_type) if with_gradient else None
        parts = []
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = functional.linear(hidden[rows], weight)
            product_type = logits.dtype
            logits = logits.to(torch.promote_types(product_type, torch.float32))
            log_p = functional.log_softmax(logits, -1)
            del logits
            parts.append(
                functional.nll_loss(log_p, labels[rows], ignore_index=IGNORED, reduction="sum")
            )
            if hidden_gradient is not None and weight_gradient is not None:
                is_real = (labels[rows] != IGNORED).unsqueeze(1)
                logit_gradient = log_p.exp_()
                logit_gradient.scatter_add_(
                    1, labels[rows].clamp(min=0).unsqueeze(1), -is_real.to(logit_gradient.dtype)
                )
                logit_gradient *= is_real
                # As the backward of a linear layer does: in the type of its forward.
                logit_gradient = logit_gradient.to(product_type)
                hidden_gradient[rows] = torch.mm(logit_gradient, weight)
                weight_gradient += torch.mm(logit_gradient.t(), hidden[rows])
            del log_p
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return torch.stack(parts).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return hidden_gradient * gradient, weight_gradient * gradient, None, None, None
