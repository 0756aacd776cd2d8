"""Claims judged by a table of anyone's: those that its columns can settle, by the same rules.

The table has one row a run, or is one of curves or of steps to target. Geometry, times and memory
stand under the names of run folders. What a claim needs and the table lacks is said; nothing stands
in for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from batchscape.analysis.cells import GEOMETRY, find_cells
from batchscape.analysis.claims.claim import Claim, Verdict
from batchscape.analysis.claims.declared import CLAIMS, judge_claims
from batchscape.analysis.claims.evidence import Evidence
from batchscape.analysis.comparison import QUANTITIES
from batchscape.analysis.targets.columns import ALIASES, recognise, refuse_rows
from batchscape.analysis.targets.crossings import steps_to_target
from batchscape.analysis.targets.curves import PROGRESS
from batchscape.analysis.targets.foreign import EARLY, as_table
from batchscape.analysis.targets.tidy import refuse_missing
from batchscape.errors import AnalysisError

__all__ = ["TableClaims", "claims_from_table", "judge_table"]

_CUT = GEOMETRY[:3]
_BATCH = GEOMETRY[3]
_STEPS, _LOSS, _OUTCOME = "steps to a target", "loss", "loss or steps to a target"
_NEEDS: dict[str, tuple[str, ...]] = {
    "memory-follows-micro": (*_CUT, "seed", "peak_allocated_gib"),
    "accumulation-costs-memory": (*_CUT, "seed", "peak_allocated_gib"),
    "microstep-time-follows-micro": (*_CUT, "seed", "forward_backward_s"),
    "micro-before-accumulation": (*_CUT, "seed", "step_time_s"),
    "global-batch-is-free-per-iteration": (*_CUT, "seed", "step_time_s"),
    "fewer-updates-slower-convergence": ("seed", _STEPS, "target_loss"),
    "decompositions-are-equivalent": (*_CUT, "seed", _LOSS),
    "accumulation-equals-large-batch": (*_CUT, "seed", _LOSS),
    "learning-rate-grows-with-batch": ("learning_rate", "seed", _OUTCOME),
    "devices-scale-batch-linearly": (*_CUT, "seed", "step_time_s", "exchange_s"),
    "accumulation-4-or-8": (*_CUT, "seed", "step_time_s"),
    "musev-224": (*_CUT, "seed", "step_time_s", "peak_allocated_gib"),
}
"""Columns that a claim is settled by; the others need rows of steps or ranks, which it has not."""
_ROWS = "rows of single steps, or of ranks, which stand in run folders alone"


class TableClaims(NamedTuple):
    """What a table gives claims to be judged by."""

    evidence: Evidence
    claims: tuple[Claim, ...]
    """All claims; those that the table cannot settle find nothing, and say what it lacks."""


def judge_table(
    table: pd.DataFrame,
    *,
    group: Sequence[str] = (),
    columns: Mapping[str, str] | None = None,
    targets: Sequence[float] | None = None,
    nan: Literal["missing", "diverged"] | None = None,
) -> list[Verdict]:
    """Judge every claim by a table.

    Parameters
    ----------
    table : DataFrame
        One row a run, or as for `as_table`: `global_batch_size`, `seed`, and what claims are of:
        `data_parallel_size`, `micro_batch_size`, `gradient_accumulation_steps`, `learning_rate`,
        `loss`, `steps_to_target`, `step_time_s`, `peak_allocated_gib`, and other figures of
        `QUANTITIES`. Rows of equal seed are pairs; times are taken as measured on a free machine.
    group, columns, nan
        As for `as_table`.
    targets : sequence of float, optional
        Losses that curves reach, as for `steps_to_target`.

    Returns
    -------
    list of Verdict
        As `judge_claims`; those that lack a column are not identified, and say which.

    Raises
    ------
    AnalysisError
        As `as_table` does, or if the geometry's product is not the global batch.

    Notes
    -----
    Source: the rules of `CLAIMS`, unchanged.
    """
    found = claims_from_table(table, group=group, columns=columns, targets=targets, nan=nan)
    return judge_claims(found.evidence, found.claims)


def claims_from_table(
    table: pd.DataFrame,
    *,
    group: Sequence[str] = (),
    columns: Mapping[str, str] | None = None,
    targets: Sequence[float] | None = None,
    nan: Literal["missing", "diverged"] | None = None,
) -> TableClaims:
    """Turn a table into what claims are judged by; as `judge_table`."""
    recognised, _ = recognise(table, columns)
    named = recognised.reset_index(drop=True)
    refuse_missing(named, [_BATCH], "a table of runs that claims are judged by")
    groups = [name for name in (*group, "group") if name in named]
    keys = [n for n in (*groups, *GEOMETRY, "learning_rate", *_REPEATS) if n in named]
    _refuse_mixed(named, keys)
    named["run"] = named["run"].astype(str) if "run" in named else _texts(named[keys])
    if "trajectory_id" not in named:
        named = named.assign(trajectory_id=_trajectories(named, groups))
    told = {n: named[n] for n in ("run", "trajectory_id") if n not in recognised}
    given = table.reset_index(drop=True).assign(**told)
    runs, has_cut, varying = _runs(named, groups)
    have = {*named.columns} - varying - (set() if has_cut else {*_CUT})
    reaches = pd.DataFrame()
    if "loss" in named and not runs["status"].isin(EARLY).all():
        finals = as_table(given, group=group, columns=columns, minimise="loss", nan=nan).table
        losses = finals.set_index("run_id")["final_eval_loss"].reindex(runs["run_id"]).to_numpy()
        diverged = np.isinf(losses)
        runs["final_eval_loss"] = np.where(diverged, np.nan, losses)
        runs["status"] = runs["status"].mask(diverged, "diverged")
        have |= {_LOSS, _OUTCOME}
    if "steps_to_target" in named or ("loss" in named and not named["run"].is_unique):
        read = as_table(given, group=group, columns=columns, minimise="steps", nan=nan)
        reaches = read.table
        if read.kind == "curves":
            reaches = steps_to_target(read.table, targets)
        reaches = reaches.assign(sweep_dir=_TABLE)
        have |= {_STEPS, _OUTCOME}
        have |= set() if reaches["target_loss"].isna().any() else {"target_loss"}
    evidence = Evidence(find_cells(runs), reaches=reaches)
    return TableClaims(evidence, tuple(_withheld(claim, have, varying) for claim in CLAIMS))


_TABLE = "table"
_REPEATS = ("seed", "timing_repeat")


def _refuse_mixed(named: pd.DataFrame, keys: Sequence[str]) -> None:
    """Refuse runs of several settings, and rows not told apart; of losses `as_table` does."""
    if "loss" in named:
        return
    if "run" in named:
        several = named.groupby("run", dropna=False)[list(keys)].nunique(dropna=False).gt(1)
        wrong = np.logical_or(several.any(axis=1).to_numpy(dtype=bool), several.index.isna())
        if wrong.any():
            run = several.index[wrong][0]
            what = ", ".join(name for name in keys if several.loc[wrong].iloc[0][name])
            msg = f"every row names its run, which has one value of each setting; run {run} has "
            raise AnalysisError(msg + (f"several of {what}" if what else "no name"))
        if "steps_to_target" not in named:
            return
    names = [*({"run", "target_loss"} & {*named}), *keys]
    again = named.duplicated(names)
    if again.any():
        row = named.loc[again, names].iloc[0]
        said = ", ".join(f"{name}={row[name]}" for name in keys)
        msg = (
            f"a run has one row; {said} is there more than once ({again.sum()} rows too many). "
            "Tell runs apart by a column `seed`, `timing_repeat` or `run`, or groups of them with "
            "--group COLUMN"
        )
        raise AnalysisError(msg)


def _trajectories(named: pd.DataFrame, groups: Sequence[str]) -> pd.Series[str]:
    """Name the trajectory of each row: one of its own, or one shared by cuts of one training.

    Cuts share it where they have a seed, differ in the whole cut, and in no column besides that
    is not measured.
    """
    apart: pd.Series[str] = "run " + named["run"]
    if not {*_CUT, "seed"} <= {*named}:
        return apart
    figures = {quantity.name for quantity in QUANTITIES}
    measured = {*ALIASES, *figures, *_CUT, "timing_repeat"} - {"group", _BATCH, *_TRAINED}
    first = named.drop_duplicates("run")
    settings = [name for name in named if name in groups or name not in measured]
    # What varies along a run was measured.
    varies = named.groupby("run")[settings].nunique(dropna=False).gt(1).any()
    trained = [name for name in settings if name not in set(varies.index[varies])]
    shared = _texts(first[trained])
    cut = [*_CUT, *({"timing_repeat"} & {*named})]
    twice = first[cut].astype(str).assign(shared=shared).duplicated(keep=False)
    lone = shared.isin(set(shared[twice]))
    return named["run"].map(shared.mask(lone, apart).set_axis(first["run"]))


_TRAINED = ("learning_rate", "seed")


def _runs(named: pd.DataFrame, groups: Sequence[str]) -> tuple[pd.DataFrame, bool, set[str]]:
    """Return one row a run, as run folders give them, and whether the table tells the geometry.

    The third are the figures that vary along a run: no row of it has the run's own.
    """
    first = named.drop_duplicates("run").reset_index(drop=True)
    if "status" in named:
        # How a run ended stands in its last row.
        progress = [name for name in PROGRESS if name in named][:1]
        far = {name: pd.to_numeric(named[name], errors="coerce") for name in progress}
        ordered = named.assign(**far).sort_values(progress, kind="stable") if progress else named
        first["status"] = first["run"].map(ordered.groupby("run")["status"].last())
    has_cut = set(_CUT) <= set(first)
    batch = _whole(first, _BATCH)
    cut = {name: _whole(first, name) for name in _CUT} if has_cut else {}
    if has_cut:
        product = np.prod([*cut.values()], axis=0)
        if (product != batch).any():
            row = int(np.flatnonzero(product != batch)[0])
            factors = " x ".join(f"{cut[name][row]:g}" for name in _CUT)
            msg = (
                "a global batch is devices x micro-batch x accumulation; run "
                f"{first['run'].iloc[row]} has {factors} = {product[row]:g} and says {batch[row]:g}"
            )
            raise AnalysisError(msg)
    # Claims on a geometry are withheld without one; a run of any needs some.
    known = cut or {_CUT[0]: batch * 0 + 1, _CUT[1]: batch, _CUT[2]: batch * 0 + 1}
    there = [quantity.name for quantity in QUANTITIES if quantity.name in first]
    numbers = named[there].apply(pd.to_numeric, errors="coerce").groupby(named["run"])
    differ = numbers.nunique().gt(1).any()
    varying = {name for name in there if differ[name]}
    figures = [name for name in there if name not in varying]
    status = first["status"] if "status" in first else pd.Series("completed", first.index)
    ended = status.fillna("completed").replace({"finished": "completed"})
    runs = pd.DataFrame(
        {
            "sweep_dir": _TABLE,
            "run_id": first["run"],
            "trajectory_id": first["trajectory_id"].astype(str),
            "status": ended.astype(object),
            "stop_reason": "budget",
            "reason": None,
            **{name: numbers.astype("int64") for name, numbers in {**known, _BATCH: batch}.items()},
            "seed": first.get("seed", 0),
            "timing_repeat": first.get("timing_repeat", 0),
            "launch.world_size": known[_CUT[0]],
            "launch.timing_valid": True,
            "launch.timing_invalid_reason": None,
            "launch.device_model": first.get("hardware", "hardware not told"),
            "precision": first.get("precision", "precision not told"),
        }
    )
    if "learning_rate" in first:
        rates = pd.to_numeric(first["learning_rate"]).to_numpy(dtype=float)
        runs = runs.assign(**{"learning_rate": rates, "optimizer.learning_rate": rates})
    for name in figures:
        runs[name] = first["run"].map(numbers[name].first()).to_numpy(dtype=float)
    # A column of groups makes a context of its own, as a model does.
    runs = runs.assign(**{f"table.{name}": first[name].astype(str) for name in groups})
    return runs, has_cut, varying


def _withheld(claim: Claim, have: set[Any], varying: set[str]) -> Claim:
    """Let a claim that the table cannot settle find nothing, and say what is lacking."""
    needs = _NEEDS.get(claim.id)
    lacking = [_ROWS] if needs is None else [name for name in needs if name not in have]
    if not lacking:
        return claim
    whys = [f"{n} (it varies along a run)" if n in varying else n for n in lacking]
    said = f"{claim.needs}. The table lacks {', '.join(whys)}"
    return replace(claim, needs=said, decide=lambda _: None)


def _texts(columns: pd.DataFrame) -> pd.Series[str]:
    return columns.astype(str).agg("/".join, axis=1).astype(object)


def _whole(table: pd.DataFrame, name: str) -> np.ndarray:
    numbers = pd.to_numeric(table[name], errors="coerce").to_numpy(dtype=float)
    wrong = ~((numbers >= 1) & (numbers == np.floor(numbers)))
    refuse_rows(wrong, name, table[name], "is a positive whole number in every row")
    return numbers
