"""A saved workspace of W&B for one sweep: losses over samples, tokens and time, and the geometry.

It needs `wandb-workspaces`. Users may change the view in W&B; a saved view is not written again.
"""

from __future__ import annotations

import wandb
import wandb_workspaces.reports.v2 as panels
from wandb_workspaces import workspaces

from batchscape.tracking.state import MirrorState

_AXES = ("samples", "tokens", "train_time_s")
_GEOMETRY = (
    "data_parallel_size",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
)
_COSTS = ("final_eval_loss", "step_time_s", "peak_allocated_gib")


def save_workspace(state: MirrorState) -> str:
    """Save the workspace of a sweep; return its address.

    Parameters
    ----------
    state : MirrorState
        State of the sweep; `sweep_id` is its id in W&B.
    """
    entity = state.entity or str(wandb.Api().default_entity)
    return str(workspace_of(entity, state.project, str(state.sweep_id)).save().url)


def workspace_of(entity: str, project: str, sweep_id: str) -> workspaces.Workspace:
    """Describe the workspace of a sweep: its runs, grouped by cell.

    Parameters
    ----------
    entity, project : str
    sweep_id : str
        As in the config of its runs.
    """
    curves = [
        panels.LinePlot(
            title=f"{metric} over {axis}",
            x=axis,
            y=[metric],
            groupby="Group",
            groupby_aggfunc="mean",
            groupby_rangefunc="minmax",
        )
        for metric in ("loss/eval", "loss/train")
        for axis in _AXES
    ]
    micro = panels.Config("micro_batch_size")
    costs = [
        panels.ScatterPlot(
            title=f"{figure} against micro-batch", x=micro, y=panels.SummaryMetric(figure)
        )
        for figure in ("peak_allocated_gib", "step_time_s")
    ]
    columns = [panels.Config(name) for name in _GEOMETRY]
    columns += [panels.SummaryMetric(name) for name in _COSTS]
    geometry = panels.ParallelCoordinatesPlot(
        title="Geometry and what it costs",
        columns=[panels.ParallelCoordinatesPlotColumn(metric=column) for column in columns],
    )
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=sweep_id,
        sections=[
            workspaces.Section(name="Loss: mean and range over seeds", panels=curves, is_open=True),
            workspaces.Section(name="Geometry", panels=[*costs, geometry], is_open=True),
        ],
        settings=workspaces.WorkspaceSettings(max_runs=100),
        runset_settings=workspaces.RunsetSettings(
            filters=[
                workspaces.Config("sweep_id") == sweep_id,
                workspaces.Metric("JobType") == "train",
            ],
            groupby=[workspaces.Metric("Group")],
        ),
    )
