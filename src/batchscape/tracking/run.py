"""One run folder as one W&B run: what of it is mirrored, under which names.

==============  =====================================================================
W&B             run folder
==============  =====================================================================
name            geometry, engine, model, optimizer, learning rate, a hash of the cell, seed:
                `2x8x4 fsdp gpt adamw 0.001 1f3a2b s3`
group           the cell: the same for all seeds, so that W&B draws their mean and range
config          geometry, identity and resolved settings as columns; all settings that the
                program was told, nested; how it was launched (`launch.devices`, ...)
history         one row an optimizer step, one an evaluation; every row carries all axes, the
                last one also the figures of the run, each of which so makes a panel of bars
axes            `samples` for losses, `optimizer_step` for times; `tokens` and
                `train_time_s` to choose from
summary         the summary of `status.json`, each figure once, under the name of its panel where
                it has one, with status, stop reason and reason; times only where they count, and
                `timing_valid` and `timing_invalid_reason` beside them; of a run of a search
                `objective/...`, what it makes small
`_timestamp`    when the row came to be, by the times in the record
`_runtime`      in the summary at the server: how long the processes of the run ran
tags            those of the tracker, the status, and `timing_invalid` where no time counts
state           finished for a completed or pruned run, else failed
==============  =====================================================================

Names in W&B are in `tracking.names`. Missing values are left out of rows; as in the tables, a loss
that is not a number is missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import wandb

from batchscape.config import Sampler, WandbTracker
from batchscape.outgoing import outgoing, outgoing_json
from batchscape.record.columns import RESIDENT
from batchscape.record.files import read_json
from batchscape.record.folder import RunFolder
from batchscape.record.objective import objective_of
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus, Status
from batchscape.record.summary import SUMMARY, counts_tokens
from batchscape.record.tables import read_table, verify_seal
from batchscape.record.tail import Tail
from batchscape.record.timing import TIMES, VERDICT, timed_figures, why_run_untimed
from batchscape.tracking.labels import Label, told_settings
from batchscape.tracking.names import (
    AXES,
    CURVES,
    FIGURES,
    Row,
    axis_of,
    curve_points,
    figure_points,
    mirrored_names,
)
from batchscape.tracking.server import quiet_settings, shows
from batchscape.tracking.state import MirrorState, content_of, id_of
from batchscape.tracking.times import row_times, run_time_s, wandb_step

__all__ = ["WandbRun"]

_TIMESTAMP = "_timestamp"
"""W&B's own name for when a row came to be, which it takes from the row where that has one."""
_ONLY_ESTIMATED = frozenset({"peak_allocated_gib"})
_UNTIMED = "timing_invalid"
"""Tag of a run whose times do not count."""


