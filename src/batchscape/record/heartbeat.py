"""Where a rank is right now, told by a few bytes that it shares with whoever watches it.

A rank writes into a mapped file of its own at every micro-step, batch of an evaluation and
checkpoint: no system call, no flush, about a microsecond. The watcher compares what it reads by its
own clock; the count means nothing but that it has changed. A rank that nobody watches remembers
all the same what it was doing, for the report of a failure.
"""

from __future__ import annotations

import mmap
import os
import struct
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple


def beats_path(place: str, rank: int) -> Path:
    """Return the file that a rank of an attempt shares its beats in."""
    return Path(f"{place}.beats-{rank}")


def stacks_path(place: str, rank: int) -> Path:
    """Return the file that a rank of an attempt dumps its stacks to, when it is told to."""
    return Path(f"{place}.stacks-{rank}")


class Phase(StrEnum):
    """What a rank is doing; within an optimizer step, in this order."""

    START = "start"
    """Joining the others, building the model, opening the data."""
    COMPILATION = "compilation"
    DATA = "data"
    """Waiting for samples."""
    FORWARD = "forward"
    BACKWARD = "backward"
    """The exchange of gradients included."""
    OPTIMIZER = "optimizer"
    RECORD = "record"
    """Reducing losses over the ranks, and writing them."""
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    END = "end"
    """The training is over."""


_ORDER = tuple(Phase)
_LAYOUT = struct.Struct("<QQQIB")
_PAGE = mmap.PAGESIZE


class Beat(NamedTuple):
    """What one rank last told."""

    beats: int
    """So far; 0: none."""
    optimizer_step: int
    """The one under way, or the last one done, from 1; 0: before the first."""
    steps_done: int
    """Optimizer steps that this attempt has done."""
    micro_step: int
    """Within it, from 0."""
    phase: Phase

    @property
    def pace(self) -> tuple[int, int, int]:
        """How far the rank is, to compare ranks by: the larger one is ahead."""
        return self.optimizer_step, self.micro_step, _ORDER.index(self.phase)

    def __str__(self) -> str:
        """Say where the rank is, as in `forward of optimizer step 5`."""
        if self.optimizer_step == 0:
            return f"{self.phase} before the first optimizer step"
        within = {Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.RECORD}
        return f"{self.phase} {'of' if self.phase in within else 'after'} optimizer step " + str(
            self.optimizer_step
        )


class Heartbeat:
    """The shared bytes of one rank.

    Parameters
    ----------
    path : Path
    create : bool
        Whether to make the file: the watcher does, before the rank is started.

    Raises
    ------
    OSError
        If the file cannot be made, opened or mapped.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        try:
            if create:
                # Blocks that are there: a write into a hole of a full disk would be a SIGBUS.
                os.pwrite(descriptor, bytes(_PAGE), 0)
            self._bytes = mmap.mmap(descriptor, _PAGE)
        finally:
            os.close(descriptor)

    def write(self, told: Beat) -> None:
        """Replace what is told."""
        _LAYOUT.pack_into(self._bytes, 0, *told[:4], _ORDER.index(told.phase))

    def read(self) -> Beat:
        """Return what was last told; between two beats, perhaps a mixture of both."""
        beats, step, done, micro_step, phase = _LAYOUT.unpack_from(self._bytes, 0)
        return Beat(beats, step, done, micro_step, _ORDER[min(phase, len(_ORDER) - 1)])

    def close(self) -> None:
        """Unmap the bytes."""
        self._bytes.close()


class _Own:
    """The heartbeat of this process: it is one rank."""

    def __init__(self) -> None:
        self.last = Beat(0, 0, 0, 0, Phase.START)
        self.shared: Heartbeat | None = None


_own = _Own()


def share(path: Path) -> None:
    """Share the beats of this process in a file that the watcher has made.

    Raises
    ------
    OSError
        If there is none.
    """
    _own.last = Beat(0, 0, 0, 0, Phase.START)
    _own.shared = Heartbeat(path)


def beat(
    phase: Phase,
    optimizer_step: int | None = None,
    micro_step: int | None = None,
    *,
    steps_done: int | None = None,
) -> None:
    """Tell what this rank does next.

    Parameters
    ----------
    phase : Phase
    optimizer_step : int, optional
        From 1; left out: the same as before.
    micro_step : int, optional
        From 0; left out: the same as before, or 0 in another optimizer step.
    steps_done : int, optional
        Optimizer steps of this attempt; left out: as many as were told one by one.
    """
    before = _own.last
    step = before.optimizer_step if optimizer_step is None else optimizer_step
    if micro_step is None:
        micro_step = before.micro_step if step == before.optimizer_step else 0
    done = before.steps_done
    if steps_done is not None:
        done = steps_done
    elif step > before.optimizer_step > 0:
        done += step - before.optimizer_step
    _own.last = Beat(before.beats + 1, step, done, micro_step, phase)
    if _own.shared is not None:
        _own.shared.write(_own.last)


def last_beat() -> Beat:
    """Return what this rank told last."""
    return _own.last
