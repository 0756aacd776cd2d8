"""Choose a geometry, say why, and what it would cost to be wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.cost.table import FACTORS
from batchscape.analysis.decisions.answer import paragraphs_of
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
    settled_by,
)
from batchscape.analysis.estimates import FEWEST
from batchscape.errors import AnalysisError
from batchscape.geometry import BatchGeometry
from batchscape.text import count_text

_JSON_COLUMNS = (
    *("global_batch_size", "learning_rate", "time_s", "time_low_s", "time_high_s"),
    *("device_hours", "device_hours_low", "device_hours_high"),
    *("n_seeds", "n_runs", "memory_gib", "source", "on_front", "fits", "beyond", "derived"),
)
"""Columns of a geometry that JSON carries, beside its factors."""
_COMPARISON_COLUMNS = ("times_slower", "times_slower_low", "times_slower_high", "times_dearer")


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
            raise AnalysisError(f"devices must be at least 1, got {self.devices}")
        for name in ("memory_gib", "deadline_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise AnalysisError(f"{name} must be above zero and finite, got {value:g}")


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
    is_recommended: bool = True
    """Whether enough runs and seeds stand behind it; else it was the fastest in those there are."""
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
        candidates = self.candidates.reindex(
            columns=[*FACTORS, *_JSON_COLUMNS, *_COMPARISON_COLUMNS]
        )
        cut = self.geometry
        row: dict[Any, Any] = {} if self.chosen is None else self.chosen.to_dict()
        return {
            "label": self.label,
            "headline": self.headline,
            "target_loss": _json_value(self.target_loss),
            "geometry": None if cut is None else dict(zip(FACTORS, cut, strict=True)),
            "is_recommended": self.geometry is not None and self.is_recommended,
            "not_identified": self.why_not,
            **{name: _json_value(row.get(name)) for name in _JSON_COLUMNS},
            "reasons": self.reasons,
            "regret": self.regret,
            "warnings": self.warnings,
            "missing": self.missing,
            "config": self.config,
            "candidates": [
                {str(name): _json_value(value) for name, value in candidate.items()}
                for candidate in candidates.to_dict("records")
            ],
        }


def recommend(basis: Basis, needs: Needs) -> Recommendation:
    """Choose the geometry to use.

    Among cells that were measured and fit, the fastest to the target; with a deadline, the
    cheapest that meets it (`_ends`). Of cuts of one global batch on as many devices that the
    data do not tell apart, the largest micro-batch is taken. Predicted geometries are chosen only
    where no measured one fits, and those beyond the measured range last. Where no geometry that
    fits has a time, none is named: samples alone would always favour the smallest global batch.

    Raises
    ------
    AnalysisError
        If no geometry fits.
    """
    measured_devices = int(basis.table["data_parallel_size"].max())
    devices = needs.devices or measured_devices
    rows = candidates_of(basis, devices, needs.memory_gib)
    if not rows["fits"].any():
        raise AnalysisError(*paragraphs_of("nothing", _why_nothing_fits(rows, basis, needs)))
    pool, kind = _pool(rows)
    facts: dict[str, Any] = {
        "target": basis.target_loss,
        "fewest": FEWEST,
        "devices": devices,
        "measured_devices": measured_devices,
        "kind": kind,
        "is_memory_unknown": math.isnan(memory_of_device(basis, None, 1))
        and needs.memory_gib is not None
        and basis.out_of_memory,
    }
    warnings = [*basis.warnings, *basis.target_warnings, *paragraphs_of("warnings", facts)]
    is_timed = rows["source"].eq("measured")
    is_untimed = rows["fits"] & rows["memory_source"].eq("measured") & ~is_timed
    is_lone = is_timed.sum() == 1 and pool["source"].eq("measured").any() and is_untimed.any()
    missing = missing_evidence(basis)
    if pool.empty or is_lone:
        facts["none_reached"] = not rows["steps"].map(math.isfinite).any()
        repeat_texts = [] if facts["none_reached"] else [measured_again(basis)]
        why_not = f"not identified: {' '.join([*paragraphs_of('unnamed', facts), *repeat_texts])}"
        headline = f"Which geometry to use is {why_not}"
        no_rows = rows.iloc[:0]
        return Recommendation(basis.label, headline, warnings, missing, no_rows, why_not=why_not)
    chosen, facts_of_deadline = _choose(pool, needs.deadline_s)
    compared = compare_with(rows, chosen, len(pool)).drop(columns="steps_log_of")
    compared = compared.sort_values("time_s", ignore_index=True)
    facts |= {
        "chosen": chosen.to_dict(),
        "deadline_s": needs.deadline_s,
        **facts_of_deadline,
        **_facts_of_choice(basis, chosen, pool),
        **_facts_of_others(compared, chosen),
        "memory_gib": memory_of_device(basis, needs.memory_gib, chosen["data_parallel_size"]),
    }
    texts = {
        part: paragraphs_of(part, facts)
        for part in ("headline", "deadline", "reasons", "regret", "costliest")
    }
    return Recommendation(
        label=basis.label,
        headline=texts["headline"][0],
        warnings=[*warnings, *texts["deadline"]],
        missing=[*measured_next(basis, compared, chosen), *missing],
        candidates=compared,
        chosen=chosen,
        is_recommended=not facts["few_units"],
        reasons=texts["reasons"],
        regret=texts["regret"],
        costliest=texts["costliest"],
        target_loss=basis.target_loss,
    )


def _pool(rows: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Choose the rows to decide among: measured ones (0), else predicted, else extrapolated (2)."""
    timed_rows = rows[rows["fits"] & rows["time_s"].map(math.isfinite)]
    conditions = [timed_rows["source"].eq("measured"), timed_rows["beyond"].eq("")]
    kinds = np.select(conditions, [0, 1], 2)
    kind = int(kinds.min(initial=2)) if len(kinds) else 0
    return timed_rows[kinds == kind], kind


