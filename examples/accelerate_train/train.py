"""Train a small language model with accelerate, on documents of unequal length.

The arguments have the names of MuseV's and diffusers' training scripts. Run by torchrun:

    torchrun --nproc_per_node 2 train.py --train_batch_size 2 --gradient_accumulation_steps 2
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, set_seed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from batchscape.recorder import Recorder

PADDING, IGNORED = 0, -100
BYTES = 256
"""The tokens: a text is its bytes."""


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--train_data_dir", default=str(Path(os.__file__).parent))
    parser.add_argument("--train_batch_size", type=int, default=4, help="per device")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--max_train_steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--max_length", type=int, default=128, help="bytes of a document")
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--validation_samples", type=int, default=64)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


class Model(nn.Module):
    """A recurrent language model: padding at the end cannot reach what stands before it."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, hidden_size)
        self.recurrent = nn.GRU(hidden_size, hidden_size, batch_first=True)
        self.head = nn.Linear(hidden_size, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(tokens))[0])


def documents(args: argparse.Namespace) -> list[Tensor]:
    """Return the paragraphs of the Python files of a folder, cut at `max_length` bytes."""
    files = sorted(Path(args.train_data_dir).glob("*.py"))
    paragraphs = (text for path in files for text in path.read_bytes().split(b"\n\n"))
    cut = (bytearray(text[: args.max_length]) for text in paragraphs if len(text) > 8)
    return [torch.frombuffer(text, dtype=torch.uint8).long() for text in cut]


def collate(samples: list[Tensor]) -> dict[str, Tensor]:
    """Pad documents to the longest; the loss ignores the padding."""
    return {
        "inputs": pad_sequence([s[:-1] for s in samples], True, PADDING),
        "labels": pad_sequence([s[1:] for s in samples], True, IGNORED),
    }


def without_end(loader: DataLoader) -> Iterator[dict[str, Tensor]]:
    """Yield the batches of one epoch after the other."""
    while True:
        yield from loader


def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the sum of the losses of the labels that are not padding."""
    logits = model(batch["inputs"]).flatten(0, 1)
    return cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum")


def count(batch: dict[str, Tensor]) -> Tensor:
    """Return the number of labels that are not padding."""
    return (batch["labels"] != IGNORED).sum()


def evaluate(accelerator: Accelerator, model: nn.Module, samples: list[Tensor]) -> float:
    """Return the loss a label over all held-out documents; every rank computes it."""
    batches = [collate(samples[i : i + 8]) for i in range(0, len(samples), 8)]
    batches = [{name: t.to(accelerator.device) for name, t in b.items()} for b in batches]
    with torch.no_grad():
        total = sum(loss_sum(model, batch).item() for batch in batches)
    return total / sum(count(batch).item() for batch in batches)


def main() -> None:
    """Train; the loss of a step is the sum over its documents / their labels, on all ranks."""
    args = parse()
    accumulation = args.gradient_accumulation_steps
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        # The end of an epoch would otherwise force an optimizer step after fewer micro-steps.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=accumulation, sync_with_dataloader=False
        ),
    )
    set_seed(args.seed)
    samples = documents(args)
    held_out, samples = samples[: args.validation_samples], samples[args.validation_samples :]
    loader = DataLoader(
        samples,
        batch_size=args.train_batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(args.seed),
    )
    model = Model(args.hidden_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    recorder = Recorder(
        world_size=accelerator.num_processes,
        micro_batch_size=args.train_batch_size,
        gradient_accumulation_steps=accelerator.gradient_accumulation_steps,
    )
    global_batch = args.train_batch_size * accumulation * accelerator.num_processes
    batches, tokens = without_end(loader), 0
    for step in range(1, args.max_train_steps + 1):
        window = [next(batches) for _ in range(accumulation)]
        own = torch.stack([count(batch) for batch in window]).sum()
        labels = accelerator.reduce(own, reduction="sum").item()
        total = torch.zeros((), device=accelerator.device)
        for batch in window:
            with accelerator.accumulate(model):
                loss = loss_sum(model, batch) / labels
                total += loss.detach()
                # DDP averages over the ranks and `backward` divides by the accumulation; the sum
                # over all of them is wanted, because it is divided by all their labels already.
                accelerator.backward(loss * accelerator.num_processes * accumulation)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
        tokens += labels
        loss = accelerator.reduce(total, reduction="sum").item()
        recorder.step(
            step,
            loss=loss,
            samples=step * global_batch,
            tokens=tokens,
            learning_rate=args.learning_rate,
            gradient_norm=norm,
        )
        accelerator.print(f"step {step}: loss {loss:.6f}, labels {labels}")
    eval_loss = evaluate(accelerator, accelerator.unwrap_model(model), held_out)
    recorder.evaluation(args.max_train_steps, eval_loss=eval_loss)
    accelerator.print(f"evaluation: loss {eval_loss:.6f}")
    accelerator.end_training()
    # Threads of a wrapped model may hang or abort Python once the names of this function go, and
    # when it is taken down; all is written by now.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
