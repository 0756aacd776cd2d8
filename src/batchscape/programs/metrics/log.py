"""What is read from the metrics of another program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Log", "Observed", "Reader"]


@dataclass(frozen=True)
class Observed:
    """The batch that a program really used, as far as its metrics tell.

    A quantity that is None was not observed; it says nothing about the plan.
    """

    world_size: int | None = None
    """Data-parallel ranks."""
    micro_batch_size: int | None = None
    """Samples per rank per forward and backward."""
    gradient_accumulation_steps: int | None = None
    """Micro-steps per optimizer step, per rank."""
    global_batch_size: int | None = None
    """Samples per optimizer step."""
    tokens_per_optimizer_step: int | None = None
    """Tokens per optimizer step, where every step has as many."""
    sources: dict[str, str] = field(default_factory=dict)
    """By name of the quantity: where it was read, or what it was derived from."""


@dataclass(frozen=True)
class Log:
    """Everything that a program's metrics held at one moment."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the table `steps`, by increasing `optimizer_step`; what is missing has no key."""
    evals: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the table `evals`, by increasing `optimizer_step`."""
    observed: Observed = field(default_factory=Observed)
    problems: list[str] = field(default_factory=list)
    """Contradictions within the metrics about the batch: with one of them the run is invalid."""
    sources: dict[str, str] = field(default_factory=dict)
    """By name of a column: where its values come from, or why it is missing."""


class Reader(Protocol):
    """Reads the metrics of one run."""

    def read(self, *, final: bool = False) -> Log:
        """Return what the metrics hold by now; an empty log before the program wrote anything.

        Parameters
        ----------
        final : bool
            The program has ended: what should be there and is not is an error.

        Raises
        ------
        RecordError
            If the metrics cannot be read as configured: a missing column, a value that is no
            number, steps that come again with other numbers, damaged lines.
        """
        ...
