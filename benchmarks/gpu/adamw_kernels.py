"""An AdamW update of GPT-2 124M: the fused kernel, which is ours, against foreach.

Both update the same parameters in blocks that alternate, timed by events of the device.

    python benchmarks/gpu/adamw_kernels.py [--blocks 20] [--steps 20]
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from intervals import ratio
from results import cuda_device, save
from torch import nn
from torch.optim import AdamW


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    parameters = gpt2_parameters(cuda_device())
    optimizers = {
        "foreach": AdamW(parameters, lr=1e-6, foreach=True),
        "fused": AdamW(parameters, lr=1e-6, fused=True),
    }
    for optimizer in optimizers.values():
        block_s(optimizer, options.steps)  # makes its state
    blocks: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(options.blocks):
        for name, optimizer in optimizers.items():
            blocks[name].append(block_s(optimizer, options.steps))
    measured = {name: np.array(seconds) / options.steps for name, seconds in blocks.items()}
    count = sum(p.numel() for p in parameters)
    save(
        "adamw_kernels",
        [
            {"kernel": name, "parameters": count, "update_s": float(np.median(seconds))}
            for name, seconds in measured.items()
        ],
        [ratio("foreach / fused", measured["foreach"], measured["fused"])],
    )


def gpt2_parameters(device: torch.device) -> list[nn.Parameter]:
    """Return tensors of the shapes of GPT-2 124M, with gradients."""
    width, layers = 768, 12
    block = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    shapes = [(50257, width), (1024, width), *block * layers, (width,), (width,)]
    parameters = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def block_s(optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Return the seconds that the device takes for some updates."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        optimizer.step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


if __name__ == "__main__":
    main()
