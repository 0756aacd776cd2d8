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
    runs = cells.runs
    engine = column_of(runs, "engine.name")
    launched = was_started(runs)
    program_runs = runs[engine.eq(PROGRAMS) & launched]
    table = program_runs[["cell", "run_id", "status", "reason"]].copy()
    agreements = []
    for name, planned in OBSERVED.items():
        columns = program_runs.reindex(columns=[f"observed.{name}", f"observed.{name}_source"])
        table[f"planned_{name}"] = program_runs[planned]
        table[f"observed_{name}"] = pd.to_numeric(columns.iloc[:, 0]).astype("Int64")
        table[f"{name}_source"] = columns.iloc[:, 1]
        agreements.append(table[f"observed_{name}"].eq(table[f"planned_{name}"]))
    agreement = pd.concat(agreements, axis=1).astype("boolean")
    confirmed = table["observed_global_batch_size"].notna()
    contradicted = agreement.eq(False).any(axis=1)
    table["agrees"] = (~contradicted).where(confirmed | contradicted).astype("boolean")
    return table.sort_values("cell", kind="stable", ignore_index=True)
