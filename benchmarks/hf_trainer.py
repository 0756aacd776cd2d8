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
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
from rich.progress import track
from scipy import stats

from batchscape.data.datasets import open_dataset
from batchscape.models.build import build_model
from batchscape.record.spec import RunSpec
from batchscape.train.stream import SampleStream
from batchscape.train.timeline import Timeline
from gpu import sides

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
    return sides.make_run(
        "cpu",
        optimizer_steps,
        batch={"micro_batch_size": micro, "gradient_accumulation_steps": accumulation},
        model={"name": "transformers", "settings": {**gpt2, **no_dropout, **sizes}},
        data={"name": "stdlib", "sequence_length": length},
        optimizer={"name": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1},
        engine={"name": "ddp", "precision": "float32"},
    )


def train_ours(spec: RunSpec) -> tuple[list[float], list[float]]:
    """Return the loss of every step, and when each ended."""
    ended: list[float] = []
    losses = sides.train_ours(spec, lambda: ended.append(time.perf_counter()))
    return losses, ended


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


def train_hugging_face(spec: RunSpec, logging_steps: int) -> tuple[list[float], list[float]]:
    """Return the losses that were logged, and when each step ended."""
    ended: list[float] = []
    losses = sides.train_trainer(
        spec,
        build_model(spec.config, spec.data, spec.precision).model.network,
        Samples(spec),
        lambda: ended.append(time.perf_counter()),
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        optim="adamw_torch_fused",
        logging_steps=logging_steps,
    )
    return losses, ended


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
