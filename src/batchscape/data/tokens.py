"""Token files as samples of next-token prediction."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from batchscape.config import TokenFiles
from batchscape.data.fingerprints import cache_folder, file_state
from batchscape.data.progress import reading
from batchscape.data.store import PARTS, manifest_hash
from batchscape.data.token_files import NO_VOCABULARY, ScannedFile, TokenFile, recognise, scan
from batchscape.errors import BatchscapeError, ConfigError, RecordError
from batchscape.record.files import read_json, write_json
from batchscape.record.spec import DataIdentity

_LISTING = "files.json"

_UINT16_TOKENS = 1 << 16
_UNLIKELY_TOKENS = {"uint16": 65_000, "uint32": NO_VOCABULARY}
"""Tokens this large are unlikely in their type: probably they are numbers of another type."""


@dataclass(frozen=True)
class Segment:
    """The tokens of one file that belong to one part."""

    file: TokenFile
    begin: int
    end: int
    """Tokens [begin, end) of the file."""

    def samples(self, sequence_length: int) -> int:
        """Return how many full samples lie in it."""
        return max(0, (self.end - self.begin - 1) // sequence_length)


def prepare_tokens(config: TokenFiles) -> DataIdentity:
    """Recognise, hash and check the files; nothing of them is copied.

    A sample lies within one file, and shares its last token with the next one's first. Of each
    file the last `held_out_pct` percent of the tokens are held out, or none where other files are.
    """
    files = {"train": _token_files("path", config.path)}
    if config.held_out_path is not None:
        files["held_out"] = _token_files("held_out_path", config.held_out_path)
    files = _unify_types(files, config.vocabulary_size)
    all_files = [file for part_files in files.values() for file in part_files]
    with reading("hashing", sum(file.path.stat().st_size for file in all_files)) as advance:
        scans = {file: scan(file, advance) for file in all_files}
    if config.held_out_path is not None:
        _refuse_copies(files, scans)
    file_of_largest = max(all_files, key=lambda file: scans[file].largest)
    largest = scans[file_of_largest].largest
    _refuse_other_types(all_files, scans, config.vocabulary_size)
    vocabulary = config.vocabulary_size or largest + 1
    if largest >= vocabulary:
        msg = (
            f"data.vocabulary_size must be above every token; given {vocabulary}, "
            f"{file_of_largest.path} holds {largest}"
        )
        raise ConfigError(msg)
    held_out_pct = None if config.held_out_path is not None else config.held_out_pct
    manifest = {
        "files": [(part, scans[file].sha256, file.dtype) for part in files for file in files[part]],
        "sequence_length": config.sequence_length,
        "held_out_pct": held_out_pct,
        "vocabulary_size": vocabulary,
    }
    parts = _segments(files, held_out_pct)
    samples = {
        part: sum(segment.samples(config.sequence_length) for segment in parts[part])
        for part in PARTS
    }
    for part in PARTS:
        if samples[part] == 0:
            sizes = [segment.end - segment.begin for segment in parts[part]]
            msg = (
                f"data=tokens: the {part} part holds no sample of data.sequence_length="
                f"{config.sequence_length} labels: its longest piece has {max(sizes)} tokens, and "
                f"{config.sequence_length + 1} are needed"
            )
            raise ConfigError(msg)
    digest = manifest_hash(manifest)
    return DataIdentity(
        manifest_hash=digest,
        folder=str(_write_listing(digest, parts)),
        train_samples=samples["train"],
        held_out_samples=samples["held_out"],
        classes=vocabulary,
        task="next_token",
    )


def segments(folder: Path, part: str) -> list[Segment]:
    """Return the segments of a part, as `prepare_tokens` has listed them."""
    listed = []
    for entry in read_json(folder / _LISTING)[part]:
        path = Path(entry["file"]["path"])
        try:
            state = file_state(path)
        except OSError as error:
            msg = f"the tokens {path} cannot be read ({error})"
            raise RecordError(msg) from None
        if state != entry["state"]:
            msg = f"the tokens {path} were changed since they were hashed; plan the run again"
            raise RecordError(msg)
        file = TokenFile(**{**entry["file"], "path": path})
        listed.append(Segment(file, entry["begin"], entry["end"]))
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
        msg = (
            f"data.{setting}={path} cannot be read: {non_files[0]} is not a file (but a folder, a "
            "pipe, a device or a link to nothing); remove it, or put the file there"
        )
        raise ConfigError(msg)
    if not shards:
        msg = (
            f"data.{setting}={path}: no tokens there; give a file, a folder of .bin files, or a "
            "pattern such as folder/train_*.bin"
        )
        raise ConfigError(msg)
    return [recognise(shard) for shard in shards]


def _refuse_copies(files: dict[str, list[TokenFile]], scans: dict[TokenFile, ScannedFile]) -> None:
    train = {scans[file].sha256: file.path for file in files["train"]}
    for file in files["held_out"]:
        if (train_path := train.get(scans[file].sha256)) is not None:
            msg = (
                "data.held_out_path must hold other files than data.path; the same content is in "
                f"{file.path} and {train_path}"
            )
            raise ConfigError(msg)


def _unify_types(
    files: dict[str, list[TokenFile]], vocabulary_size: int | None
) -> dict[str, list[TokenFile]]:
    """Read all raw files as uint32 where one of them is, or where the vocabulary needs it.

    A short file does not show its type by itself.
    """
    raw = [file for part_files in files.values() for file in part_files if file.raw]
    uint32_files = [file for file in raw if file.dtype == "uint32"]
    is_large = vocabulary_size is not None and vocabulary_size > _UINT16_TOKENS
    if not uint32_files and not is_large:
        return files
    if unaligned := [file for file in raw if file.path.stat().st_size % 4]:
        reason = (
            f"data.vocabulary_size={vocabulary_size}" if is_large else f"{uint32_files[0].path}"
        )
        msg = (
            f"raw tokens must be of one type: {reason} needs uint32, and {unaligned[0].path} holds "
            "no whole number of these; write all with array.astype('uint32').tofile(path)"
        )
        raise ConfigError(msg)

    def widen(file: TokenFile) -> TokenFile:
        if not file.raw or file.dtype == "uint32":
            return file
        return replace(file, dtype="uint32", tokens=file.tokens // 2)

    return {part: [widen(file) for file in part_files] for part, part_files in files.items()}


def _refuse_other_types(
    files: list[TokenFile], scans: dict[TokenFile, ScannedFile], vocabulary_size: int | None
) -> None:
    """Refuse raw files whose values are unlikely for the type that they are read as."""
    if vocabulary_size is not None:
        return
    for file in files:
        largest = scans[file].largest
        if file.raw and largest >= _UNLIKELY_TOKENS[file.dtype]:
            msg = (
                f"{file.path}, read as {file.dtype}, holds the token {largest}, which is large for "
                "a vocabulary: the file may hold floats, big-endian numbers or tokens of another "
                "type. If these are tokens, give data.vocabulary_size, above all of them; else "
                "write all files as little-endian uint16, or all as uint32"
            )
            raise ConfigError(msg)


def _segments(
    files: dict[str, list[TokenFile]], held_out_pct: float | None
) -> dict[str, list[Segment]]:
    if held_out_pct is None:
        return {part: [Segment(f, 0, f.tokens) for f in files[part]] for part in PARTS}
    parts: dict[str, list[Segment]] = {part: [] for part in PARTS}
    for file in files["train"]:
        boundary = file.tokens - round(file.tokens * held_out_pct / 100)
        # The last label before the cut is token cut - 1, the first one after it is cut + 1.
        parts["train"].append(Segment(file, 0, boundary))
        parts["held_out"].append(Segment(file, boundary, file.tokens))
    return parts


def _write_listing(digest: str, parts: dict[str, list[Segment]]) -> Path:
    """Write where the files lie; another copy of the same content has a listing of its own."""
    listing: dict[str, Any] = {
        part: [
            {
                "file": {**asdict(piece.file), "path": str(piece.file.path)},
                "state": file_state(piece.file.path),
                "begin": piece.begin,
                "end": piece.end,
            }
            for piece in parts[part]
        ]
        for part in PARTS
    }
    places = manifest_hash({part: [str(s.file.path) for s in parts[part]] for part in PARTS})
    folder = cache_folder() / f"tokens-{digest}-{places[:8]}"
    try:
        write_json(folder / _LISTING, listing)
    except OSError as error:
        msg = f"prepared data cannot be written to {folder}: {error}; XDG_CACHE_HOME moves it"
        raise BatchscapeError(msg) from None
    return folder
