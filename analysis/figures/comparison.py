"""Charts of the comparison: memory and times of cells, as a map, lines and bars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from batchscape.analysis.cells import GEOMETRY, Cells
from batchscape.analysis.cost.table import MEMORY_PHASES
from batchscape.analysis.figures.chart import Axis, Chart, Choice, Look, Marks
from batchscape.analysis.figures.settings import cell_names, setting_names
from batchscape.analysis.figures.style import CROSS, GREY, MARK, palette, shades
from batchscape.analysis.numbers import memory_scale, significant, time_scale
from batchscape.text import count_text

MAX_BARS = 40
"""Cells of a figure of bars; further ones are left to the tables."""
_MOST_LAYERS = 50
"""Heat maps that a page has room for."""
_TIME_PHASES = {
    "data_s": "data",
    "forward_backward_s": "forward + backward",
    "exchange_s": "exchange",
    "optimizer_s": "optimizer",
}
_MICRO = "micro-batch size (samples a device)"
_LOST = {
    "rejected": ("rejected", Look(GREY.colour, GREY.dark, CROSS)),
    "oom": ("out of memory", Look(MARK.colour, symbol="square", hollow=True)),
    "diverged": ("diverged", Look("#CC79A7", symbol="triangle-down")),
    "": ("no run completed", Look(GREY.colour, GREY.dark, hollow=True)),
}
"""Name and look of a cell without completed runs, by the first status that it has."""
_RUNS = {"runs": Look("#222222", "#f0f0f0", hollow=True)}


def comparison_charts(cells: Cells, comparison: pd.DataFrame) -> Iterator[Chart]:
    """Draw the charts of `compare(cells)` that have data."""
    cost_cells = cells.by_cost()
    charts = _heat_map(comparison, cells), _cost(comparison, cells)
    yield from filter(None, (*charts, _memory(cost_cells), _step_time(cost_cells)))


def _figures(table: pd.DataFrame, *names: str) -> dict[str, tuple[str, float]]:
    """Return axis title and unit factor of each named figure that any cell has."""
    memory = memory_scale(table["peak_allocated_gib_mean"])
    time = time_scale(table["step_time_s_mean"])
    titles = {
        "step_time_s": (f"step time ({time.unit})", time.factor),
        "peak_allocated_gib": (f"peak memory of a device ({memory.unit})", memory.factor),
        "tokens_per_s": ("tokens/s, all devices", 1.0),
        "samples_per_s": ("samples/s, all devices", 1.0),
        "final_eval_loss": ("final held-out loss", 1.0),
        "final_loss": ("final training loss", 1.0),
    }
    return {name: titles[name] for name in names if table[f"{name}_n"].gt(0).any()}


def _cost(comparison: pd.DataFrame, cells: Cells) -> Chart | None:
    """Draw memory, step time and throughput against the micro-batch."""
    names = ("step_time_s", "peak_allocated_gib", "tokens_per_s", "samples_per_s")
    figures = _figures(comparison, *names)
    completed = comparison[comparison["micro_batch_size"].notna() & comparison["n_completed"].gt(0)]
    if not figures or completed["micro_batch_size"].nunique() < 2:
        return None
    cells = replace(cells, contexts=cells.cost_settings())
    context = cells.context_of
    completed = completed.sort_values("micro_batch_size", kind="stable")
    settings = setting_names(cells, context)
    keys = ["data_parallel_size", "gradient_accumulation_steps"]
    rows = pd.DataFrame(
        {"micro_batch_size": completed["micro_batch_size"], "cell": completed.index}
    )
    rows["series"] = [
        f"{count_text(int(devices), 'device')}, accumulation {accumulation}"
        f"{_suffix(settings.get(context[cell], ''))}"
        for cell, devices, accumulation in completed[keys].itertuples()
    ]
    for name, (_, factor) in figures.items():
        mean, half = completed[f"{name}_mean"] * factor, completed[f"{name}_ci95"] * factor
        rows = rows.assign(**{name: mean, f"{name}_low": mean - half, f"{name}_high": mean + half})
    order = completed.assign(context=context).sort_values(["context", *keys], kind="stable").index
    return Chart(
        "cost",
        "Memory and step time against the micro-batch",
        "Means over the completed runs of a cell, with 95 % t-intervals from three runs on. Cells "
        "that differ in what decides neither memory nor time, such as the learning rate, share a "
        "line.",
        Axis({"micro_batch_size": _MICRO}, kind="log", ticks=rows["micro_batch_size"].tolist()),
        Axis({name: title for name, (title, _) in figures.items()}, "Show", from_zero=True),
        [Marks("line", rows), Marks("interval", rows), Marks("point", rows, size=24)],
        palette(rows["series"].loc[order]),
        panels="y",
        tables=["tables/comparison.csv"],
    )


def _heat_map(comparison: pd.DataFrame, cells: Cells) -> Chart | None:
    """Map devices and micro-batch, with cells that were rejected or ran out of memory."""
    axes = ["data_parallel_size", "micro_batch_size"]
    # Rows of few columns are taken in a fraction of the time.
    columns = (*GEOMETRY, "status", "reason", "n_completed")
    names = [
        name for name in map(str, comparison) if name in columns or name.endswith(("_mean", "_n"))
    ]
    places = comparison.loc[comparison[axes].notna().all(axis=1), names]
    if places.empty or all(places[name].nunique() < 2 for name in axes):
        return None
    of_steps = ("step_time_s", "tokens_per_s", "samples_per_s", "peak_allocated_gib")
    figures = _figures(places, *of_steps, "final_eval_loss", "final_loss")
    figures = figures or {"final_loss": ("final training loss", 1.0)}
    factor, layers = _layers(places, cells)
    # Those with most to show come first.
    first_figure = next(iter(figures))
    order = sorted(layers, key=lambda key: -int(layers[key][f"{first_figure}_n"].gt(0).sum()))
    labels = order[:_MOST_LAYERS]
    limit = ""
    if len(labels) < len(layers):
        limit = f" The choice is among {len(labels)} of {len(layers)}."
    if max(len(layers[label]) for label in labels) < 2:
        return None
    rows = pd.concat([layers[label].assign(layer=label) for label in labels])
    rows = rows.assign(cell=rows.index)
    for name, (_, scale) in figures.items():
        values = rows[f"{name}_mean"] * scale
        texts = [significant(value, 3) if np.isfinite(value) else "" for value in values]
        rows[name], rows[f"{name}_text"] = values, texts
    completed, failed = rows[rows["n_completed"].gt(0)], rows[rows["n_completed"].eq(0)]
    kinds = [next(kind for kind in _LOST if kind in status) for status in failed["status"]]
    failed = failed.assign(
        series=[_LOST[kind][0] for kind in kinds],
        why=failed["status"] + ": " + failed["reason"].fillna("no reason").astype(str),
    )[[*axes, "layer", "cell", "series", "why"]]
    return Chart(
        "heat_map",
        "Devices and micro-batch",
        f"A field is a cell of the chosen {factor.lower()} and settings: the mean over its "
        "completed runs, or what became of it. Rejected: it cannot be built, or cannot fit, and "
        "was never launched. Where there is nothing, the sweep had no such cell, or none of its "
        f"runs has the figure.{limit}",
        Axis({"micro_batch_size": _MICRO}, kind="names"),
        Axis({"data_parallel_size": "devices"}, kind="names", falls=True),
        [
            Marks("field", completed),
            Marks("text", completed),
            Marks("point", failed, text="why", size=70),
        ],
        {name: look for name, look in _LOST.values() if name in set(failed["series"])},
        Axis({name: title for name, (title, _) in figures.items()}, "Show"),
        [Choice("layer", factor, {label: label for label in labels})],
        tables=["tables/comparison.csv"],
    )


def _layers(places: pd.DataFrame, cells: Cells) -> tuple[str, dict[str, pd.DataFrame]]:
    """Split cells by the setting that gives each a field of its own in the fewest layers."""
    context = cells.context_of.loc[places.index]
    settings, trained = setting_names(cells, cells.context_of), cell_names(cells)
    titles = {"global_batch_size": "Global batch", "gradient_accumulation_steps": "Accumulation"}
    counts = {name: places.groupby([context, name]).ngroups for name in titles}
    if not any(counts.values()):
        return "Settings", {"all": places}
    name = min((name for name in counts if counts[name]), key=counts.__getitem__)
    layers: dict[str, pd.DataFrame] = {}
    # A rejected cell may have no accumulation: it is in every layer of its settings.
    everywhere = dict(list(places[places[name].isna()].groupby(context)))
    for (number, size), sized in places.groupby([context, name], sort=True):
        layer = pd.concat([sized, everywhere[number]]) if number in everywhere else sized
        layer = layer[~layer.duplicated(["data_parallel_size", "micro_batch_size"])]
        # Rejected cells were trained with no rate.
        names = trained[layer.index[layer["status"].ne("rejected")]].unique()
        setting = names[0] if len(names) == 1 else settings.get(int(str(number)), "")
        label = f"{size}{_suffix(setting)}"
        layers[label if label not in layers else f"{label} ({len(layers) + 1})"] = layer
    return titles[name], layers


def _suffix(name: str) -> str:
    return f", {name}" if name else ""


def _memory(cells: Cells) -> Chart | None:
    """Draw peak allocated memory by phase of a run, maximum over ranks."""
    phases = dict(list(MEMORY_PHASES.items())[:4])
    rows = _bar_rows(cells, [*phases])
    if rows.empty:
        return None
    scale = memory_scale(rows[[*phases]].to_numpy().ravel())
    runs = rows.rename(columns=phases).melt(["row", "run"], [*phases.values()], "series")
    runs = runs.assign(value=runs["value"] * scale.factor).dropna(subset="value")
    by_bar = runs.groupby(["row", "series"], sort=False)
    means = by_bar.agg(value=("value", "mean"), run=("run", list)).reset_index()
    return _bars(
        "memory",
        "Memory by phase",
        "Allocated memory by phase of a run, maximum over ranks: bars are means, points are runs.",
        figure=f"allocated memory ({scale.unit})",
        marks=[Marks("bar", means, dodge=True), Marks("point", runs, "runs", dodge=True, size=5)],
        phases=phases,
    )


def _step_time(cells: Cells) -> Chart | None:
    """Draw the median step time, split into its phases; a point is the step time of one run."""
    rows = _bar_rows(cells, ["step_time_s"])
    if rows.empty:
        return None
    scale = time_scale(rows["step_time_s"])
    by_bar = rows.groupby("row", sort=False)
    parts = by_bar[[*_TIME_PHASES]].mean().rename(columns=_TIME_PHASES) * scale.factor
    bars = parts.fillna(0).cumsum(axis=1).melt(var_name="series", ignore_index=False)
    bars["value_start"] = bars["value"] - parts.melt()["value"].to_numpy()
    bars = bars.join(by_bar["run"].agg(list)).reset_index().dropna()
    # A point a run, and the reason in a row without points.
    points = rows[["row", "run"]].assign(value=rows["step_time_s"] * scale.factor)
    marks = [Marks("bar", bars), Marks("point", points.dropna(), "runs", size=5)]
    cell_of = rows.groupby("row")["cell"].first()
    empty_rows = cell_of[rows.groupby("row")["step_time_s"].count().eq(0)].sort_values()
    if len(empty_rows):
        completed = cells.runs[cells.runs["status"].eq("completed")]
        notes = completed.dropna(subset="timing_note").groupby("cell")["timing_note"].first()
        why = empty_rows.map(notes).fillna("not measured").astype(str)
        reasons = pd.DataFrame({"value": 0.0, "why": why}).reset_index()
        marks.append(Marks("text", reasons, text="why"))
    return _bars(
        "step_time",
        "Step time by phase",
        "Median time of an optimizer step by phase: bars are means over runs, points are whole "
        "step times of runs. Medians of parts need not add up to the median of the whole.",
        figure=f"median optimizer step ({scale.unit})",
        marks=marks,
        phases=_TIME_PHASES,
    )


def _bar_rows(cells: Cells, names: Sequence[str]) -> pd.DataFrame:
    """Name the figures of the cells that there is room for; none if nothing was measured."""
    figures = cells.figures
    if figures[list(names)].isna().all(axis=None):
        figures = figures.iloc[:0]
    first_cells = sorted(figures["cell"].unique())[:MAX_BARS]
    labels = cells.labels().loc[first_cells]
    repeats = labels.groupby(labels).cumcount()
    labels = labels.where(repeats.eq(0), labels + " (" + (repeats + 1).astype(str) + ")")
    positions = pd.Series(range(len(cells.runs)), index=cells.runs.index)
    rows = figures.assign(row=figures["cell"].map(labels), run=positions[figures.index])
    return rows.dropna(subset="row").sort_values("cell", kind="stable")


def _bars(
    name: str,
    title: str,
    caption: str,
    *,
    figure: str,
    marks: Sequence[Marks],
    phases: Mapping[str, str],
) -> Chart:
    """Make a chart of one labelled row a cell, the first on top."""
    axes = Axis({"value": figure}, from_zero=True), Axis({"row": ""}, kind="names")
    tones = shades([*phases.values()])
    looks = {name: replace(look, symbol="square") for name, look in tones.items()} | _RUNS
    return Chart(name, title, caption, *axes, marks, looks, tables=["tables/comparison.csv"])
