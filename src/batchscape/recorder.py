"""Metrics of your own training script, three lines of it.

::

    from batchscape.recorder import Recorder

    recorder = Recorder(world_size=2, micro_batch_size=4, gradient_accumulation_steps=8)
    ...                                   # once the optimizer step is done, on every rank:
    recorder.step(optimizer_step, loss=loss, samples=samples_so_far)

Within a sweep of `engine=command` the launcher says where to write; anywhere else every call
returns at once. Nothing heavy is imported, so that a script without PyTorch can use it as well.
Trouble with the disk ends the recording with one warning and never the training; a wrong call
raises `ConfigError`.
"""

from __future__ import annotations

import json
import math
import operator
import os
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, SupportsFloat, SupportsIndex

from batchscape.errors import ConfigError

__all__ = ["ATTEMPT_VARIABLE", "FOLDER", "RUN_DIR_VARIABLE", "Recorder"]

RUN_DIR_VARIABLE = "BATCHSCAPE_RUN_DIR"
"""Environment variable with the folder of the run; without it nothing is recorded."""
ATTEMPT_VARIABLE = "BATCHSCAPE_ATTEMPT"
"""Environment variable with the number of this start of the run, from 0."""
FOLDER = "recorder"
"""Folder within the run's with one file a rank."""


class _Scalar(Protocol):
    """A tensor of one number."""

    def item(self) -> float: ...


Number = SupportsFloat | SupportsIndex | _Scalar


