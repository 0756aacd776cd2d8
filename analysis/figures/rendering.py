"""Rendering figures beside other work, in a process of their own.

A report spends about as long on its figures as on its numbers, and the two need not wait for each
other. The process is started anew, as those that read run folders are; figures go to it one at a
time, and what is still to be done in the end is shared with it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import IO, NamedTuple, cast

from matplotlib.figure import Figure

from batchscape.analysis.figures.style import paper_style, render

__all__ = ["Renderer", "serve"]

_START = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from batchscape.analysis.figures.rendering import serve; serve()"
)
"""With the import path of the caller, which need not be the one that a new process has."""


class _Job(NamedTuple):
    draw: Callable[..., Figure | None]
    inputs: tuple[object, ...]
    pickled: bytes | None
    """None where it cannot be sent."""
    files: Future[dict[str, bytes]]


class Renderer:
    """Renders figures; to be used in a `with` statement, whose end waits for all of them.

    Parameters
    ----------
    beside : bool
        Start a process for it; else figures are rendered at the end, by this one.
    """

    def __init__(self, *, beside: bool) -> None:
        self._beside = beside
        self._jobs: deque[_Job] = deque()
        self._kept: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Renderer:
        if self._beside:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self._thread = threading.Thread(target=self._hand_over, daemon=True)
            self._thread.start()
        return self

    def submit(self, figure: Figure) -> Future[dict[str, bytes]]:
        """Have a figure rendered; nothing may be changed in it from then on.

        Parameters
        ----------
        figure : Figure

        Returns
        -------
        Future
            The contents that `render` returns, by file ending; there when the `with` ends.
        """
        return self.draw(_as_it_is, figure)

    def draw(
        self,
        draw: Callable[..., Figure | None],
        *inputs: object,
    ) -> Future[dict[str, bytes]]:
        """Have a figure drawn and rendered; nothing may be changed in the inputs from then on.

        Parameters
        ----------
        draw : callable
            A function of a module, which returns a figure, or None where there is none to draw.
        *inputs
            What it is called with.

        Returns
        -------
        Future
            As of `submit`; empty without a figure.
        """
        pickled = None
        if self._beside:
            with contextlib.suppress(AttributeError, TypeError, pickle.PickleError):
                pickled = pickle.dumps((draw, inputs))
        job = _Job(draw, inputs, pickled, Future())
        with self._changed:
            (self._kept if pickled is None else self._jobs).append(job)
            self._changed.notify()
        return job.files

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        try:
            # Shared with the process, which takes the first ones.
            while kind is None and (job := self._last()) is not None:
                _render_here(job)
            if kind is None and self._process is not None:
                self._thread.join()
        finally:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._thread.join()
                for pipe in (self._process.stdin, self._process.stdout):
                    with contextlib.suppress(BrokenPipeError):
                        cast("IO[bytes]", pipe).close()
        while kind is None and (job := self._last()) is not None:
            _render_here(job)

    def _last(self) -> _Job | None:
        with self._changed:
            return next((jobs.pop() for jobs in (self._kept, self._jobs) if jobs), None)

    def _first(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._ended)
            return self._jobs.popleft() if self._jobs else None

    def _hand_over(self) -> None:
        process = cast("subprocess.Popen[bytes]", self._process)
        there, back = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
        job = None
        try:
            pickle.dump(sys.path, there)
            there.flush()  # it has a lot to import before the first figure comes
            while (job := self._first()) is not None:
                there.write(job.pickled or b"")
                there.flush()
                job.files.set_result(pickle.load(back))  # noqa: S301  (our own process)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            # The process has died: its figures are rendered here in the end.
            if job is not None:
                with self._changed:
                    self._kept.append(job)


def serve() -> None:
    """Render the figures that come from standard input; write their files to standard output."""
    # Nothing else may write there.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with paper_style(), contextlib.suppress(EOFError):
        while True:
            draw, inputs = pickle.load(sys.stdin.buffer)  # noqa: S301  (from who started us)
            pickle.dump(_rendered(draw, inputs), out)
            out.flush()


def _render_here(job: _Job) -> None:
    with paper_style():
        job.files.set_result(_rendered(job.draw, job.inputs))


def _rendered(draw: Callable[..., Figure | None], inputs: tuple[object, ...]) -> dict[str, bytes]:
    figure = draw(*inputs)
    return {} if figure is None else render(figure)


def _as_it_is(figure: Figure) -> Figure:
    return figure
