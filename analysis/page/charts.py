"""Charts of the page beside the loss curves: each from one table that the report writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.cells import GEOMETRY, Cells, geometry_label, launched_batches
from batchscape.analysis.decisions.candidates import DERIVED, is_to_target
from batchscape.analysis.decisions.show import geometry_text
from batchscape.analysis.numbers import memory_scale, significant, time_scale
from batchscape.analysis.page.chart import (
    Chart,
    Choice,
    by,
    colour,
    error_bars,
    label_text,
    log_axis,
    numbers,
    scatter,
    shade,
    size_axis,
)
from batchscape.analysis.page.settings import cell_names, setting_names
from batchscape.text import count_text

__all__ = [
    "OfRow",
    "claims_chart",
    "cost_chart",
    "decompositions_chart",
    "heat_map",
    "learning_rate_charts",
    "noise_charts",
    "pareto_chart",
    "steps_chart",
]

OfRow = Callable[[Mapping[Any, Any]], list[int]]
"""Gives the positions of the runs behind a row of a table."""

_BATCH = "global batch size (samples)"
_ACCENT = by("theme", {"light": "#0072B2", "dark": "#56B4E9"})
_BAND = by("theme", {"light": "rgba(0,114,178,0.18)", "dark": "rgba(86,180,233,0.22)"})
_MARK = "#D55E00"
_INK = by("theme", {"light": "#222222", "dark": "#f0f0f0"})
_GREY = "#8a8a8a"
_SHADES = {
    "light": [[0, "#e8f1fa"], [1, "#3182bd"]],
    "dark": [[0, "#24364a"], [1, "#4a90c8"]],
}
_MOST_LAYERS = 50
"""Heat maps that a page has room for."""
_QUANTITIES = {
    "steps_to_target": "optimizer steps to target",
    "samples_to_target": "samples to target",
    "tokens_to_target": "tokens to target",
    "time_to_target_s": "time to target (s)",
}


def steps_chart(
    reaches: pd.DataFrame,
    curve: pd.DataFrame | None,
    labels: Mapping[int, str],
    found: OfRow,
    spoken_of: tuple[int, float] | None = None,
) -> Chart | None:
    """Draw what reaching a target took, run by run, with the fit where there is one.

    Parameters
    ----------
    reaches : DataFrame
        At the best learning rate of each global batch, as the fit had it.
    curve : DataFrame, optional
        As `tradeoff.tables.fitted_curves` returns it.
    labels : mapping of int to str
        Labels of groups, by number.
    found : callable
        Positions of the runs of a row.
    spoken_of : tuple of int and float, optional
        Group and target of which the sentences are: shown when the page opens.

    Returns
    -------
    Chart or None
        None where no target was tried at several global batches.
    """
    quantities = {
        name: text
        for name, text in _QUANTITIES.items()
        if name == "steps_to_target" or reaches[name].notna().any()
    }
    several = reaches["group"].nunique() > 1
    targets: dict[str, str] = {}
    traces: list[dict[str, Any]] = []
    shapes: dict[str, list[dict[str, Any]]] = {}
    for keys, own in reaches.groupby(["group", "target_loss"], sort=False):
        group, target = int(str(keys[0])), float(str(keys[1]))
        if own["global_batch_size"].nunique() < 2:
            continue
        key, name = f"{group}|{target!r}", f"loss {target:.7g}"
        targets[key] = f"{labels.get(group, '')}: {name}" if several else name
        drawn = [*_reached(own, quantities, found)]
        shapes[key] = []
        if curve is not None:
            fit = curve[curve["group"].eq(group) & curve["target_loss"].eq(target)]
            drawn += _fitted(fit, quantities) if len(fit) else []
            shapes[key] = _critical(fit.iloc[0]) if len(fit) else []
        traces += [{**trace, "when": {"target": [key]}} for trace in drawn]
    if not targets:
        return None
    tried = reaches.reindex(columns=["n_learning_rates"])["n_learning_rates"]
    at_best = " at the best learning rate of their global batch" if tried.gt(1).any() else ""
    opens = "" if spoken_of is None else f"{spoken_of[0]}|{spoken_of[1]!r}"
    order = dict.fromkeys(key for key in (opens, *targets) if key in targets)
    return Chart(
        "steps_to_target",
        "What a target takes, by global batch",
        f"Points are runs{at_best}, one a trajectory: in "
        "tables/reaches.csv those of which is_best is true. Triangles point up from "
        "what a run had seen when it ended without reaching the target. The line is the fit, with "
        "its pointwise 95 % interval; dashed: perfect scaling, half the steps at twice the batch, "
        "from the smallest batch on. Vertical: the critical batch size, with its interval.",
        traces,
        {
            "xaxis": size_axis(reaches["global_batch_size"], _BATCH),
            "yaxis": log_axis(by("quantity", quantities)),
            "shapes": by("target", shapes),
        },
        [
            Choice("target", "Target", {key: targets[key] for key in order}),
            Choice("quantity", "Count", quantities),
        ],
        ["tables/reaches.csv"] + ["tables/tradeoff_curve.csv"] * (curve is not None),
    )


def _reached(
    own: pd.DataFrame, quantities: Mapping[str, str], found: OfRow
) -> Iterable[dict[str, Any]]:
    met = own[own["outcome"].eq("reached")]
    yield scatter(
        "runs",
        met["global_batch_size"],
        by("quantity", {name: numbers(met[name]) for name in quantities}),
        "B = %{x}: %{y:.5g}",
        customdata=_each(met, found),
        marker={"color": _INK, "size": 7, "opacity": 0.75},
    )
    short = own[own["outcome"].isin(["censored", "pruned"])]
    if len(short):
        yield scatter(
            "not reached: more than this",
            short["global_batch_size"],
            _steps_and_samples(short["steps_low"], short["global_batch_size"], quantities),
            "B = %{x}: more than %{y:.5g}",
            customdata=_each(short, found),
            marker={"color": _MARK, "size": 10, "symbol": "triangle-up-open"},
        )
    lost = own.loc[own["outcome"].eq("diverged"), "global_batch_size"]
    if len(lost):
        counts = lost.value_counts().sort_index()
        said = ", ".join(f"{n} at B = {batch}" for batch, n in counts.items())
        marker = {"color": _MARK, "size": 9, "symbol": "x"}
        yield scatter(f"diverged: {said}", [None], [None], marker=marker)


def _fitted(fit: pd.DataFrame, quantities: Mapping[str, str]) -> Iterable[dict[str, Any]]:
    sizes = fit["global_batch_size"]

    def line(name: str, column: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401  (JSON)
        counted = _steps_and_samples(fit[column], sizes, quantities)
        return scatter(name, sizes, counted, mode="lines", **more)

    if fit["low"].notna().any():
        edge = {"line": {"width": 0}}
        yield line("", "low", **edge, showlegend=False)
        yield line("interval of the fit", "high", **edge, fill="tonexty", fillcolor=_BAND)
    yield line("fit", "steps", line={"color": _ACCENT, "width": 2})
    dashed = {"color": _GREY, "width": 1.5, "dash": "dash"}
    yield line("perfect scaling", "perfect_steps", line=dashed)
    critical = fit["critical_batch_size"].iloc[0]
    if np.isfinite(critical):
        name = f"critical batch size {significant(critical, 3)}"
        yield scatter(name, [None], [None], mode="lines", line={"color": _MARK, "width": 2})


def _steps_and_samples(
    steps: pd.Series[float], sizes: pd.Series[int], quantities: Mapping[str, str]
) -> dict[str, Any]:
    """Count optimizer steps as each quantity counts; tokens and time do not follow from them."""
    known = {"steps_to_target": steps, "samples_to_target": steps * sizes}
    nothing = [None] * len(steps)
    return by("quantity", {n: numbers(known[n]) if n in known else nothing for n in quantities})


def _critical(row: pd.Series[Any]) -> list[dict[str, Any]]:
    value, low, high = (float(row[f"critical_batch_size{end}"]) for end in ("", "_low", "_high"))
    if not np.isfinite(value):
        return []
    place = {"yref": "paper", "y0": 0, "y1": 1}
    shapes: list[dict[str, Any]] = [
        {"type": "line", **place, "x0": value, "x1": value, "line": {"color": _MARK, "width": 2}}
    ]
    if np.isfinite([low, high]).all() and low > 0:
        band = {"type": "rect", **place, "x0": low, "x1": high, "line": {"width": 0}}
        shapes.append({**band, "fillcolor": "rgba(213,94,0,0.15)", "layer": "below"})
    return shapes


def pareto_chart(name: str, title: str, candidates: pd.DataFrame, found: OfRow) -> Chart | None:
    """Draw time to the target against device-hours.

    Parameters
    ----------
    candidates : DataFrame
        Table of the section on decisions.
    found : callable
        Positions of the runs of one of its rows.

    Returns
    -------
    Chart or None
        None where fewer than two geometries have a time to a target: times of one step are in
        the heat map.
    """
    if not is_to_target(candidates):
        return None
    rows = candidates[candidates["time_s"].map(np.isfinite) & candidates["fits"].astype(bool)]
    if len(rows) < 2:
        return None

    def places(own: pd.DataFrame, kind: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401  (JSON)
        names = list(map(geometry_text, own.to_dict("records")))
        # The others would lie on top of each other.
        shown = [text if on else "" for text, on in zip(names, own["on_front"], strict=True)]
        return scatter(
            kind,
            own["time_s"],
            own["device_hours"],
            "%{hovertext}<br>%{x:.4g} s, %{y:.4g} device-hours",
            hovertext=names,
            text=shown,
            textposition="top center",
            customdata=_each(own, found),
            **more,
        )

    def bars(own: pd.DataFrame) -> dict[str, Any]:
        return error_bars(*(own[f"time{end}_s"] for end in ("_low", "", "_high")))

    measured = rows[rows["source"].eq("measured") & ~rows["derived"].astype(bool)]
    derived = rows[rows["source"].eq("measured") & rows["derived"].astype(bool)]
    predicted = rows[rows["source"].ne("measured") & rows["beyond"].eq("")]
    front = rows[rows["on_front"].astype(bool)].sort_values("time_s")
    chosen = rows[rows["recommended"].astype(bool)]
    named = by("room", {"wide": "markers+text", "narrow": "markers"})
    solid = {"size": 10, "color": _ACCENT}
    hollow = {"size": 6, "symbol": "circle-open", "color": _GREY}
    dotted = {"color": _MARK, "width": 1.5, "dash": "dot"}
    star = {"symbol": "star-open", "size": 20, "color": _MARK}
    drawn: tuple[tuple[str, pd.DataFrame, dict[str, Any]], ...] = (
        ("measured", measured, {"mode": named, "marker": solid}),
        ("derived", derived, {"mode": named, "marker": {**solid, "symbol": "circle-open"}}),
        ("predicted", predicted, {"marker": hollow}),
        ("recommended", chosen, {"marker": star}),
    )
    traces = [places(own, kind, error_x=bars(own), **look) for kind, own, look in drawn if len(own)]
    bars_say = " Bars: 95 % intervals of the time." if rows["time_high_s"].notna().any() else ""
    derived_say = f" {DERIVED}." if len(derived) else ""
    line_says = ""
    if len(front) > 1:
        x, y = front["time_s"], front["device_hours"]
        traces.append(scatter("front", x, y, mode="lines", line=dotted))
        line_says = " Line: the front, the geometries that none beats in both."
    return Chart(
        name.replace("time_to_target", "pareto"),
        title,
        f"Device-hours against time to the target.{bars_say}{line_says}{derived_say}",
        traces,
        {"xaxis": log_axis("time to target (s)"), "yaxis": log_axis("device-hours")},
        tables=[f"tables/{name}.csv"],
    )


def _figures(table: pd.DataFrame, *names: str) -> dict[str, tuple[str, float]]:
    """Title the figures of a comparison that any cell has, with the factor to their unit."""
    memory = memory_scale(table["peak_allocated_gib_mean"])
    time = time_scale(table["step_time_s_mean"])
    known = {
        "step_time_s": (f"step time ({time.unit})", time.factor),
        "peak_allocated_gib": (f"peak memory of a device ({memory.unit})", memory.factor),
        "tokens_per_s": ("tokens/s, all devices", 1.0),
        "samples_per_s": ("samples/s, all devices", 1.0),
        "final_eval_loss": ("final held-out loss", 1.0),
        "final_loss": ("final training loss", 1.0),
    }
    return {name: known[name] for name in names if table[f"{name}_n"].gt(0).any()}


def _titles(figures: Mapping[str, tuple[str, float]]) -> dict[str, str]:
    return {name: title for name, (title, _) in figures.items()}


def cost_chart(
    comparison: pd.DataFrame, cells: Cells, of_cell: Mapping[int, list[int]]
) -> Chart | None:
    """Draw memory, step time and throughput against the micro-batch."""
    names = ("step_time_s", "peak_allocated_gib", "tokens_per_s", "samples_per_s")
    figures = _figures(comparison, *names)
    known = comparison[comparison["micro_batch_size"].notna() & comparison["n_completed"].gt(0)]
    if not figures or known["micro_batch_size"].nunique() < 2:
        return None
    cells = replace(cells, contexts=cells.costly())
    context = cells.context_of()
    keys = ["data_parallel_size", "gradient_accumulation_steps"]
    known = known.sort_values("micro_batch_size", kind="stable")
    series = list(known.groupby([context.loc[known.index], *keys], sort=True))
    traces = []
    settings = setting_names(cells, context)
    for index, ((number, devices, accumulation), own) in enumerate(series):
        counted = count_text(int(str(devices)), "device")
        values, bars = (
            {n: numbers(own[f"{n}_{end}"] * factor) for n, (_, factor) in figures.items()}
            for end in ("mean", "ci95")
        )
        drawn = {n: {"type": "data", "array": [bar or 0 for bar in bars[n]]} for n in figures}
        traces.append(
            scatter(
                f"{counted}, accumulation {accumulation}{_behind(settings[int(str(number))])}",
                own["micro_batch_size"],
                by("figure", values),
                "micro-batch %{x}: %{y:.5g}",
                "lines+markers",
                error_y=by("figure", drawn),
                line={"color": colour(index, len(series)), "width": 1.5},
                marker={"size": 8},
                customdata=[of_cell[int(str(cell))] for cell in own.index],
            )
        )
    titles = _titles(figures)
    return Chart(
        "cost",
        "Memory and step time against the micro-batch",
        "Means over the completed runs of a cell, with 95 % t-intervals from three runs on. Cells "
        "that differ in what decides neither memory nor time, such as the learning rate, share a "
        "line.",
        traces,
        {
            "xaxis": size_axis(known["micro_batch_size"], "micro-batch size (samples a device)"),
            "yaxis": {"title": {"text": by("figure", titles)}, "rangemode": "tozero"},
        },
        [Choice("figure", "Show", titles)],
        ["tables/comparison.csv"],
    )


_MARKS = {
    "rejected": ("rejected", "x-thin", _GREY),
    "oom": ("out of memory", "square-x-open", _MARK),
    "diverged": ("diverged", "cross", "#CC79A7"),
}
"""What is said of a cell without completed runs, the first that its status names."""


def heat_map(
    comparison: pd.DataFrame, cells: Cells, of_cell: Mapping[int, list[int]]
) -> Chart | None:
    """Map devices and micro-batch, with what was rejected or ran out of memory.

    Returns
    -------
    Chart or None
        None where neither devices nor micro-batch vary.
    """
    axes = ("data_parallel_size", "micro_batch_size")
    asked = (*GEOMETRY, "status", "reason", "n_completed")
    # Parts of the few columns that are asked for are taken in a fraction of the time.
    names = [
        name for name in map(str, comparison) if name in asked or name.endswith(("_mean", "_n"))
    ]
    places = comparison.loc[comparison[list(axes)].notna().all(axis=1), names]
    if places.empty or all(places[name].nunique() < 2 for name in axes):
        return None
    of_steps = ("step_time_s", "tokens_per_s", "samples_per_s", "peak_allocated_gib")
    figures = _figures(places, *of_steps, "final_eval_loss", "final_loss")
    figures = figures or {"final_loss": ("final training loss", 1.0)}
    factor, layers = _layers(places, cells)
    # Those with most to show come first.
    shown = next(iter(figures))
    counts = {key: int(own[f"{shown}_n"].gt(0).sum()) for key, (_, own) in layers.items()}
    first = sorted(layers, key=lambda key: -counts[key])[:_MOST_LAYERS]
    few = (
        "" if len(first) == len(layers) else f" The choice is among {len(first)} of {len(layers)}."
    )
    layers = {key: layers[key] for key in first}
    if max(len(own) for _, own in layers.values()) < 2:
        return None
    ticks = [sorted(places[name].unique()) for name in axes]
    traces = [
        {**trace, "when": {"layer": [key]}}
        for key, (_, own) in layers.items()
        for trace in (*_fields(own, ticks, figures, of_cell), *_lost(own, of_cell))
    ]
    titles = ("devices", "micro-batch size (samples a device)")
    down, across = (
        {"type": "category", "categoryorder": "array", "categoryarray": [f"{n}" for n in sizes]}
        | {"title": {"text": title}, "showgrid": False}
        for sizes, title in zip(ticks, titles, strict=True)
    )
    return Chart(
        "heat_map",
        "Devices and micro-batch",
        f"A field is a cell of the chosen {factor.lower()} and settings: the mean over its "
        "completed runs, or what became of it. Rejected: it cannot be built, or cannot fit, and "
        f"was never launched. Where there is nothing, the sweep had no such cell.{few}",
        traces,
        {"xaxis": across, "yaxis": down},
        [
            Choice("figure", "Show", _titles(figures)),
            Choice("layer", factor, {key: text for key, (text, _) in layers.items()}),
        ],
        ["tables/comparison.csv"],
    )


def _layers(places: pd.DataFrame, cells: Cells) -> tuple[str, dict[str, tuple[str, pd.DataFrame]]]:
    """Part cells so that one has a field of its own, by what takes the fewest parts."""
    context = cells.context_of().loc[places.index]
    settings, trained = setting_names(cells, cells.context_of()), cell_names(cells)
    titles = {"global_batch_size": "Global batch", "gradient_accumulation_steps": "Accumulation"}
    counts = {name: places.groupby([context, name]).ngroups for name in titles}
    if not any(counts.values()):
        return "Settings", {"l0": ("all", places)}
    name = min((name for name in counts if counts[name]), key=counts.__getitem__)
    layers: dict[str, tuple[str, pd.DataFrame]] = {}
    # What was rejected may have no accumulation: it is in every part of its settings.
    everywhere = dict(list(places[places[name].isna()].groupby(context)))
    for (number, size), own in places.groupby([context, name], sort=True):
        shown = pd.concat([own, everywhere[number]]) if number in everywhere else own
        shown = shown[~shown.duplicated(["data_parallel_size", "micro_batch_size"])]
        # What was rejected was trained with nothing.
        names = trained[shown.index[shown["status"].ne("rejected")]].unique()
        said = names[0] if len(names) == 1 else settings[int(str(number))]
        layers[f"l{len(layers)}"] = (f"{size}{_behind(said)}", shown)
    return titles[name], layers


def _fields(
    own: pd.DataFrame,
    ticks: Iterable[Iterable[Any]],
    figures: Mapping[str, tuple[str, float]],
    of_cell: Mapping[int, list[int]],
) -> Iterable[dict[str, Any]]:
    """Colour what completed, over all places: plotly would stretch a field without a neighbour."""
    done = own[own["n_completed"].gt(0)]
    if done.empty:
        return
    devices, micros = map(list, ticks)
    cuts = zip(done["data_parallel_size"], done["micro_batch_size"], strict=True)
    at = {cut: int(str(cell)) for cut, cell in zip(cuts, done.index, strict=True)}
    fields = [[at.get((count, size)) for size in micros] for count in devices]
    values = {n: done[f"{n}_mean"] * factor for n, (_, factor) in figures.items()}

    def each(write: Callable[[int], object], nothing: object = None) -> list[list[object]]:
        return [[nothing if cell is None else write(cell) for cell in line] for line in fields]

    texts = {n: {c: significant(v, 3) for c, v in own.items()} for n, own in values.items()}
    yield {
        "type": "heatmap",
        "x": [f"{size}" for size in micros],
        "y": [f"{count}" for count in devices],
        "z": by("figure", {n: [numbers(line) for line in each(v.get)] for n, v in values.items()}),
        "text": by("figure", {n: each(own.get, "") for n, own in texts.items()}),
        "texttemplate": "%{text}",
        "customdata": each(of_cell.get),
        "hoverongaps": False,
        "hovertemplate": "%{y} devices, micro-batch %{x}: %{text}<extra></extra>",
        "colorscale": by("theme", _SHADES),
        "showscale": False,
        "xgap": 3,
        "ygap": 3,
    }


def _lost(own: pd.DataFrame, of_cell: Mapping[int, list[int]]) -> Iterable[dict[str, Any]]:
    """Name what became of cells of which no run completed."""
    lost = own[own["n_completed"].eq(0)]
    if lost.empty:
        return
    kinds = [next((k for k in _MARKS if k in status), "other") for status in lost["status"]]
    for kind, rows in lost.groupby(np.array(kinds, dtype=object)):
        text, symbol, tone = _MARKS.get(str(kind), ("", "circle-open", _GREY))
        reasons = rows["status"] + ": " + rows["reason"].fillna("no reason").astype(str)
        yield scatter(
            text or ", ".join(rows["status"].unique()),
            [f"{size}" for size in rows["micro_batch_size"]],
            [f"{count}" for count in rows["data_parallel_size"]],
            "%{y} devices, micro-batch %{x}<br>%{hovertext}",
            by("room", {"wide": "markers+text", "narrow": "markers"}),
            text=[text or label_text(status) for status in rows["status"]],
            textposition="bottom center",
            hovertext=[label_text(reason) for reason in reasons],
            customdata=[of_cell[int(str(cell))] for cell in rows.index],
            marker={"symbol": symbol, "size": 14, "color": tone}
            | {"line": {"width": 2, "color": tone}},
            showlegend=True,
        )


def noise_charts(
    table: pd.DataFrame, curve: pd.DataFrame, cells: Cells, of_cell: Mapping[int, list[int]]
) -> list[Chart]:
    """Draw the gradient noise scale by global batch, and over the training.

    Parameters
    ----------
    table : DataFrame
        Table of the section, indexed by cell.
    curve : DataFrame
        As `noise_scale_curves` returns it.
    """
    charts = []
    names = _cell_names(cells)
    scale = log_axis("gradient noise scale (samples)")
    known = table[table["note"].isna() & table["estimate"].notna()]
    if len(known):
        batches = sorted(known["global_batch_size"].unique())
        points = scatter(
            "noise scale",
            known["global_batch_size"],
            known["estimate"],
            "%{text}: %{y:.4g} samples",
            error_y=error_bars(known["low"], known["estimate"], known["high"]),
            text=[label_text(name) for name in names.loc[known.index]],
            customdata=[of_cell[int(str(cell))] for cell in known.index],
            marker={"size": 9, "color": _ACCENT},
        )
        dashed = {"color": _GREY, "dash": "dash", "width": 1}
        equal = scatter("as large as the batch", batches, batches, mode="lines", line=dashed)
        charts.append(
            Chart(
                "noise_scale",
                "Noise scale by global batch",
                "A point a cell in which it is identified, with its 95 % interval. Below the "
                "dashed line the batch is larger than the noise scale.",
                [points, equal],
                {"xaxis": size_axis(batches, _BATCH), "yaxis": scale},
                tables=["tables/noise_scale.csv"],
            )
        )
    drawn = curve[curve["estimate"].notna() & curve["high"].map(np.isfinite)]
    series = [(int(str(cell)), own) for cell, own in drawn.groupby("cell") if len(own) > 1]
    if series:
        size_of = cells.table["global_batch_size"]
        series.sort(key=lambda one: size_of[one[0]])
        sizes = launched_batches(cells.runs)
        traces = [
            scatter(
                names.loc[cell],
                own["samples"],
                own["estimate"],
                "%{x} samples: %{y:.4g}",
                "lines+markers",
                error_y=error_bars(own["low"], own["estimate"], own["high"]),
                line={
                    "color": shade(sizes.index(size_of[cell]), len(sizes))
                    if len(sizes) > 1
                    else colour(index, len(series)),
                    "width": 1.5,
                },
                meta=of_cell[cell],
            )
            for index, (cell, own) in enumerate(series)
        ]
        charts.append(
            Chart(
                "noise_scale_curve",
                "Noise scale over the training",
                "Ratio of two debiased exponential moving averages, whose half-life is the "
                "distance of the points; bars: 95 % intervals. Points at which it is not "
                "identified are left out. Of cells that figures/noise_scale.png shows.",
                traces,
                {"xaxis": {"title": {"text": "samples seen"}}, "yaxis": scale},
                tables=["tables/noise_scale_curve.csv"],
            )
        )
    return charts


def learning_rate_charts(
    best: pd.DataFrame,
    costs: pd.DataFrame,
    labels: Mapping[int, str],
    found: OfRow,
    batches: Sequence[int],
) -> list[Chart]:
    """Draw what each learning rate took, and the best one of each global batch.

    Parameters
    ----------
    best : DataFrame
        Table `learning_rates` of the section.
    costs : DataFrame
        Its curves `learning_rate_costs`.
    labels : mapping of int to str
        Labels of groups, by number.
    found : callable
        Positions of the runs of a row.
    batches : sequence of int
        Global batches that have colours, in their order.
    """
    counts_steps = "steps_to_target" in costs
    value = "steps_to_target" if counts_steps else "final_eval_loss"
    groups = {f"{number}": labels.get(int(number), "") for number in best["group"].unique()}
    reached = costs[costs[value].map(np.isfinite)].sort_values("learning_rate", kind="stable")
    traces = [
        scatter(
            f"B = {batch:g}",
            own["learning_rate"],
            own[value],
            f"B = {batch:g}, rate %{{x:.3g}}: %{{y:.5g}}",
            customdata=_each(own, found),
            legendgroup=f"{batch:g}",
            marker={"color": shade(batches.index(batch), len(batches)), "size": 7},
            when={"group": [f"{group}"]},
        )
        for (group, batch), own in reached.groupby(["group", "global_batch_size"])
    ]
    of_steps = log_axis("optimizer steps to target")
    charts = [
        Chart(
            "learning_rate_costs",
            "What each learning rate took",
            "A point a run. Runs that diverged or missed the target have none.",
            traces,
            {
                "xaxis": log_axis("learning rate"),
                "yaxis": of_steps if counts_steps else {"title": {"text": "final held-out loss"}},
            },
            [Choice("group", "Runs", groups)] if len(groups) > 1 else [],
            ["tables/learning_rate_costs.csv"],
        )
    ]
    inside = best[best["learning_rate"].notna()]
    if inside.empty:
        return charts
    optima = [
        scatter(
            labels.get(int(str(group)), "") or "best learning rate",
            own["global_batch_size"],
            own["learning_rate"],
            "B = %{x}: %{y:.3g}",
            error_y=error_bars(own["low"], own["learning_rate"], own["high"]),
            customdata=_each(own, found),
            marker={"size": 9, "color": colour(index, len(groups))},
        )
        for index, (group, own) in enumerate(inside.groupby("group"))
    ]
    charts.append(
        Chart(
            "learning_rates",
            "Best learning rate by global batch",
            "With its 95 % interval; a batch whose best rate is at the edge of its grid has none.",
            optima,
            {
                "xaxis": size_axis(inside["global_batch_size"], _BATCH),
                "yaxis": log_axis("best learning rate"),
            },
            tables=["tables/learning_rates.csv"],
        )
    )
    return charts


def decompositions_chart(
    table: pd.DataFrame, cells: Cells, of_cell: Mapping[int, list[int]]
) -> Chart | None:
    """Set how far cuts of one trajectory are apart beside how far seeds are.

    Parameters
    ----------
    table : DataFrame
        Table `decompositions` of the section, indexed by cell.

    Returns
    -------
    Chart or None
        None where all are equal to the last bit and there is one seed.
    """
    figures = {
        "max_abs_difference": ("largest difference", "diamond", _MARK),
        "rms_difference": ("root mean square", "circle", _ACCENT),
        "seed_sd": ("between seeds", "line-ew-open", _INK),
    }
    shown = {name: table[name].where(table[name] > 0) for name in figures}
    if all(values.isna().all() for values in shown.values()):
        return None
    # Settings that a shortened name does not tell apart are still another experiment.
    names = _cell_names(cells).loc[table.index] + " against " + table["reference"]
    again = names.groupby(names).cumcount()
    places = [f"{text} ({n + 1})" if n else text for text, n in zip(names, again, strict=True)]
    traces = [
        scatter(
            text,
            shown[name],
            [label_text(place) for place in places],
            "%{y}: %{x:.3g}",
            customdata=[of_cell[int(str(cell))] for cell in table.index],
            marker={"symbol": symbol, "size": 11, "color": tone, "line": {"width": 2}},
        )
        for name, (text, symbol, tone) in figures.items()
    ]
    return Chart(
        "decompositions",
        "How far cuts of one trajectory are apart",
        "Differences of the training loss, paired by seed and optimizer step, beside the spread "
        "between seeds. What is equal to the last bit has no point.",
        traces,
        {
            "xaxis": {**log_axis("|difference of the loss|"), "dtick": 1, "tickformat": "~e"},
            "yaxis": {"type": "category", "automargin": True},
        },
        tables=["tables/decompositions.csv"],
    )


def claims_chart(table: pd.DataFrame, found: OfRow) -> Chart | None:
    """Draw the effects behind settled verdicts that are ratios.

    Returns
    -------
    Chart or None
        None where there are none.
    """
    settled = table[table["verdict"].isin(["supported", "contradicted"])]
    ratios = settled[settled["definition"].str.startswith("ratio") & settled["low"].gt(0)]
    if ratios.empty:
        return None
    # A claim that is judged in several contexts has a line for each.
    names = ratios["claim"]
    if ratios["context"].nunique() > 1:
        names = names + "<br>" + ratios["context"].map(label_text)
    looks = {"supported": (_ACCENT, "circle"), "contradicted": (_MARK, "circle-open")}
    traces = [
        scatter(
            verdict,
            own["effect"],
            names.loc[own.index],
            "%{y}: %{x:.4g}<br>%{text}",
            error_x=error_bars(own["low"], own["effect"], own["high"]),
            text=[label_text(text) for text in own["definition"]],
            customdata=_each(own, found),
            marker={"size": 10, "color": looks[str(verdict)][0], "symbol": looks[str(verdict)][1]},
        )
        for verdict, own in ratios.groupby("verdict", sort=False)
    ]
    return Chart(
        "claims",
        "Effects behind the verdicts",
        "Ratios with their 95 % intervals; the threshold of each rule stands in the table.",
        traces,
        {
            "xaxis": log_axis("ratio"),
            "yaxis": {"type": "category", "automargin": True, "autorange": "reversed"},
        },
        tables=["tables/claims.csv"],
    )


def _each(rows: pd.DataFrame, found: OfRow) -> list[list[int]]:
    """Give the positions of the runs behind each row."""
    return [found(row) for row in rows.to_dict("records")]


def _cell_names(cells: Cells) -> pd.Series[str]:
    return geometry_label(cells.table) + cell_names(cells).map(_behind)


def _behind(name: str) -> str:
    """What stands behind a geometry, or a size, to tell settings apart."""
    return f", {name}" if name else ""
