"""The report of a sweep as one W&B run, beside those of its runs.

==============  =====================================================================
W&B             folder `report/` of the sweep
==============  =====================================================================
id, name        follow from the sweep; `job_type` is `report`
`report/page`   `report.html`
`report/...`    `comparison`, `targets` and `claims` of `tables/*.csv`, as tables
`figures/...`   `figures/*.png`
artifact        all files but `paper/`, of type `report`
summary         `report_sha256`: a digest of all the files of the artifact
==============  =====================================================================

A report is one row; a changed report is the next row and the next version of the artifact. The
digest is read from the server, so that a call that was killed after the upload is not repeated.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import wandb

from batchscape.record.folder import SweepFolder
from batchscape.tracking.run import finish, quiet_settings
from batchscape.tracking.state import MirrorState, report_content, report_files

_TABLES = ("comparison", "targets", "claims")
_DIGEST = "report_sha256"


def send_report(sweep: SweepFolder, state: MirrorState) -> None:
    """Send the report of a sweep, unless the server has the same.

    Parameters
    ----------
    sweep : SweepFolder
    state : MirrorState
        State of the report in W&B, written once all files have arrived; `sweep_id` is the id of its
        W&B run.

    Raises
    ------
    TimeoutError
        If the server does not show the end of the W&B run.
    """
    content = report_content(sweep)
    run = wandb.init(
        id=state.sweep_id,
        name=f"report of {state.sweep_id}",
        group=state.sweep_id,
        job_type="report",
        project=state.project,
        entity=state.entity,
        config={"sweep_id": state.sweep_id},
        dir=str(sweep.path),
        mode="online",
        resume="allow",
        reinit="create_new",
        settings=quiet_settings(),
    )
    if run.summary.get(_DIGEST) != content:  # type: ignore[no-untyped-call]  # wandb's
        artifact = wandb.Artifact(f"report-{state.sweep_id}", type="report")
        for file in report_files(sweep):
            name = file.relative_to(sweep.report.resolve()).as_posix()
            # Without these options W&B copies every file first.
            artifact.add_file(str(file), name=name, skip_cache=True, policy="immutable")
        run.log_artifact(artifact)
        artifact.wait()
        run.log(_row(sweep), step=run.starting_step)
        run.summary[_DIGEST] = content
    finish(run, "finished")
    state.mode, state.content = "online", content
    state.write(sweep)


def _row(sweep: SweepFolder) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for path in report_files(sweep):
        if path.parent.name == "tables" and path.suffix == ".csv" and path.stem in _TABLES:
            # An empty field is None, which W&B shows as empty, while `NA` is a text; whole numbers
            # stay whole beside it.
            table = pd.read_csv(
                path, keep_default_na=False, na_values=[""], dtype_backend="numpy_nullable"
            )
            table = table.astype(object).where(table.notna(), None)
            row[f"report/{path.stem}"] = wandb.Table(dataframe=table, allow_mixed_types=True)
        elif path.parent.name == "figures" and path.suffix == ".png":
            row[f"figures/{path.stem}"] = wandb.Image(str(path))
        elif path.name == "report.html":
            row["report/page"] = wandb.Html(str(path), inject=False)
    return row
