"""Prepared data on disk: arrays in a folder that is named by their content.

The name is the manifest hash: of the content of every source, in order, and of the rules that cut
it. The same name therefore means the same samples, on every machine. Arrays are made once, and
again where they were damaged.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchscape.data.fingerprints import cache_folder, file_sha256
from batchscape.errors import BatchscapeError, ConfigError, RecordError
from batchscape.record.files import read_json, sha256_of, write_json
from batchscape.record.spec import DataIdentity

PARTS = ("train", "held_out")
Arrays = dict[str, NDArray[Any]]

_FORMAT = 1
"""Version of the prepared arrays; part of the manifest hash."""


@dataclass(frozen=True)
class DataArrays:
    """Arrays of one preparation."""

    arrays: Mapping[str, NDArray[Any]]
    """By name; `<part>_...` for each part."""
    samples: Mapping[str, int]
    """In each part."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else the source shows, such as the size of a vocabulary."""


@dataclass(frozen=True)
class StoredData:
    """Prepared data in the cache."""

    manifest_hash: str
    folder: str
    train_samples: int
    held_out_samples: int
    facts: Mapping[str, Any]

    def identity(
        self,
        task: str,
        classes: int,
        *,
        features: int | None = None,
        vocabulary: int | None = None,
    ) -> DataIdentity:
        """Return the identity of the data, with the kinds of its labels and inputs."""
        return DataIdentity(
            self.manifest_hash,
            self.folder,
            self.train_samples,
            self.held_out_samples,
            classes,
            task,
            features,
            vocabulary,
        )


def manifest_hash(manifest: Mapping[str, Any]) -> str:
    """Return the name of a content: the first digits of a SHA-256."""
    canonical = json.dumps({**manifest, "format": _FORMAT}, sort_keys=True).encode()
    return hashlib.sha256(canonical).hexdigest()[:16]


def keep(name: str, manifest: Mapping[str, Any], build: Callable[[], DataArrays]) -> StoredData:
    """Return the prepared data of a manifest; build them where they are not there, or damaged."""
    digest = manifest_hash(manifest)
    folder = cache_folder() / f"{name}-{digest}"
    content = _read_verified(folder)
    if content is None:
        content = _store(name, folder, manifest, build())
    samples = content["samples"]
    return StoredData(digest, str(folder), samples["train"], samples["held_out"], content["facts"])


def load_array(folder: Path, name: str) -> NDArray[Any]:
    """Map an array of prepared data into memory."""
    path = folder / f"{name}.npy"
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        msg = f"the prepared data {path} cannot be read ({error}); the same command makes it anew"
        raise RecordError(msg) from None
    return array


def _read_verified(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a folder whose arrays match their digests; else None."""
    try:
        content = read_json(folder / "manifest.json")
        for file, digest in content["arrays"].items():
            if file_sha256(folder / file) != digest:
                return None
    except (OSError, RecordError):
        return None
    return content if {"samples", "facts"} <= set(content) else None


def _store(
    name: str, folder: Path, manifest: Mapping[str, Any], data: DataArrays
) -> dict[str, Any]:
    """Write the arrays into a folder that appears at once."""
    for part in PARTS:
        if data.samples[part] == 0:
            msg = (
                f"data={name}: the {part} part holds no sample; give more data, another "
                "data.held_out_pct, or a smaller data.sequence_length where there is one"
            )
            raise ConfigError(msg)
    content = {
        **manifest,
        "format": _FORMAT,
        "samples": dict(data.samples),
        "facts": dict(data.facts),
    }
    if folder.is_dir():
        shutil.rmtree(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            arrays = Path(temporary) / "arrays"
            arrays.mkdir()
            for array_name, array in data.arrays.items():
                np.save(arrays / f"{array_name}.npy", array, allow_pickle=False)
            files = sorted(path.name for path in arrays.iterdir())
            content["arrays"] = {file: sha256_of(arrays / file) for file in files}
            write_json(arrays / "manifest.json", content)
            with suppress(FileExistsError):  # another launcher has just written the same content
                arrays.rename(folder)
    except OSError as error:
        if not (folder / "manifest.json").exists():
            msg = f"prepared data cannot be written to {folder}: {error}; XDG_CACHE_HOME moves it"
            raise BatchscapeError(msg) from None
    return content
