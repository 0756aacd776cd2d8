"""What every run that is written to W&B has in common."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import wandb

__all__ = ["quiet_settings", "shows"]


def quiet_settings(patience_s: float) -> wandb.Settings:
    """Return settings by which W&B gets what it is given: no console, code, git, machine.

    Parameters
    ----------
    patience_s : float
        Time that W&B has to open a run, in seconds.
    """
    return wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        save_code=False,
        init_timeout=patience_s,
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
    )


def shows(
    path: str, state: str, patience_s: float, figures: Mapping[str, Any] | None = None
) -> bool:
    """Whether the server shows a run in its end state, which it enters after the last row.

    Parameters
    ----------
    path : str
        Entity, project and id.
    state : str
    patience_s : float
        Longest time until then, in seconds.
    figures : mapping, optional
        What W&B's own figures of the summary are replaced by, once it does.
    """
    deadline = time.monotonic() + patience_s
    wait_s = patience_s / 400
    while time.monotonic() < deadline:
        with suppress(Exception):  # W&B raises errors of many families
            # Anew each time: it answers from memory.
            run = wandb.Api(timeout=math.ceil(patience_s)).run(path)
            if run.state == state:
                if figures:
                    run.summary.update(figures)  # type: ignore[no-untyped-call]  # wandb's
                return True
        wait_s = min(2 * wait_s, patience_s / 20)
        time.sleep(wait_s)
    return False
