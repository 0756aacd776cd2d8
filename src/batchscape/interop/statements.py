"""What one file or command line says of the batch, whatever it calls it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from batchscape.errors import ConfigError
from batchscape.geometry import is_count

__all__ = ["KINDS", "Kind", "Source", "Statement", "Value", "differ", "whole"]

T = TypeVar("T")

Kind = Literal[
    "deepspeed",
    "accelerate",
    "trainer",
    "axolotl",
    "llamafactory",
    "torchtune",
    "litgpt",
    "launcher",
    "script",
]

KINDS: dict[Kind, str] = {
    "deepspeed": "DeepSpeed JSON",
    "accelerate": "accelerate config",
    "trainer": "TrainingArguments",
    "axolotl": "axolotl config",
    "llamafactory": "LLaMA-Factory v1 config",
    "torchtune": "torchtune config",
    "litgpt": "LitGPT config",
    "launcher": "launcher",
    "script": "script arguments",
}
"""What a reader calls each kind."""

_PRECISIONS = ("no", "fp16", "bf16", "fp8")


@dataclass(frozen=True)
class Value(Generic[T]):
    """One value, and the key that it is written under."""

    value: T | None
    """None where the file says "auto": another file decides."""
    key: str

    @property
    def is_auto(self) -> bool:
        """Whether another file is to decide."""
        return self.value is None

    def __str__(self) -> str:
        return f"{self.key} {'auto' if self.value is None else self.value}"


@dataclass(frozen=True)
class Statement:
    """The values of one source; None where it says nothing."""

    kind: Kind
    source: str
    """Name of the file, or what part of the command line."""
    devices: Value[int] | None = None
    """Processes in all, over all nodes."""
    nodes: Value[int] | None = None
    micro: Value[int] | None = None
    accumulation: Value[int] | None = None
    total: Value[int] | None = None
    """Samples per optimizer step."""
    precision: Value[str] | None = None
    """One of no, fp16, bf16, fp8."""
    clipping: Value[float] | None = None
    unused: tuple[Value[str], ...] = ()
    """Numbers whose names speak of the batch, and whose meaning is not known."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Switches that decide what the values above mean; names as in the library."""

    @property
    def states_batch(self) -> bool:
        """Whether it states a number of samples or of micro-steps."""
        return any((self.micro, self.accumulation, self.total))

    def on(self, name: str) -> bool:
        """Return whether a switch is set."""
        return bool(self.others.get(name))

    def name(self, value: Value[T] | None) -> str:
        """Return `source: key value`, for messages."""
        return f"{self.source}: {value}"


@dataclass(frozen=True)
class Source:
    """Raw keys of one source, read with the rules that they must keep.

    Parameters
    ----------
    name : str
        Shown in front of every message.
    content : mapping
        As read from the file or the arguments.
    is_text : bool
        Whether numbers come as text, as on a command line.
    """

    name: str
    content: Mapping[str, object]
    is_text: bool = False

    def count(self, key: str, *, auto: bool = False) -> Value[int] | None:
        """Return an int of at least 1; None where it is not given.

        Raises
        ------
        ConfigError
            It is something else; "auto" is accepted where the library does.
        """
        given = self.content.get(key)
        if given is None:
            return None
        if auto and given == "auto":
            return Value(None, key)
        number = whole(given) if self.is_text else given
        if not is_count(number):
            also = ' or "auto"' if auto else ""
            raise self._refusal(key, given, f"an int from 1 to 2**63 - 1{also}")
        return Value(number, key)

    def number(self, key: str, *, auto: bool = False) -> Value[float] | None:
        """Return a finite number of at least 0; None where it is not given.

        Raises
        ------
        ConfigError
            It is something else.
        """
        given = self.content.get(key)
        if given is None:
            return None
        if auto and given == "auto":
            return Value(None, key)
        found = math.nan
        try:
            # YAML 1.1 reads 1e-3 as text, and the libraries convert it.
            if isinstance(given, (int, float, str)) and not isinstance(given, bool):
                found = float(given)
        except (ValueError, OverflowError):
            pass
        if not 0 <= found < math.inf:
            raise self._refusal(key, given, "a number of at least 0")
        return Value(found, key)

    def flag(self, key: str, *, auto: bool = False) -> Value[bool] | None:
        """Return true or false; None where it is not given.

        Raises
        ------
        ConfigError
            It is something else.
        """
        given = self.content.get(key)
        if given is None:
            return None
        if auto and given == "auto":
            return Value(None, key)
        if isinstance(given, str):
            lower = given.lower()
            if lower in {"true", "yes", "1", "t", "y", ""}:
                return Value(value=True, key=key)
            if lower in {"false", "no", "0", "f", "n"}:
                return Value(value=False, key=key)
        if not isinstance(given, bool):
            raise self._refusal(key, given, "true or false")
        return Value(given, key)

    def precision(self, key: str) -> Value[str] | None:
        """Return one of no, fp16, bf16, fp8; None where it is not given.

        Raises
        ------
        ConfigError
            It is something else.
        """
        given = self.content.get(key)
        if given is None:
            return None
        if given is False:
            rule = 'one of "no", fp16, bf16, fp8; in YAML no without quotes means false'
            raise self._refusal(key, given, rule)
        name = given.lower() if isinstance(given, str) else given
        if not isinstance(name, str) or name not in _PRECISIONS:
            raise self._refusal(key, given, "one of no, fp16, bf16, fp8")
        return Value(name, key)

    def section(self, key: str) -> Source:
        """Return the keys below one key; empty where it is not given.

        Raises
        ------
        ConfigError
            There is something else below it.
        """
        given = self.content.get(key)
        if given is None:
            return Source(self.name, {})
        if not isinstance(given, dict):
            raise self._refusal(key, given, "a mapping of settings")
        return Source(self.name, given)

    def _refusal(self, key: str, given: object, rule: str) -> ConfigError:
        return ConfigError(f"{self.name}: {key} must be {rule}; given {_shown(given)}")


def whole(given: object) -> object:
    """Return the int that a text of digits stands for; all else as it is."""
    return int(given) if isinstance(given, str) and re.fullmatch("[0-9]{1,20}", given) else given


def differ(left: Value[T] | None, right: Value[T] | None) -> bool:
    """Return whether both are values, and not the same one."""
    values = [None if side is None else side.value for side in (left, right)]
    return None not in values and values[0] != values[1]


def _shown(given: object) -> str:
    try:
        text = repr(given)
    except ValueError:
        # Python refuses to print ints of more than 4300 digits, and nobody could read them.
        return "ints that are too long to print"
    except RecursionError:
        return "something nested too deeply to print"
    return text if len(text) <= 60 else f"{text[:57]}..."
