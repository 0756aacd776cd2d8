"""Choose a geometry, say why, and what it would cost to be wrong."""

from __future__ import annotations

import math
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
    slower_text,
)
from batchscape.analysis.estimates import FEWEST
from batchscape.analysis.numbers import significant
from batchscape.errors import AnalysisError
from batchscape.geometry import BatchGeometry
from batchscape.text import duration_text, list_text

_MOST_NAMED = 3
"""Geometries named in a headline."""
_CARRIED = (
    *("global_batch_size", "learning_rate", "time_s", "time_low_s", "time_high_s"),
    *("device_hours", "device_hours_low", "device_hours_high"),
    *("memory_gib", "source", "on_front", "fits", "beyond", "derived"),
)
"""Columns of a geometry that JSON carries, beside its factors."""
_COMPARED = ("times_slower", "times_slower_low", "times_slower_high", "times_dearer")
_POOLS = (
    "",
    "no measured geometry fits: this one is predicted",
    "BEYOND THE MEASURED RANGE: no geometry inside it fits, this one is extrapolated",
)
"""What is said of a choice among measured geometries, predicted ones, and those beyond the range.
"""


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
    headline: str
    """The geometry and its target, and the measured geometries that may be as fast; with its
    learning rate, where several were tried."""
    warnings: list[str]
    missing: list[str]
    """What is not identified, each with what would settle it."""
    candidates: pd.DataFrame
    """As `compare_with` returns it, compared with the chosen one, fastest first; empty without
    one."""
    chosen: pd.Series[Any] | None = None
    """Its row of `candidates`; None where no time is known, and so no geometry is named."""
    reasons: list[str] = field(default_factory=list)
    """The recipe's five steps, as carried out here; without a geometry none."""
    regret: list[str] = field(default_factory=list)
    """What a wrong choice would cost."""
    costliest: list[str] = field(default_factory=list)
    """What the worst choice measured would cost, in one sentence; empty without one."""
    why_not: str | None = None
    """Why no geometry is named, and what would help; None where one is."""
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
    def config(self) -> dict[str, dict[str, int]]:
        """As `config_values` returns it; empty without a geometry."""
        return {} if self.geometry is None else config_values(BatchGeometry(1, *self.geometry))

    def as_mapping(self) -> dict[str, Any]:
        """Return values that JSON can carry; unknown or infinite values are null."""
        candidates = self.candidates.reindex(columns=[*FACTORS, *_CARRIED, *_COMPARED])
        cut = self.geometry
        row: dict[Any, Any] = {} if self.chosen is None else self.chosen.to_dict()
        return {
            "label": self.label,
            "headline": self.headline,
            "target_loss": _plain(self.target_loss),
            "geometry": None if cut is None else dict(zip(FACTORS, cut, strict=True)),
            "not_identified": self.why_not,
            **{name: _plain(row.get(name)) for name in _CARRIED},
            "reasons": self.reasons,
            "regret": self.regret,
            "warnings": self.warnings,
            "missing": self.missing,
            "config": self.config,
            "candidates": [
                {str(name): _plain(value) for name, value in candidate.items()}
                for candidate in candidates.to_dict("records")
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
    if not rows["fits"].any():
        raise AnalysisError(_nothing_fits(rows, evidence, needs))
    pool, doubts = _pool(rows)
    warnings = [
        *evidence.warnings,
        *evidence.target_warnings,
        *_warnings(evidence, needs, devices, measured),
        *doubts,
    ]
    is_timed = rows["source"].eq("measured")
    untimed = rows["fits"] & rows["memory_source"].eq("measured") & ~is_timed
    is_lone = is_timed.sum() == 1 and pool["source"].eq("measured").any() and untimed.any()
    missing = missing_evidence(evidence)
    if pool.empty or is_lone:
        why_not = f"not identified: {_why_unnamed(rows, evidence)}"
        headline = f"Which geometry to use is {why_not}"
        none = rows.iloc[:0]
        return Recommendation(evidence.label, headline, warnings, missing, none, why_not=why_not)
    chosen, in_time, late = _choose(pool, needs.deadline_s)
    compared = compare_with(rows, chosen, len(pool)).drop(columns="steps_log_of")
    compared = compared.sort_values("time_s", ignore_index=True)
    is_chosen = (compared[list(FACTORS)] == chosen[list(FACTORS)]).all(axis=1)
    others = compared[compared["source"].eq("measured") & compared["fits"] & ~is_chosen]
    costliest = _costliest(others)
    return Recommendation(
        label=evidence.label,
        headline=_headline(compared, others, chosen, evidence.target_loss),
        warnings=[*warnings, *late],
        missing=[*measured_next(evidence, compared, chosen), *missing],
        candidates=compared,
        chosen=chosen,
        reasons=[*reasons_for(evidence, rows, chosen, needs.memory_gib), *in_time],
        regret=_regret(compared, others, costliest),
        costliest=costliest,
        target_loss=evidence.target_loss,
    )


def _pool(rows: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Choose the rows to decide among: measured ones where there are any; none without a time."""
    timed = rows[rows["fits"] & rows["time_s"].map(math.isfinite)]
    conditions = [timed["source"].eq("measured"), timed["beyond"].eq("")]
    kinds = np.select(conditions, [0, 1], 2)
    if not len(kinds):
        return timed, []
    warning = _POOLS[kinds.min()]
    return timed[kinds == kinds.min()], [warning] if warning else []


def _warnings(evidence: Basis, needs: Needs, devices: int, measured: int) -> list[str]:
    """Say what of the needs lies beyond what was measured."""
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
    return warnings


def _why_unnamed(rows: pd.DataFrame, evidence: Basis) -> str:
    """Say why no geometry can be named."""
    if not rows["steps"].map(math.isfinite).any():
        return (
            "in no global batch most runs reached a target. Train longer (budget), or ask for a "
            "higher loss (--target)"
        )
    to_target = "" if math.isnan(evidence.target_loss) else " of a batch that reached the target"
    return (
        f"fewer than two geometries that fit have a valid time{to_target} to choose by. "
        f"{measured_again(evidence)}"
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


def _choose(
    pool: pd.DataFrame, deadline_s: float | None
) -> tuple[pd.Series[Any], list[str], list[str]]:
    """Choose the fastest, or the cheapest that is sure to meet a deadline; say that it is, or not.

    Of cuts that are not significantly slower than it, the one of the largest micro-batch is taken.
    """
    order = ["time_s", "data_parallel_size", "micro_batch_size"]
    best = pool.sort_values(order, ascending=[True, False, False]).iloc[0]
    late: list[str] = []
    if deadline_s is not None:
        safe = pool[(pool["time_high_s"] <= deadline_s) & pool["n_seeds"].gt(0)]
        if safe.empty:
            late = [
                f"NO GEOMETRY IS SURE TO MEET THE DEADLINE of {duration_text(deadline_s)}: none "
                "has a time to the target whose interval ends before it. This is the fastest"
            ]
        else:
            order = ["device_hours", *order]
            best = safe.sort_values(order, ascending=[True, True, False, False]).iloc[0]
            cheaper = pool[pool["device_hours"].lt(best["device_hours"])]
            late = [
                f"{cut_text(cut)} may take fewer device-hours, but its time has no interval to "
                f"hold against the deadline: {FEWEST} valid times give one"
                for _, cut in cheaper[cheaper["time_high_s"].isna()].iterrows()
            ]
    shared = ["global_batch_size", "data_parallel_size", "source"]
    cuts = compare_with(pool[(pool[shared] == best[shared]).all(axis=1)], best, len(pool))
    tied = cuts[cuts["times_slower_low"] <= 1]
    if deadline_s is not None and best["n_seeds"]:
        # Where no time is sure to meet the deadline, none is given away for the recipe.
        tied = tied[tied["time_high_s"] <= deadline_s]
    chosen = best
    if len(tied):
        chosen = tied.sort_values("micro_batch_size").iloc[-1].reindex(best.index)
    in_time: list[str] = []
    if deadline_s is not None and not safe.empty:
        by = "device-hours decided"
        if chosen.name != best.name:
            by += ", and the largest micro-batch among cuts that nothing tells from the cheapest"
        in_time = [
            f"The deadline of {duration_text(deadline_s)}: the time's interval ends at "
            f"{duration_text(chosen['time_high_s'])} ({chosen['source']}). Among the geometries "
            f"whose interval ends in time, {by}."
        ]
    return chosen, in_time, late


def _headline(
    compared: pd.DataFrame, others: pd.DataFrame, chosen: pd.Series[Any], target_loss: float
) -> str:
    """Name the geometry and its target, and what may be as fast."""
    is_measured = chosen["source"] == "measured"
    parts = [
        f"Use {cut_text(chosen)} = {chosen['global_batch_size']} "
        "(devices x micro-batch x accumulation = global batch)",
        own_learning_rate(compared, chosen.to_dict()),
        "" if math.isnan(target_loss) else f"to reach a held-out loss of {target_loss:.4g}",
        "" if is_measured else "of which no time was measured",
    ]
    doubts = _doubts(others, is_to_target=is_to_target(compared)) if is_measured else []
    return "; ".join([", ".join(filter(None, parts)), *doubts]) + "."


def _doubts(others: pd.DataFrame, *, is_to_target: bool) -> list[str]:
    """Name the measured geometries that may be as fast as the chosen one."""
    rivals = others[np.isfinite(others["time_s"])].sort_values("times_slower")
    if rivals.empty:
        where = " to the target" if is_to_target else ""
        return [f"no other geometry that fits has a valid time{where} to compare"]
    low, high = rivals["times_slower_low"], rivals["times_slower_high"]
    doubts = {
        "these runs do not tell its time from that of {cuts}": (low <= 1) & (high >= 1),
        "too few seeds or valid times to compare it with {cuts} (n = {n:.0f})": low.isna(),
    }
    return [
        text.format(cuts=_cuts_text(rivals[are]), n=rivals.loc[are, "times_slower_n"].max())
        for text, are in doubts.items()
        if are.any()
    ]


def _regret(compared: pd.DataFrame, others: pd.DataFrame, costliest: list[str]) -> list[str]:
    """Say how much faster another geometry might be, at the worst end of its interval."""
    has_interval = others["times_slower_low"].notna()
    takes = f"which takes {FEWEST} seeds that reach and {FEWEST} valid times"
    lines = [f"Not identified: what a wrong choice would cost, {takes} of another geometry."]
    if has_interval.any():
        rival = others.iloc[int(others["times_slower_low"].argmin())]
        lost = 100 * (1 - rival["times_slower_low"])
        lines = [
            f"If this is the wrong one, at most {significant(lost, 2)} % of the time is lost, "
            f"against {cut_text(rival)} at the end of its interval (95 %, of all pairs at "
            "once: the data chose which are compared)."
            if lost > 0
            else "No other measured geometry is faster, even at the end of its interval (95 %, of "
            "all pairs at once).",
            *costliest,
        ]
        if not has_interval.all():
            lines.append(
                f"Not compared, {takes}, and so not among those that may be faster: "
                f"{_cuts_text(others[~has_interval])}."
            )
    is_cheaper = compared["on_front"] & compared["fits"] & (compared["times_dearer"] < 1 - 1e-9)
    for _, row in compared[is_cheaper].nsmallest(1, "times_dearer").iterrows():
        lines.append(
            f"Cheapest: {cut_text(row)} ({row['source']}) takes "
            f"{significant(row['times_dearer'], 3)} times the device-hours and "
            f"{significant(row['times_slower'], 3)} times the time."
        )
    return lines


def _cuts_text(rows: pd.DataFrame) -> str:
    """Name the first few cuts, and count the others."""
    return list_text((cut_text(row) for _, row in rows.iterrows()), "and", _MOST_NAMED)


def _costliest(others: pd.DataFrame) -> list[str]:
    """Name the slowest of all other measured geometries that fit, with or without an interval."""
    timed = others[others["times_slower"].map(math.isfinite)]
    if timed.empty:
        return []
    worst = timed.sort_values("times_slower").iloc[-1]
    which = " that reached the target" if others["time_s"].eq(math.inf).any() else ""
    text = f"The slowest measured{which}, {cut_text(worst)}, takes {slower_text(worst)} times"
    if not is_to_target(others):
        return [f"{text} as long a step."]
    return [f"{text} as long to the target and {worst['times_dearer']:.3g} times the device-hours."]


def _plain(value: object) -> object:
    plain = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain
