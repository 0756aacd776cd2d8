"""A decoder-only transformer in the style of Llama: RMSNorm, rotary positions, SwiGLU, GQA."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from batchscape.config import Llama
from batchscape.models.next_token import NextTokenModel, Undrawn, causal_attention

_EPSILON = 1e-5
"""Added to the mean square by RMSNorm. Source: `norm_eps` of the released Llama weights."""


class _LlamaAttention(nn.Module):
    def __init__(self, config: Llama) -> None:
        super().__init__()
        self.head_width = config.d_model // config.n_heads
        kv_width = config.n_kv_heads * self.head_width
        self.query = nn.Linear(config.d_model, config.d_model, bias=False)
        self.key = nn.Linear(config.d_model, kv_width, bias=False)
        self.value = nn.Linear(config.d_model, kv_width, bias=False)
        self.projection = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        samples, length, width = x.shape
        q, k, v = (
            layer(x).view(samples, length, -1, self.head_width).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = causal_attention(_rotate(q, cosine, sine), _rotate(k, cosine, sine), v)
        joined: Tensor = self.projection(mixed.transpose(1, 2).reshape(samples, length, width))
        return joined


class _LlamaBlock(nn.Module):
    def __init__(self, config: Llama) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=_EPSILON)
        self.attention = _LlamaAttention(config)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=_EPSILON)
        self.gate = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.expand = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.contract = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        normed = self.mlp_norm(x)
        out: Tensor = x + self.contract(functional.silu(self.gate(normed)) * self.expand(normed))
        return out


class LlamaModel(NextTokenModel):
    """See `NextTokenModel`.

    As Touvron et al. 2023 (arXiv 2302.13971, section 2.2), with key-value heads that several
    query heads share (Ainslie et al. 2023, arXiv 2305.13245). All matrices are drawn from a normal
    distribution with standard deviation 0.02, as Hugging Face's does by default.
    """

    def __init__(self, config: Llama, vocabulary: int, sequence_length: int) -> None:
        super().__init__()
        with Undrawn():
            self.tokens = nn.Embedding(vocabulary, config.d_model)
            self.blocks = nn.ModuleList(_LlamaBlock(config) for _ in range(config.n_layers))
            self.norm = nn.RMSNorm(config.d_model, eps=_EPSILON)
            self.head = nn.Linear(config.d_model, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        # Rotation of each position and pair of features, which are half a head apart, in the order
        # of Hugging Face's weights. Source: Su et al. 2021 (arXiv 2104.09864), section 3.2.2.
        head_width = config.d_model // config.n_heads
        exponents = -torch.arange(0, head_width, 2, dtype=torch.float64) / head_width
        positions = torch.arange(sequence_length, dtype=torch.float64)
        pair_angles = torch.outer(positions, config.rope_base**exponents)
        angles = torch.cat([pair_angles, pair_angles], dim=-1)
        self.register_buffer("cosine", angles.cos().float(), persistent=False)
        self.register_buffer("sine", angles.sin().float(), persistent=False)

    @property
    def output_weight(self) -> Tensor:
        """The matrix of the head."""
        return self.head.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return what the last matrix is applied to."""
        length = tokens.shape[1]
        cosine = self.get_buffer("cosine")[:length]
        sine = self.get_buffer("sine")[:length]
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, cosine, sine)
        last: Tensor = self.norm(x)
        return last


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine
