"""What settings mean, in words: for the command line, and for the page about settings."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types
import yaml
from pydantic.fields import FieldInfo

from batchscape.config.messages import tags_of
from batchscape.config.run import RunConfig
from batchscape.config.settings import SETTINGS, members_of
from batchscape.text import list_text

DECIDED = {(setting.owner, setting.path[-1]): str(setting.affects) for setting in SETTINGS}
"""What a setting decides in words, by its dataclass and its field; groups are not in it."""
_WORDS = {
    int: "integer",
    float: "number",
    bool: "`true`, `false`",
    str: "text",
    NoneType: "`null`",
}


def meaning_of(owner: type, name: str) -> str:
    """Return the text below a field, in the dataclass itself or the one that it stands on.

    Parameters
    ----------
    owner : type
    name : str
        Of the field.
    """
    found = (getattr(base, "__pydantic_fields__", {}).get(name) for base in owner.__mro__)
    said = next((info.description for info in found if info and info.description), "")
    return " ".join(said.split())


def plain(value: object) -> str:
    """Return a value as it is written on the command line.

    Parameters
    ----------
    value : object
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {plain(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(plain, value)) + "]"
    return json.dumps(value)


def values_of(hint: Any) -> str:  # noqa: ANN401  (a type)
    """Return in words which values a type takes.

    Parameters
    ----------
    hint : type
    """
    inner = get_args(hint)
    match get_origin(hint):
        case origin if origin is Annotated:
            bounds = [bound for mark in inner[1:] for bound in _bounds_of(mark)]
            said = " ".join([values_of(inner[0]), list_text(bounds, "and")]).rstrip()
        case origin if origin in {Union, UnionType}:
            said = list_text(map(values_of, inner))
        case origin if origin is Literal:
            said = ", ".join(f"`{plain(value)}`" for value in inner)
        case origin if origin in {list, tuple}:
            said = f"list of {values_of(inner[0])}"
        case origin if origin is dict:
            said = "mapping"
        case _ if is_dataclass(hint):
            said = "{" + ", ".join(field.name for field in fields(hint)) + "}"
        case _:
            said = _WORDS.get(hint, "any value")
    return said


def explained(settings: Mapping[str, Any], owner: type = RunConfig) -> Iterator[str]:
    """Yield lines of YAML: each setting below what it means, takes and decides.

    Parameters
    ----------
    settings : mapping
        As composed; nothing has looked through them yet, so that anything may stand there.
    owner : type
        The dataclass that they are of.
    """
    # A name of pydantic's dataclasses, of which there is no type.
    infos: Mapping[str, Any] = owner.__pydantic_fields__  # type: ignore[attr-defined]
    names = {infos[name].alias or name: name for name in infos}
    hints = get_type_hints(owner, include_extras=True)
    for key, value in settings.items():
        name = names.get(key, "")
        member = _chosen(hints.get(name), value)
        if member is not None:
            about = inspect.cleandoc(member.__doc__ or "").partition("\n\n")[0]
            yield from [*_comment(about), f"{key}:"]
            yield from textwrap.indent("\n".join(explained(value, member)), "  ").splitlines()
            continue
        if (owner, name) in DECIDED and (said := meaning_of(owner, name)):
            yield from _comment(f"{said} ({values_of(hints[name])}; {DECIDED[owner, name]})")
        yield from yaml.safe_dump(
            {key: value}, allow_unicode=True, sort_keys=False, width=10**6
        ).splitlines()


def _chosen(hint: object, value: object) -> type | None:
    """Return the dataclass that settings choose; None where there is none, or no group."""
    members = members_of(hint) if isinstance(value, Mapping) else []
    if isinstance(value, Mapping) and len(members) > 1:
        tag = value.get("name", value.get("kind"))
        members = [member for member in members if tag in tags_of(member)]
    return members[0] if members else None


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        96,  # of 100 columns, the deepest settings being indented by four
        initial_indent="# ",
        subsequent_indent="# ",
        break_on_hyphens=False,
    )


def _bounds_of(mark: object) -> Iterator[str]:
    """Yield the bounds that a mark of a type sets."""
    for inner in mark.metadata if isinstance(mark, FieldInfo) else ():
        match inner:
            case annotated_types.Ge(ge=bound):
                yield f"≥ {bound}"
            case annotated_types.Gt(gt=bound):
                yield f"> {bound}"
            case annotated_types.Le(le=bound):
                yield f"≤ {bound}"
            case annotated_types.Lt(lt=bound):
                yield f"< {bound}"
