"""The meaning of settings in words, for the command line and the documentation."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from batchscape.config.messages import tags_of
from batchscape.config.run import RunConfig
from batchscape.config.settings import SETTINGS
from batchscape.config.types import key_of, members_of
from batchscape.text import list_text

DECIDED = {(setting.owner, setting.path[-1]): str(setting.affects) for setting in SETTINGS}
"""The effect of a setting in words, by its dataclass and its field; without groups."""
_WORDS = {
    int: "integer",
    float: "number",
    bool: "`true`, `false`",
    str: "text",
    NoneType: "`null`",
}

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def meaning_of(owner: type, name: str) -> str:
    """Return the text below a field, in the dataclass itself or one of its bases."""
    texts = (_texts(base).get(name) for base in filter(is_dataclass, owner.__mro__))
    return next(filter(None, texts), "")


@cache
def _texts(owner: type) -> dict[str, str]:
    """Return the text below each field of a dataclass."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    texts = {}
    for field, text in pairwise(getattr(definition, "body", ())):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            texts[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return texts


def plain(value: object) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {plain(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(plain, value)) + "]"
    return json.dumps(value)


def values_of(hint: Any) -> str:  # noqa: ANN401  (a type)
    """Return the values of a type in words."""
    inner = get_args(hint)
    match get_origin(hint):
        case origin if origin is Annotated:
            bounds = [
                f"{sign} {bound}"
                for mark in inner[1:]
                for rule in getattr(mark, "metadata", ())
                for name, sign in _BOUNDS.items()
                if (bound := getattr(rule, name, None)) is not None
            ]
            words = " ".join([values_of(inner[0]), list_text(bounds, "and")]).rstrip()
        case origin if origin in {Union, UnionType}:
            words = list_text(map(values_of, inner))
        case origin if origin is Literal:
            words = ", ".join(f"`{plain(value)}`" for value in inner)
        case origin if origin in {list, tuple}:
            words = f"list of {values_of(inner[0])}"
        case origin if origin is dict:
            words = "mapping"
        case _ if is_dataclass(hint):
            words = "{" + ", ".join(field.name for field in fields(hint)) + "}"
        case _:
            words = _WORDS.get(hint, "any value")
    return words


def explained(settings: Mapping[str, Any], owner: type = RunConfig) -> Iterator[str]:
    """Yield lines of YAML, each setting below its meaning, its values and its effect.

    The settings are not validated yet, so that any value may stand there.
    """
    hints = get_type_hints(owner, include_extras=True)
    names = {key_of(name, hint): name for name, hint in hints.items()}
    for key, value in settings.items():
        name = names.get(key, "")
        member = _chosen_member(hints.get(name), value)
        if member is not None:
            summary = (member.__doc__ or "").partition("\n\n")[0]
            yield from [*_comment(summary), f"{key}:"]
            yield from textwrap.indent("\n".join(explained(value, member)), "  ").splitlines()
            continue
        if (owner, name) in DECIDED and (description := meaning_of(owner, name)):
            yield from _comment(f"{description} ({values_of(hints[name])}; {DECIDED[owner, name]})")
        yield from yaml.safe_dump(
            {key: value}, allow_unicode=True, sort_keys=False, width=10**6
        ).splitlines()


def _chosen_member(hint: object, value: object) -> type | None:
    """Return the dataclass that the settings of a group choose; None where there is none."""
    if not isinstance(value, Mapping):
        return None
    members = members_of(hint)
    if len(members) > 1:
        tag = value.get("name", value.get("kind"))
        members = [member for member in members if tag in tags_of(member)]
    return next(iter(members), None)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        96,  # of 100 columns, the deepest settings being indented by four
        initial_indent="# ",
        subsequent_indent="# ",
        break_on_hyphens=False,
    )
