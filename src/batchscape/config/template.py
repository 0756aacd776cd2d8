"""Texts with placeholders in braces, as `engine.argv` has them.

`{name}` stands for a value, `{{` and `}}` for braces. There is nothing else: no formats, no
expressions, no shell. A value is put in as it is and never looked at again, so that none can add
an argument or a placeholder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from batchscape.errors import ConfigError

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


def placeholders(text: str) -> list[str]:
    """Return the names in a template, in their order; a brace of another kind is refused."""
    names = []
    for part in _PART.finditer(text):
        name = part[1]
        if part[0] in {"{{", "}}"}:
            continue
        if name is None or not _NAME.fullmatch(name):
            raise ConfigError(
                f"{text!r}: {part[0]!r} is no placeholder; those are {{name}}, and a brace of the "
                "text's own is doubled: {{ or }}"
            )
        names.append(name)
    return names


def fill(text: str, values: Mapping[str, str]) -> str:
    """Put values in the place of placeholders."""
    return _PART.sub(lambda part: part[0][0] if part[1] is None else values[part[1]], text)


def to_text(value: str | float) -> str:
    """Write a value so that a program reads the same one: floats in full, `true` and `false`."""
    return str(value).lower() if isinstance(value, bool) else str(value)
