"""Data for `litgpt pretrain`: the Python files of a folder as bytes, without a tokenizer."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from litgpt.data import DataModule
from litgpt.tokenizer import Tokenizer
from torch.utils.data import DataLoader


class ByteText(DataModule):
    """Blocks of bytes in one seeded order; the last blocks of the text are held out."""

    def __init__(self, folder: str | None = None, held_out: int = 64, seed: int = 0) -> None:
        super().__init__()
        self.folder = Path(folder or Path(os.__file__).parent)
        self.held_out, self.seed = held_out, seed

    def connect(
        self, tokenizer: Tokenizer | None = None, batch_size: int = 1, max_seq_length: int = -1
    ) -> None:
        """Take the micro-batch and the block size that LitGPT decided on."""
        del tokenizer  # bytes need none
        self.batch_size = batch_size
        text = bytearray(b"\n\n".join(p.read_bytes() for p in sorted(self.folder.glob("*.py"))))
        # A block has one byte more than the model reads: the last target.
        self.blocks = torch.frombuffer(text, dtype=torch.uint8).unfold(
            0, max_seq_length + 1, max_seq_length
        )

    def train_dataloader(self) -> DataLoader:
        """Return batches in an order that does not depend on their size."""
        order = torch.Generator().manual_seed(self.seed)
        blocks = self.blocks[: -self.held_out]
        return DataLoader(blocks, self.batch_size, shuffle=True, generator=order, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        """Return the held-out blocks, eight at a time whatever the micro-batch."""
        return DataLoader(self.blocks[-self.held_out :], batch_size=8)
