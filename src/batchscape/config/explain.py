"""What settings mean, in words: for the command line, and for the page about settings."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types
from pydantic.fields import FieldInfo

from batchscape.config.messages import tags_of
from batchscape.config.run import RunConfig
from batchscape.config.settings import SETTINGS, members_of

__all__ = ["DECIDED", "below_comments", "comments_of", "meaning_of", "plain", "values_of"]

DECIDED = {(setting.owner, setting.path[-1]): str(setting.affects) for setting in SETTINGS}
"""What a setting decides in words, by its dataclass and its field; groups are not in it."""
_WORDS = {
    int: "integer",
    float: "number",
    bool: "`true`, `false`",
    str: "text",
    NoneType: "`null`",
}
_KEY = re.compile(r"( *)([A-Za-z_]\w*):")
_WIDTH = 100


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
            said = " ".join([values_of(inner[0]), " and ".join(bounds)]).rstrip()
        case origin if origin in {Union, UnionType}:
            said = " or ".join(values_of(member) for member in inner)
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


def comments_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return what each setting and each group of a run means, by its dotted key.

    Parameters
    ----------
    settings : mapping
        As composed; nothing has looked through them yet, so that anything may stand there.
    """
    return dict(_comments(RunConfig, settings, ""))


def _comments(owner: type, settings: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    # A name of pydantic's dataclasses, of which there is no type.
    infos: Mapping[str, Any] = owner.__pydantic_fields__  # type: ignore[attr-defined]
    for field, hint in get_type_hints(owner, include_extras=True).items():
        name = infos[field].alias or field
        key, value = f"{prefix}{name}", settings.get(name)
        said = meaning_of(owner, field)
        members = members_of(hint)
        if not members and said:
            yield key, f"{said} ({values_of(hint)}; {DECIDED[owner, field]})"
        if isinstance(value, Mapping):
            tag = value.get("name", value.get("kind"))
            for member in members:
                if len(members) == 1 or tag in tags_of(member):
                    about = inspect.cleandoc(member.__doc__ or "").partition("\n\n")[0]
                    yield key, " ".join(about.split())
                    yield from _comments(member, value, f"{key}.")


def below_comments(lines: Iterable[str], comments: Mapping[str, str]) -> Iterator[str]:
    """Yield lines of YAML, each key that has a comment below it.

    Parameters
    ----------
    lines : iterable of str
        With their ends, in blocks and not in braces.
    comments : mapping
        By dotted key.
    """
    above: list[tuple[int, str]] = []
    for line in lines:
        if match := _KEY.match(line):
            indent, name = len(match[1]), match[2]
            above = [(column, key) for column, key in above if column < indent]
            key = ".".join([*(key for _, key in above), name])
            above.append((indent, name))
            start = f"{match[1]}# "
            for part in textwrap.wrap(
                comments.get(key, ""),
                _WIDTH,
                initial_indent=start,
                subsequent_indent=start,
                break_on_hyphens=False,
            ):
                yield f"{part}\n"
        yield line


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
