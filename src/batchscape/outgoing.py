r"""What leaves for a terminal, a page, a table, a figure or a tracker does nothing there.

Names, reasons and settings are texts of others. A sequence that a terminal obeys is removed, what
is left of control characters is shown as `\x1b`, and secrets are replaced. Records keep texts as
they are, except for secrets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from batchscape.credentials import redact, redact_json

__all__ = ["outgoing", "outgoing_cell", "outgoing_json", "visible"]

# ECMA-48, and xterm's control sequences: https://invisible-island.net/xterm/ctlseqs/ctlseqs.html
_SEQUENCE = re.compile(
    # Titles, links, strings. Another escape ends the search, so that each begin is looked at once.
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\n\x07\x1b\x90\x98\x9c-\x9f]*+(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, the cursor
    r"|\x1b[ -/]*[0-~]"
)
_CONTROL = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"
    # They turn the direction of what follows, or break lines, or cannot be written at all.
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
    "]"
)
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # noqa: RUF001
"""What spreadsheets take for the begin of a formula.

Source: OWASP, CSV injection, https://owasp.org/www-community/attacks/CSV_Injection."""


def visible(text: str) -> str:
    """Return a text without the sequences that terminals obey, other control characters visible.

    Line ends and tabs stay.

    Parameters
    ----------
    text : str
    """
    if text.isprintable():
        return text
    text = _SEQUENCE.sub("", text.replace("\r\n", "\n"))
    return _CONTROL.sub(_code_of, text)


def outgoing(text: str, secrets: Mapping[str, str] | None = None) -> str:
    """Return a text as it may leave: as `visible`, and without secrets.

    Parameters
    ----------
    text : str
    secrets : mapping, optional
        As `secret_variables` returns it; for many texts it is asked once.
    """
    # In this order: a sequence may stand within a secret.
    return redact(visible(text), secrets)


def outgoing_json(content: Any) -> Any:  # noqa: ANN401  (of JSON)
    """Return a JSON value whose texts, and keys, are as they may leave.

    Parameters
    ----------
    content : mapping, list, str, number or None
        Not changed.
    """
    return redact_json(_all_visible(content))


def outgoing_cell(text: str) -> str:
    """Return a text as it may stand in a CSV file: `outgoing`, and no formula of a spreadsheet.

    An apostrophe goes before what begins as a formula and is no number; a spreadsheet shows it as
    text, and so does pandas, with the apostrophe.

    Parameters
    ----------
    text : str
    """
    text = outgoing(text)
    return f"'{text}" if text.startswith(_FORMULA) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text == text.strip()


def _all_visible(content: Any) -> Any:  # noqa: ANN401  (anything of JSON)
    if isinstance(content, str):
        return visible(content)
    if isinstance(content, dict):
        return {_all_visible(key): _all_visible(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_all_visible(value) for value in content]
    return content


def _code_of(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
