"""The heartbeat of a rank: a few bytes about what it does, which it shares with its watcher.

A rank writes into a mapped file of its own at every micro-step, batch of an evaluation and
checkpoint: no system call, no flush, about a microsecond. The watcher notes by its own clock when
the bytes change. A rank without a watcher keeps its last heartbeat, too, for the report of a
failure.
"""

from __future__ import annotations

import mmap
import os
import struct
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple


def beats_path(prefix: str, rank: int) -> Path:
    """Return the file of the heartbeat of a rank."""
    return Path(f"{prefix}.beats-{rank}")


def stacks_path(prefix: str, rank: int) -> Path:
    """Return the file that a rank dumps its stacks to on a signal."""
    return Path(f"{prefix}.stacks-{rank}")


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
    """One heartbeat of a rank."""

    beats: int
    """Number of heartbeats so far; 0: none."""
    optimizer_step: int
    """The optimizer step under way, or the last one done, from 1; 0: before the first."""
    steps_done: int
    """Optimizer steps that this attempt has done."""
    micro_step: int
    """Micro-step within the optimizer step, from 0."""
    phase: Phase

    @property
    def pace(self) -> tuple[int, int, int]:
        """Progress of the rank, to compare ranks: the larger one is ahead."""
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
                # Allocate the blocks: a write into a hole of a full disk would raise SIGBUS.
                os.pwrite(descriptor, bytes(_PAGE), 0)
            self._bytes = mmap.mmap(descriptor, _PAGE)
        finally:
            os.close(descriptor)

    def write(self, beat: Beat) -> None:
        """Replace the heartbeat."""
        _LAYOUT.pack_into(self._bytes, 0, *beat[:4], _ORDER.index(beat.phase))

    def read(self) -> Beat:
        """Return the last heartbeat; during a write, perhaps a mixture of two."""
        beats, step, done, micro_step, phase = _LAYOUT.unpack_from(self._bytes, 0)
        return Beat(beats, step, done, micro_step, _ORDER[min(phase, len(_ORDER) - 1)])

    def close(self) -> None:
        """Unmap the bytes."""
        self._bytes.close()


class _CurrentRank:
    """The heartbeat of this process, which is one rank."""

    def __init__(self) -> None:
        self.last = Beat(0, 0, 0, 0, Phase.START)
        self.shared: Heartbeat | None = None


_current = _CurrentRank()


def share(path: Path) -> None:
    """Share the beats of this process in a file that the watcher has made.

    Raises
    ------
    OSError
        If there is no such file.
    """
    _current.last = Beat(0, 0, 0, 0, Phase.START)
    _current.shared = Heartbeat(path)


def beat(
    phase: Phase,
    optimizer_step: int | None = None,
    micro_step: int | None = None,
    *,
    steps_done: int | None = None,
) -> None:
    """Note what this rank does next.

    Parameters
    ----------
    phase : Phase
    optimizer_step : int, optional
        From 1; left out: the same as before.
    micro_step : int, optional
        From 0; left out: the same as before, or 0 in another optimizer step.
    steps_done : int, optional
        Optimizer steps of this attempt; left out: those counted so far.
    """
    beats, last_step, last_done, last_micro_step, _ = _current.last
    step = last_step if optimizer_step is None else optimizer_step
    if micro_step is None:
        micro_step = last_micro_step if step == last_step else 0
    if steps_done is None:
        steps_done = last_done + (step - last_step if step > last_step > 0 else 0)
    _current.last = Beat(beats + 1, step, steps_done, micro_step, phase)
    if _current.shared is not None:
        _current.shared.write(_current.last)


def last_beat() -> Beat:
    """Return the last heartbeat of this rank."""
    return _current.last
