"""Data that a program of the user's own reads: only named here."""

from __future__ import annotations

import hashlib
from pathlib import Path

from batchscape.config import ExternalData
from batchscape.record.content import hash_of_files
from batchscape.record.spec import DataIdentity

__all__ = ["prepare_external"]


def prepare_external(config: ExternalData) -> DataIdentity:
    """Name the data by the content of the files that are said to hold them.

    Parameters
    ----------
    config : ExternalData

    Returns
    -------
    DataIdentity
        Of unknown sizes, with zeros for them.

    Raises
    ------
    ConfigError
        If a file cannot be read.
    """
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
