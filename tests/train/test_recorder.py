"""Rows of optimizer steps: what ranks tell is added up alike, whenever it is exchanged."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import reduce
from operator import add
from pathlib import Path

import pytest

from batchscape.record.files import read_json_lines
from batchscape.record.folder import RunFolder

RANKS, STEPS = 3, 40
RANK = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from batchscape.measure.clock import CpuClock
from batchscape.record.folder import RunFolder
from batchscape.train.divergence import DivergenceRule
from batchscape.train.recorder import StepRecorder

root, rank, ranks, steps = Path(sys.argv[1]), *map(int, sys.argv[2:])
store = dist.FileStore(str(root / "meeting"), ranks)
dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
generator = torch.Generator().manual_seed(rank)
losses = torch.rand(steps, dtype=torch.float64, generator=generator)
(root / f"losses-{rank}.json").write_text(json.dumps(losses.tolist()))
for every in (1, 7, steps):
    folder = RunFolder(root / str(every))
    if rank == 0:
        folder.path.mkdir()
    clock = CpuClock()
    recorder = StepRecorder(folder, rank, ranks, torch.device("cpu"), clock, rank_on_node=rank,
                            ranks_on_node=ranks, attempt=0, warmup_optimizer_steps=0,
                            rule=DivergenceRule())
    for step, loss in enumerate(losses, start=1):
        clock.begin()
        clock.end()
        recorder.add(optimizer_step=step, samples=step, global_batch_size=1, labels=1,
                     loss_sum=loss, gradient_norm=loss, learning_rate=0.1, exchanged_bytes=0)
        if step % every == 0:
            recorder.drain(stop=False, checkpoint=False)
    recorder.flush()
    recorder.close()
dist.barrier()
"""


@pytest.mark.slow
def test_a_loss_does_not_depend_on_when_it_was_exchanged(tmp_path: Path) -> None:
    """Three ranks: to the last bit the sum in the order of the ranks, whatever stood beside it."""
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, *map(str, (tmp_path, rank, RANKS, STEPS))])
        for rank in range(RANKS)
    ]
    assert [rank.wait() for rank in ranks] == [0] * RANKS
    losses_by_rank = [
        json.loads((tmp_path / f"losses-{rank}.json").read_text()) for rank in range(RANKS)
    ]
    # Not by `sum`, which compensates from Python 3.12 on.
    expected = [reduce(add, losses) for losses in zip(*losses_by_rank, strict=True)]
    # The case can fail: in another order some sums are others.
    assert expected != [math.fsum(losses) for losses in zip(*losses_by_rank, strict=True)]
    for every in (1, 7, STEPS):
        rows = list(read_json_lines(RunFolder(tmp_path / str(every)).lines("steps")))
        assert [row["optimizer_step"] for row in rows] == list(range(1, STEPS + 1))
        assert [row["loss"] for row in rows] == expected
