"""Signals that ask the launcher to stop: they are counted, or raised as Ctrl-C is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn

_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP while it is entered, and restores the old handlers.

    Outside of the main thread Python delivers no signals, and none is counted. A signal that the
    process ignores (as under `nohup`) stays ignored.
    """

    def __init__(self) -> None:
        self.count = 0
        """Signals so far."""
        self.first: str | None = None
        """Name of the first one."""
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _ASKING:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or signal.Signals(number).name


@contextmanager
def terminations_as_interrupts() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `KeyboardInterrupt`, as SIGINT does.

    A signal that the process ignores stays ignored. Outside of the main thread nothing changes.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    previous: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                previous[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