def _why_nothing_fits(rows: pd.DataFrame, basis: Basis, needs: Needs) -> dict[str, Any]:
    smallest = _first(rows.sort_values("memory_gib", kind="stable"))
    devices = smallest["data_parallel_size"] if smallest else 1
    return {
        "devices": needs.devices,
        "smallest": smallest,
        "limit_gib": memory_of_device(basis, needs.memory_gib, devices),
        "failed": ", ".join(" x ".join(map(str, cut)) for cut in basis.out_of_memory),
    }


def _choose(pool: pd.DataFrame, deadline_s: float | None) -> tuple[pd.Series[Any], dict[str, Any]]:
    """Choose the fastest; with a deadline, the cheapest that meets it. Return facts, too.

    Of cuts that are not significantly slower than it, the one of the largest micro-batch is taken.
    """
    limit = -math.inf if deadline_s is None else deadline_s
    rows = pool.assign(end_s=_ends(pool))
    meets = rows["end_s"].le(limit) & rows["n_seeds"].gt(0)
    order = ["time_s", "data_parallel_size", "micro_batch_size"]
    fastest = rows.sort_values(order, ascending=[True, False, False]).iloc[:1]
    order = ["device_hours", *order]
    cheapest = rows[meets].sort_values(order, ascending=[True, True, False, False])
    best = (cheapest if meets.any() else fastest).iloc[0]
    shared = ["global_batch_size", "data_parallel_size", "source"]
    cuts = compare_with(rows[(rows[shared] == best[shared]).all(axis=1)], best, len(pool))
    tied_cuts = cuts[cuts["times_slower_low"] <= 1]
    if deadline_s is not None and best["n_seeds"]:
        # Where no time is sure to meet the deadline, none is given away for the recipe.
        tied_cuts = tied_cuts[tied_cuts["end_s"] <= deadline_s]
    chosen = best
    if len(tied_cuts):
        chosen = tied_cuts.sort_values("micro_batch_size").iloc[-1].reindex(best.index)
    is_cheaper = rows["device_hours"].lt(best["device_hours"]) & rows["time_high_s"].isna()
    return chosen.drop("end_s"), {
        "end_s": chosen["end_s"],
        "meets_deadline": meets.any(),
        "is_tied": chosen.name != best.name,
        "cheaper": rows[is_cheaper & ~meets].to_dict("records") if meets.any() else [],
        "sure": _first(cheapest.dropna(subset="time_high_s")),
    }


