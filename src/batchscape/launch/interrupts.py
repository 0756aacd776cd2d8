"""Signals that ask the launcher to stop: they are counted, or raised as Ctrl-C is.

A signal that the process ignores (as under `nohup`) stays ignored. Outside of the main thread
Python delivers no signals, and nothing changes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_TERMINATIONS = (signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP."""

    def __init__(self) -> None:
        self.count = 0
        """Signals so far."""
        self.first: str | None = None
        """Name of the first one."""

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count signals, and restore the earlier handlers."""
        with _handled((signal.SIGINT, *_TERMINATIONS), self._note):
            yield

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or signal.Signals(number).name


@contextmanager
def terminations_as_interrupts() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `KeyboardInterrupt`, as SIGINT does."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    with _handled(_TERMINATIONS, interrupt):
        yield


@contextmanager
def _handled(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Handle signals, and restore the earlier handlers."""
    is_main = threading.current_thread() is threading.main_thread()
    heeded_numbers = [n for n in numbers if is_main and signal.getsignal(n) is not signal.SIG_IGN]
    earlier_handlers = [(number, signal.signal(number, handler)) for number in heeded_numbers]
    try:
        yield
    finally:
        for number, earlier_handler in earlier_handlers:
            signal.signal(number, earlier_handler)