class Recorder:
    """Records optimizer steps and evaluations of a script that batchscape launched.

    Make one on every rank, after the process group and right before the training loop: the
    first step is timed from here. Only rank 0 writes steps; the others leave what they observed.

    Parameters
    ----------
    world_size : int, optional
        Data-parallel ranks that the script trains with; that of `torch.distributed` where it is
        left out and a process group exists.
    micro_batch_size : int, optional
        Samples per rank per forward and backward.
    gradient_accumulation_steps : int, optional
        Micro-steps per optimizer step, per rank.
    global_batch_size : int, optional
        Samples per optimizer step; needed only where the three above are not all known.
    rank : int, optional
        Of this process; that of `torch.distributed`, or the variable RANK, where it is left out.

    Raises
    ------
    ConfigError
        If a value is no count of at least 1, or the rank is none of `world_size`.
    """

    def __init__(
        self,
        *,
        world_size: int | None = None,
        micro_batch_size: int | None = None,
        gradient_accumulation_steps: int | None = None,
        global_batch_size: int | None = None,
        rank: int | None = None,
    ) -> None:
        self._file = -1
        self._last_step = 0
        self._last_samples = 0
        self._last_tokens = 0
        self._train_time_s = 0.0
        self._mark = time.perf_counter()
        self._writes_steps = False
        run_dir = os.environ.get(RUN_DIR_VARIABLE)
        if not run_dir:
            return
        group = _process_group()
        if rank is None:
            rank = group.get("rank", _environment_number("RANK"))
        declared = {
            "world_size": group.get("world_size") if world_size is None else world_size,
            "micro_batch_size": micro_batch_size,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "global_batch_size": global_batch_size,
        }
        counts = {
            key: _count(key, value, 1) for key, value in declared.items() if value is not None
        }
        rank = _count("rank", rank, 0)
        if rank >= counts.get("world_size", rank + 1):
            raise ConfigError(
                f"rank must be below world_size, got {rank=} of {counts['world_size']}"
            )
        self._writes_steps = rank == 0
        self._open(Path(run_dir) / FOLDER, rank)
        self._write(
            "begin",
            {
                "rank": rank,
                "pid": os.getpid(),
                "attempt": _environment_number(ATTEMPT_VARIABLE),
                # How often torchrun has started the ranks again.
                "restart": _environment_number("TORCHELASTIC_RESTART_COUNT"),
                **counts,
            },
        )
        if world_size is not None and world_size != group.get("world_size", world_size):
            self.problem(
                f"the script says world_size={world_size}, torch.distributed has "
                f"{group['world_size']}"
            )

    @property
    def is_active(self) -> bool:
        """Whether this process records steps: within a sweep, on rank 0, the disk willing."""
        return self._writes_steps and self._file >= 0

    def step(
        self,
        optimizer_step: int,
        *,
        loss: Number | None = None,
        samples: int | None = None,
        tokens: int | None = None,
        learning_rate: Number | None = None,
        gradient_norm: Number | None = None,
        step_time_s: Number | None = None,
        loss_window: int = 1,
    ) -> None:
        """Record an optimizer step that is done.

        Its time is that since the last call, unless it is given.

        Parameters
        ----------
        optimizer_step : int
            Optimizer steps done, from 1; larger at every call.
        loss : number, optional
            Mean over the labels of the whole global batch, not of one rank or micro-batch; a
            number, or a tensor of one. Not a number: the training diverged.
        samples, tokens : int, optional
            Training samples and loss-bearing tokens so far, over all ranks.
        learning_rate, gradient_norm : number, optional
            Of this step; the norm before clipping.
        step_time_s : number, optional
            Time of the step in seconds, where the script measures it better.
        loss_window : int
            Optimizer steps that the loss is a mean over. Where that is more than one, the loss
            is that of no step, and the tables leave it out.

        Raises
        ------
        ConfigError
            If a count is no int, does not grow, or a value is no number.
        """
        if not self.is_active:
            return
        step = self._check_growth("optimizer_step", optimizer_step, self._last_step)
        row: dict[str, Any] = {"optimizer_step": step}
        if samples is not None:
            row["samples"] = self._last_samples = self._check_growth(
                "samples", samples, self._last_samples
            )
        if tokens is not None:
            row["tokens"] = self._last_tokens = self._check_growth(
                "tokens", tokens, self._last_tokens
            )
        row |= _numbers(loss=loss, learning_rate=learning_rate, gradient_norm=gradient_norm)
        if _count("loss_window", loss_window, 1) > 1:
            row["loss_window"] = loss_window
        # Read after the numbers: `item` of a tensor waits until the device has done the step.
        elapsed = self._elapsed()
        self._train_time_s += elapsed
        if step == self._last_step + 1:
            row["step_time_s"] = elapsed
        row |= _numbers(step_time_s=step_time_s)
        self._last_step = step
        self._write("step", {**row, "train_time_s": self._train_time_s})

    def evaluation(
        self,
        optimizer_step: int,
        *,
        eval_loss: Number | None = None,
        eval_accuracy: Number | None = None,
        eval_labels: int | None = None,
        evaluation_s: Number | None = None,
    ) -> None:
        """Record an evaluation; call it as soon as it is done.

        Its time is that since the last call, unless it is given, and is none of the training's.

        Parameters
        ----------
        optimizer_step : int
            Optimizer steps done, 0 before the first.
        eval_loss : number, optional
            Mean over the held-out labels.
        eval_accuracy : number, optional
            Share of right classes, 0 to 1.
        eval_labels : int, optional
            Held-out labels.
        evaluation_s : number, optional
            Time that it took, in seconds.

        Raises
        ------
        ConfigError
            If a count is no int, the step is behind the last one, or a value is no number.
        """
        if not self.is_active:
            return
        step = _count("optimizer_step", optimizer_step, self._last_step)
        row: dict[str, Any] = {"optimizer_step": step}
        row |= _numbers(eval_loss=eval_loss, eval_accuracy=eval_accuracy)
        if eval_labels is not None:
            row["eval_labels"] = _count("eval_labels", eval_labels, 1)
        elapsed = self._elapsed()
        row |= _numbers(evaluation_s=elapsed if evaluation_s is None else evaluation_s)
        # Time beyond the evaluation's own belongs to the next step.
        self._mark -= max(elapsed - row["evaluation_s"], 0.0)
        self._write("evaluation", {**row, "train_time_s": self._train_time_s})

    def exclude(self) -> None:
        """Leave the time since the last call out of the training, such as a checkpoint's."""
        self._mark = time.perf_counter()

    def problem(self, message: str) -> None:
        """Record why the run is invalid, such as a batch other than the one asked for."""
        self._write("problem", {"message": str(message)})

    def close(self) -> None:
        """Close the file; the end of the process does the same."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _elapsed(self) -> float:
        now = time.perf_counter()
        elapsed, self._mark = now - self._mark, now
        return elapsed

    @staticmethod
    def _check_growth(name: str, value: object, last: int) -> int:
        count = _count(name, value, 1)
        if count <= last:
            raise ConfigError(f"{name} counts all so far and must grow: got {count} after {last}")
        return count

    def _open(self, folder: Path, rank: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
            self._file = os.open(folder / f"rank_{rank}.jsonl", flags, 0o666)
        except OSError as error:
            self._give_up(error)

    def _write(self, event: str, row: Mapping[str, Any]) -> None:
        if self._file < 0:
            return
        line = (json.dumps({"event": event, **row}) + "\n").encode()
        try:
            # One write a line: a reader never sees a line with another inside it.
            if os.write(self._file, line) < len(line):
                raise OSError("the disk took a part of a line")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.close()
        warnings.warn(f"batchscape records nothing more: {error}", RuntimeWarning, stacklevel=4)


def _process_group() -> dict[str, int]:
    """Return rank and world size of `torch.distributed`, where the script has set it up."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return {}
    return {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()}


def _environment_number(name: str) -> int:
    text = os.environ.get(name, "0")
    return int(text) if text.isascii() and text.isdecimal() else 0


def _count(name: str, value: object, smallest: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)  # type: ignore[arg-type]  # a value without index is refused
    except TypeError:
        raise ConfigError(f"{name} must be an int, got {value!r}") from None
    if not smallest <= count < 2**63:
        raise ConfigError(f"{name} must be an int from {smallest} to 2**63 - 1, got {count}")
    return count


def _numbers(**values: Number | None) -> dict[str, float]:
    """Turn numbers and tensors of one number into floats, without those left out."""
    row = {}
    for name, value in values.items():
        if value is None:
            continue
        try:
            if isinstance(value, str | bytes | bool):
                raise TypeError
            row[name] = float(value)  # type: ignore[arg-type]  # a value that is no float is refused
        except (TypeError, ValueError, OverflowError, RuntimeError):
            text = repr(value)
            text = text if len(text) <= 60 else f"{text[:60]}..."
            raise ConfigError(f"{name} must be a number or a tensor of one, got {text}") from None
        if name.endswith("_s") and not 0 <= row[name] < math.inf:
            raise ConfigError(
                f"{name} must be a time in seconds, finite and at least 0; got {row[name]}"
            )
    return row
