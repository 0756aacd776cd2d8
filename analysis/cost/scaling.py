"""Weak and strong scaling efficiency over devices, paired by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pandas as pd

from batchscape.analysis.comparing.pairs import blocks_of, contrasts_of, logarithm
from batchscape.analysis.cost.table import FACTORS, Geometry
from batchscape.analysis.estimates import Estimate
from batchscape.analysis.numbers import TIMES

_PAIRED_BY = ("seed", "init_seed", "data_seed", "timing_repeat")
_MICRO, _ACCUMULATION = FACTORS[1:]
_KINDS: Sequence[tuple[str, str, list[str], Callable[[int, int, int], Geometry]]] = (
    (
        "weak",
        "micro-batch and accumulation",
        [_MICRO, _ACCUMULATION],
        lambda devices, micro, accumulation: (devices, micro, accumulation),
    ),
    (
        "strong",
        "accumulation",
        ["samples_a_micro_step", _ACCUMULATION],
        lambda devices, samples, accumulation: (devices, samples // devices, accumulation),
    ),
    (
        "strong",
        "micro-batch",
        ["micro_steps", _MICRO],
        lambda devices, micro_steps, micro: (devices, micro, micro_steps // devices),
    ),
)
"""What stays equal between numbers of devices, the columns that say so, and the cut of these."""
_DEFINITIONS = {
    "weak": "step time on the fewer devices / step time on the more, at equal micro-batch and "
    "accumulation",
    "strong": "step time on the fewer devices x their number / the same of the more, at an equal "
    "global batch and equal {fixed_factor}",
}


def scaling_efficiency(table: pd.DataFrame) -> pd.DataFrame:
    """Compare step times on several devices with those on the fewest measured.

    Weak scaling gives each device the same work (equal micro-batch and accumulation); strong
    scaling shares one global batch out, by smaller micro-batches or by less accumulation. Runs
    are paired by seed and timing repeat.

    Parameters
    ----------
    table : DataFrame
        One row a run of one machine, model and setting: `run_id`, `data_parallel_size`,
        `micro_batch_size`, `gradient_accumulation_steps`, `step_time_s` (NaN where the machine was
        not free), and optionally `seed`, `timing_repeat`.

    Returns
    -------
    DataFrame
        One row a comparison: `kind` (weak or strong), `held` (what stays equal beside the global
        batch), `devices`, `geometry`, `reference` (its geometry), `efficiency` (1: ideal),
        `low`, `high`, `n` (pairs), `estimate` (the same as an `Estimate`) and `run_ids`. Empty
        where nothing can be compared.

    Notes
    -----
    Ratios are geometric means over the pairs, with the t-interval of the mean logarithm.
    """
    cuts = {name: table[name].astype(int) for name in FACTORS}
    devices, micro, accumulation = cuts.values()
    rows = table.assign(
        **cuts,
        samples_a_micro_step=devices * micro,
        micro_steps=devices * accumulation,
        pair=blocks_of(table, _PAIRED_BY),
        value=-logarithm(table["step_time_s"]),
    ).dropna(subset=["value"])
    efficiencies = []
    for kind, fixed_factor, within, cut_of in _KINDS:
        for contrast in contrasts_of(rows, "data_parallel_size", within, "pair"):
            n = len(contrast.values)
            if not n:
                continue
            ideal = math.log(contrast.base / contrast.level) if kind == "strong" else 0.0
            estimate = Estimate.of_ratio(
                contrast.values + ideal,
                _DEFINITIONS[kind].format(fixed_factor=fixed_factor),
                f"t-interval of the mean log ratio over {n} pairs of runs",
                note=None if n > 1 else "no interval: one pair",
            )
            geometry, reference = (
                TIMES.join(map(str, cut_of(devices, *contrast.place)))
                for devices in (contrast.level, contrast.base)
            )
            efficiencies.append(
                {
                    "kind": kind,
                    "held": fixed_factor,
                    "devices": contrast.level,
                    "geometry": geometry,
                    "reference": reference,
                    "efficiency": estimate.value,
                    "low": estimate.low,
                    "high": estimate.high,
                    "n": n,
                    "estimate": estimate,
                    "run_ids": ";".join(contrast.run_ids),
                }
            )
    keys = ["kind", "held", "reference", "devices"]
    return (
        pd.DataFrame(efficiencies).sort_values(keys, ignore_index=True)
        if efficiencies
        else pd.DataFrame()
    )
