"""`litgpt pretrain` on random tokens: samples and learning rate of each optimizer step."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["TORCH_COMPILE_DISABLE"] = "1"

import torch
from litgpt import Config, pretrain
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

BLOCK = 8


class Tokens(DataModule):
    """Random blocks, and how many of them have been asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0

    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int = -1) -> None:
        """Take the micro-batch that LitGPT decided on."""
        del tokenizer, max_seq_length
        self.batch_size = batch_size

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= len(self):
            raise IndexError
        self.given += 1
        return torch.full((BLOCK + 1,), index % 13)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return batches."""
        return DataLoader(self, self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return one batch."""
        return DataLoader([torch.zeros(BLOCK + 1, dtype=torch.long)])


def pretrained(samples: int, global_batch: int, micro: int, warmup_steps: int) -> dict[str, Any]:
    """Train on some samples with a highest learning rate of 1."""
    data = Tokens()
    rates: list[float] = []
    seen: list[int] = []

    def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
        rates.append(optimizer.param_groups[0]["lr"])
        seen.append(data.given)

    handle = register_optimizer_step_post_hook(hook)
    pretrain.setup(
        "tiny",
        model_config=Config(
            name="tiny", block_size=BLOCK, padded_vocab_size=16, n_layer=1, n_head=1, n_embd=8
        ),
        out_dir=Path(tempfile.mkdtemp()),
        precision="32-true",
        data=data,
        train=TrainArgs(
            global_batch_size=global_batch,
            micro_batch_size=micro,
            max_tokens=samples * BLOCK,
            max_seq_length=BLOCK,
            max_norm=1.0,
            min_lr=0.0,
            lr_warmup_steps=warmup_steps,
            save_interval=None,
            tie_embeddings=False,
        ),
        eval=EvalArgs(interval=1000, max_iters=1, final_validation=False),
        optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0}},
        devices=1,
        logger_name="csv",
    )
    handle.remove()
    batches = [after - before for before, after in zip([0, *seen], seen, strict=False)]
    return {"learning_rates": rates, "global_batches": batches}


found = {
    "version": version("litgpt"),
    "18 by 4": pretrained(72, 18, 4, 0),
    "whole": pretrained(80, 8, 8, 4),
    "in four": pretrained(80, 8, 2, 4),
    "cut short": pretrained(12, 8, 2, 0),
}
Path(sys.argv[1]).write_text(json.dumps(found))
