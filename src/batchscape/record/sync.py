"""`batchscape sync`: brings to Weights & Biases what it does not have yet, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from batchscape.errors import RecordError
from batchscape.record.containment import refuse_links
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.mirror_state import MIRRORED_STATUSES, MirrorState
from batchscape.record.neighbours import no_runs
from batchscape.record.status import RunStatus, Status
from batchscape.record.sync_upload import upload

__all__ = ["Pending", "pending", "sync"]


@dataclass
class Pending:
    """The runs of a sweep, by what W&B has of them."""

    sweep_dir: Path
    waiting: list[str] = field(default_factory=list)
    """Ended, and not uploaded as they ended."""
    uploaded: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    """Marked as running, or not started: they are uploaded when they have ended."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Those that cannot be read, and why."""


def pending(sweep_dir: Path) -> Pending:
    """Find out what W&B does not have of a sweep, without asking it.

    Parameters
    ----------
    sweep_dir : Path
        Folder of the sweep.

    Raises
    ------
    RecordError
        If the folder holds no runs.
    LaunchError
        If something in it leads out of it.
    """
    # One folder, one name: the lock and the log of its mirror lie in it.
    sweep_dir = sweep_dir.resolve()
    refuse_links(SweepFolder(sweep_dir))
    folders = SweepFolder(sweep_dir).run_folders()
    if not folders:
        msg = no_runs(sweep_dir)
        raise RecordError(msg)
    found = Pending(sweep_dir)
    for folder in folders:
        try:
            _sort_in(found, folder)
        except RecordError as error:
            found.damaged[folder.path.name] = str(error)
    return found


def sync(
    sweep_dirs: Sequence[Path],
    console: Console,
    *,
    project: str | None = None,
    entity: str | None = None,
    timeout_s: float = 600.0,
) -> bool:
    """Upload every ended run of some sweeps that W&B does not have as it ended.

    A run is noted as uploaded when the server shows its end, so that the same call goes on where
    another one was stopped, and then has nothing to do.

    Parameters
    ----------
    sweep_dirs : sequence of Path
        Folders of sweeps.
    console : Console
        Where progress is shown.
    project, entity : str, optional
        Where runs that W&B has not seen yet go; by default as their own settings say.
    timeout_s : float
        Longest time that one run may take, in seconds.

    Returns
    -------
    bool
        Whether W&B has every run that has ended.

    Raises
    ------
    RecordError
        If a folder holds no runs.
    LaunchError
        If nothing can be uploaded: no key, no network, or another process is at it.
    """
    resolved = dict.fromkeys(sweep_dir.resolve() for sweep_dir in sweep_dirs)
    found = [pending(sweep_dir) for sweep_dir in resolved]
    failed = 0
    uploaded = 0
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=sum(len(sweep.waiting) for sweep in found))
        for sweep in found:
            for run, problem in sweep.damaged.items():
                failed += 1
                console.print(f"{run}: not uploaded: {problem}", soft_wrap=True)
            for outcome in upload(
                sweep.sweep_dir, sweep.waiting, project=project, entity=entity, timeout_s=timeout_s
            ):
                if not outcome.is_done and outcome.problem is None:
                    progress.update(task, description=outcome.run)
                    continue
                progress.advance(task)
                uploaded += outcome.is_done
                if outcome.problem is not None:
                    failed += 1
                    console.print(f"{outcome.run}: not uploaded: {outcome.problem}", soft_wrap=True)
    console.print(_summary(found, uploaded, failed))
    return failed == 0


def _sort_in(found: Pending, folder: RunFolder) -> None:
    if not folder.status.exists():
        return
    status = RunStatus.read(folder.status)
    if status.status in {Status.PENDING, Status.RUNNING}:
        found.open.append(folder.path.name)
    if status.status not in MIRRORED_STATUSES:
        return
    state = MirrorState.read(folder)
    is_uploaded = state is not None and state.is_uploaded(status, found.sweep_dir)
    (found.uploaded if is_uploaded else found.waiting).append(folder.path.name)


def _summary(found: Sequence[Pending], uploaded: int, failed: int) -> str:
    parts = [f"uploaded {uploaded} {'run' if uploaded == 1 else 'runs'}"] if uploaded else []
    if failed:
        parts.append(f"{failed} not uploaded: the same command tries again")
    if not parts:
        parts.append("nothing to upload")
    before = sum(len(sweep.uploaded) for sweep in found)
    if before:
        parts.append(f"{before} had been uploaded before")
    unended = sum(len(sweep.open) for sweep in found)
    if unended:
        parts.append(f"{unended} have not ended")
    return f"Weights & Biases: {'; '.join(parts)}"
