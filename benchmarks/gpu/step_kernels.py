"""Where the time of a compiled step of GPT-2 124M goes: its kernels, the dearest first.

Steps by the engine, in bfloat16, on samples that lie on the device, as torch's profiler sees them.
On a CPU a tiny GPT is trained, its operators are counted and nothing is saved.

    python benchmarks/gpu/step_kernels.py [--eager] [--micro-batch-size 16] [--device cpu]
"""

from __future__ import annotations

import argparse
import itertools

import torch
from peers import batches, make_spec
from results import cuda_device, save
from torch.profiler import ProfilerActivity, profile

from batchscape.engines import build_engine
from batchscape.train.worker import _set_precision_of_products

SETTLE, STEPS = 8, 5
MOST_ROWS = 30
MOST_CHARACTERS = 100
"""Of the name of a kernel, which holds the types of all its arguments."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--eager", action="store_true", help="else the model is compiled")
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    options = parser.parse_args()
    on_cuda = options.device == "cuda"
    device = cuda_device() if on_cuda else torch.device("cpu")
    _set_precision_of_products("highest")
    size, micro = "124M" if on_cuda else "tiny", options.micro_batch_size
    spec = make_spec(size, micro, SETTLE + STEPS)
    engine = build_engine(spec, device)
    if not options.eager:
        engine.module.compile(dynamic=False)
    samples = [(x.to(device), y.to(device)) for x, y in itertools.islice(batches(spec), 8)]

    def train(steps: int) -> None:
        for k in range(steps):
            inputs, labels = samples[k % len(samples)]
            engine.micro_step(inputs, labels, 1 / labels.numel(), last=True)
            engine.optimizer_step(spec.config.optimizer, 1.0)
        if on_cuda:
            torch.cuda.synchronize()

    train(SETTLE)
    kind = ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiler:
        train(STEPS)
    time_us = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    averages = sorted(profiler.key_averages(), key=lambda each: -getattr(each, time_us))
    total_us = sum(getattr(each, time_us) for each in averages)
    rows = [
        {
            "kernel": each.key[:MOST_CHARACTERS],
            "a_step": each.count / STEPS,
            "step_s": getattr(each, time_us) / STEPS / 1e6,
            "share_pct": 100 * getattr(each, time_us) / total_us,
        }
        for each in averages[:MOST_ROWS]
    ]
    if on_cuda:
        save(f"step_kernels_{'eager' if options.eager else 'compiled'}", rows)
    else:
        print(*rows, sep="\n")


if __name__ == "__main__":
    main()
