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
from batchscape.analysis.hardware import is_timed_alone, was_started
from batchscape.analysis.joins import rows_of
from batchscape.analysis.targets.curves import PROGRESS, only_what_counts
from batchscape.analysis.targets.ends import TO_TARGET
from batchscape.record.tables import Tables

_KINDS = {"eval_loss": "held-out loss", "loss": "training loss"}
_ALL_POINTS = 24_000
_MOST_POINTS, _FEWEST_POINTS = 1000, 24
"""Points of all curves of a page, and of one: ours, so that a page moves smoothly."""
_MOST_CURVES = 500
"""Curves that a page has room for."""
THINNING = (
    "Curves of many points are thinned: of windows of equally many measurements the lowest and the "
    "highest stay, with the first and the last of the curve; none is moved. How many "
    f"stay depends on the number of curves: all together have about {_ALL_POINTS:,} points, but "
    f"each has {_FEWEST_POINTS} where it has as many."
)
_CUT = (
    "The axis of the loss is cut above the first and last losses of the runs that did not diverge: "
    "peaks, and crosses, may lie outside."
)
_SELECTION = (
    "one of each cell, of its completed runs if there are such, then another of each, as far as "
    "there is room; geometries take turns, each with cells from all over its settings."
)
_MOST_MARKED, _ALL_MARKED = 25, 1000
"""Evaluations of a curve that are marked, and of all curves."""
_BEST = "best"
_SOARED = 1.5
"""Multiple of the range of losses above which a loss has the axis cut."""
_RUN_COLUMNS = [
    *("sweep_dir", "run_id", "cell", "global_batch_size", "status", "stop_reason", "task"),
    *("timing_valid", "timed_steps"),
]
_TRIANGLE = Look(MARK.colour, symbol="triangle-down")
_DIVERGED, _MET = "diverged", "met the target"


