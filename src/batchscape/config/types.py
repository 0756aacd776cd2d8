"""Kinds of values that settings have."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

__all__ = [
    "STRICT",
    "Count",
    "Fraction",
    "NonNegative",
    "Percent",
    "Positive",
    "Seed",
    "SequenceLength",
]

STRICT = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)
"""No unknown settings, no conversions, and the text below a field describes it."""

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
SequenceLength = Annotated[int, Field(ge=2, lt=2**31)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Percent = Annotated[float, Field(gt=0, lt=100)]
