"""The model that is trained: built in, of `transformers`, or the user's own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from batchscape.config.command import ExternalModel
from batchscape.config.types import Affects, Count, Fraction, Positive, keyword_settings, settings
from batchscape.text import near_multiples


@keyword_settings
class _Decoder:
    """Settings of both built-in language models."""

    n_layers: Count
    """Transformer blocks."""
    n_heads: Count
    """Attention heads (of `llama` those of queries); must divide `d_model`."""
    d_model: Count
    """Width of the residual stream."""
    vocabulary_size: Count | None = None
    """Rows of the embedding, at least the data's vocabulary; null: the data's. Matrix kernels are
    at their best with multiples of 64."""
    loss_chunk: Count | None = None
    """Labels whose logits exist at the same time, such as 1024; null: all of the micro-batch. A
    loss and gradient part by part take less memory."""


def _refuse_remainder(sizes: _Decoder, name: str, divisor_name: str) -> None:
    value, divisor = getattr(sizes, name), getattr(sizes, divisor_name)
    if value % divisor:
        raise ValueError(
            f"{divisor_name} must divide {name}: {value} % {divisor} = {value % divisor}; use "
            f"{name}={near_multiples(value, divisor)}"
        )


@settings
class Gpt(_Decoder):
    """A decoder-only transformer: pre-norm, learned positions, tied embeddings, SDPA."""

    name: Literal["gpt"]
    dropout: Fraction = 0.0
    """Dropout probability; above 0 a run is not decomposition-invariant."""

    def __post_init__(self) -> None:
        """Refuse a width that the heads do not divide."""
        _refuse_remainder(self, "d_model", "n_heads")


@settings
class Llama(_Decoder):
    """A decoder-only transformer in the style of Llama.

    RMSNorm, rotary positions, SwiGLU, grouped key-value heads, untied embeddings, no biases.
    """

    name: Literal["llama"]
    n_kv_heads: Count
    """Key and value heads; must divide `n_heads`."""
    d_ff: Count
    """Width of the feed-forward layer."""
    rope_base: Annotated[Positive, Affects.LOSS] = 10000.0
    """Base of the wavelengths of the rotary positions."""

    def __post_init__(self) -> None:
        """Refuse heads that do not divide, and an odd width of a head."""
        _refuse_remainder(self, "d_model", "n_heads")
        _refuse_remainder(self, "n_heads", "n_kv_heads")
        if self.d_model // self.n_heads % 2:
            width = self.d_model // self.n_heads
            raise ValueError(f"rotary positions need an even d_model / n_heads; got {width}")


@settings
class Transformers:
    """A model of Hugging Face `transformers`, from a local folder or from settings alone.

    A causal language model, or a sequence classifier where the data have labels.
    """

    name: Literal["transformers"]
    path: str | None = None
    """Folder with a `config.json`, as `save_pretrained` writes it. Its content counts."""
    pretrained: Annotated[bool, Affects.LOSS] = False
    """Start from the weights in the folder instead of random ones."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Entries of the model's configuration, over those of the folder; without a folder,
    `model_type` among them."""

    def __post_init__(self) -> None:
        """Refuse a network that neither a folder nor its settings give, or that both give."""
        if self.path is None and "model_type" not in self.settings:
            raise ValueError(
                "give model.path, or model.settings with a model_type such as gpt2 or llama"
            )
        if self.path is not None and "model_type" in self.settings:
            raise ValueError(
                f"model.path={self.path} takes the network from a folder, and settings with a "
                f"model_type build one without: those of model_type={self.settings['model_type']} "
                f"would replace the folder's sizes. Use model=hf model.path={self.path}, and "
                "+model.settings.NAME=VALUE for an entry that is to differ from the folder's"
            )
        if self.pretrained and self.path is None:
            raise ValueError("pretrained=true needs model.path, a folder with weights")


@settings
class CustomModel:
    """A module of your own: `_target_` is called with the arguments and returns it."""

    name: Literal["custom"]
    target: Annotated[str, Field(alias="_target_")]
    """Import path of a callable, `package.module.name`. Its source counts too."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""


@settings
class Mlp:
    """A multi-layer perceptron with GELU, for classification."""

    name: Literal["mlp"]
    hidden_sizes: list[Count]
    """Width of each hidden layer."""
    dropout: Fraction = 0.0
    """Dropout probability; above 0 a run is not decomposition-invariant."""


LanguageModel = Gpt | Llama
"""Built-in models that predict the next token."""

Model = Annotated[
    LanguageModel | Mlp | Transformers | CustomModel | ExternalModel, Field(discriminator="name")
]
