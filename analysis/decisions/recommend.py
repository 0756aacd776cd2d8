"""Choose a geometry, say why, and what it would cost to be wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.cost.table import FACTORS
from batchscape.analysis.decisions.answer import said
from batchscape.analysis.decisions.candidates import (
    DERIVED,
    MEMORY_MARGIN,
    candidates_of,
    compare_with,
    is_to_target,
    memory_of_device,
    own_learning_rate,
)
from batchscape.analysis.decisions.config_files import config_values
from batchscape.analysis.decisions.evidence import Basis
from batchscape.analysis.decisions.missing import (
    measured_again,
    measured_next,
    missing_evidence,
)
from batchscape.analysis.estimates import FEWEST
from batchscape.errors import AnalysisError
from batchscape.geometry import BatchGeometry

_CARRIED = (
    *("global_batch_size", "learning_rate", "time_s", "time_low_s", "time_high_s"),
    *("device_hours", "device_hours_low", "device_hours_high"),
    *("memory_gib", "source", "on_front", "fits", "beyond", "derived"),
)
"""Columns of a geometry that JSON carries, beside its factors."""
_COMPARED = ("times_slower", "times_slower_low", "times_slower_high", "times_dearer")


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
        raise AnalysisError(*said("nothing", _why_nothing_fits(rows, evidence, needs)))
    pool, kind = _pool(rows)
    is_memory_unknown = math.isnan(memory_of_device(evidence, None, 1))
    facts: dict[str, Any] = {
        "target": evidence.target_loss,
        "fewest": FEWEST,
        "devices": devices,
        "measured": measured,
        "kind": kind,
        "is_memory_unknown": is_memory_unknown
        and needs.memory_gib is not None
        and evidence.out_of_memory,
    }
    warnings = [*evidence.warnings, *evidence.target_warnings, *said("warnings", facts)]
    is_timed = rows["source"].eq("measured")
    untimed = rows["fits"] & rows["memory_source"].eq("measured") & ~is_timed
    is_lone = is_timed.sum() == 1 and pool["source"].eq("measured").any() and untimed.any()
    missing = missing_evidence(evidence)
    if pool.empty or is_lone:
        facts["none_reached"] = not rows["steps"].map(math.isfinite).any()
        again = [] if facts["none_reached"] else [measured_again(evidence)]
        why_not = f"not identified: {' '.join([*said('unnamed', facts), *again])}"
        headline = f"Which geometry to use is {why_not}"
        none = rows.iloc[:0]
        return Recommendation(evidence.label, headline, warnings, missing, none, why_not=why_not)
    chosen, of_deadline = _choose(pool, needs.deadline_s)
    compared = compare_with(rows, chosen, len(pool)).drop(columns="steps_log_of")
    compared = compared.sort_values("time_s", ignore_index=True)
    facts |= {
        "chosen": chosen.to_dict(),
        "deadline_s": needs.deadline_s,
        **of_deadline,
        **_facts_of_choice(evidence, chosen),
        **_facts_of_others(compared, chosen),
        "memory_gib": memory_of_device(evidence, needs.memory_gib, chosen["data_parallel_size"]),
    }
    late = said("deadline", facts) if needs.deadline_s is not None else []
    return Recommendation(
        label=evidence.label,
        headline=said("headline", facts)[0],
        warnings=[*warnings, *late],
        missing=[*measured_next(evidence, compared, chosen), *missing],
        candidates=compared,
        chosen=chosen,
        reasons=said("reasons", facts),
        regret=said("regret", facts),
        costliest=said("costliest", facts),
        target_loss=evidence.target_loss,
    )


def _pool(rows: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Choose the rows to decide among: measured ones (0), else predicted, else extrapolated (2)."""
    timed = rows[rows["fits"] & rows["time_s"].map(math.isfinite)]
    conditions = [timed["source"].eq("measured"), timed["beyond"].eq("")]
    kinds = np.select(conditions, [0, 1], 2)
    kind = int(kinds.min(initial=2)) if len(kinds) else 0
    return timed[kinds == kind], kind


def _why_nothing_fits(rows: pd.DataFrame, evidence: Basis, needs: Needs) -> dict[str, Any]:
    smallest = rows.sort_values("memory_gib", kind="stable").head(1).to_dict("records")
    devices = [row["data_parallel_size"] for row in smallest] or [1]
    return {
        "devices": needs.devices,
        "smallest": smallest[0] if smallest else None,
        "limit_gib": memory_of_device(evidence, needs.memory_gib, devices[0]),
        "failed": ", ".join(" x ".join(map(str, cut)) for cut in evidence.out_of_memory),
    }


