"""What W&B is told of a run when it is opened: its config, and how the client behaves."""

from __future__ import annotations

from typing import Any

import wandb

from batchscape.outgoing import outgoing_json
from batchscape.record.files import read_json
from batchscape.record.folder import RunFolder
from batchscape.record.summary import SUMMARY
from batchscape.record.timing import VERDICT

__all__ = ["run_config", "run_settings"]


def run_config(folder: RunFolder) -> dict[str, Any]:
    """Return what W&B shows as the config of a run.

    Groups of settings stay nested, which W&B shows as `model.name`; a dot inside a key would
    break its queries.

    Raises
    ------
    RecordError
        If a file is missing or damaged.
    """
    content = read_json(folder.config)
    config: dict[str, Any] = dict(content["config"])
    for name, value in content["resolved"].items():
        # What was planned must not pass for what was done.
        config[f"planned_{name}" if name in SUMMARY else name] = value
    config |= content["geometry"]
    config |= {name: content[name] for name in ("run_id", "trajectory_id", "sweep_name")}
    config["data_manifest_hash"] = content["data"]["manifest_hash"]
    if folder.launch.exists():
        launch = read_json(folder.launch)
        # A path that is gone when the run ends, and what the summary says with the run's end.
        for name in ("rendezvous", *VERDICT):
            launch.pop(name, None)
        config["launch"] = launch
    leaving: dict[str, Any] = outgoing_json(config)
    return leaving


def run_settings(init_timeout_s: float) -> wandb.Settings:
    """Return settings with nothing but the run folder: no console, code, git, machine statistics.

    Parameters
    ----------
    init_timeout_s : float
        Time that W&B has to open the run, in seconds.
    """
    return wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        save_code=False,
        init_timeout=init_timeout_s,
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
    )
