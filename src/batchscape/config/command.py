"""Training programs of others: their commands and their metrics."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from batchscape.config.metrics import Metrics
from batchscape.config.types import Affects, Count, settings

OwnValue = str | int | float | bool
"""A value of the user's own that argv may name."""


@settings
class Command:
    """A training program of your own, started by its command and not rewritten.

    Texts of argv and environment hold placeholders in braces, `{micro_batch_size}` or `{seed}`;
    `docs/own_script.md` lists them. Settings that no placeholder names do not reach the program.
    """

    name: Literal["command"]
    argv: Annotated[list[str], Field(min_length=1)]
    """The command, one text an argument; there is no shell. The content of the files that it
    names counts too."""
    metrics: Annotated[Metrics, Affects.TIME | Affects.RECORD]
    """Where the program leaves its losses and times."""
    cwd: str | None = None
    """Folder in which the program starts; null: that of batchscape."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables, over those of batchscape."""
    values: dict[str, OwnValue] = Field(default_factory=dict)
    """Placeholders of your own."""
    files: list[str] = Field(default_factory=list)
    """Files and folders that decide the training beside those in argv, such as modules that the
    script imports; relative to `cwd`. Their content counts."""
    precision: Annotated[
        Literal["program", "float32", "bfloat16", "float16", "float64"], Affects.LOSS
    ] = "program"
    """Arithmetic, as a label of tables and as `{precision}`; `program`: whatever the program
    does."""
    max_devices: Annotated[Count | None, Affects.NOTHING] = None
    """Most data-parallel ranks that the program can take; wider cells are rejected. Null: no
    limit."""
    resumable: Annotated[bool, Affects.NOTHING] = False
    """Whether the same command goes on from what it finds in `{run_dir}`; false: a run that was cut
    short begins again from an empty folder."""

    def __post_init__(self) -> None:
        """Refuse names that cannot be placeholders."""
        for name in self.values:
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ValueError(
                    f"values: {name!r} cannot be a placeholder; use letters, digits and _"
                )


@settings
class ExternalModel:
    """The model that the program of `engine=command` builds for itself."""

    name: Literal["external"]


@settings
class ExternalData:
    """The data that the program of `engine=command` reads for itself."""

    name: Literal["external"]
    sequence_length: Annotated[int, Field(ge=2)] | None = None
    """Tokens a sample, where every sample is full: tokens are then counted, and `{sequence_length}`
    is known. Null: samples alone are counted."""
    files: list[str] = Field(default_factory=list)
    """Files and folders that the program reads, relative to the folder in which batchscape is
    called. Their content counts."""
