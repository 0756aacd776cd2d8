"""A small training under the memory probe; as a rank of a launch, in a few geometries."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from batchscape.measure.memory_cpu import CpuProbe
from batchscape.measure.memory_report import MemoryReport

GIB = 2**30
WIDTH, CONTEXT, VOCABULARY, LAYERS = 64, 16, 128, 4
OPTIMIZER_STEPS = 3
RANKS = 2

Phase = Callable[[str], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(samples, length, 3, 4, WIDTH // 4)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, WIDTH))
        y: Tensor = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(tokens)))
        loss: Tensor = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return loss


def batch(micro_batch_size: int) -> Tensor:
    return torch.randint(VOCABULARY, (micro_batch_size, CONTEXT))


def bytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def rehearse(
    phase: Phase,
    micro_batch_size: int,
    accumulation: int = 1,
    *,
    ddp: bool = False,
    set_to_none: bool = True,
    after_micro_step: Callable[[], None] = lambda: None,
    device: str = "cpu",
) -> None:
    """Train for a few optimizer steps, and drop everything."""
    phase("after_model")
    model = Model().to(device)
    wrapped = (
        DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1)
        if ddp
        else None
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(OPTIMIZER_STEPS):
        phase("steady" if step else "first_backward")
        for micro_step in range(accumulation):
            last = micro_step == accumulation - 1
            with nullcontext() if wrapped is None or last else wrapped.no_sync():
                (wrapped or model)(batch(micro_batch_size).to(device)).backward()
            after_micro_step()
        phase("steady" if step else "first_optimizer_step")
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def measure(micro_batch_size: int, accumulation: int = 1, **options: Any) -> MemoryReport:
    with CpuProbe() as probe:
        rehearse(probe.phase, micro_batch_size, accumulation, **options)
    return probe.report()


def in_bytes(report: MemoryReport) -> dict[str, int]:
    assert report.problem is None, report.problem
    figures = report.as_columns()
    return {
        name.removesuffix("_gib"): int(value * GIB)
        for name, value in figures.items()
        if isinstance(value, float)
    }


def main(run_dir: str, rank: int) -> int:
    """Be one of two gloo ranks, and leave the figures in `<rank>.json`."""
    folder = Path(run_dir)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=RANKS
    )
    names = {str(a): a for a in (1, 2, 3)} | {f"repeat {i}": 2 for i in range(3)}
    reports = {}
    for name, accumulation in names.items():
        dist.barrier()
        reports[name] = in_bytes(measure(16, accumulation, ddp=True))
    (folder / f"{rank}.json").write_text(json.dumps(reports))
    # Ending the group while a DDP model is alive can hang; by now all are dropped.
    gc.collect()
    dist.destroy_process_group()
    return 0
