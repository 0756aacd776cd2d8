"""Charts of the page beside the loss curves: each from one table that the report writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.cells import GEOMETRY, Cells, geometry_label
from batchscape.analysis.decisions.show import geometry_text, is_to_target
from batchscape.analysis.numbers import memory_scale, significant, time_scale
from batchscape.analysis.page.chart import (
    Chart,
    Choice,
    by,
    colour,
    error_bars,
    label_text,
    numbers,
)
from batchscape.analysis.page.settings import setting_names

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
_MOST_NAMED = 12
"""Points that have room for their names."""
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
        None where there is one global batch.
    """
    if reaches["global_batch_size"].nunique() < 2:
        return None
    quantities = {
        name: text
        for name, text in _QUANTITIES.items()
        if name == "steps_to_target" or reaches[name].notna().any()
    }
    several = reaches["group"].nunique() > 1
    targets: dict[str, str] = {}
    traces: list[dict[str, Any]] = []
    shapes: dict[str, list[dict[str, Any]]] = {}
    fitted: list[str] = []
    for keys, own in reaches.groupby(["group", "target_loss"], sort=False):
        group, target = int(str(keys[0])), float(str(keys[1]))
        if own["global_batch_size"].nunique() < 2:
            continue
        key = f"{group}|{target!r}"
        name = f"loss {target:.7g}"
        targets[key] = f"{labels.get(group, '')}: {name}" if several else name
        when = {"target": [key]}
        traces += [{**trace, "when": when} for trace in _reached(own, quantities, found)]
        shapes[key] = []
        if curve is None:
            continue
        fit = curve[curve["group"].eq(group) & curve["target_loss"].eq(target)]
        if len(fit):
            fitted.append(key)
            traces += [{**trace, "when": when} for trace in _fitted(fit, quantities)]
            shapes[key] = _critical(fit.iloc[0])
    if not targets:
        return None
    opens = "" if spoken_of is None else f"{spoken_of[0]}|{spoken_of[1]!r}"
    order = [key for key in (opens, *targets) if key in targets]
    return Chart(
        "steps_to_target",
        "What a target takes, by global batch",
        "Points are runs at the best learning rate of their global batch, one a trajectory: in "
        "tables/reaches.csv those of which is_best is true. Triangles point up from "
        "what a run had seen when it ended without reaching the target. The line is the fit, with "
        "its pointwise 95 % interval; dashed: perfect scaling, half the steps at twice the batch, "
        "from the smallest batch on. Vertical: the critical batch size, with its interval.",
        traces,
        {
            "xaxis": _batch_axis(reaches["global_batch_size"]),
            "yaxis": {"type": "log", "title": {"text": by("quantity", quantities)}},
            "shapes": by("target", shapes),
        },
        [
            Choice("target", "Target", {key: targets[key] for key in dict.fromkeys(order)}),
            Choice("quantity", "Count", quantities),
        ],
        ["tables/reaches.csv"] + ["tables/tradeoff_curve.csv"] * bool(fitted),
    )


def _reached(
    own: pd.DataFrame, quantities: Mapping[str, str], found: OfRow
) -> Iterable[dict[str, Any]]:
    met = own[own["outcome"].eq("reached")]
    yield {
        "type": "scatter",
        "mode": "markers",
        "name": "runs",
        "x": numbers(met["global_batch_size"]),
        "y": by("quantity", {name: numbers(met[name]) for name in quantities}),
        "customdata": _each(met, found),
        "hovertemplate": "B = %{x}: %{y:.5g}<extra></extra>",
        "marker": {"color": _INK, "size": 7, "opacity": 0.75},
    }
    short = own[own["outcome"].isin(["censored", "pruned"])]
    if len(short):
        least = {
            "steps_to_target": short["steps_low"],
            "samples_to_target": short["steps_low"] * short["global_batch_size"],
        }
        nothing = [None] * len(short)
        seen = {n: numbers(least[n]) if n in least else nothing for n in quantities}
        yield {
            "type": "scatter",
            "mode": "markers",
            "name": "not reached: more than this",
            "x": numbers(short["global_batch_size"]),
            "y": by("quantity", seen),
            "customdata": _each(short, found),
            "hovertemplate": "B = %{x}: more than %{y:.5g}<extra></extra>",
            "marker": {"color": _MARK, "size": 10, "symbol": "triangle-up-open"},
        }
    lost = own[own["outcome"].eq("diverged")]
    if len(lost):
        counts = lost["global_batch_size"].value_counts().sort_index()
        said = ", ".join(f"{n} at B = {batch}" for batch, n in counts.items())
        yield {
            "type": "scatter",
            "mode": "markers",
            "name": f"diverged: {said}",
            "x": [None],
            "y": [None],
            "customdata": [sorted({run for own in _each(lost, found) for run in own})],
            "marker": {"color": _MARK, "size": 9, "symbol": "x"},
        }


