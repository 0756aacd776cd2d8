"""What is read from the metrics of another program, and the batch that it really used.

Numbers are noted as they are read, each with its source. Others are derived from them in whole
numbers. A remainder, or two sources that disagree, is a problem: the quantity counts as not
observed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from batchscape.geometry import BatchGeometry
from batchscape.programs.metrics.rows import Row, fill_counts, fill_train_time


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
        """Return what the metrics hold by now; an empty log before the program wrote anything."""
        ...


_FACTORS = ("world_size", "micro_batch_size", "gradient_accumulation_steps")


class ObservedBatch:
    """The batch of a program, put together from what it logs."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._values: dict[str, int] = {}
        self._sources: dict[str, str] = {}
        self._disputed: set[str] = set()

    def put(self, name: str, value: int, source: str) -> None:
        """Note a number that was read."""
        if value < 1:
            self._dispute(name, f"{name} is {value} by {source}")
        elif self._values.setdefault(name, value) != value:
            first_source = self._sources[name]
            self._dispute(
                name, f"{name} is {self._values[name]} by {first_source}, {value} by {source}"
            )
        else:
            self._sources.setdefault(name, source)

    def value(self, name: str) -> int | None:
        """Return a number that was read, if sources agree on it."""
        return None if name in self._disputed else self._values.get(name)

    def put_growth(
        self, name: str, rows: Sequence[Mapping[str, Any]], column: str, source: str
    ) -> None:
        """Note by how much a running count grows with an optimizer step.

        A count of samples that grows unevenly is a problem, one of tokens is not: samples may
        be of any length.
        """
        steps = [row for row in rows if column in row]
        points = [(0, 0), *((row["optimizer_step"], row[column]) for row in steps)]
        size, uneven = even_growth(points)
        if size is not None:
            self.put(name, size, source)
        elif uneven is not None and column == "samples":
            self._dispute(name, f"{source}: {uneven}")

    def infer(self, sequence_length: int | None) -> Observed:
        """Return what is observed and what follows from it."""
        factors = {name: self._values[name] for name in _FACTORS if name in self._values}
        if len(factors) == len(_FACTORS):
            self.put("global_batch_size", math.prod(factors.values()), _product(factors))
        tokens = self._values.get("tokens_per_optimizer_step")
        if tokens is not None and sequence_length is not None:
            self._count_samples(tokens, sequence_length)
        global_batch = self._values.get("global_batch_size")
        if len(factors) == len(_FACTORS) - 1 and global_batch is not None:
            (unknown_factor,) = set(_FACTORS) - set(factors)
            self._divide(unknown_factor, global_batch, factors)
        undisputed = {
            name: value for name, value in self._values.items() if name not in self._disputed
        }
        return Observed(**undisputed, sources={name: self._sources[name] for name in undisputed})

    def _count_samples(self, tokens: int, length: int) -> None:
        """Derive samples from tokens: those read, or those predicted, one less a sample."""
        lengths = [n for n in (length, length - 1) if n and tokens % n == 0]
        sizes = [tokens // n for n in lengths]
        source = self._sources["tokens_per_optimizer_step"]
        observed = self._values.get("global_batch_size")
        if "tokens_per_optimizer_step" in self._disputed:
            return
        if not sizes or (len(sizes) > 1 and observed is not None and observed not in sizes):
            self.problems.append(
                f"{tokens} tokens an optimizer step ({source}) are not those of "
                f"{observed or 'whole'} samples of {length} tokens, nor of {length - 1} labels"
            )
        elif len(sizes) == 1:
            self.put("global_batch_size", sizes[0], f"{tokens} ({source}) / {lengths[0]} tokens")

    def _divide(self, name: str, global_batch: int, parts: Mapping[str, int]) -> None:
        if "global_batch_size" in self._disputed or self._disputed & parts.keys():
            return
        text = f"global_batch_size {global_batch} ({self._sources['global_batch_size']})"
        text = f"{text} / ({_product(parts)})"
        quotient, remainder = divmod(global_batch, math.prod(parts.values()))
        if remainder:
            self.problems.append(f"{name} is no whole number: {text}")
        else:
            self.put(name, quotient, text)

    def _dispute(self, name: str, problem: str) -> None:
        self._disputed.add(name)
        if problem not in self.problems:
            self.problems.append(problem)


def even_growth(points: Iterable[tuple[int, int]]) -> tuple[int | None, str | None]:
    """Return the growth of a count with each optimizer step, or where it is uneven."""
    size: int | None = None
    previous: tuple[int, int] | None = None
    for step, count in points:
        if previous is not None:
            growth, remainder = divmod(count - previous[1], step - previous[0])
            if remainder or (size is not None and growth != size):
                usual = "" if size is None else f", {size} a step before"
                return None, (
                    f"optimizer steps {previous[0] + 1} to {step} took {count - previous[1]}{usual}"
                )
            size = growth
        previous = (step, count)
    return size, None


def _product(parts: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {value}" for name, value in parts.items())


def finish(
    steps: list[Row],
    evals: list[Row],
    batch: ObservedBatch,
    *,
    geometry: BatchGeometry,
    sequence_length: int | None,
    sources: dict[str, str],
    source: str,
) -> Log:
    """Infer the batch and fill in counts and times."""
    batch.put_growth("global_batch_size", steps, "samples", f"samples in the {source}")
    batch.put_growth("tokens_per_optimizer_step", steps, "tokens", f"tokens in the {source}")
    observed = batch.infer(sequence_length)
    size = observed.global_batch_size
    basis = "planned" if size is None else "observed"
    derivations = {"samples": f"optimizer steps x {basis} global batch size"}
    if sequence_length is not None:
        derivations["tokens"] = "samples x sequence length"
    for name, origin in derivations.items():
        if steps and not any(name in row for row in steps):
            sources.setdefault(name, f"not logged; {origin}")
    for rows in (steps, evals):
        fill_counts(rows, size or geometry.global_batch_size, sequence_length)
    fill_train_time(steps, evals)
    return Log(steps, evals, observed, batch.problems, sources)


def settle_loss(steps: list[Row], parts: int = 1) -> str | None:
    """Remove every loss that is not the mean over the global batch of its step.

    One that is not finite stays: the training diverged, whatever the mean is over.
    """
    previous = removed = 0
    for row in steps:
        if "loss" not in row:
            continue
        step = int(row["optimizer_step"])
        if (parts > 1 or step - previous > 1) and math.isfinite(row["loss"]):
            del row["loss"]
            removed += 1
        previous = step
    if not removed:
        return None
    return f"missing in {removed} rows: the program may log the mean of a part, or of several steps"
