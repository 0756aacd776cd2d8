"""Pydantic's errors about a configuration, in the user's own keys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import starmap
from typing import get_args, get_type_hints

from pydantic import ValidationError

from batchscape.config.types import key_of, members_of
from batchscape.text import near_names, suggest

_VALUE_LETTERS = 200
_RULE_LETTERS = 2000
_UNKNOWN = {"unexpected_keyword_argument", "extra_forbidden"}
_TEXTS = {
    **dict.fromkeys(
        _UNKNOWN,  # of the key `sweeps`
        "the settings of the file are one level too deep; write `# @package _global_` as its first "
        "line",
    ),
    "missing": "a value is needed",
    "json_invalid": "a text holds half a character (a lone surrogate), which no file can carry",
}
"""Messages by pydantic's type of an error."""


def explain(error: ValidationError, root: type) -> str:
    """Return one line for each problem: the key, the rule, the value, and what would work."""
    lines = ["The configuration breaks these rules:"]
    for problem in error.errors(include_url=False):
        keys, settings_class = _locate(problem["loc"], root)
        kind, context = problem["type"], problem.get("ctx", {})
        message = problem["msg"].removeprefix("Value error, ")
        # `sweeps` is the folder of the file, not a setting: `_TEXTS` says why it stands there.
        if kind in _UNKNOWN and keys != ["sweeps"]:
            type_hints = (
                {}
                if settings_class is None
                else get_type_hints(settings_class, include_extras=True)
            )
            message = "unknown setting" + suggest(keys[-1], [*starmap(key_of, type_hints.items())])
        elif kind in _TEXTS:
            message = _TEXTS[kind]
        elif kind == "union_tag_invalid":
            tag = _cut(repr(context["tag"]), _VALUE_LETTERS)
            message = f"name must be one of {context['expected_tags']}, got {tag}"
        elif kind != "value_error":
            message = message.replace("Input should be", "must be")
            message += f", got {_cut(repr(problem['input']), _VALUE_LETTERS)}"
            if kind == "literal_error":
                allowed_words = re.findall(r"'([^']+)'", context["expected"])
                near_words = near_names(str(problem["input"]).lower(), allowed_words)
                message += f"; write {near_words[0]}" if near_words else ""
        message = _cut(message, _RULE_LETTERS)
        lines.append(f"  {'.'.join(keys)}: {message}" if keys else f"  {message}")
    return "\n".join(lines)


def _locate(location: Sequence[int | str], root: type) -> tuple[list[str], type | None]:
    """Return the keys that a user wrote, and the dataclass that holds the last of them.

    Pydantic also names the chosen member of a union (`gpt` in `model.gpt.n_layers`), which is left
    out.
    """
    keys: list[str] = []
    settings_class: type | None = root
    members: list[type] = [root]
    for part in location:
        chosen_members = [c for c in members if len(members) > 1 and part in tags_of(c)]
        if chosen_members:
            members = chosen_members
            continue
        keys.append(str(part))
        settings_class = members[0] if len(members) == 1 else None
        hint = get_type_hints(settings_class).get(str(part)) if settings_class is not None else None
        members = members_of(hint)
    return keys, settings_class


def tags_of(member: type) -> tuple[object, ...]:
    """Return the values of `name`, or of `kind`, that choose a dataclass among others."""
    hints = get_type_hints(member)
    return get_args(hints.get("name", hints.get("kind")))


def _cut(text: str, longest: int) -> str:
    """Shorten a long text to its begin and end."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} ... {text[-half:]} ({len(text)} characters)"