def _fitted(fit: pd.DataFrame, quantities: Mapping[str, str]) -> Iterable[dict[str, Any]]:
    sizes = fit["global_batch_size"]
    nothing: list[None] = [None] * len(fit)

    def counted(name: str) -> dict[str, Any]:
        in_ = {"steps_to_target": fit[name], "samples_to_target": fit[name] * sizes}
        return by("quantity", {q: numbers(in_[q]) if q in in_ else nothing for q in quantities})

    line = {"type": "scatter", "mode": "lines", "x": numbers(sizes), "hoverinfo": "skip"}
    if fit["low"].notna().any():
        edge = {**line, "line": {"width": 0}, "showlegend": False}
        yield {**edge, "y": counted("low")}
        yield {
            **edge,
            "y": counted("high"),
            "fill": "tonexty",
            "fillcolor": _BAND,
            "showlegend": True,
            "name": "interval of the fit",
        }
    yield {**line, "y": counted("steps"), "name": "fit", "line": {"color": _ACCENT, "width": 2}}
    dashed = {"color": _GREY, "width": 1.5, "dash": "dash"}
    yield {**line, "y": counted("perfect_steps"), "name": "perfect scaling", "line": dashed}
    critical = fit["critical_batch_size"].iloc[0]
    if np.isfinite(critical):
        nowhere = {"type": "scatter", "mode": "lines", "x": [None], "y": [None]}
        name = f"critical batch size {significant(critical, 3)}"
        yield {**nowhere, "name": name, "line": {"color": _MARK, "width": 2}}


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
    parts = {
        "measured": rows[rows["source"].eq("measured")],
        "predicted": rows[rows["source"].ne("measured") & rows["beyond"].eq("")],
    }
    traces = []
    for kind, own in parts.items():
        if own.empty:
            continue
        timed = own["has_interval"].astype(bool)
        low, value, high = (own[f"time{end}_s"].where(timed) for end in ("_low", "", "_high"))
        named = "markers+text" if kind == "measured" and len(own) <= _MOST_NAMED else "markers"
        traces.append(
            {
                "type": "scatter",
                "mode": by("room", {"wide": named, "narrow": "markers"}),
                "name": kind,
                "x": numbers(own["time_s"]),
                "y": numbers(own["device_hours"]),
                "error_x": error_bars(low, value, high),
                "text": list(map(geometry_text, own.to_dict("records"))),
                "textposition": "top center",
                "customdata": _each(own, found),
                "hovertemplate": "%{text}<br>%{x:.4g} s, %{y:.4g} device-hours<extra></extra>",
                "marker": {
                    "size": 10 if kind == "measured" else 6,
                    "symbol": "circle" if kind == "measured" else "circle-open",
                    "color": _ACCENT if kind == "measured" else _GREY,
                },
            }
        )
    front = rows[rows["on_front"].astype(bool)].sort_values("time_s")
    if len(front) > 1:
        line = {"color": _MARK, "width": 1.5, "dash": "dot"}
        places = {"x": numbers(front["time_s"]), "y": numbers(front["device_hours"])}
        traces.append({"type": "scatter", "mode": "lines", "name": "front", **places, "line": line})
    chosen = rows[rows["recommended"].astype(bool)]
    if len(chosen):
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "recommended",
                "x": numbers(chosen["time_s"]),
                "y": numbers(chosen["device_hours"]),
                "customdata": _each(chosen, found),
                "marker": {"symbol": "star-open", "size": 20, "color": _MARK},
            }
        )
    return Chart(
        name.replace("time_to_target", "pareto"),
        title,
        "Device-hours against time to the target. Bars: 95 % intervals of the time. Line: the "
        "front, the geometries that none beats in both.",
        traces,
        {
            "xaxis": {"type": "log", "title": {"text": "time to target (s)"}},
            "yaxis": {"type": "log", "title": {"text": "device-hours"}},
        },
        tables=[f"tables/{name}.csv"],
    )


