"""Tokens a second against the Hugging Face Trainer: one model, one order, one arithmetic.

Both train the same `transformers` GPT-2 from the same weights on the same samples, in float32 on
one thread, with the same fused AdamW, clipping and accumulation (on a GPU: gpu/peers.py). Their
losses are compared first; then they take turns, and the ratio of tokens a second is printed for
three sizes. Both clocks run from the end of one optimizer step to the end of a later one, so that
everything between steps counts: fetching samples, logging, recording. The Trainer logs as rarely
as its default, batchscape records every step.

    python benchmarks/hf_trainer.py [--rounds 12] [--sizes tiny small medium]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
from rich.progress import track
from scipy import stats
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from batchscape.config import RunConfig
from batchscape.data.corpus import prepare
from batchscape.data.datasets import open_dataset
from batchscape.geometry import solve
from batchscape.models.build import build_model
from batchscape.record.folder import RunFolder
from batchscape.record.spec import RunSpec, Stage
from batchscape.train.loop import Training
from batchscape.train.stream import SampleStream
from batchscape.train.timeline import Timeline

SETTLE = 6
"""First optimizer steps, which belong to no figure."""

STEPS = {"tiny": 300, "small": 60, "medium": 14}
"""Measured optimizer steps of a round."""

SIZES = {
    # name: (layers, heads, width, sequence length, micro-batch, accumulation)
    "tiny": (1, 1, 16, 16, 2, 1),
    "small": (2, 2, 64, 32, 4, 2),
    "medium": (4, 4, 128, 64, 8, 2),
}


def make_spec(size: str, optimizer_steps: int) -> RunSpec:
    """Return the run that both sides train."""
    layers, heads, width, length, micro, accumulation = SIZES[size]
    gpt2 = {"model_type": "gpt2", "n_layer": layers, "n_head": heads, "n_embd": width}
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    sizes = {"vocab_size": 256, "n_positions": length}
    config = RunConfig.from_mapping(
        {
            "batch": {"micro_batch_size": micro, "gradient_accumulation_steps": accumulation},
            "model": {"name": "transformers", "settings": {**gpt2, **no_dropout, **sizes}},
            "data": {"name": "stdlib", "sequence_length": length},
            "optimizer": {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1},
            "schedule": {"name": "constant"},
            "scaling": {},
            "budget": {"optimizer_steps": optimizer_steps},
            "evaluation": {"samples": 8},
            "engine": {"name": "ddp", "precision": "float32"},
            "loader": {},
            "checkpoint": {"every_s": None},
            "measure": {"memory": False},
            "launcher": {"name": "local", "device": "cpu"},
            "tracker": {"name": "none"},
        }
    )
    geometry = solve(
        data_parallel_size=1, micro_batch_size=micro, gradient_accumulation_steps=accumulation
    )
    return RunSpec(
        run_id=size,
        trajectory_id=size,
        sweep_name="benchmark",
        stages=(Stage(optimizer_steps * micro * accumulation, geometry, config.optimizer),),
        device_type="cpu",
        precision=config.engine.precision,
        evaluation_every_samples=None,
        data=prepare(config.data),
        config=config,
    )


class Ours(Training):
    """A training that notes when each optimizer step has ended, with all that belongs to it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ended: list[float] = []

    def _agree(self, *, at_once: bool) -> Any:
        verdict = super()._agree(at_once=at_once)
        self.ended.append(time.perf_counter())
        return verdict


def train_ours(spec: RunSpec) -> tuple[list[float], list[float]]:
    """Return the loss of every step, and when each ended."""
    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder(Path(root))
        training = Ours(spec, folder, 0, torch.device("cpu"), 0)
        training.run(lambda _: None)
        rows = [json.loads(line) for line in folder.lines("steps").read_text().splitlines()]
    return [row["loss"] for row in rows], training.ended


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The very samples of a run, in its order."""

    def __init__(self, spec: RunSpec) -> None:
        self._data = open_dataset(spec.config, spec.data, "train")
        stream = SampleStream(self._data, spec.config.resolved_data_seed, Timeline(spec.stages), 0)
        steps = [stream.step(k).indices.ravel() for k in range(spec.optimizer_steps)]
        self._order = np.concatenate(steps)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        inputs, labels = self._data.batch(self._order[position : position + 1])
        # `shift_labels` are taken as they are: both sides then compute the same positions.
        return {"input_ids": inputs[0], "labels": labels[0], "shift_labels": labels[0]}


class Notes(TrainerCallback):
    """Losses that the Trainer logs, and when each optimizer step has ended."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.ended: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ended.append(time.perf_counter())

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


def train_hugging_face(spec: RunSpec, logging_steps: int) -> tuple[list[float], list[float]]:
    """Return the losses that were logged, and when each step ended."""
    geometry = spec.geometry
    peer = build_model(spec.config, spec.data, spec.precision).model.network
    notes = Notes()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=geometry.micro_batch_size,
            gradient_accumulation_steps=geometry.gradient_accumulation_steps,
            max_steps=spec.optimizer_steps,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_epsilon=1e-8,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            use_cpu=True,
            logging_steps=logging_steps,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        trainer = InOrder(model=peer, args=arguments, train_dataset=Samples(spec))
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(notes)
        trainer.train()
    return notes.losses, notes.ended


class InOrder(Trainer):
    """A Trainer that leaves the order of the samples to the dataset."""

    def _get_train_sampler(self, dataset: Any = None) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(dataset or self.train_dataset)


def tokens_per_s(spec: RunSpec, ended: list[float]) -> float:
    """Return the tokens a second between the end of the settling steps and the end."""
    steps = len(ended) - SETTLE
    tokens = steps * spec.geometry.global_batch_size * (spec.config.sequence_length or 1)
    return tokens / (ended[-1] - ended[SETTLE - 1])


def compare_losses(size: str) -> None:
    """Print how far the two loss curves are apart."""
    spec = make_spec(size, 20)
    ours, theirs = train_ours(spec)[0], train_hugging_face(spec, logging_steps=1)[0]
    apart = np.abs(np.array(ours) - np.array(theirs))
    print(
        f"{size}: losses of {len(ours)} optimizer steps from {ours[0]:.4f} to {ours[-1]:.4f}; "
        f"largest difference {apart.max():.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for size in options.sizes:
        compare_losses(size)
        spec = make_spec(size, STEPS[size] + SETTLE)
        rates = []
        for _ in track(range(options.rounds), description=size):
            theirs = tokens_per_s(spec, train_hugging_face(spec, logging_steps=500)[1])
            rates.append((tokens_per_s(spec, train_ours(spec)[1]), theirs))
        report(size, np.array(rates))


def report(size: str, rates: np.ndarray) -> None:
    """Print the ratio with its interval; `rates` has shape (rounds, 2)."""
    logs = np.log(rates[:, 0] / rates[:, 1])
    half = stats.t.ppf(0.975, len(logs) - 1) * stats.sem(logs)
    low, middle, high = np.exp([logs.mean() - half, logs.mean(), logs.mean() + half])
    ours, theirs = np.median(rates, axis=0)
    print(
        f"{size}: {ours:.0f} tokens/s, the Trainer {theirs:.0f}; ratio {middle:.2f} "
        f"(95 % interval {low:.2f} to {high:.2f}, {len(logs)} rounds)"
    )


if __name__ == "__main__":
    main()
