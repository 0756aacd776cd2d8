"""The whole life of one rank: from a forked process to the outcome that it leaves."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from batchscape.device import device_of_rank, is_accelerator
from batchscape.errors import BatchscapeError
from batchscape.measure.memory_limit import memory_limit
from batchscape.outgoing import redact
from batchscape.record.disk import explained
from batchscape.record.files import read_json
from batchscape.record.folder import RunFolder
from batchscape.record.heartbeat import Phase, beat, last_beat
from batchscape.record.outcome import Outcome
from batchscape.record.spec import RunSpec
from batchscape.record.status import Status
from batchscape.text import count_text
from batchscape.train.branching import BranchPoint
from batchscape.train.failures import failure_of
from batchscape.train.loop import Training
from batchscape.train.memory import MemoryPhases
from batchscape.train.ranks import write_rank_row

_VARIANTS = 8
"""Of one function, for each size of a micro-batch: as many as torch allows a function in all."""


@contextmanager
def code_for_each_size(sizes: int) -> Iterator[None]:
    """Allow compiled code for each size of a micro-batch; raise where it is not enough.

    Torch would go on with code that is not compiled, and say so in a warning alone.

    Notes
    -----
    Source: `recompile_limit`, `accumulated_recompile_limit` and `fail_on_recompile_limit_hit` of
    `torch._dynamo.config`; "Dealing with Recompilations",
    https://docs.pytorch.org/docs/stable/compile/programming_model.recompilation.html.
    """
    import torch._dynamo  # takes a second, and only compiled runs need it
    from torch._dynamo.exc import FailOnRecompileLimitHit

    limit = _VARIANTS * sizes
    with torch._dynamo.config.patch(
        recompile_limit=limit,
        accumulated_recompile_limit=max(limit, torch._dynamo.config.accumulated_recompile_limit),
        fail_on_recompile_limit_hit=True,
    ):
        try:
            yield
        except FailOnRecompileLimitHit as error:
            each = count_text(sizes, "size of micro-batches", "sizes of micro-batches")
            msg = (
                f"engine.compile: a function of the model would be compiled more than {limit} "
                f"times, {_VARIANTS} for {each}, as its inputs or settings differ from "
                "step to step (TORCH_LOGS=recompiles says how); let them be the same, or use "
                "engine.compile=false"
            )
            raise BatchscapeError(msg) from error


_COLLECTIVE_TIMEOUT_S = 1800.0
_NEVER_S = 30 * 86_400.0
"""A rank that waits longer for the others gives up, if nobody has ended it: where one has died or
hangs, the launcher is faster."""


def main(run_dir: str, rank: int) -> int:
    """Train one rank of the run in `run_dir`."""
    began = time.perf_counter()
    folder = RunFolder(Path(run_dir))
    progress = _RankState()
    try:
        outcome = _train(folder, rank, began, progress)
    except Exception as error:  # noqa: BLE001  (a run ends with a status, whatever happened)
        explained_error = error
        if not isinstance(error, BatchscapeError):
            explained_error = explained(error, folder.path)
            with suppress(OSError):  # the log may be on the same full disk
                sys.stderr.write(redact(traceback.format_exc()))
        done = 0 if progress.training is None else progress.training.done
        outcome = failure_of(explained_error, done, progress.device, progress.spec)
    if not progress.has_left:
        _leave(folder, rank, outcome, progress)
    return 0 if outcome.status in {Status.COMPLETED, Status.DIVERGED} else 1


class _RankState:
    """How far a rank has come, for the report of a failure."""

    def __init__(self) -> None:
        self.has_left = False
        self.spec: RunSpec | None = None
        self.training: Training | None = None
        self.device: torch.device | None = None


def _leave(folder: RunFolder, rank: int, outcome: Outcome, progress: _RankState) -> None:
    """Write how this rank ended."""
    outcome.write(folder, rank)
    beat(Phase.END)
    progress.has_left = True


def _train(folder: RunFolder, rank: int, began: float, progress: _RankState) -> Outcome:
    spec = progress.spec = RunSpec.read(folder.config)
    launch = read_json(folder.launch)
    on_node = spec.geometry.devices_per_node
    device = progress.device = device_of_rank(
        launch["device_type"], rank % on_node, len(launch["devices"])
    )
    torch.set_num_threads(launch["threads_per_rank"])
    _set_precision_of_products(spec.config.in_process.float32_matmul)
    outside_s = spec.config.launcher.hang_outside_s
    # Where no hang is looked for, no collective ends a run either.
    timeout_s = _NEVER_S if outside_s is None else max(_COLLECTIVE_TIMEOUT_S, 2 * outside_s)
    with _process_group(launch, rank, device, timeout_s), ExitStack() as limits:
        begins = None
        if "begins" in launch:
            begins = BranchPoint(folder, launch["begins"]["trunk"])
        training = Training(
            *(spec, folder, rank, device, launch["attempt"]),
            keeps=launch.get("keeps", ()),
            begins=begins,
        )
        progress.training = training
        signal.signal(signal.SIGTERM, lambda *_: training.request_stop())
        sharing = 1
        if is_accelerator(device):
            ranks = [rank % len(launch["devices"]) for rank in range(on_node)]
            sharing = ranks.count(device.index)
        limit_gib = spec.config.device.memory_limit_gib
        limits.enter_context(memory_limit(device, limit_gib, ranks_on_device=sharing))
        if spec.config.in_process.compile:
            limits.enter_context(code_for_each_size(training.sizes))
        memory = MemoryPhases(device, measure=spec.config.measure.memory)
        memory.rehearse(training)
        startup_s: float | None = None

        def enter(phase: str) -> None:
            nonlocal startup_s
            if startup_s is None and phase in {"first_backward", "steady"}:
                apart_s = training.evaluation_s + sum(training.compilations_s)
                startup_s = time.perf_counter() - began - apart_s
            memory.enter(phase)

        outcome = training.run(enter)
        write_rank_row(
            folder,
            launch,
            training,
            rank=rank,
            device=device,
            memory=memory.report(),
            startup_s=startup_s,
            memory_probe_s=memory.probe_s,
            peak_taken_gib=memory.peak_taken_gib(),
        )
        # The training is over: what hangs or fails in the teardown takes nothing from it.
        _leave(folder, rank, replace(outcome, phase=str(last_beat().phase)), progress)
        # Nothing may hold the wrapped model when the process group ends.
        if spec.config.in_process.compile:
            gc.unfreeze()
        gc.collect()
    return outcome


def _set_precision_of_products(float32: str) -> None:
    """Set whether products of float32, convolutions included, may be in TF32.

    Parts of a product of halves are added up in float32. By default torch lets cuBLAS add them up
    in halves, where it cuts a product for its shape: cuts of a batch, whose shapes differ, would
    then differ by that rounding too.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html, "TensorFloat-32" and "Reduced
    Precision Reduction in BF16 GEMMs".
    """
    torch.set_float32_matmul_precision(float32)
    torch.backends.cudnn.allow_tf32 = float32 == "high"
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


@contextmanager
def _process_group(
    launch: dict[str, Any], rank: int, device: torch.device, timeout_s: float
) -> Iterator[None]:
    """Make the process group; none for a single rank."""
    if launch["world_size"] == 1:
        yield
        return
    meeting = launch.get("master") or f"file://{launch['rendezvous']}"
    loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
    if loopback and "master" not in launch:
        # Host names of laptops often resolve to no interface; all ranks are on this machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
    # Otherwise NCCL's errors have no reason. Source: "Logging", NCCL user guide,
    # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/logging.html.
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    backend = _backend(launch)
    dist.init_process_group(
        backend,
        init_method=meeting,
        rank=rank,
        world_size=launch["world_size"],
        timeout=timedelta(seconds=timeout_s),
        device_id=device if backend == "nccl" else None,
    )
    yield
    # Only after success: a rank that failed exits at once, and its peers are ended with it.
    dist.destroy_process_group()


def _backend(launch: dict[str, Any]) -> str:
    """Return the backend of the process group: gloo where ranks share a device, as NCCL refuses."""
    own_devices = launch["world_size"] <= len(launch["devices"])
    return dist.get_default_backend_for_device(launch["device_type"]) if own_devices else "gloo"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