def _choose(
    pool: pd.DataFrame, deadline_s: float | None
) -> tuple[pd.Series[Any], dict[str, object]]:
    """Choose the fastest, or the cheapest that is sure to meet a deadline; and tell whether it is.

    Of cuts that are not significantly slower than it, the one of the largest micro-batch is taken.
    """
    order = ["time_s", "data_parallel_size", "micro_batch_size"]
    best = pool.sort_values(order, ascending=[True, False, False]).iloc[0]
    limit = -math.inf if deadline_s is None else deadline_s
    safe = pool[pool["time_high_s"].le(limit) & pool["n_seeds"].gt(0)]
    cheaper = pool.iloc[:0]
    if len(safe):
        order = ["device_hours", *order]
        best = safe.sort_values(order, ascending=[True, True, False, False]).iloc[0]
        cheaper = pool[pool["device_hours"].lt(best["device_hours"]) & pool["time_high_s"].isna()]
    shared = ["global_batch_size", "data_parallel_size", "source"]
    cuts = compare_with(pool[(pool[shared] == best[shared]).all(axis=1)], best, len(pool))
    tied = cuts[cuts["times_slower_low"] <= 1]
    if deadline_s is not None and best["n_seeds"]:
        # Where no time is sure to meet the deadline, none is given away for the recipe.
        tied = tied[tied["time_high_s"] <= deadline_s]
    chosen = best
    if len(tied):
        chosen = tied.sort_values("micro_batch_size").iloc[-1].reindex(best.index)
    return chosen, {
        "in_time": len(safe) > 0,
        "is_tied": chosen.name != best.name,
        "cheaper": cheaper.to_dict("records"),
    }


def _facts_of_choice(evidence: Basis, chosen: pd.Series[Any]) -> dict[str, object]:
    """Return what is said of the chosen geometry alone."""
    reaches = pd.DataFrame() if evidence.reaches is None else evidence.reaches
    tuning = reaches.reindex(columns=["global_batch_size", "tuned", "edge"])
    tuning = tuning[tuning["global_batch_size"].eq(chosen["global_batch_size"])]
    return {
        "margin": f"{MEMORY_MARGIN:.0%}",
        "derived": DERIVED,
        "optimizer": evidence.optimizer,
        "rule": "linear" if evidence.optimizer == "sgd" else "sqrt",
        "is_tuned": len(tuning) > 0 and tuning["tuned"].eq(True).all(),
        "is_edge": tuning["edge"].eq(True).any(),
        "seeds": "seed" if chosen["n_seeds"] == 1 else "seeds",
    }


def _facts_of_others(compared: pd.DataFrame, chosen: pd.Series[Any]) -> dict[str, object]:
    """Return what is said of the other geometries beside the chosen one."""
    is_chosen = (compared[list(FACTORS)] == chosen[list(FACTORS)]).all(axis=1)
    others = compared[compared["source"].eq("measured") & compared["fits"] & ~is_chosen]
    others = others.sort_values("times_slower", kind="stable")
    low, high = others["times_slower_low"], others["times_slower_high"]
    rivals, timed = np.isfinite(others["time_s"]), np.isfinite(others["times_slower"])
    elsewhere = others["data_parallel_size"].ne(chosen["data_parallel_size"])
    elsewhere &= others["global_batch_size"].eq(chosen["global_batch_size"])
    is_cheaper = compared["on_front"] & compared["fits"] & (compared["times_dearer"] < 1 - 1e-9)

    def first(rows: pd.DataFrame) -> dict[Any, Any] | None:
        return next(iter(rows.head(1).to_dict("records")), None)

    return {
        "rate": own_learning_rate(compared, chosen.to_dict()),
        "is_to_target": is_to_target(compared),
        "rivals": rivals.any(),
        "untold": others[rivals & low.le(1) & high.ge(1)].to_dict("records"),
        "few": others[rivals & low.isna()].to_dict("records"),
        "few_n": f"{others.loc[rivals & low.isna(), 'times_slower_n'].max():.0f}",
        "elsewhere": first(others[elsewhere & timed]),
        "slowest": first(others[timed].iloc[::-1]),
        "some_missed": others["time_s"].eq(math.inf).any(),
        "rival": first(others.loc[low.dropna().sort_values(kind="stable").index]),
        "lost": 100 * (1 - low.min()),
        "uncompared": others[low.isna()].to_dict("records"),
        "cheapest": first(compared[is_cheaper].nsmallest(1, "times_dearer")),
    }


def _plain(value: object) -> object:
    plain = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain
