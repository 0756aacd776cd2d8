"""The training loop of one rank."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from batchscape.data.datasets import open_dataset
from batchscape.device import empty_cache, synchronize
from batchscape.engines import Engine, begins_in_parts, build_engine, model_outline
from batchscape.engines.declared import check_exchanged, declaration
from batchscape.engines.precision import autocast
from batchscape.measure.clock import CpuClock, StepClock, build_clock
from batchscape.measure.gradient_sketch import gradient_sketch
from batchscape.measure.memory_report import OUTSIDE
from batchscape.measure.noise_scale import GradientSquares, NoiseSample
from batchscape.models.undisturbed import undisturbed
from batchscape.record.files import JsonLines, keep_json_lines
from batchscape.record.folder import RunFolder
from batchscape.record.gradient_sketch import write_sketch
from batchscape.record.heartbeat import Phase, beat
from batchscape.record.spec import RunSpec
from batchscape.record.status import Cause, Outcome, Status, StopReason
from batchscape.train.accumulation import StepTotals, accumulate, rehearse
from batchscape.train.averaging import WeightAverage
from batchscape.train.batches import to_device
from batchscape.train.branching import BranchPoint, keep_branch_point
from batchscape.train.checkpoint import (
    Resumable,
    agree_on,
    find_resumable,
    gather_random_states,
    save_checkpoint,
    set_random_state,
)
from batchscape.train.divergence import DivergenceRule
from batchscape.train.evaluation import Evaluator
from batchscape.train.examination import ModelColumns, examine
from batchscape.train.failures import is_out_of_memory
from batchscape.train.loader import BatchLoader, MicroBatch, build_loader
from batchscape.train.recorder import Agreement, StepRecorder
from batchscape.train.stream import SampleStream
from batchscape.train.timeline import Timeline, schedule_factor


class Training:
    """One rank's share of one run."""

    def __init__(
        self,
        spec: RunSpec,
        folder: RunFolder,
        rank: int,
        device: torch.device,
        attempt: int,
        *,
        branch_steps: Collection[int] = (),
        branch_point: BranchPoint | None = None,
    ) -> None:
        self.spec = spec
        self._config = spec.config
        self.steps_done = 0
        """Optimizer steps done."""
        self.started_at: float | None = None
        """When the first step began, had there been no evaluation and no compilation before."""
        self.evaluation_s = 0.0
        self.checkpoint_s = 0.0
        self.compilations_s: list[float] = []
        self.model_columns = ModelColumns()
        """Properties of the model, which rank 0 alone measures."""
        self.declaration: dict[str, Any] = {}
        """What the engine declares and reports of itself."""
        self._stop_requested = False
        self._folder = folder
        self._rank = rank
        self._is_first = rank == 0
        self._world_size = spec.geometry.data_parallel_size
        self._timeline = Timeline(spec.stages)
        self._device = device
        self._attempt = attempt
        self._branch_steps = frozenset(branch_steps)
        """Optimizer steps after which other runs begin."""
        self._branch_point = branch_point
        self._evaluator = Evaluator(spec, device, rank)
        self._dataset = open_dataset(spec.config, spec.data, "train")
        self._stream = SampleStream(
            self._dataset,
            spec.config.resolved_data_seed,
            self._timeline,
            rank,
            spec.config.measure.noise_scale_every,
        )
        self._loader: BatchLoader = BatchLoader(self._dataset, self._stream, device, spec.precision)
        self._divergence_rule = DivergenceRule()
        self.recorder: StepRecorder
        self._engine: Engine
        self._average: WeightAverage | None = None
        self._clock: StepClock

    def rehearse(self, phase: Callable[[str], None], optimizer_steps: int) -> None:
        """Train a few steps for a memory probe; parameters are those of `rehearsal.rehearse`."""
        build = partial(build_engine, self.spec, self._device, None, self._is_first)
        rehearse(self.spec, self._loader, build, phase, optimizer_steps)

    def compile_ahead(self) -> None:
        """Compile once and forget it, before a rehearsal fills the caches of the compiler."""
        if self._config.in_process.compile:
            self._build(CpuClock())
            self._compile()
            self._engine.close()
            del self._engine
            self._average = None
            # A compiled module refers to itself: it would stay, with all its parameters.
            gc.collect()

    @property
    def micro_batch_size_count(self) -> int:
        """Sizes of the micro-batches, for each of which a compiled model has code."""
        return len(self._stream.micro_batch_sizes)

    def request_stop(self) -> None:
        """Ask for a checkpoint and an end, at the next drain of all ranks."""
        self._stop_requested = True

    def run(self, phase: Callable[[str], None]) -> Outcome:
        """Train to the budget, the target, or a request to stop."""
        self._phase = phase
        resumable = find_resumable(self._folder, self.spec.run_id)
        if resumable.state is None and self._branch_point is not None:
            resumable = self._branch_point.find_resumable(resumable)
            if self._is_first and resumable.state is not None:
                self._branch_point.take_rows(self.spec)
        state = resumable.state
        # Of a resumed run, what memory holds before its first step is not that of a new model.
        first_phase = "after_model" if state is None else OUTSIDE
        phase(first_phase)
        # Rank 0 alone examines a model that every rank holds whole; of parts, all ranks do.
        in_parts = begins_in_parts(self.spec)
        examine_model = partial(self._examine, first_phase) if self._is_first else None
        self._build(build_clock(self._device), None if in_parts else examine_model)
        if in_parts:
            self._examine(first_phase, self._engine.module)
        self.declaration = declaration(self._engine)
        self.steps_done = self._resume(resumable)
        self._evals = JsonLines(self._folder.lines("evals")) if self._is_first else None
        phase(OUTSIDE)
        self._loader = build_loader(
            self._config.loader,
            self._dataset,
            self._stream,
            self._device,
            self.spec.precision,
            steps=range(self.steps_done, self.spec.optimizer_steps),
        )
        try:
            return self._train()
        finally:
            self._loader.close()
            self.recorder.close()
            if self._evals is not None:
                self._evals.close()
            self._engine.close()

    def _examine(self, phase: str, module: nn.Module) -> None:
        """Examine the model outside of every phase, before micro-batches are fetched."""
        self._phase(OUTSIDE)
        in_parts = begins_in_parts(self.spec)
        # Its memory belongs to no optimizer step, as that of an evaluation.
        beat(Phase.EVALUATION)
        try:
            self.model_columns = examine(
                module,
                self._dataset,
                self._device,
                self.spec.precision,
                self._stream.micro_batch_sizes[0],
                forward=self._engine.forward if in_parts else None,
                outline=model_outline(self.spec) if in_parts and self._is_first else None,
            )
        except Exception as error:
            # With parts, the other ranks would wait for ever for a rank that goes on.
            if in_parts or not is_out_of_memory(error, self.spec):
                raise
            # The training goes on: its own steps show whether it fits.
            self.model_columns = ModelColumns(not_invariant="not examined: memory was out for it")
        # Parts of a micro-batch would have other batch statistics, or other draws of dropout.
        self._stream.may_cut = self.model_columns.not_invariant is None
        beat(Phase.START)
        self._phase(phase)

    def _train(self) -> Outcome:
        is_whole = self.spec.timed_steps is None
        outcome = self._judge(self._evaluate()) if self.steps_done == 0 and is_whole else None
        if self._config.in_process.compile:
            self._compile()
            # The compiler leaves half a million objects: no later collection shall visit them.
            gc.collect()
            gc.freeze()
        self._last_checkpoint = time.monotonic()
        if outcome is not None:
            return outcome
        self.started_at = time.perf_counter() - self.evaluation_s - sum(self.compilations_s)
        self._phase("first_backward" if self.steps_done == 0 else "steady")
        while self.steps_done < self.spec.optimizer_steps:
            self._step(self.steps_done)
            self.steps_done += 1
            evaluates = self._evaluation_is_due()
            is_last = self.steps_done == self.spec.optimizer_steps
            agreement = self._agree(
                at_once=evaluates or is_last or self.steps_done in self._branch_steps
            )
            if agreement.diverged is not None:
                self.recorder.flush()
                return self._divergence_outcome(agreement.diverged)
            if evaluates:
                self._phase(OUTSIDE)
                if (outcome := self._judge(self._evaluate())) is not None:
                    return outcome
            self._keep_branch_point()
            if is_last:
                break
            if agreement.stop or agreement.checkpoint:
                self._save()
            if agreement.stop:
                return Outcome(
                    Status.INTERRUPTED,
                    optimizer_step=self.steps_done,
                    reason="asked to stop",
                    cause=Cause.INTERRUPTED,
                )
        reason = StopReason.BUDGET if is_whole else StopReason.TIMED
        return Outcome(Status.COMPLETED, reason, optimizer_step=self.steps_done)

    def _agree(self, *, at_once: bool) -> Agreement:
        """Exchange the ranks' requests to stop and to save, if that is due."""
        if not at_once and not self.recorder.is_due:
            return Agreement()
        beat(Phase.RECORD)
        stop, every_s = self._stop_requested, self._config.checkpoint.every_s
        # Rank 0 decides when a checkpoint is due.
        checkpoint = (
            self._is_first
            and every_s is not None
            and time.monotonic() - self._last_checkpoint >= every_s
        )
        if at_once:
            return self.recorder.flush(stop=stop, checkpoint=checkpoint)
        agreement = self.recorder.drain(stop=stop, checkpoint=checkpoint)
        if agreement.stop or agreement.checkpoint:
            # A checkpoint needs every row before it on the disk.
            agreement |= self.recorder.flush()
        return agreement

    def _judge(self, held_out_loss: float) -> Outcome | None:
        """Return how an evaluation ends the run; None where it goes on."""
        if not math.isfinite(held_out_loss):
            what = f"the held-out loss after optimizer step {self.steps_done}"
            return self._divergence_outcome(f"{what} is not finite")
        target = self._config.budget.target_loss
        if target is not None and held_out_loss <= target:
            return Outcome(Status.COMPLETED, StopReason.TARGET, optimizer_step=self.steps_done)
        return None

    def _divergence_outcome(self, reason: str) -> Outcome:
        step, cause = self.steps_done, Cause.DIVERGENCE
        return Outcome(Status.DIVERGED, reason=reason, cause=cause, optimizer_step=step)

    def _compile(self) -> None:
        """Compile in a forward and backward that is forgotten, so that no step contains it."""
        beat(Phase.COMPILATION)
        begin = time.perf_counter()
        # With parts, a backward without its exchange would leave gradients behind.
        last = not self._engine.state_is_whole
        with undisturbed(self._engine.module):
            for size in self._stream.micro_batch_sizes:
                self._engine.micro_step(*self._micro_batch(self.steps_done, size), 0.0, last=last)
        self._engine.forget_gradients()
        synchronize(self._device)
        self.compilations_s.append(time.perf_counter() - begin)

    def _micro_batch(self, k: int, size: int) -> MicroBatch:
        """Return samples of optimizer step k (from 0), as a micro-batch of any size."""
        indices = np.resize(self._stream.step(k, sampling=False).indices.ravel(), size)
        return to_device(self._dataset.batch(indices), self._device, self.spec.precision)

    def _build(self, clock: StepClock, examine: Callable[[nn.Module], None] | None = None) -> None:
        self._engine = build_engine(self.spec, self._device, examine, self._is_first)
        is_whole = self.spec.timed_steps is None
        self._stream.samples_noise = is_whole and self._engine.micro_gradients_are_whole
        half_life_tokens = self._config.evaluation.ema_half_life_tokens
        if half_life_tokens is not None:
            self._average = WeightAverage(self._engine.module, half_life_tokens)
        self._clock = clock
        self._engine.marks = clock
        # Each rank draws dropout of its own; the parameters, the same on all, are drawn by now.
        torch.manual_seed(1_000_003 * (self._config.resolved_init_seed + 1) + self._rank)

    def _step(self, k: int) -> None:
        """Do optimizer step k (from 0) and give it to the recorder."""
        planned = self._timeline.step(k)
        optimizer = planned.stage.optimizer
        factor = schedule_factor(self._config.schedule, planned.midpoint, self.spec.samples)
        bytes_before = self._engine.exchanged_bytes
        if k > 0:
            # A step whose micro-batch is cut to sample the noise takes less memory.
            self._phase(OUTSIDE if self._stream.is_cut(k) else "steady")
        self.recorder.begin()
        self._clock.begin()
        totals, noise = self._accumulate(k)
        if k == 0:
            self._sketch_gradient()
            self._phase("first_optimizer_step")
        beat(Phase.OPTIMIZER)
        norm = self._engine.optimizer_step(optimizer, factor)
        if self._average is not None:
            self._average.update(totals.labels)
        self._clock.end()
        exchanged = self._engine.exchanged_bytes - bytes_before
        check_exchanged(self._config.engine.name, self._engine, exchanged, totals.micro_steps)
        self.recorder.add(
            optimizer_step=k + 1,
            samples=planned.samples_after,
            global_batch_size=planned.stage.geometry.global_batch_size,
            labels=totals.labels,
            loss_sum=totals.loss_sum,
            gradient_norm=norm,
            learning_rate=optimizer.learning_rate * factor,
            exchanged_bytes=exchanged,
            skipped=self._engine.skipped,
            noise=noise,
        )

    def _sketch_gradient(self) -> None:
        """Keep a sketch of the first gradient, outside of the step's time and memory.

        Every rank makes it, although one writes it: else the others would wait in the next step.
        """
        if not self._engine.gradients_are_whole:
            return
        self._phase(OUTSIDE)
        beat(Phase.RECORD)
        self._clock.pause()
        trained = (p for p in self._engine.module.parameters() if p.requires_grad)
        sketch = gradient_sketch(trained, self._engine.gradient_scale)
        if self._is_first:
            write_sketch(self._folder, sketch.numpy())
        self._clock.resume()

    def _accumulate(self, k: int) -> tuple[StepTotals, NoiseSample | None]:
        """Do the micro-steps of optimizer step k, and sample the noise where it is its turn."""
        noise_batch_size = self._stream.small_batch_size(k)
        if noise_batch_size is None:
            return accumulate(self._engine, self._loader, self._clock, k), None
        with GradientSquares(self._engine.module) as squares:
            totals = accumulate(self._engine, self._loader, self._clock, k)
        size = self._timeline.step(k).stage.geometry.global_batch_size
        square_sum = squares.square_sum(self._engine.gradient_scale)
        return totals, NoiseSample(noise_batch_size, size // noise_batch_size, square_sum)

    def _evaluation_is_due(self) -> bool:
        if self.spec.timed_steps is not None:
            return False
        if self.steps_done == self.spec.optimizer_steps:
            return True
        every = self.spec.evaluation_every_samples
        return every is not None and self._timeline.samples_before(self.steps_done) % every == 0

    def _evaluate(self) -> float:
        beat(Phase.EVALUATION, self.steps_done)
        self.recorder.break_off()
        begin = time.perf_counter()
        memory_error: Exception | None = None
        try:
            result = self._evaluator.evaluate(self._engine, self._average)
        except Exception as error:
            if not is_out_of_memory(error, self.spec):
                raise
            # A traceback would keep the tensors of the forward alive.
            memory_error = error.with_traceback(None)
        if memory_error is not None:
            self._try_micro_step()
            raise memory_error
        elapsed_s = time.perf_counter() - begin
        self.evaluation_s += elapsed_s
        if self._evals is not None:
            row = {
                "optimizer_step": self.steps_done,
                "samples": self._timeline.samples_before(self.steps_done),
                "tokens": self.recorder.tokens,
                "train_time_s": self.recorder.train_time_s,
                "attempt": self._attempt,
                **result._asdict(),
                "evaluation_s": elapsed_s,
            }
            self._evals.append([row])
        return result.eval_loss

    def _try_micro_step(self) -> None:
        """Do a forward and backward of a whole micro-batch after an evaluation ran out of memory.

        It takes no more memory than the training, so an error of it shows that the training does
        not fit either. Not done where all ranks would have to take part, nor for a compiled
        training, which takes less memory.
        """
        if not self._engine.gradients_are_whole or self._config.in_process.compile:
            return
        module = self._engine.module.train()
        beat(Phase.FORWARD)
        empty_cache(self._device)
        batch = self._micro_batch(0, max(self._stream.micro_batch_sizes))
        with undisturbed(module):
            with autocast(self._device.type, self.spec.precision):
                loss, _ = self._engine.forward(*batch)
            beat(Phase.BACKWARD)
            (loss * 0.0).backward()
        self._engine.forget_gradients()
        beat(Phase.EVALUATION)

    def _save(self) -> None:
        """Write the state, to go on from."""
        self._write_state(partial(save_checkpoint, self._folder.checkpoints))
        self._last_checkpoint = time.monotonic()

    def _keep_branch_point(self) -> None:
        """Keep the state if other runs begin with it."""
        if self.steps_done in self._branch_steps:
            self._write_state(partial(keep_branch_point, self._folder))

    def _write_state(self, write: Callable[[int, dict[str, Any]], object]) -> None:
        beat(Phase.CHECKPOINT, self.steps_done)
        self.recorder.break_off()
        begin = time.perf_counter()
        # All ranks gather the state, of which each may hold a part; rank 0 writes it.
        rng = gather_random_states(self._device, self._world_size)
        engine = self._engine.state()
        average = None if self._average is None else self._average.state()
        if self._is_first:
            if self._evals is not None:
                self._evals.flush()
            state = {
                "run_id": self.spec.run_id,
                "optimizer_step": self.steps_done,
                "tokens": self.recorder.tokens,
                "train_time_s": self.recorder.train_time_s,
                "rng": rng,
                "divergence": self._divergence_rule.state(),
                **engine,
                "average": average,
            }
            write(self.steps_done, state)
        self.checkpoint_s += time.perf_counter() - begin

    def _resume(self, resumable: Resumable) -> int:
        """Restore the checkpoint, where there is one; return its optimizer steps."""
        begin: dict[str, Any] = {"optimizer_step": 0, "tokens": 0, "train_time_s": 0.0}
        if resumable.state is not None:
            begin = resumable.state
            self._engine.restore(begin)
            if self._average is not None:
                self._average.restore(begin["average"])
            set_random_state(self._device, begin["rng"][self._rank])
            self._divergence_rule.restore(begin["divergence"])
            step = begin["optimizer_step"]
            print(f"batchscape: going on after optimizer step {step}", file=sys.stderr)  # noqa: T201  (run log)
        steps_done: int = begin["optimizer_step"]
        agree_on(steps_done, self._world_size, self._device)
        if self._is_first:
            for note in resumable.notes:
                print(f"batchscape: {note}", file=sys.stderr)  # noqa: T201  (run log)
            for path in resumable.damaged_checkpoints:
                path.unlink()
            # This attempt writes the rows after the checkpoint again.
            for table in ("steps", "evals"):
                keep_json_lines(
                    self._folder.lines(table),
                    lambda row: steps_done > 0 and row["optimizer_step"] <= steps_done,
                )
        self.recorder = StepRecorder(
            self._folder,
            self._rank,
            self._world_size,
            self._device,
            self._clock,
            ranks_on_node=self.spec.geometry.devices_per_node,
            attempt=self._attempt,
            warmup_optimizer_steps=self._config.measure.warmup_optimizer_steps,
            rule=self._divergence_rule,
            tokens=begin["tokens"],
            train_time_s=begin["train_time_s"],
        )
        return steps_done
