"""How many tokens a model must know; nothing here imports torch."""

from __future__ import annotations

from batchscape.config import LanguageModel
from batchscape.errors import ConfigError
from batchscape.record.spec import DataIdentity


def check_classes(model: str, data: DataIdentity) -> None:
    """Refuse data that do not say how many classes or tokens they have."""
    if not data.classes:
        raise ConfigError(
            f"model={model} needs to know how many classes or tokens there are: give the data an "
            "attribute `classes`"
        )


def data_vocabulary(data: DataIdentity) -> int:
    """Return the number of different tokens in the inputs of token sequences."""
    return data.vocabulary or data.classes


def vocabulary_size(model: LanguageModel, data: DataIdentity) -> int:
    """Return the tokens that a model knows."""
    check_classes(model.name, data)
    if model.vocabulary_size is None:
        return data_vocabulary(data)
    check_vocabulary("model.vocabulary_size", model.vocabulary_size, data)
    return model.vocabulary_size


def check_vocabulary(name: str, rows: int, data: DataIdentity) -> None:
    """Refuse an embedding with fewer rows than the data have different tokens."""
    needed = data_vocabulary(data)
    if rows < needed:
        raise ConfigError(f"{name} must be at least the data's vocabulary, {needed}; given {rows}")
