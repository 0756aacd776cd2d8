"""`transformers.Trainer`: which of its ways divides by the global count of labels."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import problem
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

LENGTH = 10


class WithoutKwargs(LlamaForCausalLM):
    """A model whose forward takes no arguments for the loss, as many of users' own."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        """Return the mean over the labels of what it is given."""
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


class InOrder(Trainer):
    """Gives the samples in the order of the data, so that micro-batches are known."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(train_dataset or self.train_dataset)


class OwnLoss(InOrder):
    """Computes the loss itself, as scripts did before `num_items_in_batch`."""

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,  # noqa: ARG002  (the Trainer gives it; this loss ignores it)
    ) -> Any:
        """Return the mean over the labels of a micro-batch."""
        outputs = model(**inputs)
        logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        return (loss, outputs) if return_outputs else loss


def build(kind: type[LlamaForCausalLM] = LlamaForCausalLM) -> LlamaForCausalLM:
    """Return the same small model each time."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        attention_dropout=0.0,
        use_cache=False,
    )
    return kind(config).double()


def data(n: int) -> list[dict[str, Tensor]]:
    """Return samples of one length, of which the last few positions are labels."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for count in (2 * problem.COUNTS)[:n]:
        ids = torch.randint(0, 17, (LENGTH,), generator=draw)
        labels = ids.clone()
        labels[: LENGTH - count] = -100
        mask = torch.ones_like(ids)
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return rows


def flat(parameters: Any) -> Tensor:
    """Join tensors."""
    return torch.cat([p.detach().flatten() for p in parameters])


def gradient_of(rows: list[dict[str, Tensor]]) -> Tensor:
    """Return the gradient of the mean over all labels, one sample at a time."""
    model = build()
    count = sum(int((row["labels"][1:] != -100).sum()) for row in rows)
    for row in rows:
        logits = model(input_ids=row["input_ids"][None]).logits[0, :-1]
        (cross_entropy(logits, row["labels"][1:], reduction="sum") / count).backward()
    return flat(p.grad for p in model.parameters() if p.grad is not None)


def micro_batches(rows: list[dict[str, Tensor]]) -> list[list[dict[str, Tensor]]]:
    """Return what each micro-step of each rank is given."""
    size = problem.MICRO
    return [rows[first : first + size] for first in range(0, len(rows), size)]


class Counted(InOrder):
    """Counts the samples of each optimizer step, on this rank."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.windows: list[int] = []

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Count a micro-step."""
        if self.state.global_step == len(self.windows):
            self.windows.append(0)
        self.windows[-1] += len(inputs["input_ids"])
        return super().training_step(model, inputs, num_items_in_batch)


def trained(
    model: LlamaForCausalLM, trainer: type[Trainer], n: int, steps: int, **settings: Any
) -> Trainer:
    """Train by plain descent with learning rate 1."""
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=problem.MICRO,
        gradient_accumulation_steps=problem.ACCUMULATION,
        max_steps=steps,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        log_level="error",
        **settings,
    )
    used = trainer(model=model, args=arguments, train_dataset=data(n))
    used.train()
    return used


def gradient(kind: type[LlamaForCausalLM], trainer: type[Trainer], **settings: Any) -> Tensor:
    """Return the gradient that the first optimizer step used."""
    model = build(kind)
    before = flat(model.parameters())
    trained(model, trainer, 8, 1, **settings)
    return before - flat(model.parameters())


def main() -> None:
    """Try everything once."""
    warnings.simplefilter("ignore")
    rows = data(8)
    true = gradient_of(rows)
    means = torch.stack([gradient_of(own) for own in micro_batches(rows)]).mean(dim=0)
    found: dict[str, Any] = {"accumulation": problem.ACCUMULATION}
    ways: dict[str, tuple[type[LlamaForCausalLM], type[Trainer], dict[str, Any]]] = {
        "default": (LlamaForCausalLM, InOrder, {}),
        "each rank by itself": (
            LlamaForCausalLM,
            InOrder,
            {"average_tokens_across_devices": False},
        ),
        "model without kwargs": (WithoutKwargs, InOrder, {}),
        "own compute_loss": (LlamaForCausalLM, OwnLoss, {}),
    }
    for name, (kind, trainer, settings) in ways.items():
        used = gradient(kind, trainer, **settings)
        found[name] = {
            "error": problem.apart(used, true),
            "from mean of means": problem.apart(used, means),
        }
    counted = trained(build(), Counted, 8 + problem.MICRO * problem.RANKS, 4)
    assert isinstance(counted, Counted)
    found["windows"] = counted.windows
    problem.tell(**found)
    problem.leave()


main()
