"""Programs of others: the batch that each of them was seen to use, beside the planned one."""

from __future__ import annotations

import pandas as pd

from batchscape.analysis.cells import PROGRAMS, Cells, geometry_label
from batchscape.analysis.numbers import MISSING
from batchscape.analysis.report.grids import Grid, lettered
from batchscape.analysis.report.section import TableView

__all__ = ["observed_batches", "observed_view"]

_PLANNED = {
    "world_size": "data_parallel_size",
    "micro_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "global_batch_size": "global_batch_size",
}
"""Column of the plan that each observed number stands beside."""
_HEADERS = ("ranks", "micro-batch", "accumulation", "global batch")


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
    launched = ~runs["status"].isin(["rejected", "pending"])
    own = runs[engine.eq(PROGRAMS) & launched]
    table = own[["cell", "run_id", "status", "reason"]].copy()
    same = []
    for name, planned in _PLANNED.items():
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


def observed_view(table: pd.DataFrame, cells: Cells) -> TableView:
    """Choose what of the observations goes on a page.

    Parameters
    ----------
    table : DataFrame
        As `observed_batches` returns it; not empty.
    """
    labels = geometry_label(cells.table)
    rows, notes = [], []
    for row in table.to_dict("records"):
        pairs = [(row[f"observed_{name}"], row[f"planned_{name}"]) for name in _PLANNED]
        texts = [
            MISSING if pd.isna(seen) else str(seen) if seen == planned else f"{seen}, not {planned}"
            for seen, planned in pairs
        ]
        said = MISSING if pd.isna(row["agrees"]) else "yes" if row["agrees"] else "no"
        rows.append([labels[row["cell"]], row["run_id"], row["status"], *texts, said])
        sources = {
            source
            for name, (seen, _) in zip(_PLANNED, pairs, strict=True)
            if not pd.isna(seen) and isinstance(source := row[f"{name}_source"], str)
        }
        notes.append([f"seen in: {', '.join(sorted(sources))}" if sources else None])
    marks, footnotes = lettered(notes)
    grid = Grid(
        headers=["planned geometry", "run", "status", *_HEADERS, "as planned"],
        rows=rows,
        short_first="planned",
        n_left=3,
        marks=marks,
        footnotes=footnotes,
        notes=[
            f"The batch that each program was seen to use; {MISSING}: not observed, which "
            "contradicts nothing and confirms nothing. As planned is a run whose global batch was."
        ],
    )
    return TableView("observed_batches", "What programs were seen to use", table, grid)
