"""Choose a geometry, say why, and what it would cost to be wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.cost.table import FACTORS
from batchscape.analysis.decisions.candidates import (
    candidates_of,
    compare_with,
    is_to_target,
    memory_of_device,
    own_learning_rate,
)
from batchscape.analysis.decisions.config_files import config_values
from batchscape.analysis.decisions.evidence import Basis
from batchscape.analysis.decisions.reasons import (
    cut_text,
    measured_again,
    measured_next,
    missing_evidence,
    reasons_for,
)
from batchscape.analysis.estimates import FEWEST, interval_text
from batchscape.analysis.numbers import significant
from batchscape.errors import AnalysisError
from batchscape.geometry import BatchGeometry
from batchscape.text import duration_text, list_text

_MOST_NAMED = 3
"""Geometries named in a headline."""


@dataclass(frozen=True)
class Needs:
    """What the user has and wants."""

    devices: int | None = None
    """Devices that may be used; None: as many as were measured."""
    memory_gib: float | None = None
    """Memory of one device; None: that of the device measured (of the smaller one that a limit
    emulated, where there was one), where it is known."""
    deadline_s: float | None = None
    """Longest time to the target; None: the fastest is wanted."""

    def __post_init__(self) -> None:
        if self.devices is not None and self.devices < 1:
            msg = f"devices must be at least 1, got {self.devices}"
            raise AnalysisError(msg)
        for name in ("memory_gib", "deadline_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                msg = f"{name} must be above zero and finite, got {value:g}"
                raise AnalysisError(msg)


@dataclass(frozen=True)
class Recommendation:
    """A geometry to use with reasons, regret and warnings; or why none can be named."""

    label: str
    """Settings that differ from other runs; empty if there are no others."""
    chosen: pd.Series[Any] | None
    """Its row of `candidates`; None where no time is known, and so no geometry is named."""
    reasons: list[str]
    """The recipe's five steps, as carried out here; without a geometry none."""
    regret: list[str]
    """What a wrong choice would cost."""
    costliest: list[str]
    """What the worst choice measured would cost, in one sentence; empty without one."""
    warnings: list[str]
    missing: list[str]
    """What is not identified, each with what would settle it."""
    candidates: pd.DataFrame
    """As `compare_with` returns it, compared with the chosen one, fastest first; empty without
    one."""
    config: dict[str, dict[str, int]]
    """As `config_values` returns it; empty without a geometry."""
    why_not: str | None = None
    """Why no geometry is named, and what would help; None where one is."""
    needs: Needs = field(default_factory=Needs)
    target_loss: float = math.nan
    """NaN: there is none, and the time is that of a step."""

    @property
    def geometry(self) -> tuple[int, int, int] | None:
        """Devices, micro-batch and accumulation; None where none is named."""
        if self.chosen is None:
            return None
        devices, micro, accumulation = (int(self.chosen[name]) for name in FACTORS)
        return devices, micro, accumulation

    @property
    def headline(self) -> str:
        """The geometry and its target, and the measured geometries that may be as fast.

        With its learning rate, where several were tried.
        """
        if self.chosen is None or self.geometry is None:
            return f"Which geometry to use is {self.why_not}"
        devices, micro, accumulation = self.geometry
        text = (
            f"Use {devices} x {micro} x {accumulation} = {devices * micro * accumulation} "
            "(devices x micro-batch x accumulation = global batch)"
        )
        if rate := own_learning_rate(self.candidates, self.chosen.to_dict()):
            text += f", {rate}"
        if not math.isnan(self.target_loss):
            text += f", to reach a held-out loss of {self.target_loss:.4g}"
        doubt = _doubt(self.candidates, self.chosen)
        return f"{text}{doubt}."

    def as_mapping(self) -> dict[str, Any]:
        """Return values that JSON can carry; unknown or infinite values are null."""
        columns = [*FACTORS, "global_batch_size", "learning_rate", "time_s", "time_low_s"]
        columns += ["time_high_s", "device_hours", "device_hours_low", "device_hours_high"]
        columns += ["memory_gib", "source", "on_front", "fits", "beyond", "derived", "note"]
        compared = ["times_slower", "times_slower_low", "times_slower_high", "times_dearer"]
        others = self.candidates.reindex(columns=[*columns, *compared]).to_dict("records")
        cut = self.geometry
        row: Mapping[Any, Any] = {} if self.chosen is None else self.chosen.to_dict()
        return {
            "label": self.label,
            "headline": self.headline,
            "target_loss": _plain(self.target_loss),
            "geometry": None if cut is None else dict(zip(FACTORS, cut, strict=True)),
            "not_identified": self.why_not,
            **{name: _plain(row.get(name)) for name in columns if name not in FACTORS},
            "reasons": self.reasons,
            "regret": self.regret,
            "warnings": self.warnings,
            "missing": self.missing,
            "config": self.config,
            "candidates": [
                {str(name): _plain(value) for name, value in row.items()} for row in others
            ],
        }


