"""A bar on a terminal while data are read for the first time; nothing anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def reading(what: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """Show a bar of the bytes read; the function that it yields adds some."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from batchscape.terminal import OutgoingConsole

    console = OutgoingConsole(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda count: bar.advance(task, count)