def thinned(rows: pd.DataFrame, value: str, points: int) -> pd.DataFrame:
    """Thin curves of more than `points` rows; the lowest and the highest of each window stay."""
    grouped = rows.groupby("run", sort=False)[value]
    counts, place = grouped.transform("size").to_numpy(), grouped.cumcount().to_numpy()
    if not (counts > points).any():
        return rows
    windows = (points - 2) // 2
    finite = np.flatnonzero(np.isfinite(rows[value]))
    losses = pd.Series(rows[value].to_numpy()[finite], index=finite)
    by_window = losses.groupby(
        [rows["run"].to_numpy()[finite], (place * windows // counts)[finite]]
    )
    is_kept = (counts <= points) | (place == 0) | (place == counts - 1)
    is_kept[by_window.idxmin()] = True
    is_kept[by_window.idxmax()] = True
    remaining: pd.DataFrame = rows[is_kept]
    return remaining


def with_means(rows: pd.DataFrame, runs: pd.DataFrame, value: str) -> pd.DataFrame:
    """Average the curves of the completed runs of a cell up to the end of the first run.

    Adds `behind` (positions of the averaged runs; `run` is the first), and the range of their
    losses as `<value>_low` and `<value>_high`, NaN for a lone run.
    """
    completed = rows.join(runs.loc[runs["status"].eq("completed"), "cell"], on="run", how="inner")
    completed = completed.drop_duplicates(["run", "optimizer_step"], keep="last")
    completed = completed[completed.groupby("cell")["run"].transform("nunique").gt(1)]
    runs_by_cell = completed.groupby("cell")["run"]
    steps = completed.groupby(["cell", "optimizer_step"])
    means = steps[[*PROGRESS, value]].mean().drop(columns="optimizer_step")
    means[f"{value}_low"], means[f"{value}_high"] = steps[value].min(), steps[value].max()
    count = steps["run"].nunique()
    n_runs = runs_by_cell.nunique().reindex(count.index, level="cell")
    means = means[count.eq(n_runs)].reset_index()
    run_lists = runs_by_cell.unique().map(lambda averaged: sorted(averaged.tolist())).astype(object)
    means["behind"] = means["cell"].map(run_lists).astype(object)
    means["run"] = means["cell"].map(runs_by_cell.min())
    lone = rows[~rows["run"].isin(means["behind"].explode())]
    lone = lone.assign(
        behind=pd.Series([[run] for run in lone["run"].tolist()], lone.index, dtype=object)
    )
    curves = pd.concat([lone, means.drop(columns="cell")], ignore_index=True)
    return pd.DataFrame(curves.astype({"run": int}))


def loss_chart(
    cells: Cells,
    tables: Tables,
    reaches: pd.DataFrame | None,
    at_best: Mapping[int, float] = MappingProxyType({}),
) -> Chart | None:
    """Draw the losses, the cells of `at_best` first, and where runs met the targets of `reaches`.

    Lines are means over the completed runs of a cell, or lone runs. None if no run has a loss.
    """
    # Rows of few columns are taken in a fraction of the time.
    runs = cells.runs.reindex(columns=_RUN_COLUMNS).reset_index(drop=True)
    launched = runs[was_started(runs) & ~is_timed_alone(runs)]
    settings = _options_by_cell(cells, launched, at_best)
    curves, n_drawn = _curves(runs, launched, geometry_label(cells.table), tables, at_best)
    if not curves:
        return None
    for rows in curves.values():
        rows["setting"] = rows.pop("cell").map(settings)
    axes = {
        name: text
        for name, text in PROGRESS.items()
        if any(rows[name].notna().any() for rows in curves.values())
    }
    marks = [mark for value, rows in curves.items() for mark in _marks(value, rows)]
    targets = {"": "none"}
    if reaches is not None and len(reaches):
        marks += _target_marks(reaches, settings, axes)
        targets |= {_key(level): f"{level:.7g}" for level in reaches["target_loss"].unique()}
    has_targets = len(targets) > 1
    setting_choice = _setting_choice(cells, settings, at_best)
    opening = next(iter(setting_choice[0].options)) if setting_choice else ""
    ranges = _ranges(curves, runs, opening)
    names = {name for mark in marks for name in mark.table.get("series", [mark.name])}
    all_looks = {**looks(cells), _DIVERGED: Look(GREY.colour, GREY.dark, CROSS), _MET: _TRIANGLE}
    legend = {name: look for name, look in all_looks.items() if name in names}
    caption = [_lines_text(curves, has_crosses=_DIVERGED in names), *([_CUT] if ranges else [])]
    caption.append(
        "Times: of runs whose times are valid, without evaluation, checkpoints and start-up."
    )
    if n_drawn < len(launched):
        caption.append(f"Drawn are curves of {n_drawn} of {len(launched)} runs: {_SELECTION}")
    caption.append("Long curves are thinned: their extremes stay.")
    met = "Triangles: where a run met the chosen target, from tables/reaches.csv. "
    return Chart(
        "loss",
        "Loss curves",
        " ".join(caption),
        Axis(axes, "Against"),
        Axis(
            {value: loss_axis(_KINDS[value], cells.runs) for value in curves},
            "Curve",
            "either",
            ranges=ranges,
        ),
        marks,
        legend,
        choices=[*([Choice("target", "Target", targets)] * has_targets), *setting_choice],
        panels="x",
        page_only=["tokens"],
        aside=f"{met * has_targets}{THINNING}",
        tables=["tables/reaches.csv"] * has_targets,
    )


def _curves(
    runs: pd.DataFrame,
    launched: pd.DataFrame,
    labels: pd.Series[str],
    tables: Tables,
    at_best: Collection[int],
) -> tuple[dict[str, pd.DataFrame], int]:
    """Return the curves of each kind of loss, thinned, and the number of runs behind them."""
    completed = launched[launched["status"].eq("completed")]
    repeat_runs = completed.index[completed.duplicated("cell")]
    chosen_runs = _choose_runs(launched.drop(repeat_runs), labels, at_best)
    averaged_cells = completed.loc[completed.index.intersection(chosen_runs), "cell"]
    drawn_runs = chosen_runs.union(
        repeat_runs[completed.loc[repeat_runs, "cell"].isin(averaged_cells)]
    )
    curves = {}
    for loss_column, table in (("eval_loss", tables.evals), ("loss", tables.steps)):
        rows = rows_of(runs.loc[drawn_runs], table, [*PROGRESS, loss_column]).dropna(
            subset=[loss_column]
        )
        rows["run"] = drawn_runs.to_numpy()[rows["run"]]
        if len(rows):
            curves[loss_column] = with_means(only_what_counts(rows, runs), runs, loss_column)
    n_curves = sum(rows["run"].nunique() for rows in curves.values())
    points_per_curve = min(max(_ALL_POINTS // max(n_curves, 1), _FEWEST_POINTS), _MOST_POINTS)
    run_columns = runs[["cell", "global_batch_size", "run_id", "status"]]
    for loss_column, rows in curves.items():
        points = thinned(rows, loss_column, points_per_curve)
        points = points[np.isfinite(points[loss_column])].join(run_columns, on="run")
        counts = points["behind"].str.len()
        means = "mean of " + counts.astype(str) + " runs"
        curves[loss_column] = points.assign(
            curve=points["run"],
            run=points["behind"],
            series=points["cell"].map(labels),
            text=points["run_id"].where(counts.eq(1), means),
        ).sort_values(["global_batch_size", "cell", "curve", "optimizer_step"], kind="stable")
    return curves, len(drawn_runs)


def _lines_text(curves: Mapping[str, pd.DataFrame], *, has_crosses: bool) -> str:
    """Say what lines and crosses are."""
    counts = {len(runs) for rows in curves.values() for runs in rows["run"]} - {1}
    lines = "A line a run"
    if counts:
        n = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else str(min(counts))
        lines = (
            f"Lines: means over the {n} completed runs of a cell, until the first of them ends, "
            "shaded from their lowest to their highest loss; or lone runs"
        )
    crosses = "; a cross ends a run that diverged, where its loss was last finite" * has_crosses
    return f"{lines}, of one colour a geometry{crosses}."


def _marks(value: str, rows: pd.DataFrame) -> Iterator[Marks]:
    """Draw the curves of one kind: a lone point as such, and a cross where a run diverged."""
    means = rows.dropna(subset=f"{value}_low")
    if len(means):
        yield Marks("band", means, line="curve")
    rows = rows.drop(columns=[f"{value}_low", f"{value}_high"])
    yield Marks("line", rows, text="text", line="curve")
    lone = rows.groupby("curve")["curve"].transform("size").eq(1)
    has_room = len(rows) <= min(_MOST_MARKED * rows["curve"].nunique(), _ALL_MARKED)
    dotted = rows if value == "eval_loss" and has_room else rows[lone]
    if len(dotted):
        yield Marks("point", dotted, text="text", size=9)
    diverged = rows[rows["status"].eq("diverged")]
    if len(diverged):
        ends = diverged.groupby("curve").tail(1).drop(columns="series")
        yield Marks("point", ends, _DIVERGED, "text", size=40)


def _target_marks(
    reaches: pd.DataFrame, settings: Mapping[int, list[str]], axes: Mapping[str, str]
) -> list[Marks]:
    """Mark each target with a line, and the places where runs met it."""
    names = {name: progress for name, progress in TO_TARGET.items() if progress in axes}
    met = reaches[reaches["outcome"].eq("reached")]
    marked = met[[*names, "sweep_dir", "run_id", "cell"]].rename(columns=names)
    marked = marked.assign(
        eval_loss=met["target_loss"],
        target=met["target_loss"].map(_key),
        setting=met["cell"].map(settings),
    ).drop(columns="cell")
    levels = pd.DataFrame({"eval_loss": reaches["target_loss"].unique()})
    levels["target"] = levels["eval_loss"].map(_key)
    return [Marks("rule", levels), Marks("point", marked, _MET, "run_id", size=36)]


def _key(level: float) -> str:
    return repr(float(level))


def _options_by_cell(
    cells: Cells, launched: pd.DataFrame, at_best: Collection[int]
) -> dict[int, list[str]]:
    """Return the options of the choice of settings under which each cell shows."""
    context, group = cells.context_of, cells.by_batch()
    tuned = set(group.loc[list(at_best)])
    return {
        int(cell): ["", f"s{context[cell]}"]
        + ([_BEST] if cell in at_best or group[cell] not in tuned else [])
        for cell in launched["cell"].unique()
    }


def _setting_choice(
    cells: Cells, options: Mapping[int, list[str]], at_best: Collection[int]
) -> list[Choice]:
    names = setting_names(cells, cells.context_of)
    if len(names) < 2:
        return []
    labels = {f"s{number}": name for number, name in names.items()}
    others = [cell for cell, keys in options.items() if _BEST in keys and cell not in at_best]
    sizes = cells.table["global_batch_size"].loc[others].unique()
    exceptions = "".join(f", B = {size} at all where it has none" for size in sizes)
    best = {_BEST: f"each global batch at its best learning rate{exceptions}"} if at_best else {}
    counts = Counter(key for keys in options.values() for key in keys)
    # The best, or that of the most cells, comes first.
    first = _BEST if best else max(labels, key=lambda key: counts[key])
    all_labels = {**best, **labels, "": "all"}
    ordered = {key: all_labels[key] for key in [first, *all_labels]}
    return [Choice("setting", "Settings", ordered)]


def _choose_runs(
    launched: pd.DataFrame, geometries: pd.Series[str], at_best: Collection[int] = ()
) -> pd.Index[int]:
    """Choose one run of each cell, then another of each; completed ones and the best rates first.

    Where there is no room for all cells, geometries take turns. The cells of a geometry come in
    the order of their reversed bits, which spreads any first few of them over all.
    """
    order = launched.loc[launched["status"].ne("completed").sort_values(kind="stable").index]
    cells = geometries.loc[sorted(launched["cell"].unique())]
    place = cells.groupby(cells).cumcount()
    bits = int(place.max()).bit_length() if len(place) else 0
    spread = place.map(lambda number: int(f"{number:0{bits}b}"[::-1], 2))
    keys = pd.DataFrame({"turn": order.groupby("cell").cumcount()})
    keys["of_geometry"] = order["cell"].map(spread.groupby(cells).rank())
    keys["other"] = ~order["cell"].isin(list(at_best))
    order_of_turns = keys.sort_values(["turn", "other", "of_geometry"], kind="stable")
    return order_of_turns.index[:_MOST_CURVES].sort_values()


def _ranges(
    curves: Mapping[str, pd.DataFrame], runs: pd.DataFrame, opening: str
) -> dict[str, tuple[float, float]]:
    """Cut the axis where one high loss would flatten the other curves of the opening settings."""
    diverged = runs.index[runs["status"].eq("diverged")]
    limits: dict[str, tuple[float, float]] = {}
    for value, rows in curves.items():
        is_first = rows["setting"].map(lambda options: opening in options)
        usual = rows[is_first & ~rows["curve"].isin(diverged)]
        ends = usual.groupby("curve")[value].agg(["first", "last"])
        low, high = float(usual[value].min()), float(ends.to_numpy().max(initial=-np.inf))
        if usual.empty or rows[value].max() <= low + _SOARED * (high - low):
            continue
        margin = 0.05 * (high - low) or 0.05 * abs(high)
        limits[value] = (low - margin if low > 2 * margin else low / 2, high + 2 * margin)
    return limits