def recommend(evidence: Basis, needs: Needs) -> Recommendation:
    """Choose the geometry to use.

    Among cells that were measured and fit, the fastest to the target; with a deadline, the
    cheapest whose upper end meets it. Of cuts of one global batch on as many devices that the
    data do not tell apart, the largest micro-batch is taken. Predicted geometries are chosen only
    where no measured one fits, and those beyond the measured range last. Where no geometry that
    fits has a time, none is named: samples alone would always favour the smallest global batch.

    Raises
    ------
    AnalysisError
        If no geometry fits.
    """
    measured = int(evidence.table["data_parallel_size"].max())
    devices = needs.devices or measured
    rows = candidates_of(evidence, devices, needs.memory_gib)
    pool, warnings = _pool(rows, evidence, needs, devices, measured)
    untimed = rows["fits"] & rows["memory_source"].eq("measured") & rows["source"].ne("measured")
    is_timed = rows["source"].eq("measured")
    is_lone = is_timed.sum() == 1 and pool["source"].eq("measured").any() and untimed.any()
    if pool.empty or is_lone:
        return _unnamed(evidence, needs, rows, warnings)
    best, late = _best(pool, needs.deadline_s)
    chosen = _by_recipe(pool, best, needs.deadline_s)
    compared = compare_with(rows, chosen, len(pool)).drop(columns="steps_log_of")
    compared = compared.sort_values("time_s", ignore_index=True)
    memory = memory_of_device(evidence, needs.memory_gib, int(chosen["data_parallel_size"]))
    return Recommendation(
        label=evidence.label,
        chosen=chosen,
        reasons=[
            *reasons_for(evidence, rows, chosen, memory),
            *_on_deadline(chosen, best, needs.deadline_s),
        ],
        regret=_regret(compared, chosen),
        costliest=_costliest(compared, chosen),
        warnings=[*evidence.warnings, *evidence.target_warnings, *warnings, *late],
        missing=[
            *(measured_next(evidence, compared) if chosen["source"] == "measured" else []),
            *missing_evidence(evidence),
        ],
        candidates=compared,
        config=config_values(BatchGeometry(1, *(int(chosen[name]) for name in FACTORS))),
        needs=needs,
        target_loss=evidence.target_loss,
    )


def _pool(
    rows: pd.DataFrame, evidence: Basis, needs: Needs, devices: int, measured: int
) -> tuple[pd.DataFrame, list[str]]:
    """Choose the rows to decide among: measured ones where there are any; none without a time."""
    warnings = []
    if devices > measured:
        warnings.append(
            f"nothing was measured on more than {measured} devices; predictions for more "
            "lie beyond the measured range, and are chosen only if no measured geometry fits"
        )
    is_unknown = math.isnan(memory_of_device(evidence, None, 1))
    if needs.memory_gib is not None and is_unknown and evidence.out_of_memory:
        warnings.append(
            "geometries that ran out of memory stay left out, though --memory-gib may be more "
            "than their device had, which is not recorded"
        )
    fits = rows[rows["fits"]]
    if fits.empty:
        raise AnalysisError(_nothing_fits(rows, evidence, needs))
    timed = fits[fits["time_s"].map(math.isfinite)]
    pools = [
        (timed[timed["source"] == "measured"], ""),
        (timed[timed["beyond"] == ""], "no measured geometry fits: this one is predicted"),
        (timed, "BEYOND THE MEASURED RANGE: no geometry inside it fits, this one is extrapolated"),
    ]
    for pool, warning in pools:
        if len(pool):
            return pool, warnings + ([warning] if warning else [])
    return timed, warnings


