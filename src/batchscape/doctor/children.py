"""Probes that may crash, hang or take long run in processes of their own, with a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

__all__ = ["ChildError", "ask"]


class ChildError(Exception):
    """A probe's process failed; the message is its last word."""


def ask(question: str, timeout_s: float, **environment: str) -> dict[str, Any]:
    """Run one question of `doctor.child`.

    Parameters
    ----------
    question : str
        Its name.
    timeout_s : float
        Longest time, in seconds; all its processes are killed then.
    **environment : str
        Variables beside this process's own.

    Returns
    -------
    dict
        The answer.

    Raises
    ------
    ChildError
        If there is none.
    """
    # -P: a module in the current folder must not stand in for one of a library.
    command = [sys.executable, "-P", "-m", "batchscape.doctor.child", question]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
        start_new_session=True,
    ) as process:
        try:
            printed, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            msg = f"no answer within {timeout_s:g} s"
            raise ChildError(msg) from None
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    answer = _last_object(printed.decode(errors="replace"))
    if answer is None:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise ChildError(lines[-1] if lines else _ending(process.returncode))
    if "error" in answer:
        raise ChildError(answer["error"])
    return answer


def _last_object(printed: str) -> dict[str, Any] | None:
    for line in reversed(printed.splitlines()):
        with suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer
    return None


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
