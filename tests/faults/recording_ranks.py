"""Ranks that train nothing and tell losses, exchanged in every step, in some, or at the end."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

from batchscape.measure.clock import CpuClock
from batchscape.record.folder import RunFolder
from batchscape.train.divergence import DivergenceRule
from batchscape.train.recorder import StepRecorder

RANKS, STEPS = 3, 40


def main(run_dir: str, rank: int) -> int:
    """Record the same losses in a folder for each way, and leave them in `losses-<rank>.json`."""
    root = Path(run_dir)
    store = dist.FileStore(str(root / "meeting"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    generator = torch.Generator().manual_seed(rank)
    losses = torch.rand(STEPS, dtype=torch.float64, generator=generator)
    (root / f"losses-{rank}.json").write_text(json.dumps(losses.tolist()))
    for every in (1, 7, STEPS):
        folder = RunFolder(root / str(every))
        if rank == 0:
            folder.path.mkdir()
        clock = CpuClock()
        recorder = StepRecorder(
            folder,
            rank,
            RANKS,
            torch.device("cpu"),
            clock,
            ranks_on_node=RANKS,
            attempt=0,
            warmup_optimizer_steps=0,
            rule=DivergenceRule(),
        )
        for step, loss in enumerate(losses, start=1):
            clock.begin()
            clock.end()
            recorder.add(
                optimizer_step=step,
                samples=step,
                global_batch_size=1,
                labels=1,
                loss_sum=loss,
                gradient_norm=loss,
                learning_rate=0.1,
                exchanged_bytes=0,
            )
            if step % every == 0:
                recorder.drain(stop=False, checkpoint=False)
        recorder.flush()
        recorder.close()
    dist.barrier()
    dist.destroy_process_group()
    return 0
