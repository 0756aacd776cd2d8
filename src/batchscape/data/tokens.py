"""Token files as samples of next-token prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from batchscape.config import TokenFiles
from batchscape.data.fingerprints import cache_folder, file_state
from batchscape.data.progress import reading
from batchscape.data.store import PARTS, manifest_hash
from batchscape.data.token_files import TokenFile, recognise, scan
from batchscape.errors import BatchscapeError, ConfigError, RecordError
from batchscape.record.files import read_json, write_json
from batchscape.record.spec import DataIdentity

_LISTING = "parts.json"

_UINT16_TOKENS = 1 << 16

_Parts = Mapping[str, Sequence[TokenFile]]


def prepare_tokens(config: TokenFiles) -> DataIdentity:
    """Recognise, hash and check the files; nothing of them is copied.

    A sample lies within one file, and shares its last token with the next one's first. Of each
    file the last `held_out_pct` percent of the tokens are held out, or none where other files are.
    """
    files: _Parts = {"train": _token_files("path", config.path)}
    if config.held_out_path is not None:
        files = {**files, "held_out": _token_files("held_out_path", config.held_out_path)}
    files = _unify_types(files, config.vocabulary_size)
    all_files = [file for part_files in files.values() for file in part_files]
    with reading("hashing", sum(file.path.stat().st_size for file in all_files)) as advance:
        scans = {file: scan(file, config.vocabulary_size, advance) for file in all_files}
    trained_copies = {scans[file].sha256: file.path for file in files["train"]}
    for file in files.get("held_out", ()):
        if (copy := trained_copies.get(scans[file].sha256)) is not None:
            raise ConfigError(
                "data.held_out_path must hold other files than data.path; the same content is in "
                f"{file.path} and {copy}"
            )
    file_of_largest = max(all_files, key=lambda file: scans[file].largest)
    largest = scans[file_of_largest].largest
    vocabulary = config.vocabulary_size or largest + 1
    if largest >= vocabulary:
        raise ConfigError(
            f"data.vocabulary_size must be above every token; given {vocabulary}, "
            f"{file_of_largest.path} holds {largest}"
        )
    held_out_pct = None if config.held_out_path is not None else config.held_out_pct
    manifest = {
        "files": [(part, scans[file].sha256, file.dtype) for part in files for file in files[part]],
        "sequence_length": config.sequence_length,
        "held_out_pct": held_out_pct,
        "vocabulary_size": vocabulary,
    }
    parts = files if held_out_pct is None else _split(files["train"], held_out_pct)
    samples = {
        part: sum(piece.samples(config.sequence_length) for piece in parts[part]) for part in PARTS
    }
    for part in PARTS:
        if samples[part] == 0:
            raise ConfigError(
                f"data=tokens: the {part} part holds no sample of data.sequence_length="
                f"{config.sequence_length} labels: its longest piece has "
                f"{max(piece.tokens for piece in parts[part])} tokens, and "
                f"{config.sequence_length + 1} are needed"
            )
    digest = manifest_hash(manifest)
    return DataIdentity(
        manifest_hash=digest,
        folder=str(_write_listing(digest, parts)),
        train_samples=samples["train"],
        held_out_samples=samples["held_out"],
        classes=vocabulary,
        task="next_token",
    )


def pieces_of(folder: Path, part: str) -> list[TokenFile]:
    """Return the tokens of a part, as `prepare_tokens` has listed them."""
    listed = []
    for entry in read_json(folder / _LISTING)[part]:
        path = Path(entry["path"])
        try:
            state = file_state(path)
        except OSError as error:
            raise RecordError(f"the tokens {path} cannot be read ({error})") from None
        if not state.items() <= entry.items():
            raise RecordError(
                f"the tokens {path} were changed since they were hashed; plan the run again"
            )
        fields = (entry[name] for name in ("dtype", "offset", "tokens", "raw"))
        listed.append(TokenFile(path, *fields))
    return listed


def _token_files(setting: str, path: str) -> list[TokenFile]:
    root = Path(path).expanduser().absolute()
    if root.is_file():
        return [recognise(root)]
    folder, pattern = (root, "*.bin") if root.is_dir() else (root.parent, root.name)
    shards = sorted(folder.glob(pattern))
    # A pipe or a device has no end, and a dangling link is a missing shard.
    non_files = [shard for shard in shards if not shard.is_file()]
    if non_files:
        raise ConfigError(
            f"data.{setting}={path} cannot be read: {non_files[0]} is not a file (but a folder, a "
            "pipe, a device or a link to nothing); remove it, or put the file there"
        )
    if not shards:
        raise ConfigError(
            f"data.{setting}={path}: no tokens there; give a file, a folder of .bin files, or a "
            "pattern such as folder/train_*.bin"
        )
    return [recognise(shard) for shard in shards]


def _unify_types(files: _Parts, vocabulary_size: int | None) -> _Parts:
    """Read all raw files as uint32 where one of them is, or where the vocabulary needs it.

    A short file does not show its type by itself.
    """
    raw = [file for part_files in files.values() for file in part_files if file.raw]
    needing = [str(file.path) for file in raw if file.dtype == "uint32"]
    if vocabulary_size is not None and vocabulary_size > _UINT16_TOKENS:
        needing = [f"data.vocabulary_size={vocabulary_size}"]
    if not needing:
        return files
    for file in raw:
        if file.path.stat().st_size % 4:
            raise ConfigError(
                f"raw tokens must be of one type: {needing[0]} needs uint32, and {file.path} holds "
                "no whole number of these; write all with array.astype('uint32').tofile(path)"
            )
    return {
        part: [
            replace(file, dtype="uint32", tokens=file.tokens // 2)
            if file.raw and file.dtype == "uint16"
            else file
            for file in part_files
        ]
        for part, part_files in files.items()
    }


def _split(files: Sequence[TokenFile], held_out_pct: float) -> _Parts:
    """Hold out the end of each file.

    The last label before the cut is token cut - 1, the first one after it is cut + 1.
    """
    pairs = [file.split(file.tokens - round(file.tokens * held_out_pct / 100)) for file in files]
    return dict(zip(PARTS, zip(*pairs, strict=True), strict=True))


def _write_listing(digest: str, parts: _Parts) -> Path:
    """Write where the files lie; another copy of the same content has a listing of its own."""
    listing: dict[str, Any] = {
        part: [{**asdict(piece), **file_state(piece.path)} for piece in parts[part]]
        for part in PARTS
    }
    places = manifest_hash({part: [str(piece.path) for piece in parts[part]] for part in PARTS})
    folder = cache_folder() / f"tokens-{digest}-{places[:8]}"
    try:
        write_json(folder / _LISTING, listing)
    except OSError as error:
        raise BatchscapeError(
            f"prepared data cannot be written to {folder}: {error}; set XDG_CACHE_HOME to a "
            "folder that can be written"
        ) from None
    return folder
