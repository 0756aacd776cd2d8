"""Step time of GPT-2 in the loops of others, side by side: one model, one order, one arithmetic.

All train the same module from the same weights on the same samples in bfloat16 autocast, with the
same fused AdamW and clipping. They take turns in the rounds, each round in another order, and each
time in a process of its own, as the Trainer changes torch's settings of TF32. The time of a step is
that of a block of them, from an idle device to an idle device, so that fetching samples, logging
and recording count. On a CPU a tiny GPT is trained and nothing is saved.

    python benchmarks/gpu/peers.py [--compile] [--steps 40] [--rounds 3] [--micro-batch-size 16]
        [--device cpu] [--limit-s 120]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import sides
import torch
from apart import LIMIT_S, Figures, apart
from intervals import ratio
from numpy.typing import NDArray
from results import cuda_device, save
from torch import Tensor, nn
from torch.utils.data import DataLoader

from batchscape.data.datasets import open_dataset
from batchscape.engines.optimizers import build_optimizer
from batchscape.models.build import build_model
from batchscape.record.spec import RunSpec
from batchscape.train.stream import SampleStream
from batchscape.train.timeline import Timeline
from batchscape.train.worker import _set_precision_of_products

SETTLE = 8
"""First optimizer steps, which belong to no figure: compilation is in them."""


SIZES = {
    # name: (layers, heads, width, sequence length, vocabulary)
    "124M": (12, 12, 768, 1024, 50257),
    "350M": (24, 16, 1024, 1024, 50257),
    "tiny": (2, 2, 64, 64, 257),  # for a CPU
}


def make_spec(
    size: str, micro: int, steps: int, *, compiled: bool = False, **model: Any
) -> RunSpec:
    """Return the run that all sides train: GPT-2 on a GPU, with further settings of `model`."""
    layers, heads, width, length, tokens = SIZES[size]
    vocabulary = tokens + -tokens % 64
    device = "cpu" if size == "tiny" else "cuda"
    sizes = {"n_layers": layers, "n_heads": heads, "d_model": width, "vocabulary_size": vocabulary}
    return sides.make_run(
        device,
        steps,
        batch={"micro_batch_size": micro, "gradient_accumulation_steps": 1},
        model={"name": "gpt", **sizes, **model},
        data={"name": "stdlib", "sequence_length": length},
        optimizer={"name": "adamw", "learning_rate": 6e-4},
        engine={"name": "ddp", "precision": "bfloat16", "compile": compiled},
        measure={"memory": False, "noise_scale_every": None},
    )


def on_host(spec: RunSpec) -> Iterator[tuple[Tensor, Tensor]]:
    """Give the batches of a run, in its order."""
    data = open_dataset(spec.config, spec.data, "train")
    stream = SampleStream(data, spec.config.resolved_data_seed, Timeline(spec.stages), 0)
    for k in range(spec.optimizer_steps):
        inputs, labels = data.batch(stream.step(k).indices.ravel())
        yield inputs.long(), labels.long()


class MeanLoss(nn.Module):
    """The model of a run, with the mean of its losses as peers want it."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__()
        self.of_run = build_model(spec.config, spec.data, spec.precision)

    def forward(self, inputs: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"loss": self.of_run(inputs, labels)[0] / labels.numel()}


class Times:
    """When steps ended, on an idle device where a block begins and ends."""

    def __init__(self, spec: RunSpec) -> None:
        self._steps, self._cuda = spec.optimizer_steps, spec.device_type == "cuda"
        self._count, self._began, self.step_s = 0, 0.0, 0.0

    def ended(self) -> None:
        """Note that a step was launched."""
        self._count += 1
        if self._count in {SETTLE, self._steps} and self._cuda:
            torch.cuda.synchronize()
        if self._count == SETTLE:
            self._began = time.perf_counter()
        if self._count == self._steps:
            self.step_s = (time.perf_counter() - self._began) / (self._steps - SETTLE)


def train_ours(spec: RunSpec) -> tuple[list[float], float]:
    """Train as a run is trained, with its records."""
    times = Times(spec)
    return sides.train_ours(spec, times.ended), times.step_s


def batches(spec: RunSpec) -> Iterator[tuple[Tensor, Tensor]]:
    """Give batches as a bare loop takes them: from memory, pinned, copied while it computes."""
    for inputs, labels in on_host(spec):
        if spec.device_type == "cuda":
            both = [p.pin_memory().to("cuda", non_blocking=True) for p in (inputs, labels)]
            yield both[0], both[1]
        else:
            yield inputs, labels


def train_bare(spec: RunSpec) -> tuple[list[float], float]:
    """Train in the few lines that nanoGPT has: autocast, fused AdamW, clipping."""
    device = spec.device_type
    module = MeanLoss(spec).to(device)
    optimizer = build_optimizer(spec.config.optimizer, module)
    model = torch.compile(module) if spec.config.in_process.compile else module
    times, losses = Times(spec), []
    for inputs, labels in batches(spec):
        with torch.autocast(device, torch.bfloat16):
            loss = model(inputs, labels)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        times.ended()
    return [float(loss) for loss in losses], times.step_s


def samples_of(spec: RunSpec) -> list[dict[str, Tensor]]:
    """Return the samples of a run, in its order, for loaders that collate them."""
    return [
        {"inputs": x, "labels": y}
        for inputs, labels in on_host(spec)
        for x, y in zip(inputs, labels, strict=True)
    ]


