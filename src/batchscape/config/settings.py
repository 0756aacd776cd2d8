"""What each setting decides, read from the types of `RunConfig`: the one place that is asked.

Names of runs, the keys under which memory and durations are known, what a program that is not told
of a setting lacks, and what analysis never pools all follow from here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, get_args, get_type_hints

from batchscape.config.run import RunConfig
from batchscape.config.types import OUR_LOOP, Affects

__all__ = [
    "OUR_GROUPS",
    "Setting",
    "affects_of",
    "is_of_our_loop",
    "settings_of",
    "tells_apart",
    "that_affect",
]


class Setting(NamedTuple):
    """A field of a dataclass of the configuration."""

    key: str
    """Dotted key, as a user writes it."""
    affects: Affects
    is_of_our_loop: bool
    """Whether a program of others is told of it by a placeholder or not at all."""
    path: tuple[str, ...]
    """Names of the fields that lead to it, where the key may have another one."""


def settings_of(
    owner: type, prefix: str = "", *, is_ours: bool = False, within: tuple[str, ...] = ()
) -> Iterator[Setting]:
    """Yield the settings of a dataclass, with those of the dataclasses within.

    Parameters
    ----------
    owner : type
    prefix : str
        What their keys begin with, such as `engine.`.
    is_ours : bool
        Whether all of them are read by our own loop only.
    within : tuple of str
        Names of the fields that lead to the dataclass.
    """
    # A name of pydantic's dataclasses, of which there is no type.
    infos: Mapping[str, Any] = owner.__pydantic_fields__  # type: ignore[attr-defined]
    hints = get_type_hints(owner, include_extras=True)
    for field in fields(owner):
        hint = hints[field.name]
        marks = getattr(hint, "__metadata__", ())
        key = f"{prefix}{infos[field.name].alias or field.name}"
        path = (*within, field.name)
        ours = is_ours or OUR_LOOP in marks
        affects = [mark for mark in marks if isinstance(mark, Affects)]
        if affects:
            yield Setting(key, affects[0], ours, path)
            continue
        for member in _members(hint):
            yield from settings_of(member, f"{key}.", is_ours=ours, within=path)


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
    for key, _, _, (*groups, name) in _SETTINGS:
        affects = _AFFECTS[key]
        if affects & what and not affects & but and not (told and key in _OURS):
            inner = found
            for group in groups:
                inner = inner.setdefault(group, {})
            inner[name] = True
    return found


def _members(hint: Any) -> list[type]:  # noqa: ANN401  (a type)
    """Return the dataclasses of a type: itself, or the members of a union."""
    if isinstance(hint, type) and is_dataclass(hint):
        return [hint]
    return [member for inner in get_args(hint) for member in _members(inner)]


_SETTINGS = tuple(settings_of(RunConfig))
_OURS = frozenset(setting.key for setting in _SETTINGS if setting.is_of_our_loop)
_AFFECTS: dict[str, Affects] = {}
"""What every setting and every group decides, by its key."""
for _setting in _SETTINGS:
    _key, _dot = _setting.key, "."
    while _dot:
        _AFFECTS[_key] = _AFFECTS.get(_key, Affects.NOTHING) | _setting.affects
        _key, _dot, _ = _key.rpartition(".")
_GROUPS = frozenset(_AFFECTS) - {setting.key for setting in _SETTINGS}
OUR_GROUPS = tuple(
    name
    for name, hint in get_type_hints(RunConfig, include_extras=True).items()
    if name in _GROUPS and OUR_LOOP in getattr(hint, "__metadata__", ())
)
"""Groups of settings that only our own loop reads."""
