"""Real trainings that end as the first word of their run's name says, in the middle of a step."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from torch import Tensor

from batchscape.models.build import LossModule
from batchscape.train import loader, worker
from batchscape.train.loop import Training

STEP = 5
"""Optimizer step in which it happens."""


def leave_room(mib: int) -> None:
    """Let the system refuse this process more than some address space."""
    room = psutil.Process().memory_info().vms + (mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (room, room))


def limited() -> None:
    leave_room(64)
    torch.zeros(1 << 30, dtype=torch.uint8)


def wrapped() -> None:
    """Meet a MemoryError of Python, and pass on another exception."""
    leave_room(64)
    try:
        bytearray(1 << 30)
    except MemoryError as error:
        msg = "no batch can be made"
        raise ValueError(msg) from error


def speaks() -> None:
    """Raise an error that only speaks of memory."""
    msg = "a configuration that runs out of memory is refused"
    raise ValueError(msg)


def sleeps() -> None:
    while True:
        time.sleep(60)


def segfaults() -> None:
    ctypes.string_at(0)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def unplugged() -> None:
    """Cut every connection to the others, as a network does that fails."""
    for connection in psutil.Process().net_connections():
        if connection.status == psutil.CONN_ESTABLISHED:
            with socket.socket(fileno=os.dup(connection.fd)) as own:
                own.shutdown(socket.SHUT_RDWR)


def trains() -> None:
    pass


def hungry() -> None:
    leave_room(16)
    bytearray(1 << 30)


IN_THE_LOADER = {"loader": hungry, "robbed": killed}


def plant_in_the_loader(fault: Callable[[], None]) -> None:
    """Let the process that fetches samples meet a fault."""
    real = loader._Fetcher.__getitem__
    calls = 0

    def fetch(self: loader._Fetcher, indices: object) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        if calls == STEP:
            fault()
        return real(self, indices)  # type: ignore[arg-type]

    loader._Fetcher.__getitem__ = fetch  # type: ignore[method-assign]  # a planted fault


def main(run_dir: str, rank: int) -> int:
    """Train, and meet the fault in the forward of step 5 of the last rank."""
    name = Path(run_dir).name.split("-")[0]
    if name in IN_THE_LOADER:
        plant_in_the_loader(IN_THE_LOADER[name])
        return worker.main(run_dir, rank)
    fault: Callable[[], None] = globals().get(name, trains)
    ranks = int(Path(run_dir).name.rpartition("-d")[2])
    real_step, real_forward = Training._step, LossModule.forward
    current = 0

    def step(self: Training, k: int) -> None:
        nonlocal current
        current = k + 1
        if name == "sleeps" and k > 0:
            # Slow enough to be seen before it hangs.
            time.sleep(0.7)
        real_step(self, k)

    def forward(self: LossModule, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if current == STEP and rank == ranks - 1:
            fault()
        return real_forward(self, inputs, labels)

    Training._step = step  # type: ignore[method-assign]  # a planted fault
    LossModule.forward = forward  # type: ignore[method-assign]  # a planted fault
    return worker.main(run_dir, rank)
