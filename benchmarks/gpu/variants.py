"""What makes a step of GPT-2 fast: each variant beside the plain one, in bfloat16.

A variant is a process of its own, which trains on the same samples from the same weights. Its time
is the median of single steps by events of the device, its memory the allocator's peak, its FLOPs
those of docs/numbers.md. Some variants alone are printed, not saved: the file has all of them.

    python benchmarks/gpu/variants.py [--only "compiled, padded" ...] [--limit-s 120]
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch._inductor.config as inductor
from apart import LIMIT_S, Figures, apart
from peers import batches, make_spec
from results import cuda_device, save
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from batchscape.config import Cluster
from batchscape.engines import Engine, build_engine
from batchscape.measure.flops import model_flops
from batchscape.measure.peak import peak_flops
from batchscape.record.spec import RunSpec
from batchscape.train.worker import _set_precision_of_products

SETTLE, STEPS = 13, 20
FIGURES = (
    *("step_s", "tokens_per_s", "mfu_pct", "peak_allocated_gib", "first_step_s", "final_loss"),
    "reason",
)


class Variant(NamedTuple):
    """What is unlike the plain one: eager, padded to a multiple of 64, micro-batch 16."""

    size: str = "124M"
    micro: int = 16
    padded: bool = True
    chunk: int | None = None
    compiled: str | None = None
    """`whole`, `blocks` or a mode of `torch.compile`."""
    flash: bool = False
    """Whether flash attention is asked for, where torch would choose."""
    narrow: bool = False
    """Whether the residual stream is in bfloat16."""
    biases: bool = True
    """Whether linear layers and norms have biases."""
    exact_sums: bool = True
    """Whether products of bfloat16 add up in float32, as in every run."""
    launches_early: bool = False
    """Whether a kernel of inductor may begin while the one before it ends."""


VARIANTS = {
    "eager, 50257 rows": Variant(padded=False),
    "eager, padded": Variant(),
    "eager, padded, loss_chunk=4096": Variant(chunk=4096),
    "compiled, 50257 rows": Variant(padded=False, compiled="whole"),
    "compiled, padded": Variant(compiled="whole"),
    "compiled, padded, flash attention": Variant(compiled="whole", flash=True),
    "compiled, padded, residual stream in bfloat16": Variant(compiled="whole", narrow=True),
    "compiled, padded, no biases": Variant(compiled="whole", biases=False),
    "compiled, padded, sums in bfloat16": Variant(compiled="whole", exact_sums=False),
    "compiled, padded, programmatic launch": Variant(compiled="whole", launches_early=True),
    "compiled and tuned, padded": Variant(compiled="max-autotune-no-cudagraphs"),
    "CUDA graphs, padded": Variant(compiled="reduce-overhead"),
    "compiled, padded, loss_chunk=4096": Variant(compiled="whole", chunk=4096),
    "blocks compiled, padded": Variant(compiled="blocks"),
    "compiled, padded, micro-batch 64": Variant(compiled="whole", micro=64),
    "eager, padded, micro-batch 1": Variant(micro=1),
    "compiled, padded, micro-batch 1": Variant(compiled="whole", micro=1),
    "CUDA graphs, padded, micro-batch 1": Variant(compiled="reduce-overhead", micro=1),
    "350M: compiled, padded": Variant(size="350M", compiled="whole"),
}


def build_variant(variant: Variant, spec: RunSpec, device: torch.device) -> Engine:
    """Build the engine of a variant, not compiled."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = not variant.exact_sums
    engine = build_engine(spec, device)
    if not variant.biases:
        for module in engine.module.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.LayerNorm):
                module.bias = None
    if variant.narrow:
        # What enters the first block is what all of them add to.
        blocks: Any = engine.module.model.blocks
        blocks[0].register_forward_pre_hook(lambda _, x: (x[0].bfloat16(),))
    return engine


def compile_variant(variant: Variant, engine: Engine) -> None:
    """Compile the model of a variant, the whole or its blocks."""
    inductor.triton.enable_pdl = variant.launches_early
    if variant.compiled == "blocks":
        for block in engine.module.model.blocks:
            block.compile(dynamic=False)
    elif variant.compiled is not None:
        mode = None if variant.compiled == "whole" else variant.compiled
        engine.module.compile(dynamic=False, mode=mode)


def measure(name: str) -> Figures:
    """Train a variant; return its figures."""
    variant = VARIANTS[name]
    _set_precision_of_products("highest")
    device = cuda_device()
    torch.cuda.set_device(device)
    spec = make_spec(
        variant.size,
        variant.micro,
        SETTLE + STEPS,
        vocabulary_size=50304 if variant.padded else 50257,
        loss_chunk=variant.chunk,
    )
    engine = build_variant(variant, spec, device)
    samples = list(batches(spec))
    flops = model_flops(engine.module, *samples[0])
    compile_variant(variant, engine)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    losses: list[Tensor] = []
    attention = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if variant.flash else nullcontext()
    with attention:
        began = time.perf_counter()
        for k, (inputs, labels) in enumerate(samples):
            torch.compiler.cudagraph_mark_step_begin()
            if k >= SETTLE:
                marks[k - SETTLE].record()
            loss = engine.micro_step(inputs, labels, 1 / labels.numel(), last=True)
            losses.append(loss.clone() / labels.numel())
            engine.optimizer_step(spec.config.optimizer, 1.0)
            if k == 0:
                torch.cuda.synchronize()
                first_s = time.perf_counter() - began
        marks[-1].record()
        torch.cuda.synchronize()
    step_s = float(np.median([a.elapsed_time(b) for a, b in itertools.pairwise(marks)])) / 1e3
    peak = peak_flops(device, "bfloat16", "highest", Cluster()).tflops
    return {
        "step_s": step_s,
        "tokens_per_s": samples[0][0].numel() / step_s,
        "mfu_pct": None if peak is None else 100 * flops / step_s / 1e12 / peak,
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "first_step_s": first_s,
        "final_loss": float(losses[-1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(VARIANTS), nargs="+")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of each variant")
    options = parser.parse_args()
    cuda_device()
    rows: list[dict[str, Any]] = []
    for name in options.only or VARIANTS:
        found = apart(measure, name, limit_s=options.limit_s)
        rows.append({"variant": name, **dict.fromkeys(FIGURES), **found})
        print(rows[-1], flush=True)
        if not options.only:
            save("variants", rows, so_far=len(rows) < len(VARIANTS))
    sys.exit(any(row["reason"] for row in rows))


if __name__ == "__main__":
    main()
