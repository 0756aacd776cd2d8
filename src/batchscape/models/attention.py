"""Causal attention of the built-in transformers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_SHORT_CONTEXT = 128
"""Context up to which the CPU's bfloat16 flash backward is far slower than the float32 one."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Mix values by scaled dot products of queries and earlier keys."""
    shared = k.shape[1] != q.shape[1]
    if v.device.type == "cpu" and v.dtype == torch.bfloat16 and v.shape[2] <= _SHORT_CONTEXT:
        with torch.autocast("cpu", enabled=False):
            return functional.scaled_dot_product_attention(
                q.float(), k.float(), v.float(), None, dropout, is_causal=True, enable_gqa=shared
            )
    return functional.scaled_dot_product_attention(
        q, k, v, None, dropout, is_causal=True, enable_gqa=shared
    )
