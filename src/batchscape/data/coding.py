"""From text to tokens: its bytes as they are, or by the tokenizer in a folder."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchscape.errors import ConfigError

Tokens = NDArray[Any]

_PIECE_CHARACTERS = 2**20
"""Characters that are encoded at once; a longer text is cut at the ends of lines."""

_TOKENIZER_SUFFIXES = {".json", ".txt", ".model", ".tiktoken"}
"""Suffixes of the files that make a tokenizer; weights may lie beside them."""


_PLAIN = {"add_special_tokens": False, "verbose": False}
"""How text that is cut later is encoded; that it is longer than some model's context is no reason
to warn."""


class ByteCoder:
    """Bytes are the tokens."""

    kind = "bytes"
    """What the arrays are called."""
    vocabulary = 256
    """Above every token."""
    separator = np.frombuffer(b"\n\n", dtype=np.uint8)

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return the bytes of each text."""
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def encode_whole(self, texts: Sequence[bytes], length_limit: int) -> list[Tokens]:
        """Return the first bytes of each text."""
        return self.encode([text[:length_limit] for text in texts])


class FolderCoder:
    """A tokenizer of `transformers`, read from its folder and from nowhere else."""

    kind = "tokens"

    def __init__(self, folder: str) -> None:
        try:
            transformers = importlib.import_module("transformers")
        except ImportError:
            raise ConfigError(
                f"data.tokenizer={folder} needs the package transformers: "
                "pip install 'batchscape[hf]'"
            ) from None
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                str(Path(folder).expanduser()), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # noqa: BLE001  (many kinds; all mean that it cannot be read)
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"data.tokenizer={folder}: no tokenizer could be read there ({reason}); give a "
                "folder that `save_pretrained` of a transformers tokenizer has written"
            ) from None
        # Token ids may have gaps: the embedding then needs more rows than there are tokens.
        self.vocabulary = max(self._tokenizer.get_vocab().values()) + 1
        self._dtype = np.min_scalar_type(self.vocabulary - 1)
        end_token = self._tokenizer.eos_token_id
        ids = self._ids(["\n\n"], **_PLAIN)[0] if end_token is None else [end_token]
        self.separator = self._array(ids)

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return the tokens of each text, without special ones.

        Bytes that are no UTF-8 become replacement characters. Texts of more than a million
        characters are encoded a million at a time, cut at the end of a line.
        """
        pieces_by_text = [list(_pieces(text.decode(errors="replace"))) for text in texts]
        ids_by_piece = iter(self._ids([*chain.from_iterable(pieces_by_text)], **_PLAIN))
        return [
            self._array([*chain.from_iterable(islice(ids_by_piece, len(pieces)))])
            for pieces in pieces_by_text
        ]

    def encode_whole(self, texts: Sequence[bytes], length_limit: int) -> list[Tokens]:
        """Return the tokens of each text with the special ones that the tokenizer adds."""
        decoded = [text.decode(errors="replace") for text in texts]
        ids_by_text = self._ids(decoded, truncation=True, max_length=length_limit)
        return [self._array(ids) for ids in ids_by_text]

    def _ids(self, texts: list[str], **settings: bool | int) -> list[list[int]]:
        masks = {"return_attention_mask": False, "return_token_type_ids": False}
        encoded = self._tokenizer(texts, **masks, **settings) if texts else {"input_ids": []}
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def _array(self, ids: Sequence[int]) -> Tokens:
        return np.array(ids, dtype=self._dtype)


Coder = ByteCoder | FolderCoder
"""Turns text into tokens."""


def coder_of(tokenizer: str | None) -> Coder:
    """Return the coder of a tokenizer's folder; without one, bytes are the tokens."""
    return ByteCoder() if tokenizer is None else FolderCoder(tokenizer)


def tokenizer_hash(folder: str) -> str:
    """Return the SHA-256 over the files of a tokenizer; weights beside them do not count."""
    root = Path(folder).expanduser()
    files = sorted(
        path
        for path in (root.iterdir() if root.is_dir() else ())
        if path.is_file() and path.suffix in _TOKENIZER_SUFFIXES
    )
    if not files:
        raise ConfigError(
            f"data.tokenizer={folder}: there is no such folder, or no tokenizer in it; give a "
            "folder that `save_pretrained` of a transformers tokenizer has written"
        )
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode())
    return digest.hexdigest()


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        end = text.rfind("\n", start, start + _PIECE_CHARACTERS) + 1 or start + _PIECE_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]
