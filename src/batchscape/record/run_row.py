"""What is known of one run, as one flat row."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from batchscape.errors import DamageError, RecordError
from batchscape.record.figures import FIGURES
from batchscape.record.files import read_json
from batchscape.record.folder import RunFolder
from batchscape.record.status import RunStatus, check_version

__all__ = ["run_row"]

_ASKED = (
    "nodes",
    "data_parallel_size",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
)


def run_row(folder: RunFolder, status: RunStatus) -> dict[str, Any]:
    """Flatten what is known of one run into one row.

    Parameters
    ----------
    folder : RunFolder
    status : RunStatus
        What its `status.json` says.

    Returns
    -------
    dict
        Identity, status, geometry, what was resolved, where it ran, its summary, its settings.

    Raises
    ------
    RecordError
        If a file of the folder is damaged or of another format version.
    """
    config = read_json(folder.config)
    check_version(folder.config, config)
    try:
        return _row(folder, status, config)
    except KeyError as error:
        msg = f"{folder.config} is damaged: it lacks {error}"
        raise DamageError(msg) from None
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        msg = f"{folder.config} is damaged: {error}"
        raise DamageError(msg) from None


def _row(folder: RunFolder, status: RunStatus, config: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "run_id": config["run_id"],
        "trajectory_id": config["trajectory_id"],
        "sweep_name": config["sweep_name"],
        "status": str(status.status),
        "stop_reason": None if status.stop_reason is None else str(status.stop_reason),
        "reason": status.reason,
        "cause": None if status.cause is None else str(status.cause),
        "rank": status.rank,
        "attempts": len(status.attempts),
        "started_at": status.attempts[-1].started_at if status.attempts else None,
    }
    settings = _flatten(config["config"])
    # Part of the device, and in the table by the name that figures of memory have.
    row["memory_limit_gib"] = settings.pop("device.memory_limit_gib", None)
    # A rejected cell has no solved geometry: it shows what was asked for.
    row |= config["geometry"] or {
        "devices_per_node": None,
        **{name: settings[f"batch.{name}"] for name in _ASKED},
    }
    resolved = dict(config["resolved"] or {})
    stages = resolved.pop("stages", [])
    not_passed = resolved.pop("not_passed", [])
    batches = [str(stage["geometry"]["global_batch_size"]) for stage in stages]
    row["ramp"] = "\u2192".join(batches) if len(batches) > 1 else None
    # Ramps of one text may climb at other places.
    climbs = [str(stage["samples"]) for stage in stages[:-1]]
    row["ramp_samples"] = ", ".join(climbs) if climbs else None
    # What a scaling rule made of the asked one, at the peak of the schedule.
    row["learning_rate"] = stages[-1]["optimizer"]["learning_rate"] if stages else None
    for name, value in resolved.items():
        # What was planned must not pass for what was done.
        row[f"planned_{name}" if name in FIGURES else name] = value
    if folder.launch.exists():
        launch = read_json(folder.launch)
        launch.pop("rendezvous", None)  # a temporary path, gone when the run ends
        row |= _flatten(launch, "launch.")
    if folder.environment.exists():
        row |= _flatten(read_json(folder.environment), "environment.")
    if folder.prediction.exists():
        with suppress(RecordError):  # a run is no worse for what was said of it before
            row |= _flatten(read_json(folder.prediction), "predicted.")
    if config["data"] is not None:
        row["data.manifest_hash"] = config["data"]["manifest_hash"]
        row["task"] = config["data"]["task"]
        row["train_samples"] = config["data"].get("train_samples")
    row |= {name: status.summary.get(name) for name in FIGURES}
    # What a program was never told must not look as if it had applied.
    settings |= dict.fromkeys(key for key in not_passed if "." in key)
    if "optimizer.learning_rate" in not_passed:
        row["learning_rate"] = None
    if folder.command.exists():
        observed = read_json(folder.command).get("observed", {})
        row |= _flatten(observed, "observed.")
    # What was resolved, such as a seed or the sweep's name, stays before what was asked for.
    kept = {"sweep_dir", *row}
    return row | {name: value for name, value in settings.items() if name not in kept}


def _flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, dict):  # as JSON has it; any mapping takes ten times as long to tell
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
