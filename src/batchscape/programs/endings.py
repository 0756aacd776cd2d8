"""How a program ended, from its exit code and the end of its log."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from batchscape.record.files import end_of
from batchscape.record.state import killed_by
from batchscape.record.status import OUT_OF_MEMORY, Cause, Status

EXIT_ADVICE = (
    "end main() by sys.stdout.flush(); os._exit(0) once all is written, see docs/own_script.md"
)
"""Advice for a script whose interpreter hangs or aborts after the training."""

_ABORTED = "terminate called without an active exception"
"""What C++ prints where a thread is destroyed that still runs: one of a process group."""
_TAIL_BYTES = 1 << 16
_LAST_LINES = 6
"""Lines that are judged: from the last error on, or at the end of a log that names none."""
_EXCEPTION = r"(?:\w+\.)*\w*(?:Error|Exception)\b:.*"
_OUT_OF_MEMORY = re.compile(
    r"(?:\w+\.)*(?:OutOfMemoryError|MemoryError|_ArrayMemoryError)(?::|\s*$)"
    rf"|(?:{_EXCEPTION}|terminate called after throwing an instance of '|\s*what\(\):\s+)?"
    rf"(?:{OUT_OF_MEMORY.pattern})"
)
"""How a line begins that says that memory is out. A program that mentions it in the middle of a
line may have died of something else."""
_ERROR = re.compile(r"(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b:\s*\S.*)")
_NO_CAUSE = ("ChildFailedError", "CalledProcessError", "SignalException")
"""Errors of launchers that only say that their child has one."""
_ARGPARSE_ERROR = re.compile(r"(\S.*: error: \S.*)")
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
    exit_text = _exit_text("the program", code)
    words = last_words(text)
    reason = exit_text if words is None else f"{exit_text}; its log ends: {words}"
    if is_trained and _ABORTED in text:
        reason = (
            f"{exit_text} after its last optimizer step: a wrapped model still held a thread of "
            f"its process group, which aborted Python at its end ({_ABORTED}); what helps: "
            f"{EXIT_ADVICE}"
        )
    if _is_out_of_memory(text, words):
        return Ending(Status.OOM, Cause.OUT_OF_MEMORY, reason)
    cause = Cause.EXCEPTION if code > 0 else Cause.SIGNAL
    # Shells and launchers report a signal of their child as 128 and its number.
    if code in {-signal.SIGKILL, 128 + signal.SIGKILL}:
        cause = Cause.KILLED
    return Ending(Status.FAILED, cause, reason)


def _is_out_of_memory(text: str, words: str | None) -> bool:
    """Return whether the last error of a log, or else its last lines, say that memory was out.

    Lines below the error count as well: NCCL gives its details there.
    """
    lines = [_OF_RANK.sub("", line, count=1) for line in _program_lines(text) if line.strip()]
    judged_lines = lines[-_LAST_LINES:]
    if words is not None and _ERROR.match(words):
        indices = [index for index, line in enumerate(lines) if words in line]
        judged_lines = lines[indices[-1] :][:_LAST_LINES] if indices else []
    return any(_OUT_OF_MEMORY.match(line) for line in (words or "", *judged_lines))


def last_words(text: str) -> str | None:
    """Return the last error of a log, else its last line.

    A launcher prints a summary after the errors of its workers; it is added only where there is no
    error. Where torchrun's summary names the rank that failed first, the error of this rank is
    returned: the other ranks fail because it is gone.
    """
    lines_of_program = _program_lines(text)
    launcher_errors = [
        line.strip()
        for line in text.splitlines()
        if (match := _ERROR.match(line)) and any(name in match[1] for name in _NO_CAUSE)
    ]
    summary = launcher_errors[-1] if launcher_errors else None
    error = None
    if reports := _ROOT_CAUSE.findall(text):
        rank, code = map(int, reports[-1])
        error = _last_error(lines_of_program, {str(rank)}) or _last_error(lines_of_program, {None})
        summary = _exit_text(f"rank {rank}", code)
        if error is None and (error_elsewhere := _last_error(lines_of_program)):
            return f"{summary}; of another rank: {error_elsewhere}"
    if error := error or _last_error(lines_of_program):
        return error
    lines = [line.strip() for line in lines_of_program if _HAS_WORDS.search(line)]
    return "; then: ".join(filter(None, [*lines[-1:], summary])) or None


def _program_lines(text: str) -> list[str]:
    """Return what a program printed itself, without lines, traceback and summary of its launcher.

    Where torchrun has started it several times, only the last start counts.
    """
    if _ROOT_CAUSE.search(text):
        for failed_start in list(FAILED_START.finditer(text))[-2:-1]:
            text = text[failed_start.end() :]
    footer = _FOOTER.search(text)
    if footer is not None and _ROOT_CAUSE.search(text):
        text = text[: footer.start()]
    program_lines: list[str] = []
    traceback_begin: int | None = None
    for line in text.splitlines():
        if _OF_LAUNCHER.match(line):
            continue
        if line.startswith(_TRACEBACK):
            traceback_begin = len(program_lines)
        is_summary = _ERROR.match(line) and any(name in line for name in _NO_CAUSE)
        if is_summary:
            del program_lines[len(program_lines) if traceback_begin is None else traceback_begin :]
        else:
            program_lines.append(line)
        if not line.startswith((" ", _TRACEBACK)):
            traceback_begin = None
    return program_lines


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
            match = _ARGPARSE_ERROR.match(content.strip())
        if content[:1].strip() and match is None:
            is_usage = content.lower().startswith("usage: ")
        ends_traceback = in_traceback.get(rank, False) and content[:1].strip() != ""
        if content.startswith(_TRACEBACK):
            in_traceback[rank] = True
        elif ends_traceback or match:
            in_traceback[rank] = False
            error = content.strip() if match is None else match[1]
    return error


def _exit_text(what: str, code: int) -> str:
    return f"{what} exited with code {code}" if code >= 0 else killed_by(what, -code)
