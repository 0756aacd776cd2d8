"""Types of values of settings, and the effect of a setting on a run."""

from __future__ import annotations

from dataclasses import is_dataclass
from enum import Flag, auto
from types import UnionType
from typing import (
    Annotated,
    Any,
    Final,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
)

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

T = TypeVar("T")
_STRICT = ConfigDict(extra="forbid", strict=True)
"""No unknown settings, no conversions."""


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def settings(owner: type[T]) -> type[T]:
    """Make a class one of settings, which are validated and then stay as they are."""
    return cast("type[T]", dataclass(frozen=True, config=_STRICT)(owner))


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(Field,))
def keyword_settings(owner: type[T]) -> type[T]:
    """Make a class one of settings as `settings` does, each given by its name."""
    return cast("type[T]", dataclass(frozen=True, kw_only=True, config=_STRICT)(owner))


class Affects(Flag):
    """What a setting affects in a run: its type states it, else the type of its group, else ALL.

    The default is ALL: a forgotten setting may then repeat a run without need, and never gives two
    different runs one name. `config.settings` reads these types to name runs and to pool them.
    """

    NOTHING = 0
    """Only where and when a run is done, or how it is shown: no run is repeated because of it."""
    LOSS = auto()
    """The loss curve, whatever the cut: part of `trajectory_id`."""
    MEMORY = auto()
    """How many bytes a device holds: out of memory with one value says nothing of another."""
    TIME = auto()
    """How long an optimizer step takes, or which times of it are read."""
    RECORD = auto()
    """The record of a run, and how often it is measured: part of `run_id`, and pooled."""
    COST = MEMORY | TIME
    ALL = LOSS | COST

    def __str__(self) -> str:
        """Write it as the comments in `conf/` do: `loss`, `memory, time`, `all` or `nothing`."""
        if self == Affects.ALL:
            return "all"
        return ", ".join(str(one.name).lower() for one in self) or "nothing"


def key_of(field: str, hint: Any) -> str:  # noqa: ANN401  (a type)
    """Return the name of a field of a dataclass as a user writes it: its alias, if it has one."""
    marks = getattr(hint, "__metadata__", ())
    aliases = (mark.alias for mark in marks if isinstance(mark, FieldInfo))
    return next(filter(None, aliases), field)


def members_of(hint: Any) -> list[type]:  # noqa: ANN401  (a type)
    """Return the dataclasses of a group's type; none for a setting, such as a list of them."""
    if isinstance(hint, type):
        return [hint] if is_dataclass(hint) else []
    nested = get_args(hint) if get_origin(hint) in {Annotated, Union, UnionType} else ()
    return [member for one in nested for member in members_of(one)]


OUR_LOOP: Final = "our loop"
"""Marks a setting or group that only our own loop reads: a program of others receives it by a
placeholder or not at all."""

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
SequenceLength = Annotated[int, Field(ge=2, lt=2**31)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Percent = Annotated[float, Field(gt=0, lt=100)]
