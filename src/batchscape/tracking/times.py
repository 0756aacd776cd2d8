"""When the rows of a run came to be, by what the record knows of their times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from batchscape.record.status import Attempt

__all__ = ["row_times", "run_time_s", "wandb_step"]


def wandb_step(table: str, optimizer_step: Any) -> Any:  # noqa: ANN401  (an int or a Series)
    """Return what W&B numbers a row by: 2k for optimizer step k, 2k + 1 for the evaluation then."""
    return 2 * optimizer_step + (table == "evals")


def run_time_s(attempts: Sequence[Attempt]) -> float:
    """Return how long the processes of a run ran, over all attempts that have ended, in seconds."""
    return sum(a.ended_at - a.started_at for a in attempts if a.ended_at is not None)


def row_times(
    steps: pd.DataFrame, evals: pd.DataFrame, ranks: pd.DataFrame, attempts: Sequence[Attempt]
) -> dict[int, float]:
    """Return when each row was written, in seconds since the epoch.

    That is the start of its attempt, the time until the first step, and the steps, gaps and
    evaluations up to it; never after the end of the attempt. Checkpoints are not counted, since
    the record does not know between which rows they came.

    Parameters
    ----------
    steps, evals, ranks : DataFrame
        Rows of one run, with columns of `record.columns`.
    attempts : sequence of Attempt

    Returns
    -------
    dict
        Keys as `wandb_step` returns them. Rows of an attempt that is not known are left out.
    """
    rows = pd.concat(
        [
            pd.DataFrame(
                {
                    "step": wandb_step(table, frame["optimizer_step"]),
                    "attempt": frame["attempt"],
                    "took_s": frame[list(taken)].astype("Float64").sum(axis=1),
                }
            )
            for table, frame, taken in (
                ("steps", steps, ("step_time_s", "gap_s")),
                ("evals", evals, ("evaluation_s",)),
            )
        ]
    ).sort_values("step")
    rows = rows[rows["attempt"].between(0, len(attempts) - 1)]
    starting = ranks.groupby("attempt")[["startup_s", "compile_s"]].max().sum(axis=1)
    numbers = rows["attempt"].astype(int)
    began = numbers.map(lambda k: attempts[k].started_at) + numbers.map(starting).fillna(0.0)
    ended = numbers.map(lambda k: attempts[k].ended_at).astype(float).fillna(float("inf"))
    at = began + rows.groupby("attempt")["took_s"].cumsum().astype(float)
    return dict(
        zip(rows["step"].astype(int), at.where(at < ended, ended).astype(float), strict=True)
    )
