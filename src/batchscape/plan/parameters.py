"""How many parameters a model has, by its settings: nothing is built for it."""

from __future__ import annotations

from itertools import pairwise

from batchscape.config import Gpt, LanguageModel, Llama, Mlp, RunConfig
from batchscape.record.spec import DataIdentity


def count_parameters(config: RunConfig, data: DataIdentity) -> int | None:
    """Return the parameters of a model; None for one that only its own code can tell."""
    model = config.model
    if isinstance(model, Mlp):
        widths = [data.features or 0, *model.hidden_sizes, data.classes]
        return sum((wide_in + 1) * wide_out for wide_in, wide_out in pairwise(widths))
    if not isinstance(model, LanguageModel):
        return None
    rows = model.vocabulary_size or data.vocabulary or data.classes
    if isinstance(model, Llama):
        return _llama(model, rows)
    return _gpt(model, rows, config.sequence_length or 0)


def _gpt(model: Gpt, rows: int, sequence_length: int) -> int:
    width = model.d_model
    attention = 4 * width * width + 4 * width
    feed_forward = 8 * width * width + 5 * width
    block = attention + feed_forward + 4 * width
    return (rows + sequence_length) * width + model.n_layers * block + 2 * width


def _llama(model: Llama, rows: int) -> int:
    width = model.d_model
    shared = width * (width // model.n_heads) * model.n_kv_heads
    block = 2 * width * width + 2 * shared + 3 * width * model.d_ff + 2 * width
    return 2 * rows * width + model.n_layers * block + width
