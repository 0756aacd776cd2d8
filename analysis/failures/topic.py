"""Attempts that did not finish: what ended them, and what came of their runs.

There are counts here, and no times: how much of an attempt was lost, nobody has noted.
"""

from __future__ import annotations

import pandas as pd

from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section
from batchscape.record.status import FAULTS, Status
from batchscape.text import count_text

_UNFINISHED = [str(status) for status in (*FAULTS, Status.INTERRUPTED)]
_RUN = ["sweep_dir", "run_id"]


def ended_attempts(runs: pd.DataFrame, attempts: pd.DataFrame) -> pd.DataFrame:
    """Return the attempts of some runs that have ended, and what came after each.

    Parameters
    ----------
    runs : DataFrame
        One row a run: `sweep_dir`, `run_id`, `status`.
    attempts : DataFrame
        As `load` returns them.

    Returns
    -------
    DataFrame
        The columns of `attempts`, with `cause` `unknown` where none was recorded;
        `status_of_run`, `is_retried` (another attempt of the run followed), `is_unfinished` (it
        ended as failed, out of memory, timed out or interrupted).
    """
    table = attempts.merge(runs[[*_RUN, "status"]], on=_RUN, suffixes=("", "_of_run"))
    table["is_retried"] = table.groupby(_RUN)["started_at"].shift(-1).notna()
    table["is_unfinished"] = table["status"].isin(_UNFINISHED)
    table["cause"] = table["cause"].fillna("unknown")
    return table[table["status"].notna()]


def failures_by_cause(unfinished: pd.DataFrame) -> pd.DataFrame:
    """Count attempts that did not finish, by what ended them.

    Parameters
    ----------
    unfinished : DataFrame
        Those of `ended_attempts`.

    Returns
    -------
    DataFrame
        One row a status and cause, the most frequent first: `status`, `cause`, `n_attempts`,
        `n_runs`, `n_retried` (attempts), `n_completed` (runs that have completed since),
        `run_ids`, `sweep_dirs`.
    """
    rows = []
    for (status, cause), group in unfinished.groupby(["status", "cause"]):
        runs_hit = group.drop_duplicates(_RUN)
        rows.append(
            {
                "status": status,
                "cause": cause,
                "n_attempts": len(group),
                "n_runs": len(runs_hit),
                "n_retried": int(group["is_retried"].sum()),
                "n_completed": _count_completed(runs_hit),
                "run_ids": ";".join(runs_hit["run_id"]),
                "sweep_dirs": ";".join(runs_hit["sweep_dir"].unique()),
            }
        )
    by_cause = pd.DataFrame(rows)
    return by_cause.sort_values("n_attempts", ascending=False, kind="stable", ignore_index=True)


def _count_completed(runs: pd.DataFrame) -> int:
    return int(runs["status_of_run"].eq(str(Status.COMPLETED)).sum())


def failures_section(runs: pd.DataFrame, attempts: pd.DataFrame) -> Section | None:
    """Say how many attempts did not finish; None where all did."""
    ended = ended_attempts(runs, attempts)
    unfinished = ended[ended["is_unfinished"]]
    if unfinished.empty:
        return None
    table = failures_by_cause(unfinished)
    runs_hit = unfinished.drop_duplicates(_RUN)
    causes = {cause: cause.replace("_", " ") for cause in table["cause"]}
    return Section(
        "Failures and retries",
        [
            f"Of {count_text(len(ended), 'ended attempt')}, {len(unfinished)} did not finish, in "
            f"{count_text(len(runs_hit), 'run')}; {_count_completed(runs_hit)} of these runs "
            "completed since."
        ],
        [
            Table(
                "failures",
                "Attempts that did not finish",
                table,
                [
                    Column("status", "ended as", is_left=True),
                    Column("cause", words=causes, is_left=True),
                    Column("n_attempts", "attempts"),
                    Column("n_runs", "runs"),
                    Column("n_retried", "attempts retried"),
                    Column("n_completed", "runs completed since"),
                ],
                notes=[
                    "attempts: starts of a run's processes that have ended as failed, out of "
                    "memory, timed out or interrupted (by somebody, or with their launcher); "
                    "completed, diverged and pruned ones finished. A run that ended so by several "
                    "causes is counted in each row."
                ],
            )
        ],
    )
