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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchscape.data.fingerprints import cache_folder, file_sha256
from batchscape.errors import BatchscapeError, ConfigError, RecordError
from batchscape.record.files import read_json, sha256_of, write_json

PARTS = ("train", "held_out")
Arrays = dict[str, NDArray[Any]]
"""Arrays of one part, by name; the last one has an entry a sample."""
Facts = dict[str, Any]
"""What else the source shows, such as the size of a vocabulary."""

_FORMAT = 1
"""Version of the prepared arrays; part of the manifest hash."""


def manifest_hash(manifest: Mapping[str, Any]) -> str:
    """Return the name of a content: the first digits of a SHA-256."""
    canonical = json.dumps({**manifest, "format": _FORMAT}, sort_keys=True).encode()
    return hashlib.sha256(canonical).hexdigest()[:16]


def keep(
    name: str, manifest: Mapping[str, Any], build: Callable[[], tuple[dict[str, Arrays], Facts]]
) -> tuple[dict[str, Any], Facts]:
    """Build the prepared data of a manifest where they are not there, or damaged.

    Returns
    -------
    tuple
        The fields of `DataIdentity` that say what and where they are, and what the source shows.
    """
    digest = manifest_hash(manifest)
    folder = cache_folder() / f"{name}-{digest}"
    content = _read_verified(folder)
    if content is None:
        content = _store(name, folder, manifest, *build())
    samples = {f"{part}_samples": number for part, number in content["samples"].items()}
    return {"manifest_hash": digest, "folder": str(folder), **samples}, content["facts"]


def load_array(folder: Path, name: str) -> NDArray[Any]:
    """Map an array of prepared data into memory."""
    path = folder / f"{name}.npy"
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise RecordError(
            f"the prepared data {path} cannot be read ({error}); the same command makes it anew"
        ) from None
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
    name: str,
    folder: Path,
    manifest: Mapping[str, Any],
    parts: Mapping[str, Arrays],
    facts: Facts,
) -> dict[str, Any]:
    """Write the arrays into a folder that appears at once."""
    samples = {part: len([*arrays.values()][-1]) for part, arrays in parts.items()}
    for part, number in samples.items():
        if number == 0:
            raise ConfigError(
                f"data={name}: the {part} part holds no sample; give more data, another "
                "data.held_out_pct, or a smaller data.sequence_length where there is one"
            )
    content = {**manifest, "format": _FORMAT, "samples": samples, "facts": facts}
    if folder.is_dir():
        shutil.rmtree(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            arrays = Path(temporary) / "arrays"
            arrays.mkdir()
            for part, of_part in parts.items():
                for kind, array in of_part.items():
                    np.save(arrays / f"{part}_{kind}.npy", array, allow_pickle=False)
            files = sorted(path.name for path in arrays.iterdir())
            content["arrays"] = {file: sha256_of(arrays / file) for file in files}
            write_json(arrays / "manifest.json", content)
            with suppress(FileExistsError):  # another launcher has just written the same content
                arrays.rename(folder)
    except OSError as error:
        if not (folder / "manifest.json").exists():
            raise BatchscapeError(
                f"prepared data cannot be written to {folder}: {error}; set XDG_CACHE_HOME to a "
                "folder that can be written"
            ) from None
    return content
