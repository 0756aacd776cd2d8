"""Token files as others write them: recognised by their headers, hashed once, never copied.

Three layouts are known, all little-endian:

- raw (nanoGPT, `data/*/prepare.py`): tokens and nothing else, uint16 or, where every other 16 bits
  are next to nothing, uint32;
- LitGPT (`packed_dataset.py`): `LITPKDS`, a uint64 version 1, a uint8 code of the type, a uint64
  count, tokens;
- llm.c (`dev/data/data_common.py`), also of modded-nanoGPT: 256 int32, of which the first are
  magic, version and count, tokens; magic 20240520 stands for uint16 and 20240801 for uint32.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchscape.data.fingerprints import cached_result
from batchscape.errors import ConfigError

_BLOCK = 1 << 24

_LITGPT_MAGIC = b"LITPKDS"
_LITGPT_HEADER = struct.Struct("<7sQBQ")
_LITGPT_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Codes of integers; 6 and 7 are floating-point types."""

_LLMC_BYTES = 256 * 4
_LLMC_DTYPES = {20240520: "uint16", 20240801: "uint32"}

_OTHER_FORMATS = {
    b"\x93NUMPY": "an array of numpy.save; write it with array.astype('uint16').tofile(path)",
    b"MMIDIDX": "an index of Megatron",
    b"\x1f\x8b": "compressed with gzip; decompress it",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; decompress it",
    b"PK\x03\x04": "a zip archive; extract it",
}

_WRITE = "Write the tokens with array.astype('uint16').tofile(path), or as uint32"

_JUDGED_TOKENS = 1024
"""Tokens needed at least to judge that they have another type."""
_JUDGED_ZEROS = 128
"""Tokens needed at least to judge that the upper part of each is 0."""
_NO_VOCABULARY = 2**20
"""No vocabulary is as large: a larger token is two of 16 bits, read as one of 32."""
_UNLIKELY_TOKENS = {"uint16": 65_000, "uint32": _NO_VOCABULARY}
"""Tokens this large are unlikely in their type: probably they are numbers of another type."""


