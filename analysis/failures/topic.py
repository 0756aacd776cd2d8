"""Attempts that did not complete: what ended them, and what came of their runs.

When an attempt ended that died with its launcher, and what it had done by then, nobody has noted:
there are counts here, and no times.
"""

from __future__ import annotations

import pandas as pd

from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section
from batchscape.record.status import FAULTS, Status
from batchscape.text import count_text

_FAILURES = [str(status) for status in (*FAULTS, Status.INTERRUPTED)]
_RUN = ["sweep_dir", "run_id"]


def failures_by_cause(runs: pd.DataFrame, attempts: pd.DataFrame) -> pd.DataFrame:
    """Count attempts that failed, by what ended them.

    Parameters
    ----------
    runs : DataFrame
        One row a run: `sweep_dir`, `run_id`, `status`.
    attempts : DataFrame
        As `load` returns them; those of other runs, and those that have not ended, are left out.

    Returns
    -------
    DataFrame
        One row a status and cause, the most frequent first: `status` (failed, out of memory,
        timed out or interrupted), `cause` (`unknown` where none was recorded), `n_attempts`,
        `n_runs`, `n_retried` (attempts that another one followed), `n_completed` (runs that have
        completed since), `run_ids`, `sweep_dirs`.
    """
    table = attempts.merge(runs[[*_RUN, "status"]], on=_RUN, suffixes=("", "_of_run"))
    has_next = table.groupby(_RUN)["started_at"].shift(-1).notna()
    table = table.assign(cause=table["cause"].fillna("unknown"), has_next=has_next)
    rows = []
    failed = table[table["status"].isin(_FAILURES)]
    for (status, cause), group in failed.groupby(["status", "cause"]):
        runs_hit = group.drop_duplicates(_RUN)
        rows.append(
            {
                "status": status,
                "cause": cause,
                "n_attempts": len(group),
                "n_runs": len(runs_hit),
                "n_retried": int(group["has_next"].sum()),
                "n_completed": int(runs_hit["status_of_run"].eq(str(Status.COMPLETED)).sum()),
                "run_ids": ";".join(runs_hit["run_id"]),
                "sweep_dirs": ";".join(runs_hit["sweep_dir"].unique()),
            }
        )
    columns = ["status", "cause", "n_attempts", "n_runs", "n_retried", "n_completed"]
    by_cause = pd.DataFrame(rows, columns=[*columns, "run_ids", "sweep_dirs"])
    return by_cause.sort_values("n_attempts", ascending=False, kind="stable", ignore_index=True)


def failures_section(runs: pd.DataFrame, attempts: pd.DataFrame) -> Section | None:
    """Say how many attempts failed; None where none did."""
    table = failures_by_cause(runs, attempts)
    if table.empty:
        return None
    ended = attempts[attempts["status"].notna()].merge(runs[_RUN], on=_RUN)
    failed = ended[ended["status"].isin(_FAILURES)]
    hit = failed[_RUN].drop_duplicates().merge(runs[[*_RUN, "status"]], on=_RUN)
    completed = int(hit["status"].eq(str(Status.COMPLETED)).sum())
    causes = table["cause"].str.replace("_", " ")
    return Section(
        "Failures and retries",
        [
            f"{len(failed)} of {count_text(len(ended), 'attempt')} that have ended failed, of "
            f"{count_text(len(hit), 'run')}, {completed} of which completed since."
        ],
        [
            Table(
                "failures",
                "Attempts that failed",
                table,
                [
                    Column("status", "ended as", is_left=True),
                    Column("cause", words=dict(zip(table["cause"], causes, strict=True))),
                    Column("n_attempts", "attempts"),
                    Column("n_runs", "runs"),
                    Column("n_retried", "attempts retried"),
                    Column("n_completed", "runs completed since"),
                ],
                notes=[
                    "attempts: starts of a run's processes that have ended as failed, out of "
                    "memory, timed out or interrupted (by somebody, or with their launcher); "
                    "diverged and pruned runs have a result. A run that failed for several causes "
                    "is counted in each row."
                ],
            )
        ],
    )
