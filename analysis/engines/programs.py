"""Programs of others: the batch that each of them was seen to use, beside the planned one."""

from __future__ import annotations

import pandas as pd

from batchscape.analysis.cells import PROGRAMS, Cells
from batchscape.analysis.hardware import was_started

__all__ = ["OBSERVED", "observed_batches"]

OBSERVED = {
    "world_size": "data_parallel_size",
    "micro_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "global_batch_size": "global_batch_size",
}
"""Column of the plan that each observed number stands beside."""


def observed_batches(cells: Cells) -> pd.DataFrame:
    """Set what programs were seen to do beside what was planned.

    Returns
    -------
    DataFrame
        A row a launched run of a program: `cell`, `run_id`, `status`, `reason`, and for each
        quantity its `planned_` and `observed_` number (missing where it was not observed) and its
        `_source`; `agrees` (false where a number that was observed is another one, missing where
        the global batch was not observed, which the others do not confirm). No rows where no
        program ran.
    """
    runs = cells.runs
    engine = runs.reindex(columns=["engine.name"])["engine.name"]
    launched = was_started(runs)
    own = runs[engine.eq(PROGRAMS) & launched]
    table = own[["cell", "run_id", "status", "reason"]].copy()
    same = []
    for name, planned in OBSERVED.items():
        found = own.reindex(columns=[f"observed.{name}", f"observed.{name}_source"])
        table[f"planned_{name}"] = own[planned]
        table[f"observed_{name}"] = pd.to_numeric(found.iloc[:, 0]).astype("Int64")
        table[f"{name}_source"] = found.iloc[:, 1]
        same.append(table[f"observed_{name}"].eq(table[f"planned_{name}"]))
    agreement = pd.concat(same, axis=1).astype("boolean")
    confirmed = table["observed_global_batch_size"].notna()
    contradicted = agreement.eq(False).any(axis=1)
    table["agrees"] = (~contradicted).where(confirmed | contradicted).astype("boolean")
    return table.sort_values("cell", kind="stable", ignore_index=True)
