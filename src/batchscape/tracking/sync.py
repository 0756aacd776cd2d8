"""`batchscape sync`: sends the runs and reports that Weights & Biases lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from batchscape.errors import LaunchError, RecordError
from batchscape.record.folder import SweepFolder, no_runs
from batchscape.text import count_text
from batchscape.tracking.mirror import Event, MirrorRequest, Worker
from batchscape.tracking.state import MirrorState, Uploads, uploads_of


def sync(
    sweep_dirs: Sequence[Path],
    console: Console,
    *,
    project: str | None = None,
    entity: str | None = None,
    timeout_s: float = 600.0,
) -> bool:
    """Upload the ended runs and reports of sweeps that W&B lacks.

    A run counts as uploaded once the server shows its end, so that a second call goes on where the
    first was stopped.

    Parameters
    ----------
    sweep_dirs : sequence of Path
        Folders of sweeps.
    console : Console
        Where progress is shown.
    project, entity : str, optional
        Where new runs go in W&B; by default as their own settings say.
    timeout_s : float
        Longest time without an event of any run, in seconds.

    Returns
    -------
    bool
        Whether W&B has every run that has ended, and the report.

    Raises
    ------
    RecordError
        If a folder holds no runs.
    LaunchError
        If nothing can be uploaded: no key, no network, or another process mirrors the sweep.
    """
    sweeps = []
    # Paths are resolved, as two mirrors of one folder would share its lock and its log.
    for path in dict.fromkeys(path.resolve() for path in sweep_dirs):
        if not SweepFolder(path).run_folders():
            raise RecordError(no_runs(path))
        sweeps.append(uploads_of(path))
    sent_counts: Counter[str] = Counter()
    failures = 0
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    is_hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as progress:
        task = progress.add_task("", total=sum(len(_names_to_send(sweep)) for sweep in sweeps))
        for sweep in sweeps:
            for event in _events(sweep, project, entity, timeout_s):
                progress.advance(task)
                if event.kind == "done":
                    sent_counts[event.run if event.run in {"report", "workspace"} else "run"] += 1
                else:
                    failures += 1
                    console.print(f"{event.run}: not uploaded: {event.reason}", soft_wrap=True)
    for sweep in sweeps:
        with suppress(RecordError):
            state = MirrorState.read(SweepFolder(sweep.sweep_dir))
            if state is not None and state.workspace is not None:
                console.print(f"Workspace: {state.workspace}", soft_wrap=True)
    console.print(_summary(sweeps, sent_counts, failures))
    return failures == 0


def _names_to_send(sweep: Uploads) -> set[str]:
    names = {*sweep.offline, *sweep.missing_runs} - sweep.damaged.keys()
    if sweep.lacks_report:
        names.add("report")
    if sweep.lacks_workspace and (names or sweep.uploaded):
        names.add("workspace")
    return names


def _events(
    sweep: Uploads, project: str | None, entity: str | None, timeout_s: float
) -> Iterator[Event]:
    """Upload a sweep; yield the result of each run, of the report and of the workspace."""
    for run, problem in sweep.damaged.items():
        yield Event("failed", run, problem)
    unsent = _names_to_send(sweep)
    if not unsent:
        return
    sweep_parts = sorted(unsent & {"report", "workspace"})
    request = MirrorRequest(str(sweep.sweep_dir), "online", "sync", sweep_parts, project, entity)
    with closing(Worker(request)) as worker:
        for event in worker.events(timeout_s):
            # Runs that have ended since do not count, and damaged ones are reported above.
            if event.run in unsent:
                unsent.discard(str(event.run))
                yield event
    if not worker.has_finished:
        if unsent == _names_to_send(sweep):
            raise LaunchError(f"Weights & Biases: {worker.problem}; details: {worker.log}")
        yield from (Event("failed", run, worker.problem) for run in sorted(unsent))


def _summary(sweeps: Sequence[Uploads], sent_counts: Counter[str], failures: int) -> str:
    kinds = [kind for kind in ("run", "report", "workspace") if sent_counts[kind]]
    sent = [count_text(sent_counts[kind], kind) for kind in kinds]
    parts = [f"uploaded {', '.join(sent)}"] if sent else []
    if failures:
        parts.append(f"{failures} not uploaded: the same command tries again")
    if not parts:
        parts.append("nothing to upload")
    uploaded_before = sum(len(sweep.uploaded) for sweep in sweeps)
    if uploaded_before:
        parts.append(f"{uploaded_before} had been uploaded before")
    unfinished = sum(len(sweep.open) for sweep in sweeps)
    if unfinished:
        parts.append(f"{unfinished} have not ended")
    return f"Weights & Biases: {'; '.join(parts)}"
