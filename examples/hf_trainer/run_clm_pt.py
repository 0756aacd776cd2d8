"""Pre-train a causal language model with the Hugging Face Trainer.

Run by torchrun; the arguments are those of `TrainingArguments` and of the two classes below:

    torchrun --nproc_per_node 2 run_clm_pt.py --output_dir out --do_train --use_cpu \
        --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --max_steps 20
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

BYTES = 256
"""The tokens: a text is its bytes."""


@dataclass
class ModelArguments:
    """What is trained: a folder of `save_pretrained`, or a small Llama of these sizes."""

    model_name_or_path: str | None = None
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4


@dataclass
class DataTrainingArguments:
    """On what: the Python files of a folder, cut into blocks."""

    dataset_dir: str = field(
        default=str(Path(os.__file__).parent), metadata={"help": "Folder of .py files."}
    )
    block_size: int = 64
    validation_split_percentage: float = 1.0
    max_eval_samples: int = 64


class Blocks(Dataset):
    """Blocks of `block_size` bytes, one after the other."""

    def __init__(self, content: bytes, block_size: int) -> None:
        whole = len(content) // block_size * block_size
        tokens = torch.frombuffer(bytearray(content[:whole]), dtype=torch.uint8)
        self.blocks = tokens.view(-1, block_size)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block = self.blocks[index].long()
        return {"input_ids": block, "labels": block}


def split(arguments: DataTrainingArguments) -> tuple[Blocks, Blocks]:
    """Return the blocks for training and, from the end of the text, for evaluation."""
    files = sorted(Path(arguments.dataset_dir).glob("*.py"))
    content = b"\n\n".join(path.read_bytes() for path in files)
    cut = int(len(content) * (1 - arguments.validation_split_percentage / 100))
    held_out = content[cut:][: arguments.max_eval_samples * arguments.block_size]
    return Blocks(content[:cut], arguments.block_size), Blocks(held_out, arguments.block_size)


def build(arguments: ModelArguments) -> PreTrainedModel:
    """Return the model: read from its folder, or new."""
    if arguments.model_name_or_path is not None:
        return AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path)
    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=arguments.hidden_size,
        intermediate_size=arguments.intermediate_size,
        num_hidden_layers=arguments.num_hidden_layers,
        num_attention_heads=arguments.num_attention_heads,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config)


def skip_kernel_of_inference() -> None:
    """Spare DeepSpeed the kernel that it compiles on a CPU, for a minute, and trains without."""
    if all(
        any(text.startswith(flag) for text in sys.argv) for flag in ("--use_cpu", "--deepspeed")
    ):
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main() -> None:
    """Train, evaluate, and leave `trainer_state.json` in the output folder."""
    skip_kernel_of_inference()
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    train_dataset, eval_dataset = split(data_args)
    trainer = Trainer(
        model=build(model_args),
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
    )
    if training_args.do_train:
        trainer.train()
    if training_args.do_eval:
        trainer.evaluate()
    trainer.save_state()
    # The Trainer does not leave the process group.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # Threads of a wrapped model may hang or abort Python once the names of this function go, and
    # when it is taken down; all is written by now.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
