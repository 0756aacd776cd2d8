"""Charts as specifications of Vega-Lite, which page and paper draw alike.

Source: https://vega.github.io/vega-lite/docs/.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from importlib import resources
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.figures.chart import SCALE, Chart, Marks
from batchscape.analysis.figures.style import COLUMN_IN, PAGE_IN
from batchscape.outgoing import outgoing, outgoing_json

MAX_PANELS = 6
"""Panels of a figure, which fit on a page."""
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_POINTS = 72.0
"""Points of an inch."""
_VEGA = json.loads(
    resources.files("batchscape.analysis.figures").joinpath("vega.json").read_text("utf-8")
)
"""`paper`: the configuration for a paper, with the font that vl-convert brings, as machines without
fonts draw text, too. `kinds`: of each kind of marks the columns that it needs, the channels that
tell its series apart, and its mark, without what Vega would compute again for each of thousands of
points that move."""
_SHADES = {"light": ["#e8f1fa", "#6baed6"], "dark": ["#24364a", "#3a7cb0"]}
_MOST_TICKS = 8
_LETTERS = 34
"""Of a line of a name on an axis."""
_ROW = 13.0
"""Height of a line of such names, in points."""
_OF_LEGEND = ("stroke", "fill", "shape", "strokeDash")
_POWERS = (
    "datum.label && (abs(datum.value) < 1e-3 || abs(datum.value) >= 1e6)"
    " ? format(datum.value, '~e') : datum.label"
)
"""Labels of a logarithmic axis: of both kinds, 0.000001 would stand beside 1e-7."""
_HEIGHT = 150.0
"""Of a panel, in points."""


def page_chart(
    chart: Chart, runs_of: Callable[[pd.DataFrame], Sequence[Sequence[int]]]
) -> dict[str, Any]:
    """Write a chart as JSON for `page.js`, with the runs behind each row as `runs_of` finds them.

    `of_axes` names the choices that change the specification. `specs` are by their options, joined
    by a bar; the page selects the rows of the other choices.
    """
    choices = {name: list(choice.options) for name, choice in chart.all_choices.items()}
    of_rows = [choice.column for choice in chart.choices]
    of_axes = [name for name in choices if name not in of_rows]
    specs = {
        "|".join(options): outgoing_json(
            _Panel(chart, dict(zip(of_axes, options, strict=True))).spec()
        )
        for options in itertools.product(*(choices[name] for name in of_axes))
    }
    tables = {}
    for n, (marks, columns) in enumerate(zip(chart.marks, chart.columns, strict=True)):
        packed = {name: _packed(values) for name, values in columns.items()}
        tables[f"t{n}"] = {**packed, "runs": _packed([list(runs) for runs in runs_of(marks.table)])}
    return {
        "choices": choices,
        "of_axes": of_axes,
        "rows": of_rows,
        "specs": specs,
        "tables": tables,
        "names": [outgoing(name) for name in chart.looks],
        "height": _height(chart),
    }


def paper_chart(chart: Chart) -> dict[str, Any]:
    """Write a chart with its rows for a paper; `usermeta` has its width in points."""
    choices = chart.all_choices
    first = {name: next(iter(choice.options)) for name, choice in choices.items()}
    titles = choices[chart.panels].options if chart.panels in choices else {"": ""}
    options = [option for option in titles if option not in chart.page_only]
    panels: list[dict[str, Any]] = []
    series: set[str] = set()
    for option in options[:MAX_PANELS]:
        chosen = first | ({chart.panels: option} if chart.panels in choices else {})
        panel, panel_series = _paper_panel(chart, chosen)
        series |= panel_series
        if len(options) > 1 and chart.panels not in {"x", "y"}:
            title = fill(titles[option], 36).split("\n")
            panel["title"] = {"text": title, "fontWeight": "normal"}
        panels.append(panel)
    panels = [
        panel for panel in panels if any(layer["data"].get("values") for layer in panel["layer"])
    ] or panels[:1]
    columns = 1 if len(panels) < 2 else 2 if len(panels) in {2, 4} else 3
    width = (COLUMN_IN if columns == 1 else PAGE_IN) * _POINTS
    legend = [name for name in map(outgoing, chart.looks) if name in series]
    drawn_kinds = {
        layer["mark"]["type"]
        for panel in panels
        for layer in panel["layer"]
        if layer["data"].get("values")
    }
    has_symbols = not drawn_kinds.isdisjoint({"point", "bar"})
    for panel in panels:
        _widen_single_values(panel["layer"])
        panel["width"] = (width - 18 * (columns - 1)) / columns - 36
        panel["height"] = _height(chart) or _HEIGHT
        for layer in panel["layer"]:
            for name in set(layer["encoding"]) & set(_OF_LEGEND):
                channel = layer["encoding"][name]
                if channel["legend"]:
                    # A legend without an entry would be infinitely high.
                    channel["legend"] = {**channel["legend"], "values": legend} if legend else None
                if name == "shape" and not has_symbols:
                    channel["scale"]["range"] = ["stroke"] * len(chart.looks)
    names = _names(chart, next(iter(chart.y.columns))) if chart.y.kind == "names" else []
    label_width = max((4 * min(len(str(name)), _LETTERS) for name in names), default=0)
    config = deepcopy(_VEGA["paper"])
    letters = max(map(len, series), default=0)
    config["legend"]["columns"] = max(1, int((width - label_width) / (3.8 * letters + 22)))
    resolve = {"resolve": {"scale": {"color": "independent"}}} if chart.z else {}
    panes = {"concat": panels, "columns": columns, **resolve} if len(panels) > 1 else panels[0]
    return {
        "$schema": _SCHEMA,
        "usermeta": {"width": width},
        "config": config,
        "datasets": {"legend": [{"series": name} for name in legend]},
        **panes,
    }


def _paper_panel(chart: Chart, chosen: Mapping[str, str]) -> tuple[dict[str, Any], set[str]]:
    """Return a panel that does not move, with the rows of its layers, and the series in them."""
    panel = outgoing_json(_light(_Panel(chart, chosen).spec()))
    series: set[str] = set()
    for layer in panel["layer"]:
        if (name := layer["data"]["name"]) == "legend":
            continue
        marks, columns = chart.marks[int(name[1:])], chart.columns[int(name[1:])]
        values = zip(*columns.values(), strict=True)
        rows = [dict(zip(columns, row, strict=True)) for row in values]
        for column in [one.column for one in chart.choices if one.column in columns]:
            # A row has one option, or a list of them.
            rows = [row for row in rows if chosen[column] in np.ravel(row[column]).tolist()]
        if layer["mark"]["type"] in {"line", "area"}:
            fields = [layer["encoding"][axis]["field"] for axis in ("x", "y")]
            rows = [row for row in rows if None not in (row[field] for field in fields)]
        if marks.name or "series" in columns:
            series |= {outgoing(marks.name) or row["series"] for row in rows}
        layer["data"] = {"values": rows}
        layer.pop("params", None)
        layer["encoding"].pop("tooltip", None)
    return panel, series


def _widen_single_values(layers: Sequence[Mapping[str, Any]]) -> None:
    """Set, in place, the domain of an axis with a single value: else all ticks stand at it."""
    for name in ("x", "y"):
        values: set[Any] = set()
        scales = []
        for layer in layers:
            channels = [layer["encoding"].get(channel, {}) for channel in (name, f"{name}2")]
            if channels[0].get("type") != "quantitative":
                continue
            scales.append(channels[0]["scale"])
            fields = [channel["field"] for channel in channels if "field" in channel]
            values |= {row[field] for row in layer["data"]["values"] for field in fields}
        values.discard(None)
        if len(values) != 1:
            continue
        (value,) = values
        for scale in scales:
            room = [value / 2, 2 * value] if scale["type"] == "log" else [value - 1, value + 1]
            if not scale.get("zero") and (scale["type"] != "log" or value > 0):
                scale.setdefault("domain", room)


def is_narrow(chart: Chart) -> bool:
    """Tell whether the paper shows the chart in one panel, a column wide."""
    choice = chart.all_choices.get(chart.panels)
    return choice is None or len(choice.options) < 2


def paper_caption(chart: Chart) -> str:
    """Add to the caption which options the paper shows, and how many panels it leaves out."""
    options, limit = [], ""
    for column, choice in chart.all_choices.items():
        if column == chart.panels:
            if (count := len(choice.options)) > MAX_PANELS:
                limit = f" {MAX_PANELS} of {count} panels are drawn."
        elif column != SCALE and (first := next(iter(choice.options.values()))) != "none":
            options.append(f"{choice.label}: {first}")
    options_text = f" {'; '.join(options)}." if options else ""
    return f"{chart.caption}{options_text}{limit}"


def _light(spec: Any) -> Any:  # noqa: ANN401  (of JSON)
    """Take the light one of each pair of colours."""
    if isinstance(spec, list):
        return [_light(item) for item in spec]
    if isinstance(spec, dict):
        return spec["light"] if "dark" in spec else {k: _light(v) for k, v in spec.items()}
    return spec


def _height(chart: Chart) -> float:
    """Return the height in points that the names of the y axis need; 0 without names."""
    if chart.y.kind != "names":
        return 0.0
    names = _names(chart, next(iter(chart.y.columns)))
    lines = max((_wrapped(name).count("\n") + 1 for name in names), default=1)
    dodged = [set(marks.table["series"]) for marks in chart.marks if marks.dodge]
    series = max(map(len, dodged), default=1)
    row_height = max(_ROW * lines, 22.0 if chart.z else 7.0 * series + 4)
    title_height = 80.0 if next(iter(chart.y.columns.values())) else 0.0
    return max(len(names) * row_height + 4, title_height)


def _names(chart: Chart, column: str) -> list[Any]:
    """List the names of an axis: numbers in their order, texts as the tables have them."""
    names: dict[Any, None] = {}
    for marks in chart.marks:
        if column in marks.table:
            names |= dict.fromkeys(marks.table[column].dropna().tolist())
    is_text = any(isinstance(name, str) for name in names)
    return [outgoing(name) for name in map(str, names)] if is_text else sorted(names)


def _wrapped(name: object) -> str:
    return "\n".join(fill(line, _LETTERS) for line in str(name).split("\n"))


def _axis_encoding(chart: Chart, channel: str, column: str, scale: str) -> dict[str, Any]:
    axis = chart.axes[channel]
    field_and_title = {"field": column, "title": axis.columns[column]}
    if axis.kind == "names":
        names = _names(chart, column)
        texts = {str(name): _wrapped(name).split("\n") for name in names}
        label_expression = f"({json.dumps(texts)})[datum.value] || datum.label"
        axis_spec = {
            "labelExpr": label_expression,
            "labelLimit": 400,
            "labelAngle": 0,
            "grid": False,
        }
        domain = list(reversed(names)) if axis.falls else names
        return {
            **field_and_title,
            "type": "nominal",
            "scale": {"domain": domain},
            "axis": axis_spec,
        }
    kind = scale if axis.kind == "either" else axis.kind
    scale_spec: dict[str, Any] = {"type": kind, "nice": axis.from_zero}
    if kind == "linear":
        scale_spec["zero"] = axis.from_zero
    if column in axis.ranges and (kind != "log" or axis.ranges[column][0] > 0):
        scale_spec["domain"] = list(axis.ranges[column])
    elif not axis.from_zero:
        scale_spec["padding"] = 7
    scale_spec |= {"reverse": True} if axis.falls else {}
    axis_spec = {"tickCount": 5, "labelOverlap": "greedy", "labelSeparation": 4} | (
        {"format": "~g", "labelExpr": _POWERS} if kind == "log" else {}
    )
    if channel == "x" and chart.y.kind == "names":
        axis_spec["titleAnchor"] = "end"  # there is room to the left, below the names
    if axis.ticks:
        ticks = sorted({float(tick) for tick in axis.ticks if np.isfinite(tick)})
        axis_spec["values"] = ticks[:: math.ceil(len(ticks) / _MOST_TICKS)]
    return {**field_and_title, "type": "quantitative", "scale": scale_spec, "axis": axis_spec}


def _by_series(chart: Chart, marks: Marks, channel: str) -> dict[str, Any]:
    """Take the look of each series from a scale that all marks share."""
    looks = list(chart.looks.values())
    shapes: dict[str, Any] = {
        "shape": [look.symbol for look in looks],
        "strokeDash": [list(look.dash) or [1, 0] for look in looks],
    }
    values = shapes.get(channel) or {
        theme: [
            (channel == "fill" and look.hollow and "transparent")
            or (theme == "dark" and look.dark)
            or look.colour
            for look in looks
        ]
        for theme in ("light", "dark")
    }
    source = {"datum": marks.name} if marks.name else {"field": "series"}
    scale: dict[str, Any] = {"domain": list(chart.looks), "range": values}
    if channel not in _OF_LEGEND:
        # Of another domain, so that it does not join the legend, which it would take away.
        scale["domain"] = [*chart.looks, ""]
    titled = {"symbolOpacity": 1, "title": outgoing(chart.legend) or None}
    legend = titled if channel in _OF_LEGEND else None
    return {**source, "type": "nominal", "scale": scale, "legend": legend}


_ASIDE = {"align": "left", "dx": 4, "limit": 260}


class _Panel:
    """One panel under the choices of its axes; its rows are in data of the names `t0`, `t1`, ..."""

    def __init__(self, chart: Chart, chosen: Mapping[str, str]) -> None:
        self.chart = chart
        self.columns = {
            name: chosen.get(name, next(iter(axis.columns))) for name, axis in chart.axes.items()
        }
        scale = chosen.get(SCALE, "linear")
        has_dashes = any(look.dash for look in chart.looks.values())
        self.unused_channels = set() if has_dashes else {"strokeDash"}
        self.axis_encodings = {
            n: _axis_encoding(chart, n, self.columns[n], scale) for n in ("x", "y")
        }

    def spec(self) -> dict[str, Any]:
        """Write the panel, without marks whose table lacks a chosen column."""
        layers = [layer for n in range(len(self.chart.marks)) if (layer := self._layer(n))]
        for layer in layers:
            channels = [layer["encoding"].get(name, {}) for name in ("x", "y")]
            # A reader can move axes of numbers; a wheel alone scrolls the page.
            if all(channel.get("type") == "quantitative" for channel in channels):
                select = {"type": "interval", "zoom": "wheel![event.shiftKey]"}
                layer["params"] = [{"name": "shown", "select": select, "bind": "scales"}]
                break
        if self.chart.looks:
            # Invisible points carry the legend, with the symbol and the dash of each series.
            series = Marks("point", pd.DataFrame({"series": []}))
            legend = {name: _by_series(self.chart, series, name) for name in _OF_LEGEND}
            mark = {"type": "point", "size": 0, "opacity": 0}
            layers.append({"data": {"name": "legend"}, "mark": mark, "encoding": legend})
        if self.chart.z is None:
            return {"layer": layers}
        title = {"text": self.chart.z.columns[self.columns["z"]], "fontWeight": "normal"}
        return {"layer": layers, "title": title}

    def _layer(self, n: int) -> dict[str, Any] | None:
        marks, kind = self.chart.marks[n], _VEGA["kinds"][self.chart.marks[n].kind]
        # Channels that the table has a column for, and the ends of its intervals and bars on them.
        there = {
            f"{name}{end}"
            for name, column in self.columns.items()
            for end in ("", "_low", "_start")
            if f"{column}{end}" in marks.table
        } | ({"z"} - {*self.columns})
        if marks.table.empty or not any({*needed} <= there for needed in kind["needs"]):
            return None
        encoding: dict[str, Any] = {
            name: channel for name, channel in self.axis_encodings.items() if name in there
        }
        encoding |= self._kind_encoding(marks, there)
        if marks.name or "series" in marks.table:
            by_series = [
                channel for channel in kind["by_series"] if channel not in self.unused_channels
            ]
            encoding |= {channel: _by_series(self.chart, marks, channel) for channel in by_series}
        if marks.line:
            encoding["detail"] = {"field": marks.line}
        if marks.dodge and "series" in marks.table:
            dodged = [other.table["series"] for other in self.chart.marks if other.dodge]
            series = set(pd.concat(dodged))
            domain = [name for name in self.chart.looks if name in series]
            encoding["yOffset"] = {"field": "series", "scale": {"domain": domain}}
        if marks.kind == "line" and (marks.text or "series" in marks.table):
            encoding["tooltip"] = {"field": marks.text or "series"}
        if marks.kind in {"point", "bar", "field"}:
            encoding["tooltip"] = self._tooltip(marks)
        mark = {**kind["mark"], "clip": bool(self.chart.y.ranges)}
        mark |= {"size": marks.size} if marks.kind == "point" else {}
        if marks.kind == "text" and not self.chart.z:
            mark |= {**_ASIDE, "dy": 0 if self.chart.y.kind == "names" else -6}
        return {"data": {"name": f"t{n}"}, "mark": mark, "encoding": encoding}

    def _kind_encoding(self, marks: Marks, there: Collection[str]) -> dict[str, Any]:
        """Write the channels that one kind of marks alone has."""
        if marks.kind == "line":
            return {"order": {"value": None}}  # that of the table, not along x
        if marks.kind in {"band", "interval", "span"}:
            return self._ends("y" if "y_low" in there else "x")
        if marks.kind == "bar":
            bar = {"x": {**self.axis_encodings["x"], "stack": None}}
            return self._ends("x", "_start", "") if "x_start" in there else bar
        if marks.kind == "field":
            tone = {"field": self.columns["z"], "type": "quantitative", "legend": None}
            return {"color": {**tone, "scale": {"range": _SHADES}}}
        if marks.kind == "text":
            z = self.columns.get("z")
            return {"text": {"field": f"{z}_text" if z else marks.text}}
        return {}

    def _ends(self, channel: str, low: str = "_low", high: str = "_high") -> dict[str, Any]:
        column = self.columns[channel]
        low_encoding = {**self.axis_encodings[channel], "field": f"{column}{low}"}
        return {channel: low_encoding, f"{channel}2": {"field": f"{column}{high}"}}

    def _tooltip(self, marks: Marks) -> list[dict[str, Any]]:
        fields: list[dict[str, Any]] = []
        if "series" in marks.table:
            fields.append({"field": "series", "title": " "})
        if marks.text:
            fields.append({"field": marks.text, "title": "of"})
        for name, column in self.columns.items():
            axis = self.chart.axes[name]
            if column not in marks.table or name == marks.placed:
                continue
            number = {"type": "quantitative", "format": ".6~g"}
            kind = {"type": "nominal"} if axis.kind == "names" else number
            fields.append({"field": column, "title": axis.columns[column], **kind})
            fields += [
                {"field": f"{column}_{end}", "title": end, **number}
                for end in ("low", "high")
                if f"{column}_{end}" in marks.table
            ]
        return fields


def _packed(values: Sequence[Any]) -> dict[str, Any] | Sequence[Any]:
    """Write each of few values once, with the places in that list."""
    if all(value is None or isinstance(value, (int, float)) for value in values):
        return values
    unique = dict(zip(map(str, values), values, strict=True))
    place = {key: n for n, key in enumerate(unique)}
    return {"of": list(unique.values()), "at": [place[str(value)] for value in values]}
