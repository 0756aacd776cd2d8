"""A decoder-only transformer: pre-norm blocks, learned positions, tied embeddings, SDPA."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional

from batchscape.config import Gpt
from batchscape.models.next_token import NextTokenModel, Undrawn, causal_attention


class _GptAttention(nn.Module):
    def __init__(self, config: Gpt) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.dropout = nn.Dropout(config.dropout)
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model)
        self.projection = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        qkv = self.qkv(x).view(samples, length, 3, self.n_heads, width // self.n_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        # The layer is not called; it holds the dropout of the attention weights.
        mixed = causal_attention(q, k, v, self.dropout.p if self.dropout.training else 0.0)
        joined: Tensor = self.projection(mixed.transpose(1, 2).reshape(samples, length, width))
        return joined


class _GptBlock(nn.Module):
    def __init__(self, config: Gpt) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = _GptAttention(config)
        self.mlp_norm = nn.LayerNorm(config.d_model)
        self.expand = nn.Linear(config.d_model, 4 * config.d_model)
        self.contract = nn.Linear(4 * config.d_model, config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        hidden = functional.gelu(self.expand(self.mlp_norm(x)))
        out: Tensor = x + self.dropout(self.contract(hidden))
        return out


class GptModel(NextTokenModel):
    """See `NextTokenModel`.

    Initialisation follows GPT-2 (Radford et al. 2019, section 2.3, and its released code):
    normal with standard deviation 0.02, projections into the residual stream scaled by
    1/sqrt(2 n_layers), biases zero.
    """

    def __init__(self, config: Gpt, vocabulary: int, sequence_length: int) -> None:
        super().__init__()
        with Undrawn():
            self.tokens = nn.Embedding(vocabulary, config.d_model)
            self.positions = nn.Embedding(sequence_length, config.d_model)
            self.dropout = nn.Dropout(config.dropout)
            self.blocks = nn.ModuleList(_GptBlock(config) for _ in range(config.n_layers))
            self.norm = nn.LayerNorm(config.d_model)
        into_residual = 0.02 / math.sqrt(2 * config.n_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                ends_branch = name.endswith(("projection", "contract"))
                nn.init.normal_(module.weight, std=into_residual if ends_branch else 0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    @property
    def output_weight(self) -> Tensor:
        """The table of tokens."""
        return self.tokens.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return what the last matrix is applied to."""
        length = tokens.shape[1]
        x = self.dropout(self.tokens(tokens) + self.positions.weight[:length])
        for block in self.blocks:
            x = block(x)
        last: Tensor = self.norm(x)
        return last
