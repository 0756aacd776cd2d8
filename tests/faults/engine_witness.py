"""Ranks whose collectives are counted where they reach torch.distributed, whatever engine asks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import broken_engines
import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import Library

from batchscape.engines import Engine, build
from batchscape.models.build import LossModule
from batchscape.record.spec import RunSpec
from batchscape.train import loop, worker
from batchscape.train.loop import Training
from batchscape.train.recorder import Agreement

_GRADIENTS_AT = {
    "allreduce_": 0,
    "allreduce_coalesced_": 0,
    "reduce_": 0,
    "reduce_scatter_": 1,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
}
"""Which argument of an operation that reduces is what a rank gives to it."""


class _Counter:
    """Counts the bytes of what is reduced; single numbers, as norms and flags, are no gradients.

    A library may want a group even of a rank alone, which gives nothing to anyone. The dispatcher
    calls this before the group's own kernel, and for no other operator, which would take as long
    as the training.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._counts = False
        self._operators = Library("c10d", "IMPL")  # as long as it lives
        for name, place in _GRADIENTS_AT.items():
            kernel = partial(self._reduce, getattr(torch.ops.c10d, name).default, place)
            self._operators.impl(name, kernel, "AutogradCPU", with_keyset=True)

    def _reduce(self, func: Any, place: int, keys: Any, *args: Any, **kwargs: Any) -> Any:
        if self._counts and dist.get_world_size() > 1:
            self.bytes += sum(t.nbytes for t in _tensors(args[place]) if t.numel() > 1)
        return func.redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)

    @contextmanager
    def counting(self) -> Iterator[None]:
        self._counts = True
        try:
            yield
        finally:
            self._counts = False


def _tensors(value: Tensor | Iterable[Any]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for inner in value:
            yield from _tensors(inner)


def watched(run_dir: str, rank: int) -> int:
    """Train, and leave what was seen in `witness-<rank>.json`.

    `FAULT` plants one of `broken_engines`; `STOP_AFTER` ends the run after that optimizer step,
    with a checkpoint, as a request to stop does.
    """
    if fault := os.environ.get("FAULT"):
        getattr(broken_engines, fault)()
    if stop_after := os.environ.get("STOP_AFTER"):
        _stop(int(stop_after))
    seen: dict[str, Any] = {"world_size": 1, "bytes": [], "models_drawn": 0}
    real, real_model = loop.build_engine, build.build_model

    def build_model(*arguments: Any) -> LossModule:
        model = real_model(*arguments)
        seen["models_drawn"] += not next(model.parameters()).is_meta
        return model

    def build_engine(spec: RunSpec, device: torch.device, *examine: Any) -> Engine:
        engine = real(spec, device, *examine)
        seen["world_size"] = dist.get_world_size() if dist.is_initialized() else 1
        seen["bytes"] = []
        _watch(engine, seen["bytes"])
        return engine

    loop.build_engine = build_engine  # type: ignore[attr-defined]
    build.build_model = build_model  # type: ignore[attr-defined]
    code = worker.main(run_dir, rank)
    seen["compiler_imported"] = "torch._inductor.compile_fx" in sys.modules
    (Path(run_dir) / f"witness-{rank}.json").write_text(json.dumps(seen))
    return code


def _watch(engine: Engine, seen: list[int]) -> None:
    """Note the bytes of each optimizer step."""
    micro_step, optimizer_step = engine.micro_step, engine.optimizer_step
    counter = _Counter()

    def counted_micro_step(*args: Any, **options: Any) -> Tensor:
        with counter.counting():
            return micro_step(*args, **options)

    def counted_optimizer_step(*args: Any) -> Tensor:
        with counter.counting():
            norm = optimizer_step(*args)
        seen.append(counter.bytes)
        counter.bytes = 0
        return norm

    engine.micro_step = counted_micro_step  # type: ignore[method-assign]
    engine.optimizer_step = counted_optimizer_step  # type: ignore[method-assign]


def _stop(after: int) -> None:
    """Let the ranks agree in every step, and ask to stop in one."""
    agree = Training._agree

    def at_once(self: Training, *, at_once: bool) -> Agreement:
        self._stop_requested = self.steps_done == after
        return agree(self, at_once=at_once or self.steps_done == after)

    Training._agree = at_once  # type: ignore[method-assign]
