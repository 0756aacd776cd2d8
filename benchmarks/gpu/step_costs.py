"""What each layer between a bare loop and a recorded run costs a step of GPT-2 124M in bfloat16.

The layers take turns in one process, block after block of steps, there and back (A B C D E, E D C B
A), so that a drift of the device's clock meets all alike. A step's time is that between two events
of the device; the host's lead says how far the host was ahead of it: a layer costs nothing as long
as the lead stays above zero. On a CPU a tiny GPT is trained and nothing is saved.

    python benchmarks/gpu/step_costs.py [--eager] [--rounds 6] [--steps 40] [--device cpu]
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from intervals import ratio
from peers import MeanLoss, batches, make_spec
from results import cuda_device, save
from rich.progress import track
from torch import Tensor, nn

from batchscape.config import Loader
from batchscape.data.datasets import open_dataset
from batchscape.engines import build_engine
from batchscape.engines.optimizers import build_optimizer
from batchscape.measure.clock import CpuClock, NoMarks, build_clock
from batchscape.measure.telemetry import CpuTelemetry
from batchscape.record.folder import RunFolder
from batchscape.record.spec import RunSpec
from batchscape.train.accumulation import StepTotals, accumulate
from batchscape.train.divergence import DivergenceRule
from batchscape.train.loader import build_loader
from batchscape.train.recorder import StepRecorder
from batchscape.train.stream import SampleStream
from batchscape.train.timeline import Timeline
from batchscape.train.worker import _set_precision_of_products

RECORDED = {"clock and recorder", "without telemetry"}
"""Layers whose steps have a clock and a recorder."""
SETTLE = 8
"""First steps of each layer, which belong to no figure: compilation is in them."""


class Block(NamedTuple):
    """Figures of a block of steps, in seconds."""

    step_s: float
    """Median time between the ends of two steps on the device."""
    lead_s: float
    """Median time by which the host was ahead of the device when it had launched a step."""


class Layers:
    """One training by a bare loop, and one by batchscape, with more and more around its steps."""

    def __init__(self, spec: RunSpec, device: torch.device, folder: RunFolder, steps: int) -> None:
        self._spec, self._device = spec, device
        self._staged = [
            (inputs.to(device), labels.to(device))
            for inputs, labels in itertools.islice(batches(spec), 8)
        ]
        module: nn.Module = MeanLoss(spec).to(device)
        self._bare_optimizer = build_optimizer(spec.config.optimizer, module)
        self._bare_module = module
        self._engine = build_engine(spec, device)
        if spec.config.in_process.compile:
            module.compile()
            self._engine.module.compile(dynamic=False)
        data = open_dataset(spec.config, spec.data, "train")
        stream = SampleStream(data, spec.config.resolved_data_seed, Timeline(spec.stages), 0)
        self._loader = build_loader(
            Loader(), data, stream, device, spec.precision, steps=range(spec.optimizer_steps)
        )
        self._clock = build_clock(device)
        self._recorder = StepRecorder(
            folder,
            0,
            1,
            device,
            self._clock,
            ranks_on_node=1,
            attempt=0,
            warmup_optimizer_steps=0,
            rule=DivergenceRule(),
        )
        self._telemetry = self._recorder.telemetry
        self._fetched = 0
        self._recorded = 0
        self._steps = steps
        self.steps: dict[str, Callable[[int], object]] = {
            "bare loop": self._step_bare,
            "engine": self._step_engine,
            "loader": self._step_loader,
            "clock and recorder": partial(self._step_recorded, telemetry=True),
            "without telemetry": partial(self._step_recorded, telemetry=False),
        }
        """A step of each layer, given its number in the block."""

    def block(self, layer: str) -> Block:
        """Train a block of steps, from an idle device to an idle device."""
        step, on_cuda = self.steps[layer], self._device.type == "cuda"
        self._engine.marks = self._clock if layer in RECORDED else NoMarks()
        events, launched = [], []

        def mark() -> None:
            if on_cuda:
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                events.append(event)
            launched.append(time.perf_counter())

        if on_cuda:
            torch.cuda.synchronize()
        mark()
        for k in range(self._steps):
            step(k)
            mark()
        if layer in RECORDED:
            self._recorder.drain(stop=False, checkpoint=False)
        host = np.array(launched) - launched[0]
        device = host
        if on_cuda:
            torch.cuda.synchronize()
            device = np.array([events[0].elapsed_time(event) / 1e3 for event in events])
        return Block(float(np.median(np.diff(device))), float(np.median((device - host)[1:])))

    def close(self) -> None:
        """Write what is left, and close the files."""
        self._recorder.flush()
        self._recorder.close()
        self._engine.close()

    def _batch(self, k: int) -> tuple[Tensor, Tensor]:
        return self._staged[k % len(self._staged)]

    def _step_bare(self, k: int) -> None:
        inputs, labels = self._batch(k)
        with torch.autocast(self._device.type, torch.bfloat16):
            loss = self._bare_module(inputs, labels)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._bare_module.parameters(), 1.0)
        self._bare_optimizer.step()
        self._bare_optimizer.zero_grad(set_to_none=True)

    def _step_engine(self, k: int) -> None:
        inputs, labels = self._batch(k)
        self._engine.micro_step(inputs, labels, 1 / labels.numel(), last=True)
        self._engine.optimizer_step(self._spec.config.optimizer, 1.0)

    def _step_loader(self, _: int) -> None:
        self._train(CpuClock())

    def _step_recorded(self, _: int, *, telemetry: bool) -> None:
        self._recorder.telemetry = self._telemetry if telemetry else CpuTelemetry()
        self._recorder.begin()
        self._clock.begin()
        totals, norm = self._train(self._clock)
        self._clock.end()
        self._recorded += 1
        size = self._spec.geometry.global_batch_size
        self._recorder.add(
            optimizer_step=self._recorded,
            samples=self._recorded * size,
            global_batch_size=size,
            labels=totals.labels,
            loss_sum=totals.loss_sum,
            gradient_norm=norm,
            learning_rate=self._spec.config.optimizer.learning_rate,
            exchanged_bytes=0,
        )
        if self._recorder.is_due:
            self._recorder.drain(stop=False, checkpoint=False)

    def _train(self, clock: Any) -> tuple[StepTotals, Tensor]:
        totals = accumulate(self._engine, self._loader, clock, self._fetched)
        self._fetched += 1
        return totals, self._engine.optimizer_step(self._spec.config.optimizer, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--eager", action="store_true", help="else the model is compiled")
    parser.add_argument("--rounds", type=int, default=6, help="each goes there and back")
    parser.add_argument("--steps", type=int, default=40, help="of a block")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    options = parser.parse_args()
    on_cuda = options.device == "cuda"
    device = cuda_device() if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    _set_precision_of_products("highest")
    blocks_a_layer = 1 + 2 * options.rounds
    spec = make_spec(
        "124M" if on_cuda else "tiny",
        16,
        3 * blocks_a_layer * max(options.steps, SETTLE),
        compiled=not options.eager,
    )
    with tempfile.TemporaryDirectory() as folder:
        layers = Layers(spec, device, RunFolder(Path(folder)), options.steps)
        names = list(layers.steps)
        for name in names:
            for k in range(SETTLE):
                layers.steps[name](k)
        blocks: dict[str, list[Block]] = {name: [] for name in names}
        there_and_back = [*names, *reversed(names)]
        for name in track(there_and_back * options.rounds, description="measuring"):
            blocks[name].append(layers.block(name))
        layers.close()
    times = {name: np.array([block.step_s for block in blocks[name]]) for name in names}
    rows = [
        {
            "layer": name,
            "compiled": not options.eager,
            "step_s": float(np.median(times[name])),
            "host_lead_s": float(np.median([block.lead_s for block in blocks[name]])),
        }
        for name in names
    ]
    compared = [
        ratio(f"{name} / {before}", times[name], times[before])
        for before, name in itertools.pairwise(names)
    ]
    if on_cuda:
        save(f"step_costs_{'eager' if options.eager else 'compiled'}", rows, compared)
    else:
        print(rows, compared, sep="\n")


if __name__ == "__main__":
    main()
