"""The picture of a plan shows the numbers that it is given, and says what is no picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from batchscape.analysis.figures.plan_map import plan_chart, save_plan
from batchscape.errors import AnalysisError


def field(devices: int | None, micro: int, memory: float, fits: str | None, rate: float) -> Any:
    return {
        "data_parallel_size": devices,
        "micro_batch_size": micro,
        "memory_gib": memory,
        "fits": fits,
        "rate": rate,
        "rate_unit": "tokens/s",
        "is_launched": fits is not None,
    }


CELLS = pd.DataFrame(
    [
        field(1, 8, 2.0, "fits", 100.0),
        field(1, 16, 4.0, "unsure", 110.0),
        field(2, 8, 2.2, "fits", 190.0),
        field(2, 8, 2.4, "fits", 180.0),  # another seed, or another setting
        field(4, 8, 9.0, "does not fit", 350.0),
        field(2, 16, float("nan"), None, float("nan")),
    ]
)


def test_fields_hold_the_largest_memory_and_the_lowest_rate() -> None:
    chart = plan_chart(CELLS)
    fields = [marks.table for marks in chart.marks if marks.kind == "text"]
    texts = [
        {
            (row["data_parallel_size"], row["micro_batch_size"]): row[name]
            for row in table.to_dict("records")
        }
        for table, name in zip(fields, ("memory_text", "rate_text"), strict=True)
    ]
    memory = {(1, 8): "2.0", (1, 16): "4.0 ?", (2, 8): "2.4", (4, 8): "9.0\ntoo big"}
    assert texts == [memory, {(1, 8): "100", (1, 16): "110", (2, 8): "180"}]
    (never,) = (marks.table for marks in chart.marks if marks.kind == "point")
    assert never.to_numpy().tolist() == [[2, 16]]


@pytest.mark.parametrize("name", ["plan.png", "plan.pdf", "plan.svg"])
def test_a_picture_is_written(name: str, tmp_path: Path) -> None:
    save_plan(CELLS, tmp_path / name)
    assert (tmp_path / name).stat().st_size > 3000


def test_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AnalysisError, match=r"ends in one of \.png, \.pdf, \.svg"):
        save_plan(CELLS, tmp_path / "plan.xlsx")
    with pytest.raises(AnalysisError, match="nothing to draw"):
        plan_chart(CELLS.assign(data_parallel_size=None))
