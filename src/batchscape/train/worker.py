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
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from batchscape.device import device_of_rank, is_accelerator
from batchscape.errors import BatchscapeError
from batchscape.measure.memory_limit import memory_limit
from batchscape.outgoing import redact
from batchscape.record.disk import as_disk_error
from batchscape.record.files import read_json
from batchscape.record.folder import RunFolder
from batchscape.record.heartbeat import Phase, beat, last_beat
from batchscape.record.spec import RunSpec
from batchscape.record.status import Outcome, Status
from batchscape.text import count_text
from batchscape.train.branching import BranchPoint
from batchscape.train.failures import failure_of
from batchscape.train.loop import Training
from batchscape.train.memory import MemoryPhases
from batchscape.train.ranks import write_rank_row

_COMPILATIONS_PER_SIZE = 8
"""Torch's own limit for a function, here for each size of a micro-batch."""


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

    limit = _COMPILATIONS_PER_SIZE * sizes
    with torch._dynamo.config.patch(
        recompile_limit=limit,
        accumulated_recompile_limit=max(limit, torch._dynamo.config.accumulated_recompile_limit),
        fail_on_recompile_limit_hit=True,
    ):
        try:
            yield
        except FailOnRecompileLimitHit as error:
            sizes_text = count_text(sizes, "size of micro-batches", "sizes of micro-batches")
            raise BatchscapeError(
                f"engine.compile: a function of the model would be compiled more than {limit} "
                f"times, {_COMPILATIONS_PER_SIZE} for {sizes_text}, because its inputs or settings "
                "differ from step to step (TORCH_LOGS=recompiles says how); keep them the same, or "
                "use engine.compile=false"
            ) from error


_COLLECTIVE_TIMEOUT_S = 1800.0
_NEVER_S = 30 * 86_400.0
"""How long a rank waits for the others before it gives up; the launcher, which ends all ranks where
one has died or hangs, is faster."""


def main(run_dir: str, rank: int) -> int:
    """Train one rank of the run in `run_dir`."""
    begin = time.perf_counter()
    folder = RunFolder(Path(run_dir))
    state = _RankState()
    try:
        outcome = _train(folder, rank, begin, state)
    except Exception as error:  # noqa: BLE001  (a run ends with a status, whatever happened)
        explained_error = error
        if not isinstance(error, BatchscapeError):
            explained_error = as_disk_error(error, folder.path)
            with suppress(OSError):  # the log may be on the same full disk
                sys.stderr.write(redact(traceback.format_exc()))
        steps_done = 0 if state.training is None else state.training.steps_done
        outcome = failure_of(explained_error, steps_done, state.device, state.spec)
    if not state.has_outcome:
        _write_outcome(folder, rank, outcome, state)
    return 0 if outcome.status in {Status.COMPLETED, Status.DIVERGED} else 1


@dataclass
class _RankState:
    """How far a rank has come, for the report of a failure."""

    has_outcome: bool = False
    spec: RunSpec | None = None
    training: Training | None = None
    device: torch.device | None = None


def _write_outcome(folder: RunFolder, rank: int, outcome: Outcome, state: _RankState) -> None:
    """Write how this rank ended."""
    outcome.write(folder, rank)
    beat(Phase.END)
    state.has_outcome = True


def _train(folder: RunFolder, rank: int, begin: float, state: _RankState) -> Outcome:
    spec = state.spec = RunSpec.read(folder.config)
    launch = read_json(folder.launch)
    ranks_per_node = spec.geometry.devices_per_node
    device = state.device = device_of_rank(
        launch["device_type"], rank % ranks_per_node, len(launch["devices"])
    )
    torch.set_num_threads(launch["threads_per_rank"])
    _set_precision_of_products(spec.config.in_process.float32_matmul)
    outside_s = spec.config.launcher.hang_outside_s
    # Where no hang is judged, no collective may end the run either.
    timeout_s = _NEVER_S if outside_s is None else max(_COLLECTIVE_TIMEOUT_S, 2 * outside_s)
    with _process_group(launch, rank, device, timeout_s), ExitStack() as contexts:
        begins = launch.get("begins")
        training = state.training = Training(
            *(spec, folder, rank, device, launch["attempt"]),
            branch_steps=launch.get("keeps", ()),
            branch_point=None if begins is None else BranchPoint(folder, begins["trunk"]),
        )
        signal.signal(signal.SIGTERM, lambda *_: training.request_stop())
        ranks_on_device = 1
        if is_accelerator(device):
            device_indices = [rank % len(launch["devices"]) for rank in range(ranks_per_node)]
            ranks_on_device = device_indices.count(device.index)
        limit_gib = spec.config.device.memory_limit_gib
        contexts.enter_context(memory_limit(device, limit_gib, ranks_on_device=ranks_on_device))
        if spec.config.in_process.compile:
            contexts.enter_context(code_for_each_size(training.micro_batch_size_count))
        memory = MemoryPhases(device, measure=spec.config.measure.memory)
        memory.rehearse(training)
        outcome = training.run(memory.enter)
        write_rank_row(folder, launch, training, memory, rank=rank, device=device, begin=begin)
        # The outcome is written before the teardown, which may hang or fail.
        _write_outcome(folder, rank, replace(outcome, phase=str(last_beat().phase)), state)
        # Nothing may hold the wrapped model when the process group ends.
        if spec.config.in_process.compile:
            gc.unfreeze()
        gc.collect()
    return outcome


def _set_precision_of_products(float32: str) -> None:
    """Set whether products of float32, convolutions included, may be in TF32.

    A product of bfloat16 or float16 that cuBLAS splits is summed in float32. By torch's default
    cuBLAS may sum it in 16 bits; it splits by shape, so that cuts of a batch would differ by that
    rounding too.

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
    init_method = launch.get("master") or f"file://{launch['rendezvous']}"
    loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
    if loopback and "master" not in launch:
        # Host names of laptops often resolve to no interface; all ranks are on this machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
    # Without it NCCL's errors give no reason. Source: "Logging", NCCL user guide,
    # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/logging.html.
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    backend = _backend(launch)
    dist.init_process_group(
        backend,
        init_method=init_method,
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
    has_own_devices = launch["world_size"] <= len(launch["devices"])
    return dist.get_default_backend_for_device(launch["device_type"]) if has_own_devices else "gloo"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
