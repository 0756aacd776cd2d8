"""The micro-batches of one rank, in their order, on its device.

A rank fetches them itself, or leaves it to processes of its own that work ahead, over the ends of
optimizer steps. What is fetched never depends on who does it: the indices come from the stream of
samples, and batches are handed out in its order.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from batchscape.config import Loader
from batchscape.data.datasets import Dataset, Indices
from batchscape.device import is_accelerator
from batchscape.measure.memory_limit import lift_memory_limit
from batchscape.system import end_with_parent
from batchscape.train.batches import to_device
from batchscape.train.stream import SampleStream

MicroBatch = tuple[Tensor, Tensor]

_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}
_BATCHES_AHEAD = 2
"""Micro-batches that each worker fetches ahead."""
_DEATH_S = 1.0
"""How long a process may still live after its sockets are closed."""


class StepBatches(NamedTuple):
    """Micro-batches of one optimizer step."""

    labels: int
    """Loss-bearing labels of the whole global batch."""
    micro_steps: int
    batches: Iterator[MicroBatch]
    """Inputs and labels of each micro-step; taking one may wait for it."""


class BatchLoader:
    """Fetches each micro-batch when it is asked for, in this process."""

    def __init__(
        self, dataset: Dataset, stream: SampleStream, device: torch.device, precision: str
    ) -> None:
        self._dataset = dataset
        self._stream = stream
        self._to_device = partial(to_device, device=device, precision=precision)

    def step(self, optimizer_step: int, *, sampling: bool = True) -> StepBatches:
        """Return the micro-batches of any optimizer step, counted from 0; see `SampleStream`."""
        samples = self._stream.step(optimizer_step, sampling=sampling)
        batches = (self._to_device(self._dataset.batch(indices)) for indices in samples.indices)
        return StepBatches(samples.labels, len(samples.indices), batches)

    def close(self) -> None:
        """End what works ahead: nothing, here."""


class WorkerLoader(BatchLoader):
    """Fetches micro-batches ahead, in processes of this rank."""

    def __init__(
        self,
        dataset: Dataset,
        stream: SampleStream,
        device: torch.device,
        precision: str,
        *,
        workers: int,
        steps: range,
    ) -> None:
        super().__init__(dataset, stream, device, precision)
        self._steps = steps
        self._announced_steps: deque[tuple[int, int, int]] = deque()
        """Steps whose indices workers have: the step, its micro-steps and its labels."""
        children_before = set(multiprocessing.active_children())
        # The rank answers signals to the run's process group. They are blocked until each worker
        # ignores them.
        signals_before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            with warnings.catch_warnings():
                # More workers than cores are right where samples are waited for, not computed.
                warnings.filterwarnings("ignore", "This DataLoader will create")
                loader = DataLoader(
                    _Fetcher(dataset),
                    batch_size=None,
                    sampler=self._indices(),
                    num_workers=workers,
                    # Python's default is a server from 3.14 on, whose children are not this rank's.
                    multiprocessing_context="fork" if sys.platform == "linux" else None,
                    prefetch_factor=_BATCHES_AHEAD,
                    pin_memory=is_accelerator(device),
                    worker_init_fn=partial(_start_worker, os.getpid()),
                    # The loader draws a seed, which must not come from the generator of dropout.
                    generator=torch.Generator(),
                )
                self._batches: Iterator[MicroBatch] = iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals_before)
        self._workers = set(multiprocessing.active_children()) - children_before

    def step(self, optimizer_step: int, *, sampling: bool = True) -> StepBatches:
        """Return the micro-batches of the next optimizer step."""
        # Workers have always begun the next step, so the queue is never empty here.
        expected, micro_steps, labels = self._announced_steps.popleft()
        if (optimizer_step, sampling) != (expected, True):
            raise AssertionError(
                f"micro-batches are fetched in order: {expected=}, {optimizer_step=}, {sampling=}"
            )
        batches = (self._to_device(self._next()) for _ in range(micro_steps))
        return StepBatches(labels, micro_steps, batches)

    def close(self) -> None:
        """End the workers, also one that is in the middle of a batch."""
        # Python calls it when the iterator is freed, but a traceback may keep the iterator alive.
        self._batches._shutdown_workers()  # type: ignore[attr-defined]  # no public name
        for worker in self._workers:
            if worker.is_alive():
                worker.kill()
                worker.join()

    def _indices(self) -> Iterator[Indices]:
        for k in self._steps:
            samples = self._stream.step(k)
            self._announced_steps.append((k, len(samples.indices), samples.labels))
            yield from samples.indices

    def _next(self) -> MicroBatch:
        try:
            return next(self._batches)
        except (ConnectionError, EOFError, RuntimeError) as error:
            # A worker's death may first show as a closed socket: no fault of a network.
            for worker in self._workers:
                worker.join(0 if isinstance(error, RuntimeError) else _DEATH_S)
                if worker.exitcode == -signal.SIGKILL:
                    raise RuntimeError(
                        f"DataLoader worker (pid {worker.pid}) is killed by signal: Killed"
                    ) from error
            raise


class _Fetcher(TorchDataset[MicroBatch]):
    """A dataset that is indexed by the samples of a batch."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __getitem__(self, indices: Indices) -> MicroBatch:
        return self._dataset.batch(indices)


def _start_worker(rank_pid: int, _worker: int) -> None:
    """End the worker when its rank ends; ignore stop signals, which the rank handles.

    It computes nothing on the device, so the device's limit of memory does not hold for it.
    """
    end_with_parent()
    if os.getppid() != rank_pid:
        os._exit(1)
    lift_memory_limit()
    for stop_signal in _STOP_SIGNALS:
        signal.signal(stop_signal, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)


def build_loader(
    config: Loader,
    dataset: Dataset,
    stream: SampleStream,
    device: torch.device,
    precision: str,
    *,
    steps: range,
) -> BatchLoader:
    """Return the loader that the settings ask for, for optimizer steps `steps` (from 0)."""
    if config.workers == 0:
        return BatchLoader(dataset, stream, device, precision)
    return WorkerLoader(dataset, stream, device, precision, workers=config.workers, steps=steps)