@dataclass(frozen=True)
class TokenFile:
    """Tokens of a file, all of them or those of one part."""

    path: Path
    dtype: str
    offset: int
    """Bytes before the first token."""
    tokens: int
    raw: bool
    """Whether there is no header, so that the values alone tell the type."""

    def samples(self, sequence_length: int) -> int:
        """Return how many full samples lie in it."""
        return max(0, (self.tokens - 1) // sequence_length)

    def split(self, boundary: int) -> tuple[TokenFile, TokenFile]:
        """Return the tokens before a boundary, and those from it on."""
        offset = self.offset + boundary * np.dtype(self.dtype).itemsize
        rest = replace(self, offset=offset, tokens=self.tokens - boundary)
        return replace(self, tokens=boundary), rest

    def map(self) -> NDArray[Any]:
        """Map the tokens into memory."""
        dtype = np.dtype(self.dtype).newbyteorder("<")
        return np.memmap(self.path, dtype, mode="r", offset=self.offset, shape=(self.tokens,))


@dataclass(frozen=True)
class ScannedFile:
    """What one pass over a file has found."""

    sha256: str
    """Of the whole file."""
    smallest: int
    largest: int
    merged: int
    """How many numbers make up a token, judged by the first block; above 1 the type is wider."""


def recognise(path: Path) -> TokenFile:
    """Read the header of a file; without one, judge the type of its tokens by the first block."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_LLMC_BYTES)
    index: object = None
    if path.match("chunk-*.bin"):
        with suppress(OSError, ValueError):
            index = json.loads(path.with_name("index.json").read_bytes())
    if isinstance(index, dict) and "chunks" in index:
        raise ConfigError(
            f"{path} is a chunk of litdata, as the index.json beside it says, and this layout is "
            f"not read. {_WRITE}"
        )
    for magic, format_name in _OTHER_FORMATS.items():
        if head.startswith(magic):
            raise ConfigError(f"{path} does not hold plain tokens: it is {format_name}")
    if (layout := _layout_in_header(path, head)) is not None:
        dtype, offset, tokens = layout
        expected_bytes = offset + tokens * np.dtype(dtype).itemsize
        if tokens < 1 or size != expected_bytes:
            raise ConfigError(
                f"{path} has {size} bytes, but {tokens} {dtype} tokens, as its header says, and "
                f"the header make {expected_bytes}; it is not complete, or was written by another "
                "program"
            )
        return TokenFile(path, dtype, offset, tokens, raw=False)
    if size % 2 or size == 0:
        raise ConfigError(
            f"{path} has {size} bytes, which is not a whole number of uint16 tokens of 2 bytes "
            "each; is it complete?"
        )
    begin = np.fromfile(path, "<u2", _BLOCK // 2)
    width = 4 if size % 4 == 0 and _numbers_per_token(begin) == 2 else 2
    dtype = "uint16" if width == 2 else "uint32"
    return TokenFile(path, dtype, 0, size // width, raw=True)


def scan(
    file: TokenFile, vocabulary_size: int | None, advance: Callable[[int], object]
) -> ScannedFile:
    """Hash a file and find its tokens' range, in one pass whose result is cached.

    Raises
    ------
    ConfigError
        If the values are no tokens, or unlikely for the type that they are read as.
    """
    kind = f"tokens {file.dtype} from {file.offset}"
    figures = cached_result(file.path, kind, lambda: _scan_blocks(file, advance))
    scanned = ScannedFile(**figures)
    if scanned.smallest < 0:
        raise ConfigError(f"{file.path} holds the token {scanned.smallest}; tokens are 0 or above")
    if file.raw and np.dtype(file.dtype).itemsize * scanned.merged == 8:
        raise ConfigError(
            f"{file.path} looks like int64, numpy's default: read as {file.dtype}, each token is "
            f"{scanned.merged} numbers, of which the upper ones are 0. {_WRITE}"
        )
    if vocabulary_size is None and file.raw and scanned.largest >= _UNLIKELY_TOKENS[file.dtype]:
        raise ConfigError(
            f"{file.path}, read as {file.dtype}, holds the token {scanned.largest}, which is large "
            "for a vocabulary: the file may hold floats, big-endian numbers or tokens of another "
            "type. If these are tokens, give data.vocabulary_size, above all of them; else write "
            "all files as little-endian uint16, or all as uint32"
        )
    return scanned


def _layout_in_header(path: Path, head: bytes) -> tuple[str, int, int] | None:
    """Return type, bytes of the header and tokens as a header says them; None without one."""
    if len(head) >= 12 and int.from_bytes(head[:4], "little") in _LLMC_DTYPES:
        magic, _, tokens = struct.unpack_from("<3i", head)
        return _LLMC_DTYPES[magic], _LLMC_BYTES, tokens
    if not head.startswith(_LITGPT_MAGIC):
        return None
    if len(head) < _LITGPT_HEADER.size:
        raise ConfigError(f"{path} ends within its LitGPT header; it is not complete")
    _, version, code, tokens = _LITGPT_HEADER.unpack_from(head)
    if version != 1 or code not in _LITGPT_DTYPES:
        raise ConfigError(
            f"{path} has a LitGPT header of version {version} and type code {code}; known are "
            f"version 1 and the codes of integers, {', '.join(map(str, _LITGPT_DTYPES))}"
        )
    return _LITGPT_DTYPES[code], _LITGPT_HEADER.size, tokens


def _scan_blocks(file: TokenFile, advance: Callable[[int], object]) -> dict[str, Any]:
    digest = hashlib.sha256()
    smallest, largest = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    dtype = np.dtype(file.dtype).newbyteorder("<")
    merged = None
    with file.path.open("rb") as content:
        digest.update(content.read(file.offset))
        while block := content.read(_BLOCK):
            digest.update(block)
            tokens = np.frombuffer(block, dtype=dtype)
            smallest = min(smallest, int(tokens.min()))
            largest = max(largest, int(tokens.max()))
            merged = _numbers_per_token(tokens) if merged is None else merged
            advance(len(block))
    return {
        "sha256": digest.hexdigest(),
        "smallest": smallest,
        "largest": largest,
        "merged": merged or 1,
    }


def _numbers_per_token(tokens: NDArray[Any]) -> int:
    """Return how many numbers make up a token, judged by upper parts that are 0.

    Of a vocabulary up to 2**20 the upper 16 bits are below 16.
    """
    if len(tokens) < _JUDGED_ZEROS or not tokens[::2].any():
        return 1
    upper_limit = _NO_VOCABULARY >> 16
    if tokens.dtype.itemsize == 4:
        return 1 if tokens[1::2].any() else 2
    if tokens.dtype.itemsize != 2:
        return 1
    if not (tokens[2::4].any() or tokens[3::4].any()) and int(tokens[1::4].max()) < upper_limit:
        return 4
    upper = int(tokens[1::2].max())
    pairs = len(tokens) >= _JUDGED_TOKENS and upper < upper_limit <= int(tokens[::2].max())
    return 2 if upper == 0 or pairs else 1
