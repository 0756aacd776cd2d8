"""Train a small GPT with plain PyTorch under torchrun, in the manner of nanoGPT's train.py.

Settings are given as `--name=value`. As there, `gradient_accumulation_steps` counts the micro-steps
of *all* ranks: it is divided by their number.

    torchrun --nproc_per_node 2 train.py --batch_size=2 --gradient_accumulation_steps=4
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

BYTES = 256
"""The tokens: a text is its bytes."""


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data_dir", default=str(Path(os.__file__).parent))
    parser.add_argument("--batch_size", type=int, default=4, help="samples of a micro-step")
    parser.add_argument(
        "--gradient_accumulation_steps", type=int, default=2, help="micro-steps of all ranks"
    )
    parser.add_argument("--block_size", type=int, default=64)
    parser.add_argument("--n_layer", type=int, default=2)
    parser.add_argument("--n_head", type=int, default=4)
    parser.add_argument("--n_embd", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--grad_clip", type=float, default=1.0)
    parser.add_argument("--max_iters", type=int, default=20)
    parser.add_argument("--eval_iters", type=int, default=8, help="batches of 8 held-out samples")
    parser.add_argument("--seed", type=int, default=1337)
    return parser.parse_args()


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.ln_1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A decoder; returns the mean loss of a micro-batch."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, args.n_embd)
        self.positions = nn.Embedding(args.block_size, args.n_embd)
        self.blocks = nn.Sequential(*(Block(args.n_embd, args.n_head) for _ in range(args.n_layer)))
        self.head = nn.Sequential(nn.LayerNorm(args.n_embd), nn.Linear(args.n_embd, BYTES))

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        logits = self.head(self.blocks(self.tokens(inputs) + self.positions(places)))
        return cross_entropy(logits.flatten(0, 1), labels.flatten())


class Text:
    """A text as samples of `block_size` + 1 bytes, in one seeded order; the last ones held out."""

    def __init__(self, args: argparse.Namespace) -> None:
        files = sorted(Path(args.data_dir).glob("*.py"))
        content = bytearray(b"\n\n".join(path.read_bytes() for path in files))
        self._bytes = torch.frombuffer(content, dtype=torch.uint8)
        self._length = args.block_size
        samples = (len(content) - 1) // args.block_size
        held_out = 8 * args.eval_iters
        self._held_out = torch.arange(samples - held_out, samples)
        generator = torch.Generator().manual_seed(args.seed)
        self._order = torch.randperm(samples - held_out, generator=generator)

    def batch(self, first: int, size: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of `size` samples, from a position of the order on."""
        places = torch.arange(first, first + size) % len(self._order)
        return self._read(self._order[places])

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the held-out samples, eight at a time."""
        yield from map(self._read, self._held_out.split(8))

    def _read(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        places = samples[:, None] * self._length + torch.arange(self._length + 1)
        blocks = self._bytes[places].long()
        return blocks[:, :-1], blocks[:, 1:]


def mean_over_ranks(value: Tensor, world_size: int) -> float:
    """Return the mean of a number that every rank has."""
    if world_size > 1:
        dist.all_reduce(value)
    return value.item() / world_size


def main() -> None:
    """Train, and print a line for each iteration."""
    args = parse()
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world_size > 1:
        dist.init_process_group("gloo")
    if args.gradient_accumulation_steps % world_size:
        raise SystemExit(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} counts the "
            f"micro-steps of all ranks and must be a multiple of their number, {world_size}"
        )
    accumulation = args.gradient_accumulation_steps // world_size
    micro, wide = args.batch_size, args.batch_size * world_size
    torch.manual_seed(args.seed)
    text, model = Text(args), GPT(args)
    wrapped = DistributedDataParallel(model) if world_size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    if rank == 0:
        print(
            f"tokens per iteration will be: {accumulation * wide * args.block_size:,}", flush=True
        )
        print(f"world size: {world_size}", flush=True)
    for iteration in range(1, args.max_iters + 1):
        began = time.perf_counter()
        total = torch.zeros(())
        for micro_step in range(accumulation):
            position = ((iteration - 1) * accumulation + micro_step) * wide + rank * micro
            last = micro_step == accumulation - 1
            with nullcontext() if last or world_size == 1 else wrapped.no_sync():
                # Every micro-batch has as many labels, so that a mean of means is the mean.
                loss = wrapped(*text.batch(position, micro)) / accumulation
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        mean = mean_over_ranks(total, world_size)
        if rank == 0:
            ms = (time.perf_counter() - began) * 1000
            print(f"iter {iteration}: loss {mean:.6f}, time {ms:.2f}ms", flush=True)
    if rank == 0:
        with torch.no_grad():
            losses = [model(*batch).item() for batch in text.held_out()]
        print(f"step {args.max_iters}: val loss {sum(losses) / len(losses):.6f}", flush=True)
    if world_size > 1:
        dist.destroy_process_group()
    # Threads of a wrapped model may hang or abort Python once the names of this function go, and
    # when it is taken down; all is written by now.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
