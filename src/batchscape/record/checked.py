"""Checks inside of JSON files, so that a flipped byte is found and not read as another number.

A JSON object ends with a key `sha256`: the digest of every byte before it. A row of JSON lines ends
with a key `crc32`, of the row's bytes before it. Both are plain JSON for other readers. Whoever
changes one by hand removes its check: without one it is read as it is.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

__all__ = ["ROW_CHECK", "TEXT_CHECK", "checked_row", "checked_text", "row_of", "text_of", "torn"]

TEXT_CHECK = "sha256"
"""Last key of a JSON object."""
ROW_CHECK = "crc32"
"""Last key of a row of JSON lines."""

_TEXT_KEYS = (b'"sha256": "', b'"sha256":"')
_DIGITS = 64
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TEXT_ENDS = (b'"\n}\n', b'"}\n')
_ROW_KEY = b'"crc32":"'
_ROW_END = 10
"""Bytes after the key of a row's check: eight digits, a quote, a brace."""
_WHOLE_ROW = re.compile(rb'"crc32":"[0-9a-f]{8}"\}.')


def checked_text(content: Mapping[str, Any], *, indent: int | None = 2) -> bytes:
    """Return a JSON object with its check. NaN and infinities are refused, JSON has none.

    Parameters
    ----------
    content : mapping
        A check that it carries is left out.
    indent : int, optional
        None: all on one line.
    """
    plain = {name: value for name, value in content.items() if name != TEXT_CHECK}
    separators = (",", ":") if indent is None else None
    text = json.dumps(
        {**plain, TEXT_CHECK: ""}, indent=indent, separators=separators, allow_nan=False
    )
    place = text.rindex('"')
    head = text[:place].encode()
    return head + sha256(head).hexdigest().encode() + text[place:].encode() + b"\n"


def text_of(text: bytes) -> dict[str, Any]:
    """Parse a JSON object, and verify its check if it has one.

    Raises
    ------
    ValueError
        If it is not one whole JSON object, or not the one that was written.
    """
    quote = text.rfind(b'"')
    head = text[: max(0, quote - _DIGITS)]
    is_checked = head.endswith(_TEXT_KEYS)
    if is_checked:
        found = sha256(head).hexdigest().encode()
        if found != text[quote - _DIGITS : quote] or text[quote:] not in _TEXT_ENDS:
            msg = f"its content does not match the {TEXT_CHECK} in its last line"
            raise ValueError(msg)
    content = json.loads(text)
    if not isinstance(content, dict):
        msg = f"a JSON object is expected, found {type(content).__name__}"
        raise ValueError(msg)
    if is_checked:
        del content[TEXT_CHECK]
    elif _has_half_a_check(content):
        msg = f"its {TEXT_CHECK} is not where it was written"
        raise ValueError(msg)
    return content


def _has_half_a_check(content: dict[str, Any]) -> bool:
    """Whether an object ends with what was a check before a byte of it was changed."""
    if not content:
        return False
    last = next(reversed(content))
    value = content[last]
    # Any other text of that length, a path say, may well end a file without a check.
    return last == TEXT_CHECK or (isinstance(value, str) and _DIGEST.fullmatch(value) is not None)


def checked_row(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line with its check; NaN and infinities as Python writes them."""
    if ROW_CHECK in row:
        row = {name: value for name, value in row.items() if name != ROW_CHECK}
    head = json.dumps(row, separators=(",", ":"))[:-1].encode()
    head += b"," + _ROW_KEY if row else _ROW_KEY
    return b'%b%08x"}\n' % (head, zlib.crc32(head))


def row_of(line: bytes) -> dict[str, Any]:
    """Parse a line, and verify its check if it has one.

    Parameters
    ----------
    line : bytes
        Without the newline.

    Raises
    ------
    ValueError
        If it is not one whole row, or not the one that was written.
    """
    head = line[:-_ROW_END]
    is_checked = head.endswith(_ROW_KEY)
    if is_checked and line[-_ROW_END:] != b'%08x"}' % zlib.crc32(head):
        msg = f"the row does not match its {ROW_CHECK}"
        raise ValueError(msg)
    row = json.loads(line)
    if not isinstance(row, dict):
        msg = f"a row is a JSON object, found {type(row).__name__}"
        raise ValueError(msg)
    if row.pop(ROW_CHECK, None) is not None and not is_checked:
        msg = f"the {ROW_CHECK} of the row is not where it was written"
        raise ValueError(msg)
    return row


def torn(rest: bytes) -> bool:
    """Whether what follows the last newline of a file is a row that was cut short.

    A whole row with more behind it was not cut: the newline between them was changed.
    """
    return _WHOLE_ROW.search(rest) is None
