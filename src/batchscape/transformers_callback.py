"""A callback that records a Hugging Face `Trainer` for a sweep of `engine=command`.

::

    from batchscape.transformers_callback import BatchscapeCallback

    trainer = Trainer(..., callbacks=[BatchscapeCallback()])

Outside a sweep it does nothing. Within one it records every optimizer step: the loss where it is
that of one step (`logging_steps=1`; a mean over several is that of none), learning rate, gradient
norm, evaluations, and the batch that the `Trainer` really uses, micro-steps counted one by one.
It switches `logging_nan_inf_filter` off, which would log a made-up loss for one that is no number.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sized
from typing import Any

from typing_extensions import override

from batchscape.errors import ConfigError
from batchscape.recorder import RUN_DIR_VARIABLE, Recorder

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ConfigError(
        f"BatchscapeCallback needs transformers ({error}): pip install 'batchscape[hf]'"
    ) from None

__all__ = ["BatchscapeCallback"]


class BatchscapeCallback(TrainerCallback):
    """Records the steps and evaluations of a `Trainer`, see the module.

    Parameters
    ----------
    eval_loss : str
        Key of the held-out loss: `eval_<name>_loss` of one of several evaluation sets.
    """

    def __init__(self, eval_loss: str = "eval_loss") -> None:
        self._eval_loss = eval_loss
        self._recorder: Recorder | None = None
        self._micro_steps = 0
        self._recorded_step = 0
        self._logged_step = 0
        self._reported_kinds: set[str] = set()
        self._other_loss_keys: set[str] = set()
        self._is_evaluated = False

    @override
    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Record the batch that is used."""
        if not os.environ.get(RUN_DIR_VARIABLE):
            return
        args.logging_nan_inf_filter = False
        devices = max(1, args.n_gpu)
        process_batch_size = state.train_batch_size or args.train_batch_size
        self._recorder = Recorder(
            rank=args.process_index,
            # Several devices of one process are ranks too, though torch.distributed has fewer.
            world_size=args.world_size * devices,
            micro_batch_size=process_batch_size // devices,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
        )
        self._micro_steps = 0
        self._recorded_step = self._logged_step = state.global_step
        config = getattr(args, "parallelism_config", None)
        sizes = {name: getattr(config, name, 1) or 1 for name in ("tp_size", "cp_size", "sp_size")}
        text = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        if text:
            self._problem(
                "sharding", f"the Trainer shards the model ({text}), which is out of scope"
            )

    @override
    def on_substep_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Count a micro-step that was not the last of its optimizer step."""
        self._micro_steps += 1

    @override
    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Check the micro-steps; record a step that will not be logged."""
        micro_steps, self._micro_steps = self._micro_steps + 1, 0
        if micro_steps != args.gradient_accumulation_steps:
            self._problem(
                "micro-steps",
                f"optimizer step {state.global_step} took {micro_steps} micro-steps instead of "
                f"{args.gradient_accumulation_steps}: an epoch ended within it; take "
                f"gradient_accumulation_steps x the batch of all ranks as a divisor of the data",
            )
        if self._recorder is not None and not control.should_log:
            self._recorder.step(state.global_step)
            self._recorded_step = state.global_step

    @override
    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        """Record a step with its log."""
        if self._recorder is None or not logs or "loss" not in logs:
            return
        if state.global_step <= self._recorded_step:
            return
        # The Trainer counts inputs; they are tokens without padding only where it says so.
        tokens = (
            state.num_input_tokens_seen
            if args.include_num_input_tokens_seen == "non_padding"
            else None
        )
        self._recorder.step(
            state.global_step,
            loss=logs["loss"],
            loss_window=state.global_step - self._logged_step,
            learning_rate=logs.get("learning_rate"),
            gradient_norm=logs.get("grad_norm"),
            tokens=tokens or None,
        )
        self._recorded_step = self._logged_step = state.global_step

    @override
    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        """Record an evaluation, with all that the Trainer does around it."""
        if self._recorder is None or not metrics:
            return
        if self._eval_loss not in metrics:
            # The time of another evaluation set is no training's either.
            self._recorder.exclude()
            self._other_loss_keys |= {key for key in metrics if key.endswith("_loss")}
            return
        self._is_evaluated = True
        self._recorder.evaluation(
            state.global_step,
            eval_loss=metrics[self._eval_loss],
            eval_accuracy=metrics.get(f"{self._eval_loss[:-5]}_accuracy"),
        )

    @override
    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Leave the time of a checkpoint out."""
        if self._recorder is not None:
            self._recorder.exclude()

    @override
    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: object = None,
        **kwargs: object,
    ) -> None:
        """Check that the last micro-batch of the data was full."""
        dataset = getattr(train_dataloader, "dataset", None)
        is_whole_epoch = state.epoch is not None and float(state.epoch).is_integer()
        # With more ranks, accelerate fills the last micro-batches up with the first samples.
        if args.world_size > 1 or args.dataloader_drop_last or not is_whole_epoch:
            return
        if isinstance(dataset, Sized) and len(dataset) % args.train_batch_size:
            self._problem(
                "micro-batch",
                f"the last micro-batch of an epoch had {len(dataset) % args.train_batch_size} "
                f"samples; set dataloader_drop_last=True",
            )

    @override
    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Record the last step, where nothing was logged of it."""
        if self._recorder is not None and state.global_step > self._recorded_step:
            self._recorder.step(state.global_step)
        if self._other_loss_keys and not self._is_evaluated:
            warnings.warn(
                "batchscape records no held-out loss: the Trainer has "
                f"{', '.join(self._other_loss_keys)}, and no {self._eval_loss}; say which by "
                "BatchscapeCallback(eval_loss=...)",
                stacklevel=2,
            )

    def _problem(self, kind: str, problem: str) -> None:
        # One problem of a kind is enough: every epoch has the same end.
        if self._recorder is not None and kind not in self._reported_kinds:
            self._reported_kinds.add(kind)
            self._recorder.problem(problem)
