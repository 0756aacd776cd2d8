"""One run as batchscape trains it, and as the Hugging Face Trainer does, told when a step ended."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Sampler, SequentialSampler

from batchscape.config import RunConfig
from batchscape.data.corpus import prepare
from batchscape.geometry import solve
from batchscape.record.folder import RunFolder
from batchscape.record.spec import RunSpec, Stage
from batchscape.record.tables import read_table
from batchscape.train.loop import Training

Ended = Callable[[], None]


def make_run(device: str, steps: int, **groups: Any) -> RunSpec:
    """Return a run on one device, `cpu` or `cuda`, that does nothing but train and record.

    Parameters
    ----------
    device : str
    steps : int
        Optimizer steps.
    **groups
        Of the configuration: `batch`, `model`, `data`, `optimizer`, `engine`, and others that are
        not as they are here.
    """
    config = RunConfig.from_mapping(
        {
            "schedule": {"name": "constant"},
            "scaling": {},
            "budget": {"optimizer_steps": steps},
            "evaluation": {"samples": 8},
            "loader": {},
            "checkpoint": {"every_s": None},
            "measure": {"memory": False},
            "launcher": {"name": "local", "device": device},
            "tracker": {"name": "none"},
            **groups,
        }
    )
    geometry = solve(data_parallel_size=1, **groups["batch"])
    return RunSpec(
        run_id="one",
        trajectory_id="one",
        sweep_name="benchmark",
        stages=(Stage(steps * geometry.global_batch_size, geometry, config.optimizer),),
        device_type=device,
        precision=config.engine.precision,
        evaluation_every_samples=None,
        data=prepare(config.data),
        config=config,
    )


def train_ours(spec: RunSpec, ended: Ended) -> list[float]:
    """Train as a run is trained, with its records; return the loss of every step.

    Parameters
    ----------
    spec : RunSpec
    ended : callable
        Called after each optimizer step and all that belongs to it.
    """

    class Ours(Training):
        def _agree(self, *, at_once: bool) -> Any:
            verdict = super()._agree(at_once=at_once)
            ended()
            return verdict

    device = torch.device(spec.device_type, *([0] if spec.device_type == "cuda" else []))
    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder(Path(root))
        Ours(spec, folder, 0, device, 0).run(lambda _: None)
        return read_table(folder, "steps")["loss"].tolist()


def train_trainer(
    spec: RunSpec,
    module: nn.Module,
    samples: Any,
    ended: Ended,
    optimizers: tuple[Any, Any] = (None, None),
    **settings: Any,
) -> list[float]:
    """Train with the Trainer of transformers; return the losses that it logs.

    Parameters
    ----------
    spec : RunSpec
    module : Module
    samples : Dataset or list
        In the order of the run.
    ended : callable
        Called after each optimizer step.
    optimizers : tuple
        An optimizer and its schedule; None: the Trainer's own.
    **settings
        Further `TrainingArguments`.
    """
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    losses: list[float] = []

    class Notes(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended()

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    class InOrder(Trainer):
        def _get_train_sampler(self, dataset: Any = None) -> Sampler[int]:
            return SequentialSampler(dataset or self.train_dataset)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=spec.geometry.micro_batch_size,
            gradient_accumulation_steps=spec.geometry.gradient_accumulation_steps,
            max_steps=spec.optimizer_steps,
            max_grad_norm=1.0,
            use_cpu=spec.device_type == "cpu",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=spec.device_type == "cuda",
            **settings,
        )
        trainer = InOrder(
            model=module,
            args=arguments,
            train_dataset=samples,
            optimizers=optimizers,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Notes())
        trainer.train()
    return losses
