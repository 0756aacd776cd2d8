"""The form that the time of an optimizer step has over geometries.

step time = A (micro_step_fixed_s + per_sample_s M) + 2 (D - 1) / D exchange_s + optimizer_s

Its coefficients are fitted to runs (`analysis.cost.step_time`), or follow from a model's operations
and a device's figures before there are any (`plan.step_time`). What ranks wait for the slowest of
them is part of the exchange, which ends when the last has come.

A ring all-reduce moves 2 (D - 1) / D times the gradient through each device (Patarasuk and Yuan
2009, doi:10.1016/j.jpdc.2008.09.002).
"""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def weights(devices: T, micro: T, accumulation: T) -> dict[str, T]:
    """Return the factor of each coefficient at D devices, micro-batch M and accumulation A."""
    d: Any = devices
    m: Any = micro
    a: Any = accumulation
    return {
        "micro_step_fixed_s": a,
        "per_sample_s": a * m,
        "exchange_s": 2 * (d - 1) / d,
        "optimizer_s": d / d,
    }