def _unnamed(
    evidence: Basis, needs: Needs, rows: pd.DataFrame, warnings: list[str]
) -> Recommendation:
    """Say why no geometry can be named."""
    if rows["steps"].map(math.isfinite).any():
        of_target = (
            "" if math.isnan(evidence.target_loss) else " of a batch that reached the target"
        )
        reason = (
            f"fewer than two geometries that fit have a valid time{of_target} to choose by. "
            f"{measured_again(evidence)}"
        )
    else:
        reason = (
            "in no global batch most runs reached a target. Train longer (budget), or ask for a "
            "higher loss (--target)"
        )
    return Recommendation(
        label=evidence.label,
        chosen=None,
        reasons=[],
        regret=[],
        costliest=[],
        warnings=[*evidence.warnings, *evidence.target_warnings, *warnings],
        missing=missing_evidence(evidence),
        candidates=rows.iloc[:0],
        config={},
        why_not=f"not identified: {reason}",
        needs=needs,
    )


def _nothing_fits(rows: pd.DataFrame, evidence: Basis, needs: Needs) -> str:
    if rows.empty:
        return f"no global batch with known steps can be cut on {needs.devices} devices"
    smallest = rows.sort_values("memory_gib", kind="stable").iloc[0]
    limit = memory_of_device(evidence, needs.memory_gib, int(smallest["data_parallel_size"]))
    reasons = []
    if smallest["memory_gib"] > limit:
        reasons.append(
            f"no geometry fits a device of {limit:.3g} GiB: the smallest needs "
            f"{smallest['memory_gib']:.3g} GiB with its margin"
        )
    if evidence.out_of_memory:
        failed = ", ".join(" x ".join(map(str, cut)) for cut in evidence.out_of_memory)
        reasons.append(
            f"no geometry is left that takes less than one that ran out of memory ({failed})"
        )
    way_out = "use a device with more memory, or engine.activation_checkpointing"
    return "; ".join([*(reasons or ["no geometry fits"]), way_out])


def _best(pool: pd.DataFrame, deadline_s: float | None) -> tuple[pd.Series[Any], list[str]]:
    order = pool.sort_values(
        ["time_s", "data_parallel_size", "micro_batch_size"], ascending=[True, False, False]
    )
    fastest = order.iloc[0]
    if deadline_s is None:
        return fastest, []
    safe = order[(order["time_high_s"] <= deadline_s) & order["n_seeds"].gt(0)]
    if len(safe):
        return safe.sort_values("device_hours", kind="stable").iloc[0], []
    return fastest, [
        f"NO GEOMETRY IS SURE TO MEET THE DEADLINE of {duration_text(deadline_s)}: none has a time "
        "to the target whose interval ends before it. This is the fastest"
    ]


def _on_deadline(
    chosen: pd.Series[Any], best: pd.Series[Any], deadline_s: float | None
) -> list[str]:
    """Say that a deadline is met; `_best` warns if it is not, or may not be."""
    if deadline_s is None or not chosen["time_high_s"] <= deadline_s or not chosen["n_seeds"]:
        return []
    by = "device-hours decided"
    if chosen.name != best.name:
        by += ", and the largest micro-batch among cuts that nothing tells from the cheapest"
    return [
        f"The deadline of {duration_text(deadline_s)}: the time's interval ends at "
        f"{duration_text(chosen['time_high_s'])} ({chosen['source']}). Among the geometries whose "
        f"interval ends in time, {by}."
    ]


def _by_recipe(
    pool: pd.DataFrame, best: pd.Series[Any], deadline_s: float | None
) -> pd.Series[Any]:
    """Prefer a larger micro-batch that is not significantly slower than the best cut."""
    shared_columns = ["global_batch_size", "data_parallel_size", "source"]
    cuts = compare_with(
        pool[(pool[shared_columns] == best[shared_columns]).all(axis=1)], best, len(pool)
    )
    tied = cuts[~(cuts["times_slower_low"] > 1) & cuts["times_slower_low"].notna()]
    if deadline_s is not None and best["n_seeds"]:
        # Where no time is sure to meet the deadline, none is given away for the recipe.
        tied = tied[tied["time_high_s"] <= deadline_s]
    if tied.empty:
        return best
    return tied.sort_values("micro_batch_size").iloc[-1].reindex(best.index)


