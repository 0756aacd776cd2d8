"""Loss curves: means over the runs of a cell, and lone runs, thinned so that extremes stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd

from batchscape.analysis.cells import Cells, geometry_label
from batchscape.analysis.figures.chart import Axis, Chart, Choice, Look, Marks
from batchscape.analysis.figures.settings import setting_names
from batchscape.analysis.figures.style import CROSS, GREY, MARK, looks, loss_axis
from batchscape.analysis.hardware import was_started
from batchscape.analysis.joins import rows_of
from batchscape.analysis.numbers import significant
from batchscape.analysis.targets.curves import PROGRESS, only_what_counts
from batchscape.analysis.targets.ends import TO_TARGET
from batchscape.record.tables import Tables
from batchscape.text import list_text

__all__ = ["THINNING", "loss_chart", "thinned"]

_TO_TARGET = {progress: name for name, progress in TO_TARGET.items()}
_KINDS = {"eval_loss": "held-out loss", "loss": "training loss"}
_ALL_POINTS = 24_000
_MOST, _LEAST = 1000, 24
"""Points of all curves of a page, and of one. Ours: so many a page moves without a halt."""
_MOST_CURVES = 500
"""Curves that a page has room for."""
THINNING = (
    "Curves of many points are thinned: of windows of equally many measurements the lowest and the "
    "highest stay, with the first and the last of the curve; none is moved. How many "
    f"stay depends on the number of curves: all together have about {_ALL_POINTS:,} points, but "
    f"each has {_LEAST} where it has as many."
)
_CUT = (
    "The axis of the loss is cut above the first and last losses of the runs that did not diverge: "
    "peaks, and crosses, may lie outside. "
)
_MOST_MARKED, _ALL_MARKED = 25, 1000
"""Evaluations of a curve that are marked, and of all curves."""
_BEST = "best"
_SOARED = 1.5
"""How much higher than the range of these losses one must be for that."""
_OF_RUNS = [
    *("sweep_dir", "run_id", "cell", "global_batch_size", "status", "stop_reason", "task"),
    "timing_valid",
]
_TRIANGLE = Look(MARK.colour, symbol="triangle-down")
_DIVERGED, _MET = "diverged", "met the target"


def thinned(rows: pd.DataFrame, value: str, points: int) -> pd.DataFrame:
    """Leave out points of long curves, but never the lowest or highest of a window.

    Parameters
    ----------
    rows : DataFrame
        With `run` and `value`; rows of one run lie together, in order.
    points : int
        Points a run may keep, at least 4; runs that have no more keep all.

    Returns
    -------
    DataFrame
        The rows that stay, in their order.
    """
    grouped = rows.groupby("run", sort=False)[value]
    counts, place = grouped.transform("size").to_numpy(), grouped.cumcount().to_numpy()
    if not (counts > points).any():
        return rows
    windows = (points - 2) // 2
    finite = np.flatnonzero(np.isfinite(rows[value]))
    losses = pd.Series(rows[value].to_numpy()[finite], index=finite)
    of_window = losses.groupby(
        [rows["run"].to_numpy()[finite], (place * windows // counts)[finite]]
    )
    kept = (counts <= points) | (place == 0) | (place == counts - 1)
    kept[of_window.idxmin()] = True
    kept[of_window.idxmax()] = True
    remaining: pd.DataFrame = rows[kept]
    return remaining


def with_means(rows: pd.DataFrame, runs: pd.DataFrame, value: str) -> pd.DataFrame:
    """Put the mean over the completed runs of a cell, where it has several, in place of theirs.

    Parameters
    ----------
    rows : DataFrame
        With `run`, the position in `runs`, the columns of progress and `value`.
    runs : DataFrame
        With `cell` and `status`.

    Returns
    -------
    DataFrame
        Beside the columns of `rows`: `behind`, the positions of the runs of each row, of which
        `run` is the first, and `<value>_low` and `<value>_high`, the lowest and the highest of
        them, NaN where there is one. Means end with the first run that ends.
    """
    position = rows["run"].to_numpy()
    done = rows.assign(cell=runs["cell"].to_numpy()[position])
    done = done[runs["status"].eq("completed").to_numpy()[position]]
    done = done.drop_duplicates(["run", "optimizer_step"], keep="last")
    done = done[done.groupby("cell")["run"].transform("nunique").gt(1)]
    of_cells = done.groupby("cell")["run"]
    steps = done.groupby(["cell", "optimizer_step"])
    means = steps[[*PROGRESS, value]].mean().drop(columns="optimizer_step")
    means[f"{value}_low"], means[f"{value}_high"] = steps[value].min(), steps[value].max()
    count = steps["run"].nunique()
    means = means[count.eq(of_cells.nunique().reindex(count.index, level="cell"))].reset_index()
    behind = of_cells.unique().map(lambda own: sorted(own.tolist())).astype(object)
    means["behind"] = means["cell"].map(behind).astype(object)
    means["run"] = means["cell"].map(of_cells.min())
    lone = rows[~rows["run"].isin(means["behind"].explode())]
    lone = lone.assign(
        behind=pd.Series([[run] for run in lone["run"].tolist()], lone.index, dtype=object)
    )
    found = pd.concat([lone, means.drop(columns="cell")], ignore_index=True)
    return pd.DataFrame(found.astype({"run": int}))


def loss_chart(
    cells: Cells,
    tables: Tables,
    reaches: pd.DataFrame | None,
    at_best: Mapping[int, float] = MappingProxyType({}),
) -> Chart | None:
    """Draw the held-out and the training loss: means over the runs of a cell, and lone runs.

    Parameters
    ----------
    reaches : DataFrame, optional
        As `steps_to_target` returns it: where each run met a target.
    at_best : mapping of int to float
        Cells that are drawn and shown first, as `cells_at_best` returns them.

    Returns
    -------
    Chart or None
        None where no run measured a loss.
    """
    # Rows of the few columns that are asked for are taken in a fraction of the time.
    runs = cells.runs.reindex(columns=_OF_RUNS).reset_index(drop=True)
    launched = runs[was_started(runs)]
    labels = geometry_label(cells.table)
    done = launched[launched["status"].eq("completed")]
    again = done.index[done.duplicated("cell")]
    drawn = _drawn(launched.drop(again), labels, at_best)
    averaged = done.loc[done.index.intersection(drawn), "cell"]
    taken = drawn.union(again[done.loc[again, "cell"].isin(averaged)])
    found = {
        value: rows_of(runs.loc[taken], rows, [*PROGRESS, value]).dropna(subset=[value])
        for value, rows in (("eval_loss", tables.evals), ("loss", tables.steps))
    }
    for rows in found.values():
        rows["run"] = taken.to_numpy()[rows["run"]]
    found = {
        value: with_means(only_what_counts(rows, runs), runs, value)
        for value, rows in found.items()
        if len(rows)
    }
    if not found:
        return None
    n_curves = sum(rows["run"].nunique() for rows in found.values())
    points = min(max(_ALL_POINTS // n_curves, _LEAST), _MOST)
    shown = _settings_of(cells, launched, at_best)
    order = runs.sort_values(["global_batch_size", "cell"], kind="stable").index
    place = pd.Series(range(len(order)), index=order)
    for value, rows in found.items():
        left = thinned(rows, value, points)
        left = left[np.isfinite(left[value])]
        of = runs.loc[left["run"]].reset_index(drop=True)
        count = left["behind"].str.len()
        found[value] = left.assign(
            curve=left["run"],
            run=left["behind"],
            series=labels.loc[of["cell"]].to_numpy(),
            text=[
                run if n == 1 else f"mean of {n} runs"
                for run, n in zip(of["run_id"], count, strict=True)
            ],
            status=of["status"].to_numpy(),
            setting=of["cell"].map(shown).to_numpy(),
            place=place.loc[left["run"]].to_numpy(),
        ).sort_values(["place", "optimizer_step"], kind="stable")
    axes = {
        name: text
        for name, text in PROGRESS.items()
        if any(rows[name].notna().any() for rows in found.values())
    }
    marks = [mark for value, rows in found.items() for mark in _marks(value, rows)]
    targets = {"": "none"}
    if reaches is not None and len(reaches):
        marks += _targets(reaches, shown, axes)
        targets |= {_key(level): f"{level:.7g}" for level in reaches["target_loss"].unique()}
    names = {name for mark in marks for name in mark.table.get("series", [mark.name])}
    known = {**looks(cells), _DIVERGED: Look(GREY.colour, GREY.dark, CROSS), _MET: _TRIANGLE}
    settings = _setting_choice(cells, shown, at_best)
    opening = next(iter(settings[0].options)) if settings else ""
    ranges = _ranges(found, runs, opening)
    choices = [Choice("target", "Target", targets)] if len(targets) > 1 else []
    choices += settings
    few = ""
    if len(taken) < len(launched):
        few = (
            f"Drawn are curves of {len(taken)} of {len(launched)} runs: one of each cell, of its "
            "completed runs if there are such, then another of each, as far as there is room; "
            "geometries take turns, each with cells from all over its settings. "
        )
    rates = f" Best learning rates: {_rates_text(cells, at_best)}." if opening == _BEST else ""
    crosses = ""
    if _DIVERGED in names:
        crosses = "; a cross ends a run that diverged, where its loss was last finite"
    met = ""
    if len(targets) > 1:
        met = "Triangles: where a run met the chosen target, from tables/reaches.csv. "
    wider = ""
    if any(known[name].width > Look("").width for name in names if name in known):
        wider = "Of cuts of one global batch, which lie on each other, the first are wider. "
    return Chart(
        "loss",
        "Loss curves",
        f"{_lines_text(found)}, of one colour a geometry{crosses}. {_CUT if ranges else ''}Times: "
        "of runs whose times are valid, without evaluation, checkpoints and start-up. "
        f"{wider}{few}Long curves are thinned: their extremes stay.{rates}",
        Axis(axes, "Against"),
        Axis(
            {value: loss_axis(_KINDS[value], cells.runs) for value in found},
            "Curve",
            "either",
            ranges=ranges,
        ),
        marks,
        {name: look for name, look in known.items() if name in names},
        choices=choices,
        panels="x",
        page_only=["tokens"],
        aside=f"{met}{THINNING}",
        tables=["tables/reaches.csv"] if len(targets) > 1 else [],
    )


def _lines_text(found: Mapping[str, pd.DataFrame]) -> str:
    """Say what a line is the mean of."""
    counts = {len(behind) for rows in found.values() for behind in rows["run"]} - {1}
    if not counts:
        return "A line a run"
    n = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else str(min(counts))
    return (
        f"Lines: means over the {n} completed runs of a cell, until the first of them ends, "
        "shaded from their lowest to their highest loss; or lone runs"
    )


def _rates_text(cells: Cells, at_best: Mapping[int, float]) -> str:
    rates: dict[int, dict[str, None]] = {}
    for cell in sorted(at_best, key=lambda cell: at_best[cell]):
        size = int(cells.table["global_batch_size"][cell])
        rates.setdefault(size, {})[significant(at_best[cell], 3)] = None
    return ", ".join(f"{list_text(rates[size])} at B = {size}" for size in sorted(rates))


def _marks(value: str, rows: pd.DataFrame) -> Iterator[Marks]:
    """Draw the curves of one kind: a lone point as such, and a cross where a run diverged."""
    means = rows.dropna(subset=f"{value}_low")
    if len(means):
        yield Marks("band", means, line="curve")
    rows = rows.drop(columns=[f"{value}_low", f"{value}_high"])
    yield Marks("line", rows, text="text", line="curve")
    lone = rows.groupby("curve")["curve"].transform("size").eq(1)
    few = len(rows) <= min(_MOST_MARKED * rows["curve"].nunique(), _ALL_MARKED)
    dotted = rows if value == "eval_loss" and few else rows[lone]
    if len(dotted):
        yield Marks("point", dotted, text="text", size=9)
    lost = rows[rows["status"].eq("diverged")]
    if len(lost):
        ends = lost.groupby("curve").tail(1).drop(columns="series")
        yield Marks("point", ends, _DIVERGED, "text", size=40)


def _targets(
    reaches: pd.DataFrame, shown: Mapping[int, list[str]], axes: Mapping[str, str]
) -> list[Marks]:
    """Mark where runs met each target; the level as a line."""
    names = {_TO_TARGET[name]: name for name in axes}
    met = reaches[reaches["outcome"].eq("reached")]
    marked = met[[*names, "sweep_dir", "run_id", "cell"]].rename(columns=names)
    marked = marked.assign(
        eval_loss=met["target_loss"],
        target=met["target_loss"].map(_key),
        setting=met["cell"].map(shown),
    ).drop(columns="cell")
    levels = pd.DataFrame({"eval_loss": reaches["target_loss"].unique()})
    levels["target"] = levels["eval_loss"].map(_key)
    return [Marks("rule", levels), Marks("point", marked, _MET, "run_id", size=36)]


def _key(level: float) -> str:
    return repr(float(level))


def _settings_of(
    cells: Cells, launched: pd.DataFrame, at_best: Collection[int]
) -> dict[int, list[str]]:
    """Tell under which choices of settings each cell shows."""
    context, group = cells.context_of(), cells.by_batch()
    tuned = set(group.loc[list(at_best)])
    return {
        int(cell): ["", f"s{context[cell]}"]
        + ([_BEST] if cell in at_best or group[cell] not in tuned else [])
        for cell in launched["cell"].unique()
    }


def _setting_choice(
    cells: Cells, shown: Mapping[int, list[str]], at_best: Collection[int]
) -> list[Choice]:
    settings = setting_names(cells, cells.context_of())
    if len(settings) < 2:
        return []
    named = {f"s{number}": name for number, name in settings.items()}
    others = [cell for cell, own in shown.items() if _BEST in own and cell not in at_best]
    sizes = cells.table["global_batch_size"].loc[others].unique()
    apart = "".join(f", B = {size} at all where it has none" for size in sizes)
    best = {_BEST: f"each global batch at its best learning rate{apart}"} if at_best else {}
    counts = Counter(key for own in shown.values() for key in own)
    # The best, or that of the most cells, comes first.
    first = _BEST if best else max(named, key=lambda key: counts[key])
    every = {**best, **named, "": "all"}
    return [Choice("setting", "Settings", {key: every[key] for key in [first, *every]})]


def _drawn(
    launched: pd.DataFrame, geometries: pd.Series[str], at_best: Collection[int] = ()
) -> pd.Index[int]:
    """Choose runs: of many, one of each cell, then another of each; completed ones first.

    Each time those at the best learning rate of their global batch come first.

    Where cells are more than there is room for, geometries take turns, each with its cells in the
    order of their reversed bits, which spreads any first few of them over all.
    """
    order = launched.loc[launched["status"].ne("completed").sort_values(kind="stable").index]
    cells = geometries.loc[sorted(launched["cell"].unique())]
    place = cells.groupby(cells).cumcount()
    bits = int(place.max()).bit_length() if len(place) else 0
    spread = place.map(lambda number: int(f"{number:0{bits}b}"[::-1], 2))
    keys = pd.DataFrame({"turn": order.groupby("cell").cumcount()})
    keys["of_geometry"] = order["cell"].map(spread.groupby(cells).rank())
    keys["other"] = ~order["cell"].isin(list(at_best))
    chosen = keys.sort_values(["turn", "other", "of_geometry"], kind="stable")
    return chosen.index[:_MOST_CURVES].sort_values()


def _ranges(
    found: Mapping[str, pd.DataFrame], runs: pd.DataFrame, opening: str
) -> dict[str, tuple[float, float]]:
    """Cut the axis where a loss that soared would press the others, of the first settings."""
    lost = runs.index[runs["status"].eq("diverged")]
    limits: dict[str, tuple[float, float]] = {}
    for value, rows in found.items():
        is_first = rows["setting"].map(lambda own: opening in own)
        usual = rows[is_first & ~rows["curve"].isin(lost)]
        ends = usual.groupby("curve")[value].agg(["first", "last"])
        low, high = float(usual[value].min()), float(ends.to_numpy().max(initial=-np.inf))
        if usual.empty or rows[value].max() <= low + _SOARED * (high - low):
            continue
        margin = 0.05 * (high - low) or 0.05 * abs(high)
        limits[value] = (low - margin if low > 2 * margin else low / 2, high + 2 * margin)
    return limits