def cost_chart(
    comparison: pd.DataFrame, cells: Cells, of_cell: Mapping[int, list[int]]
) -> Chart | None:
    """Draw memory, step time and throughput against the micro-batch."""
    memory = memory_scale(comparison["peak_allocated_gib_mean"])
    time = time_scale(comparison["step_time_s_mean"])
    figures = {
        "step_time_s": (f"step time ({time.unit})", time.factor),
        "peak_allocated_gib": (f"peak allocated memory of a device ({memory.unit})", memory.factor),
        "tokens_per_s": ("tokens/s, all devices", 1.0),
        "samples_per_s": ("samples/s, all devices", 1.0),
    }
    figures = {n: shown for n, shown in figures.items() if comparison[f"{n}_n"].gt(0).any()}
    known = comparison[comparison["micro_batch_size"].notna() & comparison["n_completed"].gt(0)]
    if not figures or known["micro_batch_size"].nunique() < 2:
        return None
    context = cells.context_of()
    keys = ["data_parallel_size", "gradient_accumulation_steps"]
    known = known.sort_values("micro_batch_size", kind="stable")
    series = list(known.groupby([context.loc[known.index], *keys], sort=True))
    traces = []
    settings = _with_settings(cells)
    for index, ((number, devices, accumulation), own) in enumerate(series):
        counted = "1 device" if devices == 1 else f"{devices} devices"
        name = f"{counted}, accumulation {accumulation}{settings[int(str(number))]}"
        values = {n: numbers(own[f"{n}_mean"] * factor) for n, (_, factor) in figures.items()}
        bars = {
            n: {"type": "data", "array": numbers((own[f"{n}_ci95"] * factor).fillna(0))}
            for n, (_, factor) in figures.items()
        }
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": label_text(name),
                "x": numbers(own["micro_batch_size"]),
                "y": by("figure", values),
                "error_y": by("figure", bars),
                "line": {"color": colour(index, len(series)), "width": 1.5},
                "marker": {"size": 8},
                "customdata": [of_cell[int(str(cell))] for cell in own.index],
                "hovertemplate": "micro-batch %{x}: %{y:.5g}<extra></extra>",
            }
        )
    return Chart(
        "cost",
        "Memory and step time against the micro-batch",
        "Means over the completed runs of a cell, with 95 % t-intervals from three runs on.",
        traces,
        {
            "xaxis": _ticks(known["micro_batch_size"], "micro-batch size (samples a device)"),
            "yaxis": {
                "title": {"text": by("figure", {n: text for n, (text, _) in figures.items()})},
                "rangemode": "tozero",
            },
        },
        [Choice("figure", "Show", {n: text for n, (text, _) in figures.items()})],
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
    memory = memory_scale(places["peak_allocated_gib_mean"])
    time = time_scale(places["step_time_s_mean"])
    figures = {
        "step_time_s": (f"step time ({time.unit})", time.factor),
        "tokens_per_s": ("tokens/s, all devices", 1.0),
        "samples_per_s": ("samples/s, all devices", 1.0),
        "peak_allocated_gib": (f"peak memory of a device ({memory.unit})", memory.factor),
        "final_eval_loss": ("final held-out loss", 1.0),
        "final_loss": ("final training loss", 1.0),
    }
    known = {n: shown for n, shown in figures.items() if places[f"{n}_n"].gt(0).any()}
    figures = known or {"final_loss": figures["final_loss"]}
    factor, layers = _layers(places, cells)
    # Those with most to show come first.
    shown = next(iter(figures))
    counts = {key: int(own[f"{shown}_n"].gt(0).sum()) for key, (_, own) in layers.items()}
    layers = {key: layers[key] for key in sorted(layers, key=lambda key: -counts[key])}
    if max(len(own) for _, own in layers.values()) < 2:
        return None
    traces = [
        {**trace, "when": {"layer": [key]}}
        for key, (_, own) in layers.items()
        for trace in _fields(own, figures, of_cell)
    ]
    ticks = [[f"{size}" for size in sorted(places[name].unique())] for name in axes]
    ordered = [{"categoryorder": "array", "categoryarray": names} for names in ticks]
    titles = ("devices", "micro-batch size (samples a device)")
    down, across = (
        {"type": "category", **order, "title": {"text": title}, "showgrid": False}
        for order, title in zip(ordered, titles, strict=True)
    )
    return Chart(
        "heat_map",
        "Devices and micro-batch",
        f"A field is a cell of the chosen {factor.lower()} and settings: the mean over its "
        "completed runs, or what became of it. Rejected: it cannot be built, or cannot fit, and "
        "was never launched. Where there is nothing, the sweep had no such cell.",
        traces,
        {"xaxis": across, "yaxis": down},
        [
            Choice("figure", "Show", {n: text for n, (text, _) in figures.items()}),
            Choice("layer", factor, {key: text for key, (text, _) in layers.items()}),
        ],
        ["tables/comparison.csv"],
    )


def _layers(places: pd.DataFrame, cells: Cells) -> tuple[str, dict[str, tuple[str, pd.DataFrame]]]:
    """Part cells so that one has a field of its own, by what takes the fewest parts."""
    context, settings = cells.context_of().loc[places.index], _with_settings(cells)
    found = []
    for name, title in (
        ("global_batch_size", "Global batch"),
        ("gradient_accumulation_steps", "Accumulation"),
    ):
        layers: dict[str, tuple[str, pd.DataFrame]] = {}
        for (number, size), own in places.groupby([context, name], sort=True):
            # What was rejected may have no accumulation: it is in every part of its settings.
            open_ = places[context.eq(int(str(number))) & places[name].isna()]
            shown = pd.concat([own, open_])
            shown = shown[~shown.duplicated(["data_parallel_size", "micro_batch_size"])]
            layers[f"l{len(layers)}"] = (f"{size}{settings[int(str(number))]}", shown)
        if layers:
            found.append((title, layers))
    if not found:
        return "Settings", {"l0": ("all", places)}
    return min(found, key=lambda each: len(each[1]))


def _fields(
    own: pd.DataFrame,
    figures: Mapping[str, tuple[str, float]],
    of_cell: Mapping[int, list[int]],
) -> Iterable[dict[str, Any]]:
    """Colour the cells that have a figure; name what became of the others."""
    done = own[own["n_completed"].gt(0)]
    if len(done):
        micros, devices = (
            sorted(done[name].unique()) for name in ("micro_batch_size", "data_parallel_size")
        )
        place = {
            (row["data_parallel_size"], row["micro_batch_size"]): (int(str(cell)), row)
            for cell, row in done.iterrows()
        }
        fields = [[place.get((count, size)) for size in micros] for count in devices]
        means = {
            n: [[f and float(f[1][f"{n}_mean"]) * factor for f in line] for line in fields]
            for n, (_, factor) in figures.items()
        }
        shown = {
            n: [["" if v is None else significant(v, 3) for v in line] for line in of]
            for n, of in means.items()
        }
        yield {
            "type": "heatmap",
            "x": [f"{size}" for size in micros],
            "y": [f"{count}" for count in devices],
            "z": by("figure", {n: [numbers(line) for line in m] for n, m in means.items()}),
            "text": by("figure", shown),
            "texttemplate": "%{text}",
            "customdata": [[field and of_cell[field[0]] for field in line] for line in fields],
            "hovertemplate": "%{y} devices, micro-batch %{x}: %{text}<extra></extra>",
            "colorscale": by("theme", _SHADES),
            "showscale": False,
            "xgap": 3,
            "ygap": 3,
        }
    lost = own[own["n_completed"].eq(0)]
    kinds = [next((k for k in _MARKS if k in status), "other") for status in lost["status"]]
    for kind, rows in lost.groupby(np.array(kinds, dtype=object)):
        text, symbol, tone = _MARKS.get(str(kind), ("", "circle-open", _GREY))
        reasons = rows["status"] + ": " + rows["reason"].fillna("no reason").astype(str)
        yield {
            "type": "scatter",
            "mode": by("room", {"wide": "markers+text", "narrow": "markers"}),
            "name": text or label_text(", ".join(rows["status"].unique())),
            "x": [f"{size}" for size in rows["micro_batch_size"]],
            "y": [f"{count}" for count in rows["data_parallel_size"]],
            "text": [text or label_text(status) for status in rows["status"]],
            "textposition": "bottom center",
            "hovertext": [label_text(reason) for reason in reasons],
            "hovertemplate": "%{y} devices, micro-batch %{x}<br>%{hovertext}<extra></extra>",
            "customdata": [of_cell[int(str(cell))] for cell in rows.index],
            "marker": {"symbol": symbol, "size": 14, "color": tone}
            | {"line": {"width": 2, "color": tone}},
            "showlegend": True,
        }


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
    known = table[table["note"].isna() & table["estimate"].notna()]
    scale = {"type": "log", "title": {"text": "gradient noise scale (samples)"}}
    if len(known):
        names = _cell_names(cells).loc[known.index]
        trace = {
            "type": "scatter",
            "mode": "markers",
            "name": "noise scale",
            "x": numbers(known["global_batch_size"]),
            "y": numbers(known["estimate"]),
            "error_y": error_bars(known["low"], known["estimate"], known["high"]),
            "text": [label_text(name) for name in names],
            "hovertemplate": "%{text}: %{y:.4g} samples<extra></extra>",
            "customdata": [of_cell[int(str(cell))] for cell in known.index],
            "marker": {"size": 9, "color": _ACCENT},
        }
        equal = {
            "type": "scatter",
            "mode": "lines",
            "name": "as large as the batch",
            "x": numbers(sorted(known["global_batch_size"].unique())),
            "y": numbers(sorted(known["global_batch_size"].unique())),
            "line": {"color": _GREY, "dash": "dash", "width": 1},
            "hoverinfo": "skip",
        }
        charts.append(
            Chart(
                "noise_scale",
                "Noise scale by global batch",
                "A point a cell in which it is identified, with its 95 % interval. Below the "
                "dashed line the batch is larger than the noise scale.",
                [trace, equal],
                {"xaxis": _batch_axis(known["global_batch_size"]), "yaxis": scale},
                tables=["tables/noise_scale.csv"],
            )
        )
    drawn = curve[curve["estimate"].notna() & curve["high"].map(np.isfinite)]
    names = _cell_names(cells)
    series = [(int(str(cell)), own) for cell, own in drawn.groupby("cell") if len(own) > 1]
    if series:
        traces = [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": label_text(names.loc[cell]),
                "x": numbers(own["samples"]),
                "y": numbers(own["estimate"]),
                "error_y": error_bars(own["low"], own["estimate"], own["high"]),
                "line": {"color": colour(index, len(series)), "width": 1.5},
                "meta": of_cell[cell],
                "hovertemplate": "%{x} samples: %{y:.4g}<extra></extra>",
            }
            for index, (cell, own) in enumerate(series)
        ]
        charts.append(
            Chart(
                "noise_scale_curve",
                "Noise scale over the training",
                "Ratio of two debiased exponential moving averages, whose half-life is the "
                "distance of the points; bars: 95 % intervals. Points at which it is not "
                "identified are left out.",
                traces,
                {"xaxis": {"title": {"text": "samples seen"}}, "yaxis": scale},
                tables=["tables/noise_scale_curve.csv"],
            )
        )
    return charts


