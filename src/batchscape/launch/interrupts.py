"""Signals that ask the launcher to stop: they are noted, or raised as Ctrl-C is.

A signal that the process ignores (as under `nohup`) stays ignored. Outside of the main thread
Python delivers no signals, and nothing changes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

_TERMINATIONS = (signal.SIGTERM, signal.SIGHUP)


def noted_signals(names: list[str]) -> AbstractContextManager[None]:
    """Add the name of each SIGINT, SIGTERM and SIGHUP to a list."""

    def note(number: int, _frame: FrameType | None) -> None:
        names.append(signal.Signals(number).name)

    return _handled((signal.SIGINT, *_TERMINATIONS), note)


def terminations_as_interrupts() -> AbstractContextManager[None]:
    """Let SIGTERM and SIGHUP raise `KeyboardInterrupt`, as SIGINT does."""
    return _handled(_TERMINATIONS, signal.default_int_handler)


@contextmanager
def _handled(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]
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
