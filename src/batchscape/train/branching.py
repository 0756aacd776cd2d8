"""The state and the rows that one run keeps after some optimizer step, for others to begin with."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchscape.errors import BatchscapeError
from batchscape.record.disk import as_disk_error
from batchscape.record.files import json_lines, read_json_lines, write_atomically
from batchscape.record.folder import RunFolder
from batchscape.record.spec import RunSpec
from batchscape.train.checkpoint import Resumable, checkpoints, load_whole, save_checkpoint

_TRUNK_ATTEMPT = -1
"""Attempt of the rows that a run takes over from its trunk; attempts of its own count from 0."""


def keep_branch_point(folder: RunFolder, optimizer_step: int, state: Mapping[str, Any]) -> None:
    """Keep the state after an optimizer step, and all rows so far; one rename makes it appear."""
    point = folder.branch_point(optimizer_step)
    if point.is_dir():
        return
    unfinished = point.with_name(f".{point.name}.tmp")
    try:
        # A process that was killed while it wrote may have left one.
        shutil.rmtree(unfinished, ignore_errors=True)
        save_checkpoint(unfinished, optimizer_step, state)
        rows = folder.lines("steps"), folder.lines("evals"), folder.gradient_sketch
        # The record of the launch says on which device, and whether its times count.
        for path in (*rows, folder.launch):
            if path.exists():
                write_atomically(unfinished / path.name, path.read_bytes())
        unfinished.rename(point)
    except OSError as error:
        raise as_disk_error(error, folder.path) from error


@dataclass(frozen=True)
class BranchPoint:
    """What a run begins with."""

    folder: RunFolder
    """Folder of the run, with its copy of the state and the rows of the trunk."""
    trunk: str
    """Name of the run that trained them."""

    def find_resumable(self, before: Resumable) -> Resumable:
        """Return the state as that of a run without a checkpoint; every rank finds the same."""
        beginning = self.folder.beginning
        try:
            (path,) = checkpoints(beginning)
            state = load_whole(path, beginning / self.folder.lines("steps").name)
        except (BatchscapeError, ValueError) as error:
            note = f"{beginning} cannot be used: {error}; the run begins anew"
            return before._replace(notes=(*before.notes, note))
        note = f"optimizer steps 1 to {state['optimizer_step']} are those of {self.trunk}"
        return before._replace(state=state, notes=(*before.notes, note))

    def take_rows(self, spec: RunSpec) -> None:
        """Copy the rows to the run; its times are those of its own steps."""
        folder, evaluation_interval = self.folder, spec.evaluation_every_samples

        def would_evaluate(row: Mapping[str, Any]) -> bool:
            """Tell whether the run evaluates here; the trunk also did where it ended."""
            if row["samples"] == 0:
                return True
            return evaluation_interval is not None and row["samples"] % evaluation_interval == 0

        rows_by_path = {}
        for table, changes in (
            ("steps", {"attempt": _TRUNK_ATTEMPT, "warmup": True}),
            ("evals", {"attempt": _TRUNK_ATTEMPT, "evaluation_s": None}),
        ):
            path = folder.lines(table)
            rows_by_path[path] = [
                {**row, **changes}
                for row in read_json_lines(folder.beginning / path.name)
                if table == "steps" or would_evaluate(row)
            ]
        # Damage of one table is met before the other is written.
        for path, rows in rows_by_path.items():
            write_atomically(path, json_lines(rows))
        sketch = folder.beginning / folder.gradient_sketch.name
        if sketch.exists():
            write_atomically(folder.gradient_sketch, sketch.read_bytes())