def learning_rate_charts(
    best: pd.DataFrame, costs: pd.DataFrame, labels: Mapping[int, str], found: OfRow
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
    """
    value = next(name for name in ("steps_to_target", "final_eval_loss") if name in costs)
    groups = {f"{number}": labels.get(int(number), "") for number in best["group"].unique()}
    costs = costs.sort_values("learning_rate", kind="stable")
    batches = sorted(costs["global_batch_size"].unique())
    traces: list[dict[str, Any]] = []
    for (group, batch), own in costs.groupby(["group", "global_batch_size"]):
        tone = colour(batches.index(batch), len(batches))
        reached = own[own[value].map(np.isfinite)]
        shared = {
            "type": "scatter",
            "mode": "markers",
            "legendgroup": f"{batch:g}",
            "when": {"group": [f"{group}"]},
        }
        traces.append(
            {
                **shared,
                "name": f"B = {batch:g}",
                "x": numbers(reached["learning_rate"]),
                "y": numbers(reached[value]),
                "customdata": _each(reached, found),
                "hovertemplate": f"B = {batch:g}, rate %{{x:.3g}}: %{{y:.5g}}<extra></extra>",
                "marker": {"color": tone, "size": 7},
            }
        )
    axis = {"type": "log", "title": {"text": "learning rate"}}
    what = "optimizer steps to target" if value == "steps_to_target" else "final held-out loss"
    choice = [Choice("group", "Runs", groups)] if len(groups) > 1 else []
    if not choice:
        traces = [{k: v for k, v in trace.items() if k != "when"} for trace in traces]
    charts = [
        Chart(
            "learning_rate_costs",
            "What each learning rate took",
            "A point a run. Runs that diverged or missed the target have none.",
            traces,
            {
                "xaxis": axis,
                "yaxis": {"type": "log" if value != "final_eval_loss" else "linear"}
                | {"title": {"text": what}},
            },
            choice,
            ["tables/learning_rate_costs.csv"],
        )
    ]
    inside = best[best["learning_rate"].notna()]
    if inside.empty:
        return charts
    optima = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": label_text(labels.get(int(str(group)), "") or "best learning rate"),
            "x": numbers(own["global_batch_size"]),
            "y": numbers(own["learning_rate"]),
            "error_y": error_bars(own["low"], own["learning_rate"], own["high"]),
            "customdata": _each(own, found),
            "hovertemplate": "B = %{x}: %{y:.3g}<extra></extra>",
            "marker": {"size": 9, "color": colour(index, len(groups))},
        }
        for index, (group, own) in enumerate(inside.groupby("group"))
    ]
    best_axis = {"type": "log", "title": {"text": "best learning rate"}}
    charts.append(
        Chart(
            "learning_rates",
            "Best learning rate by global batch",
            "With its 95 % interval; a batch whose best rate is at the edge of its grid has none.",
            optima,
            {"xaxis": _batch_axis(inside["global_batch_size"]), "yaxis": best_axis},
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
        {
            "type": "scatter",
            "mode": "markers",
            "name": text,
            "x": numbers(shown[name]),
            "y": [label_text(place) for place in places],
            "hovertemplate": "%{y}: %{x:.3g}<extra></extra>",
            "customdata": [of_cell[int(str(cell))] for cell in table.index],
            "marker": {"symbol": symbol, "size": 11, "color": tone, "line": {"width": 2}},
        }
        for name, (text, symbol, tone) in figures.items()
    ]
    return Chart(
        "decompositions",
        "How far cuts of one trajectory are apart",
        "Differences of the training loss, paired by seed and optimizer step, beside the spread "
        "between seeds. What is equal to the last bit has no point.",
        traces,
        {
            "xaxis": {"type": "log", "dtick": 1, "title": {"text": "|difference of the loss|"}},
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
    traces = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": str(verdict),
            "x": numbers(own["effect"]),
            "y": [label_text(claim) for claim in own["claim"]],
            "error_x": error_bars(own["low"], own["effect"], own["high"]),
            "text": [label_text(text) for text in own["definition"]],
            "hovertemplate": "%{y}: %{x:.4g}<br>%{text}<extra></extra>",
            "customdata": _each(own, found),
            "marker": {
                "size": 10,
                "color": _ACCENT if verdict == "supported" else _MARK,
                "symbol": "circle" if verdict == "supported" else "circle-open",
            },
        }
        for verdict, own in ratios.groupby("verdict", sort=False)
    ]
    return Chart(
        "claims",
        "Effects behind the verdicts",
        "Ratios with their 95 % intervals; the threshold of each rule stands in the table.",
        traces,
        {
            "xaxis": {"type": "log", "title": {"text": "ratio"}},
            "yaxis": {"type": "category", "automargin": True, "autorange": "reversed"},
        },
        tables=["tables/claims.csv"],
    )


def _each(rows: pd.DataFrame, found: OfRow) -> list[list[int]]:
    """Give the positions of the runs behind each row."""
    return [found(row) for row in rows.to_dict("records")]


def _cell_names(cells: Cells) -> pd.Series[str]:
    return geometry_label(cells.table) + cells.context_of().map(_with_settings(cells))


def _with_settings(cells: Cells) -> dict[int, str]:
    """What stands behind a geometry to tell settings apart, by context."""
    names = setting_names(cells, cells.context_of())
    return {number: f", {name}" if name else "" for number, name in names.items()}


def _batch_axis(sizes: Iterable[float]) -> dict[str, Any]:
    return _ticks(sizes, _BATCH)


def _ticks(sizes: Iterable[float], title: str) -> dict[str, Any]:
    """Name at most eight of the sizes on a logarithmic axis."""
    known = sorted({size for size in numbers(sizes) if size is not None})
    chosen: Sequence[Any] = known[:: -(-len(known) // 8)]
    names = [f"{size:g}" for size in chosen]
    return {"type": "log", "title": {"text": title}, "tickvals": chosen, "ticktext": names}
