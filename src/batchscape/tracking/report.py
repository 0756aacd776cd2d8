"""The written report of a sweep as one W&B run beside those of its runs.

==============  =====================================================================
W&B             folder `report/` of the sweep
==============  =====================================================================
id, name        follow from the sweep; `job_type` is `report`
`report/page`   `report.html`, as it is
`report/...`    `comparison`, `targets` and `claims` of `tables/*.csv`, as tables
`figures/...`   `figures/*.png`
artifact        these files and all others but `paper/`, of type `report`
summary         `report_sha256`: a digest of all the files of the artifact
==============  =====================================================================

All of it is one row, and a changed report the next row and the next version of the artifact. The
server is asked which report it has, so that a call that was killed is not taken for one that was
not made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import wandb

from batchscape.record.folder import SweepFolder
from batchscape.tracking.run import finish, quiet_settings
from batchscape.tracking.state import MirrorState, report_content, report_files

_TABLES = ("comparison", "targets", "claims")
_DIGEST = "report_sha256"


def send_report(sweep: SweepFolder, state: MirrorState) -> None:
    """Send the report of a sweep, unless the server has it as it is.

    Parameters
    ----------
    sweep : SweepFolder
    state : MirrorState
        What W&B has of it; `sweep_id` is the id of its W&B run. It is noted when all has arrived.

    Raises
    ------
    TimeoutError
        If the server does not show its end.
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
            # W&B would copy every file first.
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
            row[f"report/{path.stem}"] = wandb.Table(dataframe=_table(path), allow_mixed_types=True)
        elif path.parent.name == "figures" and path.suffix == ".png":
            row[f"figures/{path.stem}"] = wandb.Image(str(path))
        elif path.name == "report.html":
            row["report/page"] = wandb.Html(str(path), inject=False)
    return row


def _table(path: Path) -> pd.DataFrame:
    """Read a table; what is missing is None, which W&B shows as empty.

    Missing is an empty field: a cell may be called `NA`. Whole numbers stay whole beside it.
    """
    table = pd.read_csv(path, keep_default_na=False, na_values=[""], dtype_backend="numpy_nullable")
    return table.astype(object).where(table.notna(), None)
