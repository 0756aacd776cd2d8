"""A chart of the page: traces and a layout of plotly, of which some values hang on a choice.

`by` puts all values of a choice in the place of one; the page takes the one that is chosen, and
computes nothing itself. Numbers are those of the tables beside the page.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

from batchscape.analysis.figures.style import PALETTE, shade_of
from batchscape.outgoing import outgoing

__all__ = [
    "Chart",
    "Choice",
    "by",
    "colour",
    "error_bars",
    "label_text",
    "log_axis",
    "numbers",
    "packed",
    "scatter",
    "shade",
    "size_axis",
]

_DARK_BLACK = "#f0f0f0"
"""Black lines would not show on a dark page."""


@dataclass(frozen=True)
class Choice:
    """A list from which a reader picks."""

    name: str
    label: str
    options: Mapping[str, str]
    """Labels by value; the first is chosen when the page opens."""

    def __post_init__(self) -> None:
        """Clean the labels: settings are texts of others."""
        options = {value: outgoing(text) for value, text in self.options.items()}
        object.__setattr__(self, "options", options)


@dataclass(frozen=True)
class Chart:
    """One picture of the page."""

    name: str
    title: str
    caption: str
    traces: Sequence[Mapping[str, Any]]
    """As plotly takes them; `when` names the choices under which a trace shows, `customdata` the
    positions of the runs behind each point, `meta` those of the whole trace."""
    layout: Mapping[str, Any]
    choices: Sequence[Choice] = ()
    tables: Sequence[str] = ()
    """Files of the same numbers."""


def by(choice: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Let a choice decide a value: one of each option.

    Beside the choices of a chart there are `theme` ("light", "dark") and `room` ("wide", "narrow").
    """
    return {"by": choice, "of": dict(values)}


def label_text(text: object) -> str:
    """Write a text so that plotly, which knows some tags, shows it as it is."""
    return escape(outgoing(str(text)), quote=False)


def numbers(values: Iterable[Any]) -> list[float | None]:
    """Write numbers as JSON can; what is missing or infinite is null."""
    column = np.array(list(values), dtype=np.float64)
    return [float(value) if np.isfinite(value) else None for value in column]


def packed(values: NDArray[Any]) -> dict[str, str]:
    """Write many numbers to the last bit, in a third of the room that digits take.

    Source: https://plotly.com/javascript/reference/, "Data array" (`dtype` and `bdata`).
    """
    exact = values.astype("<f8")
    whole = np.isfinite(exact) & (exact == np.round(exact)) & (np.abs(exact) < 2**31)
    kind, column = ("i4", exact.astype("<i4")) if whole.all() else ("f8", exact)
    return {"dtype": kind, "bdata": base64.b64encode(column.tobytes()).decode("ascii")}


def colour(index: int, total: int) -> dict[str, Any]:
    """Choose the colour of one of several things, for light and for dark pages."""
    if total <= len(PALETTE):
        light = PALETTE[index]
        return by("theme", {"light": light, "dark": _DARK_BLACK if light == "#000000" else light})
    return shade(index, total)


def shade(index: int, total: int) -> dict[str, Any]:
    """Choose the colour of one of several global batches, in their order; as the figures do."""
    dark = mpl.colormaps["viridis"](0.3 + 0.7 * index / max(total - 1, 1))
    return by("theme", {"light": shade_of(index, total), "dark": mpl.colors.to_hex(dark)})


def error_bars(low: Iterable[Any], value: Iterable[Any], high: Iterable[Any]) -> dict[str, Any]:
    """Write ends of intervals as plotly's error bars; no bar where an end is missing."""
    ends = np.array([numbers(part) for part in (low, value, high)], dtype=np.float64)
    known = np.isfinite(ends).all(axis=0)
    down, up = (np.where(known, np.abs(ends[i] - ends[1]), 0.0).tolist() for i in (0, 2))
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1.2}


def scatter(
    name: object,
    x: Iterable[Any] | Mapping[str, Any],
    y: Iterable[Any] | Mapping[str, Any],
    hover: str = "",
    mode: Any = "markers",  # noqa: ANN401  (a text, or one of each option)
    **more: Any,  # noqa: ANN401  (of JSON)
) -> dict[str, Any]:
    """Make a trace of points or a line.

    Parameters
    ----------
    name : object
        What the legend says.
    x, y : iterable, or what `by` or `packed` returns
        Numbers, or texts where the axis has categories.
    hover : str
        What is said of a point, with plotly's `%{x}`; none is pointed at where it is empty.
    mode : str, or what `by` returns
    **more
        Further attributes of the trace.
    """
    said = {"hovertemplate": f"{hover}<extra></extra>"} if hover else {"hoverinfo": "skip"}
    places = {"x": _places(x), "y": _places(y)}
    return {"type": "scatter", "mode": mode, "name": label_text(name), **places, **said, **more}


def _places(values: Iterable[Any] | Mapping[str, Any]) -> list[Any] | Mapping[str, Any]:
    if isinstance(values, Mapping):
        return values
    listed = list(values)
    return listed if any(isinstance(value, str) for value in listed) else numbers(listed)


def log_axis(title: object) -> dict[str, Any]:
    """Return a logarithmic axis; its title is a text, or one of each option."""
    return {"type": "log", "title": {"text": title}}


def size_axis(sizes: Iterable[float], title: str) -> dict[str, Any]:
    """Return a logarithmic axis that names at most eight of the sizes."""
    known = sorted({size for size in numbers(sizes) if size is not None})
    chosen = known[:: -(-len(known) // 8)]
    return {**log_axis(title), "tickvals": chosen, "ticktext": [f"{size:g}" for size in chosen]}
