"""Model files outside this package: the user's code, a folder of configuration, weights.

Plans name runs by it, so nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from batchscape.config import CustomModel, RunConfig, Transformers
from batchscape.errors import ConfigError
from batchscape.record.files import sha256_of
from batchscape.user_code import named_files, source_hash

CONFIG_NAME = "config.json"
"""File of a `transformers` folder that says what the model is."""

_WEIGHTS_NAME = "model.safetensors"
_INDEX_NAME = "model.safetensors.index.json"


def model_source_hash(config: RunConfig) -> str | None:
    """Name the content of model code and weights that are not part of this package."""
    model = config.model
    if isinstance(model, CustomModel):
        source, arguments = source_hash(model.target), named_files(model.arguments)
        if not arguments:
            return source
        parts = [source, *(f"\0{text}\0{sha256_of(path)}" for text, path in arguments.items())]
    elif isinstance(model, Transformers) and model.path is not None:
        folder = Path(model.path)
        files = [config_file(folder), *(weight_files(folder) if model.pretrained else ())]
        parts = [f"{file.name}\0{sha256_of(file)}\0" for file in files]
    else:
        return None
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


def config_file(folder: Path) -> Path:
    """Return the `config.json` of a `transformers` folder."""
    file = folder / CONFIG_NAME
    if not file.is_file():
        raise ConfigError(
            f"model.path={folder}: there is no {file.name} in this folder; model.path is a local "
            "folder as save_pretrained writes it, and names of models on a hub are not looked up"
        )
    return file


def without_weights(config: RunConfig) -> RunConfig:
    """Return settings by which a model has random weights in place of those in a file."""
    if not isinstance(config.model, Transformers):
        return config
    return replace(config, model=replace(config.model, pretrained=False))


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a `transformers` folder: one, or an index and its shards."""
    if (folder / _WEIGHTS_NAME).is_file():
        return [folder / _WEIGHTS_NAME]
    index = folder / _INDEX_NAME
    if not index.is_file():
        raise ConfigError(
            f"model.pretrained=true needs weights as {_WEIGHTS_NAME} or {_INDEX_NAME} in {folder}; "
            "save_pretrained writes them"
        )
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{index} is damaged: it has no weight_map of tensors to files; copy the folder anew"
        ) from None
    shards = [folder / name for name in names]
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise ConfigError(
            f"{index} names files that are not there: {', '.join(missing)}; copy the folder anew"
        )
    return [index, *shards]
