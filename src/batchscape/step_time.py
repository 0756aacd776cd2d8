"""The form that the time of an optimizer step has over geometries.

step time = A (micro_step_fixed_s + per_sample_s M) + 2 (D - 1) / D exchange_s + optimizer_s

Its coefficients are fitted to runs (`analysis.cost.step_time`), or follow from a model's operations
and a device's figures before there are any (`plan.step_time`). What ranks wait for the slowest of
them is part of the exchange, which ends when the last has come.

A ring all-reduce moves 2 (D - 1) / D times the gradient through each device (Patarasuk and Yuan
2009, doi:10.1016/j.jpdc.2008.09.002).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["WEIGHTS"]

WEIGHTS: Mapping[str, Callable[[Any, Any, Any], Any]] = {
    "micro_step_fixed_s": lambda devices, micro, accumulation: accumulation,
    "per_sample_s": lambda devices, micro, accumulation: accumulation * micro,
    "exchange_s": lambda devices, micro, accumulation: 2 * (devices - 1) / devices,
    "optimizer_s": lambda devices, micro, accumulation: 0 * devices + 1,
}
"""What each coefficient is multiplied by, of devices D, micro-batch M and accumulation A: numbers,
or arrays of them."""
