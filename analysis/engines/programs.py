"""The batch that each program was observed to use, beside the planned one."""

from __future__ import annotations

import pandas as pd

from batchscape.analysis.cells import PROGRAMS, Cells
from batchscape.analysis.hardware import was_started
from batchscape.analysis.joins import column_of

OBSERVED = {
    "world_size": "data_parallel_size",
    "micro_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "global_batch_size": "global_batch_size",
}
"""Column of the plan for each observed number."""


def observed_batches(cells: Cells) -> pd.DataFrame:
    """Set the batch that each launched run of a program used beside the planned one."""
    is_program = column_of(cells.runs, "engine.name").eq(PROGRAMS)
    runs = cells.runs[is_program & was_started(cells.runs)].sort_values("cell", kind="stable")
    table = runs[["cell", "run_id", "status", "reason"]].reset_index(drop=True)
    contradicted = pd.Series(False, table.index)
    for name, planned in OBSERVED.items():
        observed = pd.to_numeric(column_of(runs, f"observed.{name}")).astype("Int64").array
        table[f"planned_{name}"], table[f"observed_{name}"] = runs[planned].array, observed
        table[f"{name}_source"] = column_of(runs, f"observed.{name}_source").array
        differs = table[f"observed_{name}"].ne(table[f"planned_{name}"])
        contradicted |= differs.fillna(value=False).astype(bool)
    is_known = table["observed_global_batch_size"].notna() | contradicted
    table["agrees"] = (~contradicted).where(is_known).astype("boolean")
    return table
