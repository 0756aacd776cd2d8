"""What clock and recorder cost a training step on CUDA.

Blocks of steps with and without them alternate in one process; a block's time is that of the
wall, from an idle device to an idle device, so that nothing can hide behind the other.

    python benchmarks/gpu/recorder_overhead_cuda.py [--blocks 40] [--steps 50]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from intervals import ratio
from results import cuda_device, save
from rich.progress import track

from batchscape.config import AdamW, Ddp, Gpt
from batchscape.engines.ddp import DdpEngine
from batchscape.geometry import BatchGeometry
from batchscape.measure.clock import DeviceClock, NoMarks
from batchscape.models.build import LossModule
from batchscape.models.gpt import GptModel
from batchscape.record.folder import RunFolder
from batchscape.train.divergence import DivergenceRule
from batchscape.train.recorder import StepRecorder

MODEL = Gpt(name="gpt", n_layers=6, n_heads=8, d_model=512)
SETTINGS = AdamW(name="adamw", learning_rate=1e-4)
SAMPLES, LENGTH, CLASSES = 16, 512, 256


class Steps:
    """Optimizer steps with a clock and a recorder, or without."""

    def __init__(self, device: torch.device, folder: RunFolder) -> None:
        model = LossModule(GptModel(MODEL, CLASSES, LENGTH)).to(device)
        alone = BatchGeometry(1, 1, SAMPLES, 1)
        self._engine = DdpEngine(model, Ddp(name="ddp"), SETTINGS, "bfloat16", alone)
        self._tokens = torch.randint(CLASSES, (2, SAMPLES, LENGTH), device=device)
        self._clock = DeviceClock(torch.device("cuda"))
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
        self._done = 0

    def block_s(self, steps: int, *, recorded: bool) -> float:
        """Return the seconds that some steps take."""
        self._engine.marks = self._clock if recorded else NoMarks()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self._recorded() if recorded else self._plain()
        if recorded:
            self._recorder.drain(stop=False, checkpoint=False)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def close(self) -> None:
        """Write what is left, and close the files."""
        self._recorder.flush()
        self._recorder.close()

    def _plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = self._tokens
        loss = self._engine.micro_step(inputs, labels, 1 / labels.numel(), last=True)
        return loss, self._engine.optimizer_step(SETTINGS, 1.0)

    def _recorded(self) -> None:
        self._recorder.begin()
        self._clock.begin()
        loss, norm = self._plain()
        self._clock.end()
        self._done += 1
        self._recorder.add(
            optimizer_step=self._done,
            samples=self._done * SAMPLES,
            global_batch_size=SAMPLES,
            labels=SAMPLES * LENGTH,
            loss_sum=loss.double(),
            gradient_norm=norm,
            learning_rate=SETTINGS.learning_rate,
            exchanged_bytes=0,
        )
        if self._recorder.is_due:
            self._recorder.drain(stop=False, checkpoint=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    device = cuda_device()
    torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(device, RunFolder(Path(folder)))
        blocks: dict[bool, list[float]] = {True: [], False: []}
        for block in track(range(-2, 2 * options.blocks), description="measuring"):
            recorded = block % 2 == 0
            seconds = steps.block_s(options.steps, recorded=recorded)
            if block >= 0:
                blocks[recorded].append(seconds / options.steps)
        steps.close()
    on, off = np.array(blocks[True]), np.array(blocks[False])
    save(
        "recorder_overhead_cuda",
        [
            {"recorded": recorded, "step_s": float(np.median(seconds))}
            for recorded, seconds in ((True, on), (False, off))
        ],
        [ratio("with / without clock and recorder", on, off)],
    )


if __name__ == "__main__":
    main()
