"""A picture of a plan: memory and throughput of every cut, by devices and micro-batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from batchscape.analysis.figures.chart import Axis, Chart, Marks
from batchscape.analysis.figures.style import CROSS, GREY
from batchscape.analysis.figures.vega import paper_chart
from batchscape.analysis.numbers import memory_scale, significant
from batchscape.drawing import draw
from batchscape.errors import AnalysisError

_KINDS = (".png", ".pdf", ".svg")
_TITLES = {
    "memory": "peak of a rank's tensors ({memory}); ?: may be too big",
    "rate": "{unit}, where only a range is known its middle",
}


def save_plan(cells: pd.DataFrame, path: Path) -> None:
    """Draw the cells of `plan_chart` into a file."""
    if path.suffix not in _KINDS:
        msg = f"a picture is a file that ends in one of {', '.join(_KINDS)}; given {path}"
        raise AnalysisError(msg)
    draw(paper_chart(plan_chart(cells)), [path])


def plan_chart(cells: pd.DataFrame) -> Chart:
    """Draw fields of devices x micro-batch, each with its largest memory and its lowest rate.

    A row of `cells` has `data_parallel_size`, `micro_batch_size`, `memory_gib`, `fits` (`fits`,
    `unsure`, `does not fit` or None), `rate` in `rate_unit`, and `is_launched`.
    """
    keys = ["data_parallel_size", "micro_batch_size"]
    placed = cells.dropna(subset=keys)
    if placed.empty:
        msg = "no cell of this plan has devices and a micro-batch, so there is nothing to draw"
        raise AnalysisError(msg)
    placed = placed.assign(
        unfit=placed["fits"].eq("does not fit"), unsure=placed["fits"].eq("unsure")
    )
    fields = placed.groupby(keys, as_index=False).agg(
        memory_gib=("memory_gib", "max"),
        rate=("rate", "min"),
        unfit=("unfit", "any"),
        unsure=("unsure", "any"),
        is_launched=("is_launched", "any"),
    )
    scale = memory_scale(fields["memory_gib"].dropna())
    amounts = fields["memory_gib"] * scale.factor
    marks = np.select([fields["unfit"], fields["unsure"]], ["\ntoo big", " ?"], "")
    unit = next(iter(placed["rate_unit"].dropna()), "samples/s")
    fields = fields.assign(
        memory=amounts,
        memory_text=[
            f"{significant(amount, 2)}{mark}" for amount, mark in zip(amounts, marks, strict=True)
        ],
        rate_text=[significant(rate, 2) for rate in fields["rate"]],
        rate=fields["rate"].where(~fields["unfit"]),
    )
    launched = fields[fields["is_launched"]]
    parts = [launched.loc[launched[name].gt(0), [*keys, name, f"{name}_text"]] for name in _TITLES]
    never = fields.loc[~fields["is_launched"], keys]
    return Chart(
        "plan",
        "The plan",
        "Memory and throughput of every cut; a cross: never launched.",
        Axis({"data_parallel_size": "devices"}, kind="names"),
        Axis({"micro_batch_size": "micro-batch (samples a device)"}, kind="names", falls=True),
        [
            *(Marks(kind, part) for part in parts for kind in ("field", "text") if len(part)),
            *([Marks("point", never, "never launched")] if len(never) else []),
        ],
        {"never launched": replace(GREY, symbol=CROSS)} if len(never) else {},
        Axis({name: title.format(unit=unit, memory=scale.unit) for name, title in _TITLES.items()}),
        panels="z",
    )
