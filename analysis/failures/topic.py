"""Attempts that did not complete: what ended them, what they took, and how soon the next began."""

from __future__ import annotations

import math

import pandas as pd

from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section
from batchscape.analysis.targets.censoring import median_with_infinity
from batchscape.record.status import FAULTS, Status
from batchscape.text import count_text

_FAILURES = [str(status) for status in (*FAULTS, Status.INTERRUPTED)]


def failed_attempts(runs: pd.DataFrame, attempts: pd.DataFrame) -> pd.DataFrame:
    """Return the attempts that did not complete, each with what came after it.

    Parameters
    ----------
    runs, attempts : DataFrame
        As `load` returns them.

    Returns
    -------
    DataFrame
        A row an attempt that ended as failed, out of memory, timed out or interrupted: the columns
        of `attempts`, with `cause` `unknown` where none was recorded; `run` (its number),
        `is_completed` (the run, since), `device_hours`, `is_kept` (the next attempt began at a
        later optimizer step than this one), `pause_min` until it began (infinite without one).
    """
    keys = ["sweep_dir", "run_id"]
    of_run = runs[[*keys, "data_parallel_size"]].assign(
        is_completed=runs["status"].eq(str(Status.COMPLETED))
    )
    table = attempts.merge(of_run, on=keys)
    following = table.groupby(keys)[["started_at", "from_optimizer_step"]].shift(-1)
    ended_at = table["ended_at"].astype(float)
    # Clocks of two machines may differ by more than the pause.
    pause_s = (following["started_at"] - ended_at).clip(lower=0)
    table = table.assign(
        cause=table["cause"].fillna("unknown"),
        run=table.groupby(keys).ngroup(),
        device_hours=(ended_at - table["started_at"])
        * table["data_parallel_size"].astype(float)
        / 3600,
        is_kept=following["from_optimizer_step"] > table["from_optimizer_step"],
        pause_min=pause_s.fillna(math.inf) / 60,
    )
    return table[table["status"].isin(_FAILURES)]


def failures_by_cause(failed: pd.DataFrame) -> pd.DataFrame:
    """Sum up attempts that did not complete.

    Parameters
    ----------
    failed : DataFrame
        As `failed_attempts` returns it.

    Returns
    -------
    DataFrame
        One row a status and cause, those that took most first: `status`, `cause`, `n_attempts`,
        `n_runs`, `n_completed` (of these runs: completed since), `n_kept`, `device_hours`;
        `minutes_to_next` with `low` and `high`: the median over attempts, of which those without a
        next one count as infinite (missing where the median is infinite); `run_ids`.
    """
    rows = []
    for (status, cause), group in failed.groupby(["status", "cause"]):
        median = median_with_infinity(group["pause_min"])
        runs_hit = group.drop_duplicates("run")
        rows.append(
            {
                "status": status,
                "cause": cause,
                "n_attempts": len(group),
                "n_runs": len(runs_hit),
                "n_completed": int(runs_hit["is_completed"].sum()),
                "n_kept": int(group["is_kept"].sum()),
                "device_hours": group["device_hours"].sum(),
                "minutes_to_next": median.value if math.isfinite(median.value) else math.nan,
                "low": median.low,
                "high": median.high,
                "run_ids": " ".join(runs_hit["run_id"]),
            }
        )
    return pd.DataFrame(rows).sort_values(
        ["device_hours", "n_attempts"], ascending=False, kind="stable", ignore_index=True
    )


def failures_section(runs: pd.DataFrame, attempts: pd.DataFrame) -> Section | None:
    """Say what attempts took that did not complete; None where all of them did."""
    failed = failed_attempts(runs, attempts)
    if failed.empty:
        return None
    table = failures_by_cause(failed)
    n_runs = failed["run"].nunique()
    return Section(
        "Failures and retries",
        [
            f"{len(failed)} of {count_text(len(attempts), 'attempt')} did not complete, of "
            f"{count_text(n_runs, 'run')}; they took {failed['device_hours'].sum():.3g} "
            "device-hours."
        ],
        [
            Table(
                "failures",
                "Attempts that did not complete",
                table.assign(cause=table["cause"].str.replace("_", " ")),
                [
                    Column("status", "ended as", is_left=True),
                    Column("cause", is_left=True),
                    Column("n_attempts", "attempts"),
                    Column("n_runs", "runs"),
                    Column("n_completed", "runs completed since"),
                    Column("n_kept", "progress kept"),
                    Column("device_hours", "device-hours", format=3),
                    Column(
                        "minutes_to_next",
                        "until the next attempt (min)",
                        format=3,
                        low="low",
                        high="high",
                        n="n_attempts",
                    ),
                ],
                notes=[
                    "attempts: starts of a run's processes that ended as failed, out of memory, "
                    "timed out or interrupted. progress kept: of these, those whose next attempt "
                    "began from a checkpoint at a later optimizer step than they had begun at. "
                    "device-hours: from start to end, times data-parallel ranks. until the next "
                    "attempt: from the end to the start of the same run's next attempt, the median "
                    "over attempts with its 95 % interval by order statistics; an attempt without "
                    "a next one counts as infinite, and where that makes the median infinite none "
                    "is shown."
                ],
            )
        ],
    )
