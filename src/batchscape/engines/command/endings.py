"""How a program ended, from its exit code and the end of its log."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

from batchscape.record.status import Status

__all__ = ["ending", "last_words"]

_TAIL_BYTES = 1 << 16
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|\bMemoryError\b|std::bad_alloc|can't allocate memory"
    r"|Cannot allocate memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
    r"|Failed to CUDA calloc",
    re.IGNORECASE,
)
"""What is printed when memory is out: by the driver, torch, Python, C++, the system."""
_ERROR = re.compile(r"(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b:\s*\S.*)")
_NO_CAUSE = ("ChildFailedError", "CalledProcessError", "SignalException")
"""Errors of launchers that only say that their child has one."""
_HAS_WORDS = re.compile(r"\w")
_OF_RANK = re.compile(r"\[rank(\d+)\]:\s?")
_TRACEBACK = "Traceback (most recent call last):"
_FOOTER = re.compile(
    r"^[WE]\d{4} .*torch/distributed/elastic/.*(closing signal|failed \(exitcode)", re.MULTILINE
)
"""Where the agent of torchrun begins to tell of a rank that has failed."""
_ROOT_CAUSE = re.compile(
    r"^Root Cause \(first observed failure\):$.*?"
    r"^\s*rank\s*:\s*(\d+).*?^\s*exitcode\s*:\s*(-?\d+)",
    re.MULTILINE | re.DOTALL,
)
"""Which rank torchrun saw fail first, and its exit code."""


def ending(code: int, log: Path, offset: int) -> tuple[Status, str] | None:
    """Say how a program ended that did not end well; None where its exit code is 0.

    Parameters
    ----------
    code : int
        Exit code; negative: the signal that killed it.
    log : Path
        What it printed.
    offset : int
        Bytes of the log that are older.

    Returns
    -------
    tuple of Status and str, or None
        `oom` where it printed that memory was out, else `failed`; and the reason.
    """
    if code == 0:
        return None
    text = _tail(log, offset)
    how = _how("the program", code)
    words = last_words(text)
    reason = how if words is None else f"{how}; its log ends: {words}"
    found = _OUT_OF_MEMORY.search(text)
    return (Status.FAILED if found is None else Status.OOM), reason


def last_words(text: str) -> str | None:
    """Return the line of a log that says most about its end: the last error, else the last line.

    Launchers print a summary after the errors of their workers, which says less. Where the summary
    of torchrun names the rank that failed first, the error is that of this rank: the others fail
    because it is gone.
    """
    lines = text.splitlines()
    if root := list(_ROOT_CAUSE.finditer(text)):
        rank, code = int(root[-1][1]), int(root[-1][2])
        footer = _FOOTER.search(text)
        before = lines if footer is None else text[: footer.start()].splitlines()
        words = _last_error(before, rank) or _last_error(before) or _last_error(lines)
        return words or _how(f"rank {rank}", code)
    words = _last_error(lines)
    said = [line.strip() for line in lines if _HAS_WORDS.search(line)]
    return words or (said[-1] if said else None)


def _last_error(lines: Sequence[str], rank: int | None = None) -> str | None:
    """Return the last line that names an error: of one rank, whose lines say so, or of any."""
    found = None
    # By rank, as ranks print at once: whether the frames of a traceback are being read.
    within: dict[str | None, bool] = {}
    for line in lines:
        mark = _OF_RANK.match(line)
        own = None if mark is None else mark[1]
        if rank is not None and own != str(rank):
            continue
        content = line if mark is None else line[mark.end() :]
        named = _ERROR.match(line.strip())
        ends = within.get(own, False) and content[:1].strip() != ""
        if content.startswith(_TRACEBACK):
            within[own] = True
        elif ends or named:
            within[own] = False
            words = content.strip() if named is None else named[1]
            if not any(name in words for name in _NO_CAUSE):
                found = words
    return found


def _how(what: str, code: int) -> str:
    if code >= 0:
        return f"{what} exited with code {code}"
    how = f"{what} was killed by {_signal_name(-code)}"
    return f"{how} (often the system's out-of-memory killer)" if code == -signal.SIGKILL else how


def _tail(log: Path, offset: int) -> str:
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(offset, end - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
