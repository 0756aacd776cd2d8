"""What each setting decides, read from the types of `RunConfig`: the one place that is asked.

Names of runs, the keys under which memory and durations are known, what a program that is not told
of a setting lacks, and what analysis never pools all follow from here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from batchscape.config.run import RunConfig
from batchscape.config.types import OUR_LOOP, Affects


class Setting(NamedTuple):
    """A field of a dataclass of the configuration."""

    key: str
    """Dotted key, as a user writes it."""
    owner: type
    """The dataclass, of several models or engines the one that has it."""
    hint: Any
    """Its type, with all that is said of it there."""
    affects: Affects
    is_of_our_loop: bool
    """Whether a program of others is told of it by a placeholder or not at all."""
    path: tuple[str, ...]
    """Names of the fields that lead to it, where the key may have another one."""


def _settings_of(owner: type, group: Setting) -> Iterator[Setting]:
    """Yield the settings of a group that a dataclass is, with those of the dataclasses within."""
    # A name of pydantic's dataclasses, of which there is no type.
    infos: Mapping[str, Any] = owner.__pydantic_fields__  # type: ignore[attr-defined]
    hints = get_type_hints(owner, include_extras=True)
    for field in fields(owner):
        hint = hints[field.name]
        marks = getattr(hint, "__metadata__", ())
        found = Setting(
            ".".join(filter(None, (group.key, infos[field.name].alias or field.name))),
            owner,
            hint,
            next((mark for mark in marks if isinstance(mark, Affects)), group.affects),
            is_of_our_loop=group.is_of_our_loop or OUR_LOOP in marks,
            path=(*group.path, field.name),
        )
        members = members_of(hint)
        for member in members:
            yield from _settings_of(member, found)
        if not members:
            yield found


def members_of(hint: Any) -> list[type]:  # noqa: ANN401  (a type)
    """Return the dataclasses that a group of settings may be; of a single setting none.

    Parameters
    ----------
    hint : type
        A dataclass, or a union of them; a list of dataclasses is a value, so a setting.
    """
    if isinstance(hint, type):
        return [hint] if is_dataclass(hint) else []
    inner = get_args(hint) if get_origin(hint) in {Annotated, Union, UnionType} else ()
    return [member for one in inner for member in members_of(one)]


def affects_of(key: str) -> Affects | None:
    """Return what a setting decides; of a group, what any of its settings does.

    Parameters
    ----------
    key : str
        Dotted key. What stands below a setting, such as `model.settings.n_layer`, decides what
        that one does; a setting of several models or engines, what it does in any of them.

    Returns
    -------
    Affects or None
        None where it is no setting.
    """
    while key and key not in _AFFECTS:
        key = key.rpartition(".")[0]
    return _AFFECTS.get(key)


def tells_apart(key: str) -> bool:
    """Return whether runs that differ in something are never pooled.

    Parameters
    ----------
    key : str
        Dotted key. What is no setting is where a run ran, and tells runs apart.
    """
    affects = affects_of(key)
    return affects is None or bool(affects & Affects.ALL)


def is_of_our_loop(key: str) -> bool:
    """Return whether a setting, or a group, is read by our own loop, and by no program of others.

    Parameters
    ----------
    key : str
        Dotted key.
    """
    return key in OUR_GROUPS or key in _OURS


def that_affect(
    config: RunConfig, what: Affects, *, but: Affects = Affects.NOTHING, told: bool = False
) -> dict[str, Any]:
    """Return the settings of a run that decide something, nested, by group.

    Parameters
    ----------
    config : RunConfig
    what : Affects
        A setting is taken if it decides any of this,
    but : Affects
        and nothing of this.
    told : bool
        Leave out those that a program of others is not told of.
    """
    taken = config.to_mapping(_fields(what, but, told=told))
    return {name: value for name, value in taken.items() if value != {} or name not in _GROUPS}


@functools.cache
def _fields(what: Affects, but: Affects, *, told: bool) -> dict[str, Any]:
    """Return the fields that decide something, nested; a group of them is a mapping."""
    found: dict[str, Any] = {}
    for setting in SETTINGS:
        key, (*groups, name) = setting.key, setting.path
        affects = _AFFECTS[key]
        if affects & what and not affects & but and not (told and key in _OURS):
            inner = found
            for group in groups:
                inner = inner.setdefault(group, {})
            inner[name] = True
    return found


_ALL_OF_IT = Setting("", RunConfig, RunConfig, Affects.ALL, is_of_our_loop=False, path=())
SETTINGS = tuple(_settings_of(RunConfig, _ALL_OF_IT))
"""All settings of all options. What each decides stands in its type, else in that of the group
around it, else it is `Affects.ALL`."""
_OURS = frozenset(setting.key for setting in SETTINGS if setting.is_of_our_loop)
_AFFECTS: dict[str, Affects] = {}
"""What every setting and every group decides, by its key."""
for _setting in SETTINGS:
    _key, _dot = _setting.key, "."
    while _dot:
        _AFFECTS[_key] = _AFFECTS.get(_key, Affects.NOTHING) | _setting.affects
        _key, _dot, _ = _key.rpartition(".")
_GROUPS = frozenset(_AFFECTS) - {setting.key for setting in SETTINGS}
OUR_GROUPS = tuple(
    name
    for name, hint in get_type_hints(RunConfig, include_extras=True).items()
    if name in _GROUPS and OUR_LOOP in getattr(hint, "__metadata__", ())
)
"""Groups of settings that only our own loop reads."""
