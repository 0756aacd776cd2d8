"""What pydantic found wrong with a configuration, in the words of the user who wrote it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

from pydantic import ValidationError

__all__ = ["explain"]

_LONGEST_VALUE = 200
_LONGEST_RULE = 2000
_UNKNOWN = {"unexpected_keyword_argument", "extra_forbidden"}


def explain(error: ValidationError, root: type, groups: Sequence[str] = ()) -> str:
    """Return one line a problem: where, the rule, the value, and what would work.

    Parameters
    ----------
    error : ValidationError
    root : type
        Dataclass of the whole configuration.
    groups : sequence of str
        Names that a user may write beside the fields of `root`.
    """
    lines = ["The configuration breaks these rules:"]
    for problem in error.errors(include_url=False):
        keys, owner = _locate(problem["loc"], root)
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] in _UNKNOWN and keys[-1] in groups and owner is root:
            message = "settings stand one level too deep; is `# @package _global_` the first line?"
        elif problem["type"] in _UNKNOWN:
            known = [] if owner is None else _written(owner)
            message = "unknown setting" + _suggest(keys[-1], known + list(groups) * (owner is root))
        elif problem["type"] == "missing":
            message = "a value is needed"
        elif problem["type"] == "json_invalid":
            message = "a text holds half a character (a lone surrogate), which no file can carry"
        elif problem["type"] == "union_tag_invalid":
            allowed, given = problem["ctx"]["expected_tags"], problem["ctx"]["tag"]
            message = f"name must be one of {allowed}, got {_cut(repr(given), _LONGEST_VALUE)}"
        elif problem["type"] != "value_error":
            rule = message.replace("Input should be", "must be")
            message = f"{rule}, got {_cut(repr(problem['input']), _LONGEST_VALUE)}"
        message = _cut(message, _LONGEST_RULE)
        lines.append(f"  {'.'.join(keys)}: {message}" if keys else f"  {message}")
    return "\n".join(lines)


def _locate(location: Sequence[int | str], root: type) -> tuple[list[str], type | None]:
    """Return the keys that a user wrote, and the dataclass that holds the last of them.

    Pydantic also names the chosen member of a union (`gpt` in `model.gpt.n_layers`), which the
    user never wrote.
    """
    keys: list[str] = []
    owner: type | None = root
    inner: list[type] = [root]
    for part in location:
        tagged = [c for c in inner if len(inner) > 1 and part in _tags(c)]
        if tagged:
            inner = tagged
            continue
        keys.append(str(part))
        owner = inner[0] if len(inner) == 1 else None
        hint = get_type_hints(owner).get(str(part)) if owner is not None else None
        inner = [c for c in (hint, *get_args(hint)) if isinstance(c, type) and is_dataclass(c)]
    return keys, owner


def _written(owner: type) -> list[str]:
    """Return the names of settings as a user writes them."""
    infos = getattr(owner, "__pydantic_fields__", {})
    return [getattr(infos.get(f.name), "alias", None) or f.name for f in fields(owner)]


def _tags(member: type) -> tuple[object, ...]:
    hints = get_type_hints(member)
    return get_args(hints.get("name", hints.get("kind")))


def _cut(text: str, longest: int) -> str:
    """Return a text, of a long one its begin and end."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} ... {text[-half:]} ({len(text)} characters)"


def _suggest(key: str, known: Sequence[str]) -> str:
    if not known:
        return ""
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else "."
    return f"{hint} Known here: {', '.join(known)}"
