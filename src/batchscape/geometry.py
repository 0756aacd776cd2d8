"""The geometry of a global batch: solved exactly, or refused with geometries that would work.

One identity holds everywhere::

    data_parallel_size = nodes x devices_per_node
    global_batch_size  = data_parallel_size x micro_batch_size x gradient_accumulation_steps
    global_batch_tokens = global_batch_size x sequence_length

Any values that determine the rest are enough. A remainder is never floored away: it is an
error that names the rule, the values and the nearest geometries that satisfy the identity.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, product
from typing import TypeGuard

from batchscape.errors import GeometryError

COUNT_LIMIT = 2**63
"""Sample positions are 64-bit signed integers, so that every count is below it."""
_COUNT_RULE = "every value must be an int from 1 to 2**63 - 1"
# Divisors are sought up to this far from a value, which bounds the cost of an error message.
_PROBES = 4096
_MAX_SUGGESTIONS = 4

_FACTORS = ("data_parallel_size", "micro_batch_size", "gradient_accumulation_steps")
_ROLES = {
    "data_parallel_size": "data_parallel_size",
    "micro_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "global_batch_size": "global_batch_size (or global_batch_tokens with sequence_length)",
}
_STANDS_FOR = {
    "devices_per_node": "data_parallel_size",
    "global_batch_tokens": "global_batch_size",
}


@dataclass(frozen=True, slots=True, order=True)
class BatchGeometry:
    """One way to cut a global batch over nodes, devices, micro-batches and micro-steps.

    Parameters
    ----------
    nodes : int
        Machines, at least 1.
    devices_per_node : int
        Data-parallel ranks on each machine, at least 1.
    micro_batch_size : int
        Samples per rank per forward and backward, at least 1.
    gradient_accumulation_steps : int
        Micro-steps per optimizer step, per rank, at least 1.

    Raises
    ------
    GeometryError
        A value is not an int of at least 1, or the global batch does not fit in 63 bits.
    """

    nodes: int
    devices_per_node: int
    micro_batch_size: int
    gradient_accumulation_steps: int

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in self.__slots__}
        if not all(map(is_count, values.values())):
            raise GeometryError(f"{_COUNT_RULE}; given {_show(values)}")
        if self.global_batch_size >= COUNT_LIMIT:
            raise GeometryError(
                f"global_batch_size must be below 2**63 (it would be {self.global_batch_size})"
            )

    @property
    def data_parallel_size(self) -> int:
        """Data-parallel ranks: nodes x devices_per_node."""
        return self.nodes * self.devices_per_node

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.data_parallel_size * self.micro_batch_size * self.gradient_accumulation_steps

    def __str__(self) -> str:
        factors = " x ".join(str(getattr(self, name)) for name in _FACTORS)
        text = f"{factors} = {self.global_batch_size}"
        if self.nodes == 1:
            return text
        return f"{text} ({self.nodes} nodes x {self.devices_per_node} devices)"


def solve(
    *,
    nodes: int | None = None,
    devices_per_node: int | None = None,
    data_parallel_size: int | None = None,
    micro_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None,
    global_batch_size: int | None = None,
    global_batch_tokens: int | None = None,
    sequence_length: int | None = None,
) -> BatchGeometry:
    """Derive the geometry that the given values determine.

    More values than needed are accepted as long as they agree. `nodes` is 1 where nothing
    determines it.

    Parameters
    ----------
    nodes, devices_per_node, data_parallel_size : int, optional
        Machines, ranks per machine and ranks in all.
    micro_batch_size : int, optional
        Samples per rank per forward and backward.
    gradient_accumulation_steps : int, optional
        Micro-steps per optimizer step, per rank.
    global_batch_size : int, optional
        Samples per optimizer step.
    global_batch_tokens : int, optional
        Tokens per optimizer step; needs `sequence_length`.
    sequence_length : int, optional
        Tokens per sample; it takes part only where `global_batch_tokens` is given.

    Returns
    -------
    BatchGeometry
        The only geometry that has all the values given.

    Raises
    ------
    GeometryError
        The values are too few, contradict each other, do not divide, or are not ints of at
        least 1. The message and `nearest` give up to four geometries that would work, closest
        first: those that keep as many of the values given as can be kept.
    """
    values = {name: value for name, value in locals().items() if value is not None}
    if not all(map(is_count, values.values())):
        # Suggestions start from the nearest counts; values that are not numbers are left out.
        counts = {
            name: min(max(round(value), 1), COUNT_LIMIT - 1)
            for name, value in values.items()
            if (isinstance(value, float) and math.isfinite(value)) or type(value) is int
        }
        raise _refusal(_COUNT_RULE, values, _nearest(counts))
    try:
        return _derive(values)
    except GeometryError as error:
        raise _refusal(str(error), values, _nearest(values)) from None


def enumerate_geometries(
    global_batch_size: int,
    *,
    max_data_parallel_size: int | None = None,
    data_parallel_sizes: Collection[int] | None = None,
    max_micro_batch_size: int | None = None,
    max_gradient_accumulation_steps: int | None = None,
    nodes: int = 1,
) -> list[BatchGeometry]:
    """List every geometry of one global batch under the limits.

    Parameters
    ----------
    global_batch_size : int
        Samples per optimizer step.
    max_data_parallel_size, max_micro_batch_size, max_gradient_accumulation_steps : int, optional
        Largest value of each factor, inclusive.
    data_parallel_sizes : collection of int, optional
        The only device counts to use; those that do not divide the batch or do not spread
        evenly over the nodes yield nothing.
    nodes : int
        Machines that the devices are spread over, evenly.

    Returns
    -------
    list of BatchGeometry
        Sorted by devices, then micro-batch, then accumulation; empty where nothing fits.

    Raises
    ------
    GeometryError
        A value is not an int of at least 1.
    """
    settings = {name: value for name, value in locals().items() if value is not None}
    sizes = settings.pop("data_parallel_sizes", None)
    if not all(map(is_count, (*settings.values(), *(sizes or ())))):
        raise _refusal(_COUNT_RULE, {**settings, "data_parallel_sizes": sizes})
    return sorted(
        BatchGeometry(nodes, devices // nodes, micro, per_rank // micro)
        for devices in _divisors(global_batch_size, max_data_parallel_size)
        if devices % nodes == 0 and (sizes is None or devices in sizes)
        for per_rank in (global_batch_size // devices,)
        for micro in _divisors(per_rank, max_micro_batch_size)
        if per_rank // micro <= (max_gradient_accumulation_steps or per_rank)
    )


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is an int from 1 to 2**63 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < COUNT_LIMIT


def _show(values: Mapping[str, object]) -> str:
    # Python refuses to print ints of more than 4300 digits, and nobody could read them.
    return ", ".join(
        f"{name}=<int of {value.bit_length()} bits>"
        if isinstance(value, int) and value.bit_length() > 128
        else f"{name}={value!r}"
        for name, value in values.items()
    )


def _refusal(
    rule: str, values: Mapping[str, object], nearest: tuple[BatchGeometry, ...] = ()
) -> GeometryError:
    message = f"{rule}; given {_show(values) or 'nothing'}"
    if nearest:
        message += f"; nearest that would work: {', '.join(map(str, nearest))}"
    return GeometryError(message, nearest)


def _derive(values: Mapping[str, int]) -> BatchGeometry:
    """Solve the identity without looking for alternatives; the error holds the rule alone."""
    unknown = _unknown_roles(values)
    if len(unknown) > 1:
        choices = ", ".join(_ROLES[name] for name in unknown)
        raise GeometryError(f"too few values: add any {len(unknown) - 1} of {choices}")

    numbers = dict(values)
    if "global_batch_tokens" in numbers:
        if "sequence_length" not in numbers:
            raise GeometryError("global_batch_tokens needs sequence_length")
        samples = _quotient(numbers, "global_batch_tokens", "sequence_length")
        _agree(numbers, "global_batch_size", samples, "global_batch_tokens / sequence_length")
    if {"nodes", "devices_per_node"} <= numbers.keys():
        devices = numbers["nodes"] * numbers["devices_per_node"]
        _agree(numbers, "data_parallel_size", devices, "nodes x devices_per_node")
    elif unknown and "devices_per_node" in numbers:
        # The other factor is the unknown, so nothing determines the nodes: one node.
        numbers.setdefault("data_parallel_size", numbers["devices_per_node"])

    for name in _FACTORS:
        if name not in numbers:
            others = [factor for factor in _FACTORS if factor != name]
            numbers[name] = _quotient(numbers, "global_batch_size", *others)
    samples = math.prod(numbers[name] for name in _FACTORS)
    _agree(numbers, "global_batch_size", samples, " x ".join(_FACTORS))

    if "nodes" not in numbers and "devices_per_node" in numbers:
        numbers["nodes"] = _quotient(numbers, "data_parallel_size", "devices_per_node")
    numbers.setdefault("nodes", 1)
    return BatchGeometry(
        nodes=numbers["nodes"],
        devices_per_node=_quotient(numbers, "data_parallel_size", "nodes"),
        micro_batch_size=numbers["micro_batch_size"],
        gradient_accumulation_steps=numbers["gradient_accumulation_steps"],
    )


def _unknown_roles(names: Collection[str]) -> list[str]:
    roles = {_STANDS_FOR.get(name, name) for name in names}
    return [name for name in _ROLES if name not in roles]


def _quotient(values: Mapping[str, int], dividend: str, *parts: str) -> int:
    divisor = math.prod(values[part] for part in parts)
    quotient, remainder = divmod(values[dividend], divisor)
    if remainder:
        raise GeometryError(
            f"{dividend} must be a multiple of {' x '.join(parts)}"
            f" ({values[dividend]} / {divisor} leaves {remainder})"
        )
    return quotient


def _agree(values: dict[str, int], name: str, value: int, rule: str) -> None:
    if values.setdefault(name, value) != value:
        raise GeometryError(f"{name} must equal {rule} ({values[name]} is not {value})")


def _nearest(values: Mapping[str, int]) -> tuple[BatchGeometry, ...]:
    """Return the geometries that change the fewest values, and these least."""
    tokens_unread = "global_batch_tokens" in values and "sequence_length" not in values
    if tokens_unread or len(_unknown_roles(values)) > 1:
        return ()
    changeable = [name for name in values if name != "sequence_length"]
    # Three changes always suffice: one device count, the global batch, and its tokens.
    for changes in range(4):
        geometries = {
            geometry
            for changed_names in combinations(changeable, changes)
            for geometry in _repairs(values, changed_names)
        }
        if geometries:
            return tuple(
                sorted(geometries, key=lambda g: (_distance(g, values), g))[:_MAX_SUGGESTIONS]
            )
    return ()


def _repairs(values: Mapping[str, int], changed_names: tuple[str, ...]) -> Iterator[BatchGeometry]:
    fixed = {name: value for name, value in values.items() if name not in changed_names}
    # A changed value is either derived from the fixed ones (None), or set near what was given.
    options = [[None, *_candidates(name, values[name], fixed)] for name in changed_names]
    for replacement in product(*options):
        new_values = {
            name: value for name, value in zip(changed_names, replacement, strict=True) if value
        }
        with suppress(GeometryError):
            yield _derive({**fixed, **new_values})


def _candidates(name: str, target: int, fixed: Mapping[str, int]) -> list[int]:
    """Return values of one name near the target that may fit the fixed ones."""

    def multiply(*names: str) -> int:
        return math.prod(fixed.get(factor, 1) for factor in names if factor != name)

    devices = multiply("nodes", "devices_per_node")
    per_device = multiply("micro_batch_size", "gradient_accumulation_steps")
    if name in {"global_batch_size", "global_batch_tokens"}:
        # A batch is a multiple of the product of its factors.
        length = fixed.get("sequence_length", 1) if name == "global_batch_tokens" else 1
        factor = fixed.get("data_parallel_size", devices) * per_device * length
        return _multiples_near(factor, target)

    # A factor divides what the other factors leave of the batch.
    tokens = fixed.get("global_batch_tokens", 0) // fixed.get("sequence_length", 1)
    quotient = fixed.get("global_batch_size", tokens) // per_device
    if name == "data_parallel_size":
        # It is also a multiple of nodes, or of devices per node.
        multipliers = _divisors_near(quotient // devices, max(target // devices, 1))
        return _multiples_near(devices, target) + [devices * number for number in multipliers]
    if name in {"nodes", "devices_per_node"}:
        return _divisors_near(fixed.get("data_parallel_size", quotient) // devices, target)
    return _divisors_near(quotient // fixed.get("data_parallel_size", devices), target)


def _multiples_near(unit: int, target: int) -> list[int]:
    below = (target - 1) // unit
    above = target // unit + 1
    return [unit * count for count in (below, above) if count]


def _divisors_near(number: int, target: int) -> list[int]:
    """Return divisors of a number around the target, directly or by their cofactors."""
    if number == 0:
        return []
    cofactor = number // target
    divisors = []
    for candidates, is_cofactor in (
        (range(target - 1, max(target - _PROBES, 0), -1), False),
        (range(target + 1, target + _PROBES), False),
        (range(cofactor, max(cofactor - _PROBES, 0), -1), True),
        (range(cofactor + 1, cofactor + _PROBES), True),
    ):
        divisor = next((candidate for candidate in candidates if number % candidate == 0), None)
        if divisor:
            divisors.append(number // divisor if is_cofactor else divisor)
    return divisors


def _distance(geometry: BatchGeometry, values: Mapping[str, int]) -> float:
    """Return the sum of absolute log-ratios between the values and those of a geometry."""
    total = 0.0
    for name, value in values.items():
        if name == "global_batch_tokens":
            total += abs(math.log(geometry.global_batch_size * values["sequence_length"] / value))
        elif name != "sequence_length":
            total += abs(math.log(getattr(geometry, name) / value))
    # Rounded, so that equal ratios tie whatever the order in which they were added.
    return round(total, 9)


def _divisors(number: int, limit: int | None) -> list[int]:
    limit = number if limit is None else limit
    small = [d for d in range(1, min(math.isqrt(number), limit) + 1) if number % d == 0]
    large = [number // d for d in small if d * d != number and number // d <= limit]
    return small + large