def _ends(rows: pd.DataFrame) -> pd.Series[float]:
    """Return what times to the target are held against a deadline by.

    That is the upper end of the interval. A measured time of fewer than `FEWEST` units has none:
    it is taken to spread, as one run does, as widely as any of those with an interval.
    """
    units = rows[["n_runs", "n_seeds"]].max(axis=1)
    reach = np.log(rows["time_high_s"] / rows["time_s"]) * np.sqrt(units)
    widest = np.exp(reach[np.isfinite(reach)].max())
    return rows["time_high_s"].fillna(rows["time_s"].where(rows["n_runs"] > 0) * widest)


def _facts_of_choice(basis: Basis, chosen: pd.Series[Any], pool: pd.DataFrame) -> dict[str, object]:
    """Return what is said of the chosen geometry alone."""
    reaches = pd.DataFrame() if basis.reaches is None else basis.reaches
    tuning = reaches.reindex(columns=["global_batch_size", "tuned", "edge"])
    tuning = tuning[tuning["global_batch_size"].eq(chosen["global_batch_size"])]
    units = {"run": int(chosen["n_runs"])}
    if pool["global_batch_size"].nunique() > 1 and chosen["n_seeds"]:
        # Cuts of one global batch share its steps, whatever the number of seeds.
        units["seed"] = int(chosen["n_seeds"])
    unit, n = min(units.items(), key=itemgetter(1))
    is_too_few = chosen["source"] == "measured" and n < FEWEST
    return {
        "few_units": count_text(n, unit) if is_too_few else "",
        "n": n,
        "remedy": settled_by(basis, chosen, unit) if is_too_few else "",
        "margin": f"{MEMORY_MARGIN:.0%}",
        "derived": DERIVED,
        "optimizer": basis.optimizer,
        "is_tuned": len(tuning) > 0 and tuning["tuned"].eq(True).all(),
        "is_edge": tuning["edge"].eq(True).any(),
    }


def _facts_of_others(compared: pd.DataFrame, chosen: pd.Series[Any]) -> dict[str, object]:
    """Return what is said of the other geometries beside the chosen one."""
    is_chosen = (compared[list(FACTORS)] == chosen[list(FACTORS)]).all(axis=1)
    others = compared[compared["source"].eq("measured") & compared["fits"] & ~is_chosen]
    others = others.sort_values("times_slower", kind="stable")
    low, high = others["times_slower_low"], others["times_slower_high"]
    has_time, has_ratio = np.isfinite(others["time_s"]), np.isfinite(others["times_slower"])
    few = others[has_time & low.isna()]
    is_elsewhere = others["data_parallel_size"].ne(chosen["data_parallel_size"])
    is_elsewhere &= others["global_batch_size"].eq(chosen["global_batch_size"])
    is_cheaper = compared["on_front"] & compared["fits"] & (compared["times_dearer"] < 1 - 1e-9)
    return {
        "rate": own_learning_rate(compared, chosen.to_dict()),
        "is_to_target": is_to_target(compared),
        "rivals": has_time.any(),
        "undecided_cuts": others[has_time & low.le(1) & high.ge(1)].to_dict("records"),
        "few": few.to_dict("records"),
        "few_n": f"{few['times_slower_n'].max():.0f}",
        "elsewhere": _first(others[is_elsewhere & has_ratio]),
        "slowest": _first(others[has_ratio].iloc[::-1]),
        "some_missed": others["time_s"].eq(math.inf).any(),
        "rival": _first(others.loc[low.dropna().sort_values(kind="stable").index]),
        "lost_pct": 100 * (1 - low.min()),
        "uncompared": others[low.isna()].to_dict("records"),
        "cheapest": _first(compared[is_cheaper].nsmallest(1, "times_dearer")),
    }


def _first(rows: pd.DataFrame) -> dict[Any, Any] | None:
    return next(iter(rows.head(1).to_dict("records")), None)


def _json_value(value: object) -> object:
    plain = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain
