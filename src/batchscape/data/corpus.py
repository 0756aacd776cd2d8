"""Turning a data configuration into arrays on disk, named by their content.

A corpus is prepared once by the launcher and mapped into memory by every rank. The folder of the
arrays is named by the manifest hash: the SHA-256 of every source file, in order, and of the rules
that split them. The same name therefore means the same samples, on every machine.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchscape.config import Digits, StandardLibrary, TextFiles
from batchscape.data.order import SampleOrder
from batchscape.data.text import split_blocks, split_packed
from batchscape.errors import BatchscapeError, ConfigError
from batchscape.record.files import sha256_of, write_json
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import DataIdentity

__all__ = ["cache_folder", "prepare"]

_PIXELS = 64

_FORMAT = 1
"""Version of the prepared arrays; part of the manifest hash."""

_NOT_LIBRARY = {
    *("site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"),
    # Generated tables and one large text: in a part of few files they would outweigh the source.
    *("encodings", "pydoc_data"),
}
_TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".js", ".json", ".csv", ".tex"}


def cache_folder() -> Path:
    """Return the folder that holds prepared data: `$XDG_CACHE_HOME/batchscape/data`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "batchscape" / "data"


def prepare(config: StandardLibrary | TextFiles | Digits) -> DataIdentity:
    """Read the source, split it, and leave its arrays in the cache.

    Parameters
    ----------
    config : StandardLibrary, TextFiles or Digits

    Returns
    -------
    DataIdentity
        The manifest hash, the folder of the arrays, and the sizes of both parts.

    Raises
    ------
    ConfigError
        If there is no text at the path, or too little of it for one sample in each part.
    """
    if isinstance(config, Digits):
        arrays, manifest = _digits(config)
        classes = 10
    else:
        arrays, manifest = _text(config)
        classes = 256
    sizes = {part: len(arrays[f"{part}_{_index_of(config)}"]) for part in ("train", "held_out")}
    for part, size in sizes.items():
        if size == 0:
            msg = (
                f"data={config.name}: the {part} part holds no sample "
                f"(held_out_pct={config.held_out_pct}); give more data or another held_out_pct"
            )
            raise ConfigError(msg)
    manifest["format"] = _FORMAT
    canonical = json.dumps(manifest, sort_keys=True).encode()
    manifest_hash = hashlib.sha256(canonical).hexdigest()[:16]
    folder = cache_folder() / f"{config.name}-{manifest_hash}"
    _store(folder, arrays, manifest)
    return DataIdentity(
        manifest_hash=manifest_hash,
        folder=str(folder),
        train_samples=sizes["train"],
        held_out_samples=sizes["held_out"],
        classes=classes,
        task="class" if isinstance(config, Digits) else "next_token",
        features=_PIXELS if isinstance(config, Digits) else None,
    )


def _index_of(config: StandardLibrary | TextFiles | Digits) -> str:
    return "labels" if isinstance(config, Digits) else "offsets"


def _text(
    config: StandardLibrary | TextFiles,
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    parts: dict[str, list[bytes]] = {"train": [], "held_out": []}
    files: list[tuple[str, str]] = []
    for name, content, part in _sources(config):
        files.append((f"{part}:{name}", hashlib.sha256(content).hexdigest()))
        parts[part].append(content)
    split = split_packed if config.layout == "packed" else split_blocks
    arrays: dict[str, NDArray[Any]] = {}
    for part, contents in parts.items():
        stream = np.frombuffer(b"\n\n".join(contents), dtype=np.uint8)
        offsets, lengths = split(stream, config.sequence_length)
        arrays |= {
            f"{part}_bytes": stream,
            f"{part}_offsets": offsets,
            f"{part}_lengths": lengths,
        }
    rules = {"sequence_length": config.sequence_length, "layout": config.layout}
    return arrays, {"files": files, **rules}


def _sources(config: StandardLibrary | TextFiles) -> Iterator[tuple[str, bytes, str]]:
    """Yield (name, content, part) of each source file, in a fixed order."""
    if isinstance(config, StandardLibrary):
        root = Path(sysconfig.get_path("stdlib"))
        found = [p for p in root.rglob("*.py") if not _NOT_LIBRARY & set(p.relative_to(root).parts)]
        if not found:
            msg = f"data=stdlib: no Python source in {root}; use data=text data.path=..."
            raise ConfigError(msg)
    else:
        root = Path(config.path).expanduser()
        if root.is_file():
            yield from _one_file(root, config.held_out_pct)
            return
        found = list(_text_files(root))
        if not found:
            msg = (
                f"data.path={config.path}: no text there; give a file, or a folder with files "
                f"that end in one of {' '.join(sorted(_TEXT_SUFFIXES))} (hidden ones and sweep "
                "folders are not read)"
            )
            raise ConfigError(msg)
    names = sorted(path.relative_to(root).as_posix() for path in found)
    held_out = _held_out_names(names, config.held_out_pct)
    for name in names:
        yield name, (root / name).read_bytes(), "held_out" if name in held_out else "train"


def _text_files(root: Path) -> Iterator[Path]:
    """Find the text of a folder, but nothing hidden and no sweep folder.

    Else a sweep below the folder would change the data, hence all identities, of the next one.
    """
    for name, folders, files in os.walk(root):
        folder = Path(name)
        sweep = SweepFolder(folder)
        if sweep.runs.is_dir() and sweep.plan.is_file():
            folders.clear()
            continue
        folders[:] = [inner for inner in folders if not inner.startswith(".")]
        for path in (folder / file for file in files if not file.startswith(".")):
            if path.suffix in _TEXT_SUFFIXES and path.is_file():
                yield path


def _held_out_names(names: list[str], held_out_pct: float) -> set[str]:
    """Choose whole files by the hash of their name, so that one more file moves no other."""
    if len(names) < 2:
        msg = f"a folder with {len(names)} text file cannot be split by file; give the file itself"
        raise ConfigError(msg)

    def draw(name: str) -> float:
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64

    # Few files may leave one part empty; the extreme draw then decides.
    chosen = {name for name in names if 100 * draw(name) < held_out_pct} or {min(names, key=draw)}
    if len(chosen) == len(names):
        chosen.remove(max(names, key=draw))
    return chosen


def _one_file(path: Path, held_out_pct: float) -> Iterator[tuple[str, bytes, str]]:
    content = path.read_bytes()
    cut = round(len(content) * (1 - held_out_pct / 100))
    yield path.name, content[:cut], "train"
    yield path.name, content[cut:], "held_out"


def _digits(config: Digits) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Hold out `held_out_pct` percent of the images, to the nearest whole image.

    They are the first ones of one fixed permutation, whatever the seeds of the runs, so a larger
    percentage holds out the same images and more.
    """
    from sklearn.datasets import load_digits

    loaded = load_digits()
    images = (loaded.data / 16.0).astype(np.float32)
    labels = loaded.target.astype(np.int64)
    count = round(len(labels) * config.held_out_pct / 100)
    held_out = np.zeros(len(labels), dtype=bool)
    held_out[SampleOrder(len(labels), 0).indices(np.arange(count))] = True
    arrays: dict[str, NDArray[Any]] = {}
    for part, chosen in (("train", ~held_out), ("held_out", held_out)):
        arrays |= {f"{part}_images": images[chosen], f"{part}_labels": labels[chosen]}
    content = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    return arrays, {"files": [("digits", content)], "held_out_images": count}


def _store(folder: Path, arrays: Mapping[str, NDArray[Any]], manifest: Mapping[str, Any]) -> None:
    """Write the arrays into a folder that appears at once, or check those that are there."""
    files = {f"{name}.npy": _npy(array) for name, array in arrays.items()}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    if folder.is_dir():
        if all((folder / n).exists() and sha256_of(folder / n) == d for n, d in digests.items()):
            return
        shutil.rmtree(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as name:
            whole = Path(name) / "whole"
            whole.mkdir()
            for file, content in files.items():
                (whole / file).write_bytes(content)
            write_json(whole / "manifest.json", {**manifest, "arrays": digests})
            with suppress(FileExistsError):  # another launcher was faster, with the same content
                whole.rename(folder)
    except OSError as error:
        if not (folder / "manifest.json").exists():
            msg = f"prepared data cannot be written to {folder}: {error}; XDG_CACHE_HOME moves it"
            raise BatchscapeError(msg) from None


def _npy(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()
