"""How charts look: a paper column wide, one colour a geometry in all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from batchscape.analysis.cells import Cells, geometry_label, launched_batches
from batchscape.analysis.figures.chart import Look
from batchscape.analysis.joins import column_of

COLUMN_IN = 3.5
"""Width of a column of a two-column paper, in inches."""
PAGE_IN = 7.0
"""Width of its page, in inches."""
_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours for every kind of colour vision, without their yellow, which is too pale
for lines (https://jfly.uni-koeln.de/color/)."""
_DARK = {"#000000": "#f0f0f0", "#0072B2": "#56B4E9", "#56B4E9": "#9ad8ff"}
"""Colours that would not show on a dark page, and what stands for them there."""
_VIRIDIS = (
    "#440154",
    "#48186a",
    "#472d7b",
    "#424086",
    "#3b528b",
    "#33638d",
    "#2c728e",
    "#26828e",
    "#21918c",
    "#1fa088",
    "#28ae80",
    "#3fbc73",
    "#5ec962",
    "#84d44b",
    "#addc30",
    "#d8e219",
    "#fde725",
)
"""Of matplotlib's map, at equal distances: even in lightness, which every kind of colour vision
tells apart (https://bids.github.io/colormap/)."""
_PALER = 0.6
"""Share of white in the colour of the last of several cuts of a global batch."""
_DASHES = ((), (5.0, 1.5), (2.0, 1.2), (6.0, 1.5, 1.2, 1.5))
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "triangle-right")

CROSS = "M-.7,-.7L.7,.7M-.7,.7L.7,-.7"
"""A symbol; paths are those of SVG."""
ACCENT = Look("#0072B2", "#56B4E9")
MARK = Look("#D55E00")
INK = Look("#222222", "#f0f0f0")
GREY = Look("#777777", "#a0a0a0")


def palette(names: Iterable[object]) -> dict[str, Look]:
    """Give each of several things a colour."""
    labels = list(dict.fromkeys(map(str, names)))
    if len(labels) > len(_PALETTE):
        return shades(labels)
    tones = dict(zip(labels, _PALETTE, strict=False))
    return {name: Look(tone, _DARK.get(tone, "")) for name, tone in tones.items()}


def shades(names: Sequence[object]) -> dict[str, Look]:
    """Give each of several things in an order, such as global batches, a shade."""
    last = max(len(names) - 1, 1)
    return {
        str(name): Look(_shade(0.88 * place / last), _shade(0.3 + 0.7 * place / last))
        for place, name in enumerate(names)
    }


def looks(cells: Cells) -> Mapping[str, Look]:
    """Give each geometry its look; later cuts of one global batch are paler."""
    launched = cells.runs.loc[cells.runs["status"].ne("rejected"), "cell"].unique()
    table = cells.table.loc[sorted(launched)]
    table = table.sort_values("global_batch_size", kind="stable")
    batches = dict(zip(geometry_label(table), table["global_batch_size"], strict=True))
    members = {batch: [g for g in batches if batches[g] == batch] for batch in batches.values()}
    batch_looks, cut_looks = shades(launched_batches(cells.runs)), palette(batches)
    geometry_looks = {}
    for index, (geometry, batch) in enumerate(batches.items()):
        place, total = members[batch].index(geometry), len(members[batch])
        base = batch_looks[str(batch)] if len(members) > 1 else cut_looks[geometry]
        paler = _PALER * place / max(total - 1, 1) if len(members) > 1 else 0.0
        geometry_looks[geometry] = Look(
            _mixed(base.colour, "#ffffff", paler),
            _mixed(base.dark or base.colour, "#16181c", paler),
            _SYMBOLS[index % len(_SYMBOLS)],
            _DASHES[place % len(_DASHES)] if total > 1 else (),
            hollow=True,
        )
    return geometry_looks


def loss_axis(loss: str, runs: pd.DataFrame) -> str:
    """Name the axis of a loss with its unit, which one of a user's own task may not have."""
    has_other = column_of(runs, "task").eq("other").any()
    return loss if has_other else f"{loss} (nats)"


def _shade(place: float) -> str:
    at = place * (len(_VIRIDIS) - 1)
    low = min(int(at), len(_VIRIDIS) - 2)
    return _mixed(_VIRIDIS[low], _VIRIDIS[low + 1], at - low)


def _mixed(colour: str, other: str, share: float) -> str:
    pairs = zip(bytes.fromhex(colour[1:]), bytes.fromhex(other[1:]), strict=True)
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in pairs)
