"""The effect of each setting on a run, read from the types of `RunConfig`.

Names of runs, the keys under which memory and durations are known, the settings that a program of
others lacks, and the runs that analysis never pools follow from it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import fields
from itertools import accumulate
from typing import Any, NamedTuple, get_type_hints

from batchscape.config.run import RunConfig
from batchscape.config.types import OUR_LOOP, Affects, key_of, members_of


class Setting(NamedTuple):
    """A field of a dataclass of the configuration."""

    key: str
    """Dotted key, as a user writes it."""
    owner: type
    """The dataclass that has it: one of several models or engines."""
    hint: Any
    """Its type with annotations."""
    affects: Affects
    is_of_our_loop: bool
    """Whether a program of others receives it by a placeholder or not at all."""
    path: tuple[str, ...]
    """Names of the fields that lead to it; the key may have an alias."""


def _settings_of(owner: type, group: Setting) -> Iterator[Setting]:
    """Yield the settings of a group that a dataclass is, with those of the dataclasses within."""
    hints = get_type_hints(owner, include_extras=True)
    for field in fields(owner):
        hint = hints[field.name]
        marks = getattr(hint, "__metadata__", ())
        setting = Setting(
            ".".join(filter(None, (group.key, key_of(field.name, hint)))),
            owner,
            hint,
            next((mark for mark in marks if isinstance(mark, Affects)), group.affects),
            is_of_our_loop=group.is_of_our_loop or OUR_LOOP in marks,
            path=(*group.path, field.name),
        )
        members = members_of(hint)
        for member in members:
            yield from _settings_of(member, setting)
        if not members:
            yield setting


def affects_of(key: str) -> Affects | None:
    """Return what a setting, or any setting of a group, affects; None for any other dotted key.

    An entry of a setting, such as `model.settings.n_layer`, affects what the setting does.
    """
    while key and key not in _AFFECTS:
        key = key.rpartition(".")[0]
    return _AFFECTS.get(key)


def tells_apart(key: str) -> bool:
    """Return whether runs that differ in a dotted key, of a setting or not, are never pooled."""
    affects = affects_of(key)
    return affects is None or bool(affects & Affects.ALL)


def is_of_our_loop(key: str) -> bool:
    """Return whether our own loop alone reads a setting or a group."""
    return key in OUR_GROUPS or key in _OF_OUR_LOOP


def that_affect(
    config: RunConfig,
    what: Affects,
    *,
    without: Affects = Affects.NOTHING,
    for_program: bool = False,
) -> dict[str, Any]:
    """Return settings of a run that affect any of `what` and none of `without`, nested by group.

    `for_program` leaves out those that a program of others does not receive.
    """
    mapping = config.to_mapping(_fields(what, without, for_program=for_program))
    return {name: value for name, value in mapping.items() if value != {} or name not in _GROUPS}


@functools.cache
def _fields(what: Affects, without: Affects, *, for_program: bool) -> dict[str, Any]:
    """Return these fields, nested; a group of them is a mapping."""
    fields_by_group: dict[str, Any] = {}
    for setting in SETTINGS:
        key, (*groups, name) = setting.key, setting.path
        affects = _AFFECTS[key]
        if affects & what and not affects & without and not (for_program and key in _OF_OUR_LOOP):
            nested = fields_by_group
            for group in groups:
                nested = nested.setdefault(group, {})
            nested[name] = True
    return fields_by_group


_ROOT = Setting("", RunConfig, RunConfig, Affects.ALL, is_of_our_loop=False, path=())
SETTINGS = tuple(_settings_of(RunConfig, _ROOT))
"""All settings of all options. The type of each states its effect, else the type of the group
around it, else it is `Affects.ALL`."""
_OF_OUR_LOOP = frozenset(setting.key for setting in SETTINGS if setting.is_of_our_loop)
_AFFECTS: dict[str, Affects] = {}
"""The effect of every setting and every group, by its key."""
for _setting in SETTINGS:
    # `a.b.c` is of the groups `a` and `a.b`, which affect what any of their settings does.
    for _key in accumulate(_setting.key.split("."), "{}.{}".format):
        _AFFECTS[_key] = _AFFECTS.get(_key, Affects.NOTHING) | _setting.affects
_GROUPS = frozenset(_AFFECTS) - {setting.key for setting in SETTINGS}
OUR_GROUPS = tuple(
    name
    for name, hint in get_type_hints(RunConfig, include_extras=True).items()
    if name in _GROUPS and OUR_LOOP in getattr(hint, "__metadata__", ())
)
"""Groups that only our own loop reads."""