def _regret(compared: pd.DataFrame, chosen: pd.Series[Any]) -> list[str]:
    """Say how much faster another geometry might be, at the worst end of its interval."""
    measured = _others(compared, chosen)
    has_interval = measured["times_slower_low"].notna()
    with_interval, without_interval = measured[has_interval], measured[~has_interval]
    if with_interval.empty:
        lines = [
            f"Not identified: what a wrong choice would cost, which takes {FEWEST} seeds that "
            f"reach and {FEWEST} valid times of another geometry."
        ]
    else:
        rival = with_interval.sort_values("times_slower_low").iloc[0]
        lost = 100 * (1 - rival["times_slower_low"])
        line = (
            "No other measured geometry is faster, even at the end of its interval (95 %, of all "
            "pairs at once)."
        )
        if lost > 0:
            line = (
                f"If this is the wrong one, at most {significant(lost, 2)} % of the time is lost, "
                f"against {cut_text(rival)} at the end of its interval (95 %, of all pairs at "
                "once: the data chose which are compared)."
            )
        lines = [line, *_costliest(compared, chosen)]
    if len(with_interval) and len(without_interval):
        cuts = _cuts_text(without_interval)
        lines.append(
            f"Not compared, which takes {FEWEST} seeds that reach and {FEWEST} valid times, and so "
            f"not among those that may be faster: {cuts}."
        )
    front = compared[
        compared["on_front"] & compared["fits"] & (compared["times_dearer"] < 1 - 1e-9)
    ]
    for _, row in front.sort_values("times_dearer").head(1).iterrows():
        lines.append(
            f"Cheapest: {cut_text(row)} ({row['source']}) takes "
            f"{significant(row['times_dearer'], 3)} times the device-hours and "
            f"{significant(row['times_slower'], 3)} times the time."
        )
    return lines


def _doubt(compared: pd.DataFrame, chosen: pd.Series[Any]) -> str:
    """Name the measured geometries that may be as fast as the chosen one."""
    if chosen["source"] != "measured":
        return ", of which no time was measured"
    rivals = _others(compared, chosen)
    rivals = rivals[rivals["time_s"].map(math.isfinite)]
    if rivals.empty:
        of_target = " to the target" if is_to_target(compared) else ""
        return f"; no other geometry that fits has a valid time{of_target} to compare"
    has_interval = rivals["times_slower_low"].notna()
    is_apart = (rivals["times_slower_low"] > 1) | (rivals["times_slower_high"] < 1)
    not_apart, without_interval = (
        rows.sort_values("times_slower")
        for rows in (rivals[has_interval & ~is_apart], rivals[~has_interval])
    )
    doubts = []
    if len(not_apart):
        doubts.append(f"these runs do not tell its time from that of {_cuts_text(not_apart)}")
    if len(without_interval):
        cuts = _cuts_text(without_interval)
        doubts.append(
            f"too few seeds or valid times to compare it with {cuts} "
            f"(n = {int(without_interval['times_slower_n'].max())})"
        )
    return "".join(f"; {doubt}" for doubt in doubts)


def _others(compared: pd.DataFrame, chosen: pd.Series[Any]) -> pd.DataFrame:
    """Choose the measured geometries that fit, but for the chosen one."""
    is_chosen = (compared[list(FACTORS)] == chosen[list(FACTORS)]).all(axis=1)
    return compared[compared["source"].eq("measured") & compared["fits"] & ~is_chosen]


def _cuts_text(rows: pd.DataFrame) -> str:
    """Name the first few cuts, and count the others."""
    return list_text((cut_text(row) for _, row in rows.iterrows()), "and", _MOST_NAMED)


def _costliest(compared: pd.DataFrame, chosen: pd.Series[Any]) -> list[str]:
    """Name the slowest of all other measured geometries that fit, with or without an interval."""
    others = _others(compared, chosen)
    timed = others[others["times_slower"].map(math.isfinite)]
    if timed.empty:
        return []
    worst = timed.sort_values("times_slower").iloc[-1]
    value, low, high = (float(worst[f"times_slower{end}"]) for end in ("", "_low", "_high"))
    slower = interval_text(value, low, high, int(worst["times_slower_n"]))
    which = " that reached the target" if others["time_s"].eq(math.inf).any() else ""
    text = f"The slowest measured{which}, {cut_text(worst)}, takes {slower} times as long"
    if not is_to_target(compared):
        return [f"{text} a step."]
    return [f"{text} to the target and {worst['times_dearer']:.3g} times the device-hours."]


def _plain(value: object) -> object:
    plain = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain
