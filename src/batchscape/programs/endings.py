"""How a program ended, from its exit code and the end of its log."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from batchscape.record.causes import OUT_OF_MEMORY, Cause
from batchscape.record.files import end_of
from batchscape.record.outcome import killed_by
from batchscape.record.status import Status

HELPS_THE_END = (
    "end main() by sys.stdout.flush(); os._exit(0) once all is written, see docs/own_script.md"
)
"""What helps a script whose interpreter hangs or aborts after the training."""

_ABORTED = "terminate called without an active exception"
"""What C++ prints where a thread is destroyed that still runs: one of a process group."""
_TAIL_BYTES = 1 << 16
_LAST_LINES = 6
"""Lines at the end that are judged: of a program that names no error, or after the last one."""
_RAISED = r"(?:\w+\.)*\w*(?:Error|Exception)\b:.*"
_OUT_OF_MEMORY = re.compile(
    r"(?:\w+\.)*(?:OutOfMemoryError|MemoryError|_ArrayMemoryError)(?::|\s*$)"
    rf"|(?:{_RAISED}|terminate called after throwing an instance of '|\s*what\(\):\s+)?"
    rf"(?:{OUT_OF_MEMORY.pattern})"
)
"""How a line begins that says that memory is out. A program that only speaks of it, in the middle
of a line, may have died of anything."""
_ERROR = re.compile(r"(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b:\s*\S.*)")
_NO_CAUSE = ("ChildFailedError", "CalledProcessError", "SignalException")
"""Errors of launchers that only say that their child has one."""
_REFUSED = re.compile(r"(\S.*: error: \S.*)")
"""How argparse refuses arguments, below a line of usage."""
_HAS_WORDS = re.compile(r"\w")
_OF_RANK = re.compile(r"\[rank(\d+)\]:\s?")
_TRACEBACK = "Traceback (most recent call last):"
_FOOTER = re.compile(
    r"^[WE]\d{4} .*torch/distributed/elastic/.*(closing signal|failed \(exitcode)", re.MULTILINE
)
"""Where the agent of torchrun begins to tell of a rank that has failed."""
FAILED_START = re.compile(
    r"^E\d{4} .*torch/distributed/elastic/.*failed \(exitcode.*$", re.MULTILINE
)
"""What that agent says once of each start that failed."""
_ROOT_CAUSE = re.compile(
    r"^Root Cause \(first observed failure\):$.*?"
    r"^\s*rank\s*:\s*(\d+).*?^\s*exitcode\s*:\s*(-?\d+)",
    re.MULTILINE | re.DOTALL,
)
"""Which rank torchrun saw fail first, and its exit code."""
_OF_LAUNCHER = re.compile(
    r"[WEI]\d{4} .*torch/distributed/"
    r"|\[\d{4}-\d\d-\d\d [\d:,]+\] \[\w+\] \[(?:launch|runner)\.py:"
)
"""How lines of torchrun and of DeepSpeed's launcher begin."""


class Ending(NamedTuple):
    """How the run of a program ended."""

    status: Status
    cause: Cause | None
    reason: str | None


def ending(code: int, log: Path, offset: int, *, is_trained: bool = False) -> Ending | None:
    """Say how a program ended that did not end well; None where its exit code is 0."""
    if code == 0:
        return None
    text = end_of(log, _TAIL_BYTES, offset).decode(errors="replace")
    how = _how("the program", code)
    words = last_words(text)
    reason = how if words is None else f"{how}; its log ends: {words}"
    if is_trained and _ABORTED in text:
        reason = (
            f"{how} after its last optimizer step: a thread of its process group, which a wrapped "
            f"model still held, aborted Python while that was taken down ({_ABORTED}); what helps: "
            f"{HELPS_THE_END}"
        )
    if _is_out_of_memory(text, words):
        return Ending(Status.OOM, Cause.OUT_OF_MEMORY, reason)
    if code >= 0:
        # Shells and launchers report a signal of their child as 128 and its number.
        cause = Cause.KILLED if code == 128 + signal.SIGKILL else Cause.EXCEPTION
    else:
        cause = Cause.KILLED if code == -signal.SIGKILL else Cause.SIGNAL
    return Ending(Status.FAILED, cause, reason)