def loader_of(spec: RunSpec) -> DataLoader[dict[str, Tensor]]:
    pinned = spec.device_type == "cuda"
    return DataLoader(samples_of(spec), spec.geometry.micro_batch_size, pin_memory=pinned)


def train_accelerate(spec: RunSpec) -> tuple[list[float], float]:
    """Train as accelerate's guide does."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=spec.device_type == "cpu")
    module = MeanLoss(spec).to(accelerator.device)
    optimizer = build_optimizer(spec.config.optimizer, module)
    model = torch.compile(module) if spec.config.in_process.compile else module
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(spec))
    times, losses = Times(spec), []
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        times.ended()
    accelerator.free_memory()
    return [float(loss) for loss in losses], times.step_s


def train_fabric(spec: RunSpec) -> tuple[list[float], float]:
    """Train as Fabric's guide does."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator=spec.device_type, devices=1, precision="bf16-mixed")
    module = MeanLoss(spec)
    optimizer = build_optimizer(spec.config.optimizer, module.to(fabric.device))
    compiled = torch.compile(module) if spec.config.in_process.compile else module
    model, prepared = fabric.setup(compiled, optimizer)
    times, losses = Times(spec), []
    for batch in fabric.setup_dataloaders(loader_of(spec)):
        loss = model(**batch)["loss"]
        fabric.backward(loss)
        fabric.clip_gradients(model, prepared, max_norm=1.0, error_if_nonfinite=False)
        prepared.step()
        prepared.zero_grad()
        losses.append(loss.detach())
        times.ended()
    return [float(loss) for loss in losses], times.step_s


def train_trainer(spec: RunSpec) -> tuple[list[float], float]:
    """Train with the Trainer of transformers, whose mean loss alone is logged."""
    from torch.optim.lr_scheduler import LambdaLR

    times = Times(spec)
    module = MeanLoss(spec).to(spec.device_type)
    optimizer = build_optimizer(spec.config.optimizer, module)
    losses = sides.train_trainer(
        spec,
        module,
        samples_of(spec),
        times.ended,
        (optimizer, LambdaLR(optimizer, lambda _: 1.0)),
        bf16=True,
        torch_compile=spec.config.in_process.compile,
        logging_steps=spec.optimizer_steps,
    )
    return losses, times.step_s


SIDES = {
    "batchscape": train_ours,
    "nanoGPT-style loop": train_bare,
    "Lightning Fabric": train_fabric,
    "accelerate": train_accelerate,
    "Hugging Face Trainer": train_trainer,
}


def measure(name: str, spec: RunSpec) -> Figures:
    """Train a side once; return its losses and seconds a step."""
    _set_precision_of_products("highest")
    losses, step_s = SIDES[name](spec)
    return {"losses": losses, "step_s": step_s}


Found = dict[str, list[Figures]]
"""By side: what its rounds gave, in their order."""


def row_of(name: str, found: Found) -> dict[str, Any]:
    """Return the median time of a side, and how far its losses are from ours at first."""
    times = [one["step_s"] for one in found[name] if "step_s" in one]
    losses, ours = first_losses(found[name]), first_losses(found["batchscape"])
    every_step = len(losses) == len(ours) > 0
    return {
        "system": name,
        "rounds": len(times),
        "step_s": float(np.median(times)) if times else None,
        "mean_loss": float(losses.mean()) if len(losses) else None,
        "largest_loss_difference": float(np.abs(losses - ours).max()) if every_step else None,
        "reason": next((one["reason"] for one in found[name] if "reason" in one), None),
    }


def first_losses(rounds: list[Figures]) -> NDArray[np.float64]:
    """Return the losses of the first round that has any, which train alike; else none."""
    return np.array(next((one["losses"] for one in rounds if "losses" in one), []))


def ratios(found: Found) -> list[dict[str, Any]]:
    """Return the times of others over ours, of the rounds in which both have one."""
    compared = []
    for name in SIDES:
        pairs = zip(found[name], found["batchscape"], strict=False)  # a round may be half done
        both = [(one["step_s"], us["step_s"]) for one, us in pairs if "step_s" in one.keys() & us]
        if name != "batchscape" and both:
            compared.append(ratio(f"{name} / batchscape", *np.array(both).T))
    return compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of a side in a round")
    options = parser.parse_args()
    # Of several devices the Trainer would take all.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if options.device == "cuda":
        cuda_device()
    steps = options.steps + SETTLE
    size = "124M" if options.device == "cuda" else "tiny"
    spec = make_spec(size, options.micro_batch_size, steps, compiled=options.compile)
    part = f"peers_{'compiled' if options.compile else 'eager'}"
    names, n = list(SIDES), len(SIDES)
    turns = [names[(k + i) % n] for k in range(options.rounds) for i in range(n)]
    found: Found = {name: [] for name in names}
    for turn, name in enumerate(turns, start=1):
        one = apart(measure, name, spec, limit_s=options.limit_s)
        found[name].append(one)
        print(f"{name}:", one.get("reason") or f"{1e3 * one['step_s']:.2f} ms a step", flush=True)
        rows, compared = [row_of(name, found) for name in names], ratios(found)
        if options.device == "cuda":
            save(part, rows, compared, so_far=turn < len(turns))
    if options.device == "cpu":
        print(rows, compared, sep="\n")
    sys.exit(any(row["reason"] for row in rows))


if __name__ == "__main__":
    main()
