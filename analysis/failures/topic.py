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


def failures_by_cause(ended: pd.DataFrame) -> pd.DataFrame:
    """Count attempts that did not finish, by what ended them.

    Parameters
    ----------
    ended : DataFrame
        Attempts that have ended: `sweep_dir`, `run_id`, `status`, `cause`, `is_retried` (another
        attempt of the run followed) and `status_of_run`.

    Returns
    -------
    DataFrame
        One row a status and cause, the most frequent first: `status`, `cause`, `n_attempts`,
        `n_runs`, `n_retried` (attempts), `n_completed` (runs that have completed since),
        `run_ids`, `sweep_dirs`.
    """
    table = ended[ended["status"].isin(_UNFINISHED)]
    keys = ["status", "cause"]
    groups, runs = table.groupby(keys), table.drop_duplicates([*keys, *_RUN]).groupby(keys)
    counts = pd.DataFrame(
        {
            "n_attempts": groups.size(),
            "n_runs": runs.size(),
            "n_retried": groups["is_retried"].sum(),
            "n_completed": runs["status_of_run"].agg(_count_completed),
            "run_ids": runs["run_id"].agg(";".join),
            "sweep_dirs": runs["sweep_dir"].agg(lambda folders: ";".join(folders.unique())),
        }
    ).reset_index()
    return counts.sort_values("n_attempts", ascending=False, kind="stable", ignore_index=True)


def _count_completed(statuses: pd.Series[str]) -> int:
    return int(statuses.eq(str(Status.COMPLETED)).sum())


def failures_section(runs: pd.DataFrame, attempts: pd.DataFrame) -> Section | None:
    """Say how many attempts of some runs did not finish; None where all did."""
    attempts = attempts.merge(runs[[*_RUN, "status"]], on=_RUN, suffixes=("", "_of_run"))
    is_retried = attempts.groupby(_RUN)["started_at"].shift(-1).notna()
    ended = attempts.assign(is_retried=is_retried, cause=attempts["cause"].fillna("unknown"))
    ended = ended[ended["status"].notna()]
    table = failures_by_cause(ended)
    if table.empty:
        return None
    unfinished = ended[ended["status"].isin(_UNFINISHED)]
    runs_hit = unfinished.drop_duplicates(_RUN)
    return Section(
        "Failures and retries",
        [
            f"Of {count_text(len(ended), 'ended attempt')}, {len(unfinished)} did not finish, in "
            f"{count_text(len(runs_hit), 'run')}; {_count_completed(runs_hit['status_of_run'])} of "
            "these runs completed since."
        ],
        [
            Table(
                "failures",
                "Attempts that did not finish",
                table,
                [
                    Column("status", "ended as", is_left=True),
                    Column("cause", texts=table["cause"].str.replace("_", " "), is_left=True),
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
