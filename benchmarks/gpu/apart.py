"""A measurement in a process of its own, which may fail or hang without the others."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

LIMIT_S = 120.0
"""Of one measurement, with the start of its process and compilation."""
EXIT_S = 20.0
"""For a process to end that has given its figures."""

Figures = dict[str, Any]


def apart(measure: Callable[..., Figures], *arguments: Any, limit_s: float) -> Figures:
    """Return the figures of a measurement, or the `reason` why there are none.

    Parameters
    ----------
    measure : callable
        A function of a module, as its process imports it.
    *arguments
        What it is called with.
    limit_s : float
        Seconds after which its process is killed.
    """
    spawn = get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_send, args=(sender, measure, *arguments), daemon=True)
    process.start()
    sender.close()
    found = {"reason": f"not done after {limit_s:g} s"}
    if receiver.poll(limit_s):
        try:
            found = receiver.recv()
        except EOFError:
            found = {}
        process.join(EXIT_S)
    process.kill()
    process.join()
    return found or {"reason": f"its process ended with code {process.exitcode}"}


def _send(sender: Connection, measure: Callable[..., Figures], *arguments: Any) -> None:
    try:
        found = measure(*arguments)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is the reason)
        traceback.print_exc()
        found = {"reason": f"{type(error).__name__}: {error}".partition("\n")[0]}
    sender.send(found)
