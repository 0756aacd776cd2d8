"""From a data configuration to prepared data, named by their content."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchscape.config import (
    CustomData,
    DataSettings,
    Digits,
    Documents,
    ExternalData,
    TextFiles,
    TokenFiles,
)
from batchscape.data.custom import prepare_custom
from batchscape.data.documents import prepare_documents
from batchscape.data.images import prepare_digits
from batchscape.data.text import prepare_text
from batchscape.data.tokens import prepare_tokens
from batchscape.errors import ConfigError
from batchscape.record.content import hash_of_files
from batchscape.record.spec import DataIdentity


def prepare_external(config: ExternalData) -> DataIdentity:
    """Return the identity of data that a program reads itself, by the content of `data.files`."""
    content = hash_of_files(config.files, Path.cwd(), "data.files") or "unnamed"
    text = f"external\0{content}\0{config.sequence_length}"
    return DataIdentity(
        manifest_hash=hashlib.sha256(text.encode()).hexdigest()[:16],
        folder="",
        train_samples=0,
        held_out_samples=0,
        classes=0,
        task="other",
    )


_BY_KIND: dict[type, Callable[[Any], DataIdentity]] = {
    CustomData: prepare_custom,
    Digits: prepare_digits,
    Documents: prepare_documents,
    ExternalData: prepare_external,
    TextFiles: prepare_text,
    TokenFiles: prepare_tokens,
}


def prepare(config: DataSettings) -> DataIdentity:
    """Read the source, split it, and leave in the cache what the ranks will map into memory."""
    try:
        return _BY_KIND[type(config)](config)
    except OSError as error:
        raise ConfigError(f"data={config.name} cannot be read: {error}") from None
