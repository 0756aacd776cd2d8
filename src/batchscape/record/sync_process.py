"""The process that uploads run folders to W&B: `python -m batchscape.record.sync_process`.

It mirrors each run online, from its folder: the server is asked for the last row that it has, and
gets the later ones. What was written offline before is so covered, whole or in part, and marked as
uploaded. Standard output carries one JSON object a line, as `record.sync_upload` reads it.

After a run that W&B failed on, this process ends, and another one goes on: a fresh start is the
only state of the W&B library that is known to work.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import wandb
from pydantic import TypeAdapter, ValidationError

from batchscape.config import Tracker, WandbTracker
from batchscape.credentials import redact
from batchscape.errors import RecordError
from batchscape.record.files import read_json
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.mirror_bounds import contact_s, patience_s
from batchscape.record.mirror_process import end_helpers, knows_a_key, only_one
from batchscape.record.mirror_state import MIRRORED_STATUSES, MirrorState
from batchscape.record.status import RunStatus
from batchscape.record.tables import verify_seal
from batchscape.record.wandb_run import WandbRun

__all__ = ["main"]

_TRACKER: TypeAdapter[Tracker] = TypeAdapter(Tracker)
_NO_KEY = "no API key of Weights & Biases is known; `wandb login` or WANDB_API_KEY gives one"
_BUSY = "another process mirrors this sweep now: its own sweep, or another sync; wait for its end"


def main(arguments: Sequence[str] | None = None) -> int:
    """Upload runs of one sweep, one after the other.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those of the command line by default.

    Returns
    -------
    int
        Exit code: 0 also where runs failed, which is told on the standard output.
    """
    parser = argparse.ArgumentParser(description="Upload runs of a sweep to W&B.")
    parser.add_argument("sweep_dir", type=Path)
    parser.add_argument("destination", help="`project` and `entity` of new W&B runs, as JSON")
    parser.add_argument("runs", nargs="+")
    given = parser.parse_args(arguments)
    destination = json.loads(given.destination)
    with only_one(given.sweep_dir, wait=False) as alone:
        if not alone:
            _tell(event="busy", reason=_BUSY)
            return 0
        if (problem := _problem()) is not None:
            _tell(event="refused", reason=problem)
            return 0
        for run in given.runs:
            _tell(event="start", run=run)
            try:
                _upload(SweepFolder(given.sweep_dir), run, destination)
            except RecordError as error:
                _tell(event="failed", run=run, reason=str(error))
            except Exception as error:  # noqa: BLE001  (W&B raises errors of many families)
                said = f"{type(error).__name__}: {error}".splitlines()[0]
                _tell(event="failed", run=run, reason=said)
                return 0
            else:
                _tell(event="done", run=run)
    return 0


def _problem() -> str | None:
    """Say why nothing can be uploaded; None if W&B answers to the key."""
    if not knows_a_key():
        return _NO_KEY
    silence = threading.Timer(contact_s(), _refuse_silence)
    silence.daemon = True
    silence.start()
    try:
        wandb.Api(timeout=math.ceil(patience_s()))
    except Exception as error:  # noqa: BLE001  (W&B raises errors of many families)
        return (
            f"Weights & Biases cannot be used: {str(error).splitlines()[0]}. Check the network, "
            f"WANDB_BASE_URL, and the key (`wandb login --relogin`)"
        )
    finally:
        silence.cancel()
    return None


def _refuse_silence() -> NoReturn:
    """A call that hangs cannot be ended; the process can."""
    silence = f"Weights & Biases cannot be used: no answer within {contact_s():g} s"
    _tell(event="refused", reason=f"{silence}. Check the network and WANDB_BASE_URL")
    end_helpers()
    os._exit(0)


def _upload(sweep: SweepFolder, run: str, destination: dict[str, str | None]) -> None:
    folder = sweep.run(run)
    status = RunStatus.read(folder.status)
    state = MirrorState.read(folder)
    # Another process may have been here since the list was made.
    uploaded = state is not None and state.is_uploaded(status, sweep.path)
    if uploaded or status.status not in MIRRORED_STATUSES:
        return
    verify_seal(folder, status)
    mirrored = WandbRun(
        folder,
        sweep.path,
        _tracker(folder, destination),
        mode="online",
        status=status,
        problem=None,
        patience_s=patience_s(),
    )
    if not mirrored.close(status):
        msg = "W&B took the run and does not show its end; the rows it lacks are sent next time"
        raise RuntimeError(msg)


def _tracker(folder: RunFolder, destination: dict[str, str | None]) -> WandbTracker:
    """Return the tracker that a run was launched with, or the default one, and where it leads."""
    try:
        tracker = _TRACKER.validate_json(json.dumps(read_json(folder.config)["config"]["tracker"]))
    except (KeyError, TypeError, ValidationError) as error:
        msg = f"{folder.config} is damaged: {error}"
        raise RecordError(msg) from None
    if not isinstance(tracker, WandbTracker):
        tracker = WandbTracker(name="wandb")
    return WandbTracker(
        name="wandb",
        mode="online",
        project=destination["project"] or tracker.project,
        entity=destination["entity"] or tracker.entity,
        tags=tracker.tags,
    )


def _tell(**message: str) -> None:
    sys.stdout.write(json.dumps({name: redact(text) for name, text in message.items()}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
