"""Rows of optimizer steps, added up over the ranks in batches and written late.

Losses stay on the device, in float64, until a drain. A drain starts one small exchange (the
losses of up to 25 steps, samples of the gradient's noise and the wishes of the ranks) and writes
what the drain before it started, which has long arrived: neither the host nor the device ever
waits for a record. A row is thus at most two drains, or 50 optimizer steps, late; a crash loses no
more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from batchscape.device import is_accelerator, module_of
from batchscape.measure.clock import StepClock
from batchscape.measure.contention import CoreWaits
from batchscape.measure.noise_scale import NoiseSample
from batchscape.measure.telemetry import build_telemetry
from batchscape.record.files import JsonLines
from batchscape.record.folder import RunFolder
from batchscape.train.batches import pinning
from batchscape.train.divergence import DivergenceRule

LARGEST_INTERVAL = 25
"""Optimizer steps between drains at most; rows are up to two drains late."""

_TARGET_INTERVAL_S = 1.0
"""Time between drains that the interval aims at: a slow run is drained at every step."""


@dataclass(frozen=True)
class Agreement:
    """What all ranks have agreed on; the same on every rank, at the same step."""

    stop: bool = False
    """A rank was asked to stop."""
    checkpoint: bool = False
    """A checkpoint is due."""
    diverged: str | None = None
    """Why the training is diverged, by the first optimizer step that says so."""

    def __or__(self, other: Agreement) -> Agreement:
        """Join two agreements, the earlier one first."""
        return Agreement(
            self.stop or other.stop,
            self.checkpoint or other.checkpoint,
            self.diverged if self.diverged is not None else other.diverged,
        )


class _ExchangeVector(NamedTuple):
    """Content of the vector that ranks exchange, in its order.

    Before the exchange it is that of one rank, after it the sum over the ranks.
    """

    stop: float
    """Above 0: the rank was asked to stop."""
    checkpoint: float
    """Above 0: the rank finds a checkpoint due."""
    interval: float
    """Optimizer steps until the next drain; 0 on all ranks but the first."""
    losses: list[float]
    """Sum of the losses, one a step."""
    squares: list[float]
    """Square sums of noise samples, one a sampled step."""
    overflows: list[float]
    """Above 0: a gradient of the step was not finite on some rank; one a step. So every rank comes
    to the same verdict, also where only one meets such a number."""

    @classmethod
    def unpacked(cls, vector: Sequence[float], steps: int) -> _ExchangeVector:
        """Return the content of a vector of so many steps."""
        stop, checkpoint, interval, *rest = vector
        end = len(rest) - steps
        return cls(stop, checkpoint, interval, rest[:steps], rest[steps:end], rest[end:])


@dataclass
class _PendingExchange:
    """An exchange under way and the rows that wait for it."""

    rows: list[dict[str, Any]]
    labels: list[int]
    noise: dict[int, NoiseSample]
    vectors: Tensor
    """Vectors of `_ExchangeVector`, one row a rank."""
    norms: Tensor
    """Gradient norm of each step; then, if updates may be skipped, for each step whether it was."""
    exchange: dist.Work | None
    copy_event: torch.Event | None

    def wait(self) -> None:
        if self.copy_event is not None:
            self.copy_event.synchronize()
        elif self.exchange is not None:
            self.exchange.wait()

    def summed(self) -> _ExchangeVector:
        """Add up the vectors of the ranks, in their order.

        An all-reduce orders each sum by its place in the vector, and the place of a step depends
        on when a drain was due: the last digit of its loss would differ from run to run.
        """
        total = self.vectors[0].clone()
        for row in self.vectors[1:]:
            total += row
        return _ExchangeVector.unpacked(total.tolist(), len(self.rows))


class StepRecorder:
    """Collects the steps of one rank; rank 0 writes them."""

    def __init__(
        self,
        folder: RunFolder,
        rank: int,
        world_size: int,
        device: torch.device,
        clock: StepClock,
        *,
        ranks_on_node: int,
        attempt: int,
        warmup_optimizer_steps: int,
        rule: DivergenceRule,
        tokens: int = 0,
        train_time_s: float = 0.0,
    ) -> None:
        self.tokens = tokens
        self.train_time_s = train_time_s
        self.measured_s = 0.0
        self.measured_optimizer_steps = 0
        self._lines = JsonLines(folder.lines("steps")) if rank == 0 else None
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._clock = clock
        self._attempt = attempt
        self._rule = rule
        self._warmup_left = warmup_optimizer_steps
        self._interval = 1
        self._pending: _PendingExchange | None = None
        self._last_drain = time.perf_counter()
        self._core_waits = CoreWaits()
        self.telemetry = build_telemetry(device, rank % ranks_on_node, ranks_on_node)
        """Of this rank's device; its energy is counted in steps that are not warm-up."""
        self._start_rows()

    def _start_rows(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._labels: list[int] = []
        self._noise: dict[int, NoiseSample] = {}
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._skipped: list[Tensor] = []

    def begin(self) -> None:
        """Mark the begin of an optimizer step: what happened before it belongs to no step."""
        if self._warmup_left <= 0:
            self.telemetry.resume()
        if self._warmup_left == 0:
            # Telemetry has waited for the device; and energy and gaps are of the same time.
            self._clock.break_off()
        self._core_waits.since_last()

    def break_off(self) -> None:
        """Mark that what follows, up to the next step, is an evaluation or a checkpoint."""
        self.telemetry.pause()
        self._clock.break_off()

    def add(
        self,
        *,
        optimizer_step: int,
        samples: int,
        global_batch_size: int,
        labels: int,
        loss_sum: Tensor,
        gradient_norm: Tensor,
        learning_rate: float,
        exchanged_bytes: int,
        skipped: Tensor | None = None,
        noise: NoiseSample | None = None,
    ) -> None:
        """Take one optimizer step."""
        if noise is not None:
            self._noise[len(self._rows)] = noise
        # The drain stacks them: one operation for many steps.
        self._losses.append(loss_sum)
        self._norms.append(gradient_norm)
        if skipped is not None:
            self._skipped.append(skipped.to(gradient_norm.dtype))
        self.tokens += labels
        contention = self._core_waits.since_last()
        if is_accelerator(self._device):
            # It would include the time that the host waits for the device.
            contention = contention._replace(processor_time_s=None)
        self._rows.append(
            {
                "optimizer_step": optimizer_step,
                "samples": samples,
                "global_batch_size": global_batch_size,
                "tokens": self.tokens,
                "attempt": self._attempt,
                "learning_rate": learning_rate,
                "exchanged_bytes": exchanged_bytes,
                **contention._asdict(),
                "warmup": self._warmup_left > 0,
            }
        )
        self._labels.append(labels)
        self._warmup_left -= 1

    @property
    def is_due(self) -> bool:
        """Whether a drain is due; the same on every rank."""
        return len(self._rows) >= self._interval

    def drain(self, *, stop: bool, checkpoint: bool) -> Agreement:
        """Write the rows of the drain before, and start the reduction of the new ones."""
        agreed = self._finish()
        if self._rows:
            self._start(stop=stop, checkpoint=checkpoint)
        return agreed

    def flush(self, *, stop: bool = False, checkpoint: bool = False) -> Agreement:
        """Write everything that was added, and wait for the requests of all ranks."""
        agreed = self.drain(stop=stop, checkpoint=checkpoint) | self._finish()
        if self._lines is not None:
            self._lines.flush()
        return agreed

    def close(self) -> None:
        """Close the files."""
        self._core_waits.close()
        if self._lines is not None:
            self._lines.close()

    def _start(self, *, stop: bool, checkpoint: bool) -> None:
        if (sample := self.telemetry.sample()) is not None:
            self._rows[-1] |= sample._asdict()
        now = time.perf_counter()
        elapsed_s, self._last_drain = now - self._last_drain, now
        interval = 0
        if self._rank == 0:
            steps_per_interval = len(self._rows) * _TARGET_INTERVAL_S / max(elapsed_s, 1e-9)
            interval = min(max(int(steps_per_interval), 1), LARGEST_INTERVAL)
        # In the order of `_ExchangeVector`, as is what follows.
        head = torch.tensor([stop, checkpoint, interval], dtype=torch.float64)
        if is_accelerator(self._device):
            # A copy from pageable memory would wait until the device has done all its work.
            with pinning():
                head = head.pin_memory()
            head = head.to(self._device, non_blocking=True)
        squares = [sample.square_sum for sample in self._noise.values()]
        norms = torch.stack([*self._norms, *self._skipped])
        overflows = (~norms[: len(self._norms)].isfinite()).double()
        vector = torch.cat([head, torch.stack([*self._losses, *squares]), overflows])
        vectors = vector.unsqueeze(0)
        exchange = None
        if self._world_size > 1:
            vectors = vector.new_empty(self._world_size, len(vector))
            exchange = dist.all_gather(list(vectors), vector, async_op=True)
        copy_event = None
        if is_accelerator(self._device):
            if exchange is not None:
                exchange.wait()  # of NCCL the stream waits, not the host
            vectors = _to_pinned(vectors)
            norms = _to_pinned(norms)
            copy_event = module_of(self._device).Event()
            copy_event.record()
        self._pending = _PendingExchange(
            self._rows, self._labels, self._noise, vectors, norms, exchange, copy_event
        )
        self._start_rows()

    def _finish(self) -> Agreement:
        pending, self._pending = self._pending, None
        if pending is None:
            return Agreement()
        pending.wait()
        sums, norms = pending.summed(), pending.norms.tolist()
        for (slot, sample), total in zip(pending.noise.items(), sums.squares, strict=True):
            square = sample.small_gradients * total
            pending.rows[slot] |= {
                "small_batch_size": sample.small_batch_size,
                "small_gradient_square": square if math.isfinite(square) else None,
            }
        self._interval = int(sums.interval)
        diverged = None
        times = self._clock.read(len(pending.rows))
        for slot, (row, step) in enumerate(zip(pending.rows, times, strict=True)):
            row["loss"] = sums.losses[slot] / pending.labels[slot]
            row["gradient_norm"] = norms[slot]
            row["skipped"] = len(norms) > len(times) and norms[len(times) + slot] > 0
            self.train_time_s += step.step_time_s
            row |= {"train_time_s": self.train_time_s, **step._asdict()}
            if not row["warmup"]:
                self.measured_s += step.step_time_s
                self.measured_optimizer_steps += 1
            if diverged is None:
                diverged = self._rule.judge(
                    row["optimizer_step"],
                    row["loss"],
                    norm_is_finite=sums.overflows[slot] == 0 or row["skipped"],
                )
        if self._lines is not None:
            self._lines.append(pending.rows)
        return Agreement(sums.stop > 0, sums.checkpoint > 0, diverged)


def _to_pinned(source: Tensor) -> Tensor:
    with pinning():
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    return target.copy_(source, non_blocking=True)
