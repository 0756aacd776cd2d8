"""Step time of GPT-2 in the loops of others, side by side: one model, one order, one arithmetic.

All train the same module from the same weights on the same samples in bfloat16 autocast, with the
same fused AdamW and clipping. They take turns in the rounds, each of which is a process of its own,
as the Trainer changes torch's settings of TF32. The time of a step is that of a block of them, from
an idle device to an idle device, so that fetching samples, logging and recording count.

    python benchmarks/gpu/peers.py [--compile] [--steps 40] [--rounds 3]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from intervals import ratio
from results import cuda_device, save
from torch import Tensor, nn
from torch.utils.data import DataLoader

from batchscape.config import RunConfig
from batchscape.data.corpus import prepare
from batchscape.data.datasets import open_dataset
from batchscape.engines.optimizers import build_optimizer
from batchscape.geometry import solve
from batchscape.models.build import build_model
from batchscape.record.folder import RunFolder
from batchscape.record.spec import RunSpec, Stage
from batchscape.record.tables import read_table
from batchscape.train.loop import Training
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
    layers, heads, width, length, vocabulary = SIZES[size]
    device = "cpu" if size == "tiny" else "cuda"
    sizes = {"n_layers": layers, "n_heads": heads, "d_model": width, "vocabulary_size": vocabulary}
    config = RunConfig.from_mapping(
        {
            "batch": {"micro_batch_size": micro, "gradient_accumulation_steps": 1},
            "model": {"name": "gpt", "padded_vocabulary": True, **sizes, **model},
            "data": {"name": "stdlib", "sequence_length": length},
            "optimizer": {"name": "adamw", "learning_rate": 6e-4},
            "schedule": {"name": "constant"},
            "scaling": {},
            "budget": {"optimizer_steps": steps},
            "evaluation": {"samples": 8, "batch_size": 8},
            "engine": {"name": "ddp", "precision": "bfloat16", "compile": compiled},
            "loader": {},
            "checkpoint": {"every_s": None},
            "measure": {"memory": False, "noise_scale_every": None},
            "launcher": {"name": "local", "device": device},
            "tracker": {"name": "none"},
        }
    )
    geometry = solve(data_parallel_size=1, micro_batch_size=micro, gradient_accumulation_steps=1)
    return RunSpec(
        run_id="peers",
        trajectory_id="peers",
        sweep_name="benchmark",
        stages=(Stage(steps * micro, geometry, config.optimizer),),
        device_type=device,
        precision="bfloat16",
        evaluation_every_samples=None,
        data=prepare(config.data),
        config=config,
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

    class Ours(Training):
        def _agree(self, *, at_once: bool) -> Any:
            verdict = super()._agree(at_once=at_once)
            times.ended()
            return verdict

    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder(Path(root))
        device = torch.device(spec.device_type, *([0] if spec.device_type == "cuda" else []))
        Ours(spec, folder, 0, device, 0).run(lambda _: None)
        losses = read_table(folder, "steps")["loss"].tolist()
    return losses, times.step_s


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
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    times, losses = Times(spec), []

    class Notes(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.ended()

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    class InOrder(Trainer):
        def _get_train_sampler(self, dataset: Any = None) -> torch.utils.data.Sampler[int]:
            return torch.utils.data.SequentialSampler(dataset or self.train_dataset)

    module = MeanLoss(spec).to(spec.device_type)
    optimizer = build_optimizer(spec.config.optimizer, module)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=spec.geometry.micro_batch_size,
            max_steps=spec.optimizer_steps,
            max_grad_norm=1.0,
            bf16=True,
            use_cpu=spec.device_type == "cpu",
            torch_compile=spec.config.in_process.compile,
            logging_steps=spec.optimizer_steps,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=spec.device_type == "cuda",
        )
        constant = LambdaLR(optimizer, lambda _: 1.0)
        trainer = InOrder(
            model=module,
            args=arguments,
            train_dataset=samples_of(spec),
            optimizers=(optimizer, constant),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Notes())
        trainer.train()
    return losses, times.step_s


SIDES = {
    "batchscape": train_ours,
    "nanoGPT-style loop": train_bare,
    "Lightning Fabric": train_fabric,
    "accelerate": train_accelerate,
    "Hugging Face Trainer": train_trainer,
}


def measure(spec: RunSpec) -> dict[str, tuple[list[float], float]]:
    """Train every side once; return losses and seconds a step."""
    _set_precision_of_products("highest")
    found = {}
    for name, train in SIDES.items():
        torch._dynamo.reset()
        found[name] = train(spec)
        print(f"{name}: {1e3 * found[name][1]:.2f} ms a step", flush=True)
    return found


def row_of(name: str, rounds: list[dict[str, tuple[list[float], float]]]) -> dict[str, Any]:
    """Return the median time of a side, and how far its losses are from ours in the first round."""
    losses, ours = np.array(rounds[0][name][0]), np.array(rounds[0]["batchscape"][0])
    apart = None if len(losses) < len(ours) else float(np.abs(losses - ours).max())
    return {
        "system": name,
        "step_s": float(np.median([found[name][1] for found in rounds])),
        "mean_loss": float(losses.mean()),
        "largest_loss_difference": apart,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    options = parser.parse_args()
    if options.device == "cuda":
        cuda_device()
    steps = options.steps + SETTLE
    size = "124M" if options.device == "cuda" else "tiny"
    spec = make_spec(size, options.micro_batch_size, steps, compiled=options.compile)
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rounds = pool.map(measure, [spec] * options.rounds, chunksize=1)
    rows = [row_of(name, rounds) for name in SIDES]
    times = {name: np.array([found[name][1] for found in rounds]) for name in SIDES}
    compared = [
        ratio(f"{name} / batchscape", times[name], times["batchscape"])
        for name in SIDES
        if name != "batchscape"
    ]
    if options.device == "cuda":
        save(f"peers_{'compiled' if options.compile else 'eager'}", rows, compared)
    else:
        print(rows, compared, sep="\n")


if __name__ == "__main__":
    main()