def _is_out_of_memory(text: str, words: str | None) -> bool:
    """Return whether the last error of a log, or else its last lines, say that memory was out.

    What follows the error counts as well: NCCL gives its details below.
    """
    lines = [_OF_RANK.sub("", line, count=1) for line in _own_lines(text) if line.strip()]
    last = lines[-_LAST_LINES:]
    if words is not None and _ERROR.match(words):
        places = [place for place, line in enumerate(lines) if words in line]
        last = lines[places[-1] :][:_LAST_LINES] if places else []
    return any(_OUT_OF_MEMORY.match(line) for line in (words or "", *last))


def last_words(text: str) -> str | None:
    """Return the last error of a log, else its last line.

    Launchers print a summary after the errors of their workers, which says less, and is added only
    where no error is found. Where that of torchrun names the rank that failed first, the error is
    that of this rank: the others fail because it is gone.
    """
    own_lines = _own_lines(text)
    launcher_errors = [
        line.strip()
        for line in text.splitlines()
        if (match := _ERROR.match(line)) and any(name in match[1] for name in _NO_CAUSE)
    ]
    summary = launcher_errors[-1] if launcher_errors else None
    error = None
    if root := _root_cause(text):
        rank, code = root
        error = _last_error(own_lines, {str(rank)}) or _last_error(own_lines, {None})
        summary = _how(f"rank {rank}", code)
        if error is None and (other := _last_error(own_lines)):
            return f"{summary}; of another rank: {other}"
    if error := error or _last_error(own_lines):
        return error
    lines = [line.strip() for line in own_lines if _HAS_WORDS.search(line)]
    return "; then: ".join([*lines[-1:], *([] if summary is None else [summary])]) or None


def _root_cause(text: str) -> tuple[int, int] | None:
    """Return which rank torchrun saw fail first, and its exit code."""
    reports = list(_ROOT_CAUSE.finditer(text))
    return (int(reports[-1][1]), int(reports[-1][2])) if reports else None


def _own_lines(text: str) -> list[str]:
    """Return what a program printed itself: no lines, traceback or summary of its launcher.

    Where torchrun has started it several times, what its last start printed.
    """
    if _root_cause(text):
        for failed in list(FAILED_START.finditer(text))[-2:-1]:
            text = text[failed.end() :]
    footer = _FOOTER.search(text)
    if footer is not None and _root_cause(text):
        text = text[: footer.start()]
    kept: list[str] = []
    begin: int | None = None
    for line in text.splitlines():
        if _OF_LAUNCHER.match(line):
            continue
        if line.startswith(_TRACEBACK):
            begin = len(kept)
        is_summary = _ERROR.match(line) and any(name in line for name in _NO_CAUSE)
        if is_summary:
            del kept[len(kept) if begin is None else begin :]
        else:
            kept.append(line)
        if not line.startswith((" ", _TRACEBACK)):
            begin = None
    return kept


def _last_error(lines: Sequence[str], ranks: Collection[str | None] | None = None) -> str | None:
    """Return the last line that names an error."""
    error = None
    # By rank, as ranks print at once: whether the frames of a traceback are being read.
    in_traceback: dict[str | None, bool] = {}
    is_usage = False
    for line in lines:
        prefix = _OF_RANK.match(line)
        rank = None if prefix is None else prefix[1]
        if ranks is not None and rank not in ranks:
            continue
        content = line if prefix is None else line[prefix.end() :]
        match = _ERROR.match(content.strip())
        if match is None and is_usage:
            match = _REFUSED.match(content.strip())
        if content[:1].strip() and match is None:
            is_usage = content.lower().startswith("usage: ")
        ends = in_traceback.get(rank, False) and content[:1].strip() != ""
        if content.startswith(_TRACEBACK):
            in_traceback[rank] = True
        elif ends or match:
            in_traceback[rank] = False
            error = content.strip() if match is None else match[1]
    return error


def _how(what: str, code: int) -> str:
    return f"{what} exited with code {code}" if code >= 0 else killed_by(what, -code)