class WandbRun:
    """A run folder and the W&B run that it is written to, from init to finish.

    Parameters
    ----------
    folder : RunFolder
    sweep_dir : Path
    tracker : WandbTracker
        Its mode is not asked.
    mode : str
        `online` or `offline`.
    status : RunStatus
        How the run stands now.
    label : Label
        What it is called.
    sweep_id : str
        What W&B calls its sweep.
    patience_s : float
        Time that W&B has to open the run, which it keeps to loosely, and to show its end.
    """

    def __init__(
        self,
        folder: RunFolder,
        sweep_dir: Path,
        tracker: WandbTracker,
        *,
        mode: Literal["online", "offline"],
        status: RunStatus,
        label: Label,
        sweep_id: str,
        patience_s: float,
    ) -> None:
        config = _config(folder) | {"sweep_id": sweep_id}
        id_ = id_of(folder.path.name, status)
        self._folder = folder
        self._sweep_dir = sweep_dir
        self._tracker = tracker
        self._mode = mode
        self._patience_s = patience_s
        self._tails = {table: Tail(folder.lines(table)) for table in CURVES}
        self._waiting: list[tuple[int, str, Row]] = []
        self._state = state = MirrorState.read(folder) or MirrorState(
            project=tracker.project, entity=tracker.entity
        )
        state.remove_strays(sweep_dir, id_)
        self._run = wandb.init(
            id=id_,
            name=outgoing(label.name),
            group=outgoing(label.group),
            job_type="train",
            project=state.project,
            entity=state.entity,
            tags=self._tags(status),
            config=config,
            dir=str(sweep_dir),
            mode=mode,
            resume="allow",
            reinit="create_new",
            allow_val_change=True,
            settings=quiet_settings(patience_s),
        )
        if mode == "online":
            # From here on rows may arrive that are not noted yet: the server is asked for them,
            # and for those that are only on the disk, which are mirrored again, in order.
            known = state.last_step if state.is_at_server(sweep_dir) else -1
            state.last_step = max(known, self._run.starting_step - 1)
            state.mode, state.content = "online", None
            state.write(folder)
        self._last_step = state.last_step
        self._tokens: int | None = 0
        self._steps_with_tokens = 0
        self._counts_tokens = counts_tokens(read_json(folder.config))
        self._may_add_figures = False
        self._define_axes()

    def follow(self) -> None:
        """Mirror the rows that were written since the last call, while the run runs."""
        # The order of reading matters: an evaluation is written before any later optimizer step.
        for table in CURVES:
            self._waiting += _keyed(table, self._tails[table].read())
        reached = max((step for step, table, _ in self._waiting if table == "steps"), default=0)
        ready = max(reached, self._last_step) + 1  # the evaluation after the last known step
        self._log(row for row in self._waiting if row[0] <= ready)
        self._waiting = [row for row in self._waiting if row[0] > ready]

    def close(self, status: RunStatus) -> bool:
        """Mirror all the rest of a run that has ended, and how it ended.

        Returns
        -------
        bool
            Whether all of it has arrived: on the disk, or at the server.

        Raises
        ------
        RecordError
            If what was sealed is damaged.
        """
        verify_seal(self._folder, status)
        untimed = why_run_untimed(self._folder, status)
        tables = {name: read_table(self._folder, name) for name in (*CURVES, "ranks")}
        times = row_times(tables["steps"], tables["evals"], tables["ranks"], status.attempts)
        self._log(
            (row for table in CURVES for row in _keyed(table, self._new_rows(table, tables))), times
        )
        ranks = tables["ranks"]
        unknown = _ONLY_ESTIMATED if _is_resident(ranks) else frozenset()
        if self._may_add_figures:
            # W&B takes what else is logged at the latest step as a part of its row.
            known = {name: v for name, v in status.summary.items() if name not in unknown}
            points = figure_points(timed_figures(known, untimed))
            if (at := times.get(self._last_step)) is not None:
                points[_TIMESTAMP] = at
            self._run.log(points, step=self._last_step)
        figures = {name: status.summary.get(name) for name in SUMMARY if name not in unknown}
        figures = timed_figures(figures, untimed)
        self._run.summary.update(
            {
                **{FIGURES.get(name, name): value for name, value in figures.items()},
                **dict(zip(VERDICT, (untimed is None, untimed), strict=True)),
                **_objectives(self._folder, status, timed=untimed is None),
                "status": str(status.status),
                "stop_reason": None if status.stop_reason is None else str(status.stop_reason),
                "reason": None if status.reason is None else outgoing(status.reason),
                "attempts": len(status.attempts),
            }
        )
        for name in (TIMES if untimed is not None else frozenset()) | unknown:
            # An attempt that ended before may have left them there.
            del self._run.summary[FIGURES.get(name, name)]  # type: ignore[no-untyped-call]  # of wandb
        self._run.tags = self._tags(status)
        path, written = self._run.path, Path(self._run.dir).parent.name
        ended_well = status.status in {Status.COMPLETED, Status.PRUNED}
        self._run.finish(exit_code=0 if ended_well else 1)
        state = self._state
        if self._mode == "online":
            # W&B's own finish returns in silence when an upload was refused for good.
            ran_s = run_time_s(status.attempts)
            own = {"_runtime": ran_s, "_wandb": {"runtime": round(ran_s)}}
            if not shows(path, "finished" if ended_well else "failed", self._patience_s, own):
                return False
            state.mark_sent(self._sweep_dir)
        else:
            state.segments.append(written)
        state.mode, state.last_step = self._mode, self._last_step
        state.content = content_of(status)
        state.write(self._folder)
        return True

    def _log(
        self, rows: Iterable[tuple[int, str, Row]], times: Mapping[int, float] | None = None
    ) -> None:
        """Log rows that W&B lacks; the time of a row that is not given is now."""
        for step, table, row in sorted(rows, key=lambda keyed: keyed[0]):
            tokens_before = None
            if table == "steps":
                # A program may log every n-th step: the labels between are no single step's.
                if row["optimizer_step"] == self._steps_with_tokens + 1:
                    tokens_before = self._tokens
                self._tokens, self._steps_with_tokens = row.get("tokens"), row["optimizer_step"]
            # A resumed run writes again what came after its checkpoint.
            if step <= self._last_step:
                continue
            points = curve_points(table, row, tokens_before, counts_tokens=self._counts_tokens)
            if times is not None and step in times:
                points[_TIMESTAMP] = times[step]
            self._run.log(points, step=step)
            self._last_step = step
            self._may_add_figures = True

    def _new_rows(self, table: str, tables: Mapping[str, pd.DataFrame]) -> list[Row]:
        rows = tables[table]
        known = int((wandb_step(table, rows["optimizer_step"]) <= self._last_step).sum())
        # With the last known row: the next one's tokens are counted from there.
        new = rows.iloc[max(known - 1, 0) :].to_dict("records")
        return [{str(name): value for name, value in row.items()} for row in new]

    def _define_axes(self) -> None:
        for axis in AXES:
            # Their last values belong to the summary of the run folder, not to the last row.
            self._run.define_metric(axis, hidden=True, summary="none")
        for name in mirrored_names():
            # Nor does the end of a curve, which a figure of the run says, or which is one step's.
            last = None if name in FIGURES.values() else "none"
            self._run.define_metric(name, step_metric=axis_of(name), step_sync=False, summary=last)

    def _tags(self, status: RunStatus) -> tuple[str, ...]:
        untimed = [_UNTIMED] if why_run_untimed(self._folder, status) is not None else []
        tags = [*map(outgoing, self._tracker.tags), str(status.status), *untimed]
        return tuple(dict.fromkeys(tags))


