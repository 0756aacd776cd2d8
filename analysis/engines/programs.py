"""The batch that each program was observed to use, beside the planned one."""

from __future__ import annotations

import pandas as pd

from batchscape.analysis.cells import PROGRAMS, Cells
from batchscape.analysis.hardware import was_started
from batchscape.analysis.joins import column_of
from batchscape.analysis.numbers import MISSING

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
    sources = pd.DataFrame(index=table.index)
    contradicted = pd.Series(False, table.index)
    for name, planned in OBSERVED.items():
        plan = runs[planned].reset_index(drop=True)
        columns = runs.reindex(columns=[f"observed.{name}", f"observed.{name}_source"])
        seen = pd.to_numeric(columns.iloc[:, 0]).astype("Int64").reset_index(drop=True)
        table[f"planned_{name}"], table[f"observed_{name}"] = plan, seen
        table[f"{name}_source"] = columns.iloc[:, 1].to_numpy()
        differs = seen.ne(plan).fillna(value=False).astype(bool)
        contradicted |= differs
        text = seen.astype(str).mask(differs, seen.astype(str) + ", not " + plan.astype(str))
        table[f"{name}_text"] = text.mask(seen.isna(), MISSING)
        sources[name] = table[f"{name}_source"].where(seen.notna())
    known = table["observed_global_batch_size"].notna() | contradicted
    table["agrees"] = (~contradicted).where(known).astype("boolean")
    names = [sorted(row.dropna().unique()) for _, row in sources.iterrows()]
    table["sources"] = [f"source: {', '.join(row)}" if row else None for row in names]
    return table