def _config(folder: RunFolder) -> dict[str, Any]:
    """Return what W&B shows as the config of a run.

    Groups of settings stay nested, which W&B shows as `model.name`; a dot inside a key would
    break its queries.
    """
    content = read_json(folder.config)
    config: dict[str, Any] = told_settings(content)
    lacking = set(content["resolved"].get("not_passed", ()))
    for name, value in content["resolved"].items():
        if name in lacking or name == "not_passed":
            continue
        # What was planned must not pass for what was done.
        config[f"planned_{name}" if name in SUMMARY else name] = value
    config["stages"] = [
        {
            **stage,
            "optimizer": {
                name: value
                for name, value in stage["optimizer"].items()
                if f"optimizer.{name}" not in lacking
            },
        }
        for stage in config["stages"]
    ]
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


def _objectives(folder: RunFolder, status: RunStatus, *, timed: bool) -> dict[str, float]:
    """Return what a search made small, of a run of it that has a value; seeds of a trial differ."""
    spec = RunSpec.read(folder.config)
    search = spec.config.search
    if status.status is not Status.COMPLETED or not isinstance(search, Sampler):
        return {}
    values = {name: objective_of(name, spec, status, timed=timed) for name in search.objective}
    return {
        f"objective/{name}": value
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    }


def _keyed(table: str, rows: Sequence[Row]) -> list[tuple[int, str, Row]]:
    return [(wandb_step(table, row["optimizer_step"]), table, row) for row in rows]


def _is_resident(ranks: pd.DataFrame) -> bool:
    """Whether resident memory stands for allocated memory, which only a program could tell."""
    return bool(ranks["memory_method"].eq(RESIDENT).any())
