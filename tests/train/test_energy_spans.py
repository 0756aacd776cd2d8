"""Energy is counted in measured optimizer steps, and in nothing else."""

from __future__ import annotations

import pytest
import torch

from batchscape.engines.ddp import DdpEngine
from batchscape.measure.telemetry import DeviceTotals
from batchscape.record.files import read_json_lines
from batchscape.record.folder import RunFolder
from batchscape.train import loop, recorder
from batchscape.train.evaluation import Evaluator
from batchscape.train.loop import Training


class Meter:
    """Telemetry that remembers whether it counts."""

    def __init__(self):
        self.counts = False

    def sample(self):
        return None

    def resume(self):
        self.counts = True

    def pause(self):
        self.counts = False

    def totals(self):
        return DeviceTotals(None, None, None, None, None, None, None)


@pytest.mark.slow
def test_only_measured_steps_are_counted(spec_of, tmp_path, monkeypatch):
    spec = spec_of(
        (1, 32, 1),
        measure__warmup_optimizer_steps=3,
        budget__optimizer_steps=12,
        evaluation__every_samples=32 * 4,
        checkpoint__every_s=0.0,
    )
    meter = Meter()
    spans = []

    def watched(name, real):
        def call(*arguments, **options):
            spans.append((name, meter.counts))
            result = real(*arguments, **options)
            spans.append((name, meter.counts))
            return result

        return call

    monkeypatch.setattr(recorder, "build_telemetry", lambda *_: meter)
    evaluation = watched("evaluation", Evaluator.evaluate)
    monkeypatch.setattr(Evaluator, "evaluate", evaluation)
    monkeypatch.setattr(loop, "save_checkpoint", watched("checkpoint", loop.save_checkpoint))
    step = watched("step", DdpEngine.optimizer_step)
    monkeypatch.setattr(DdpEngine, "optimizer_step", step)
    folder = RunFolder(tmp_path)
    training = Training(spec, folder, 0, torch.device("cpu"), 0)
    assert training.run(lambda _: None).optimizer_step == 12
    counted = [counts for name, counts in spans if name == "step"]
    assert counted == [False] * 6 + [True] * 18
    for name in ("evaluation", "checkpoint"):
        assert {counts for seen_name, counts in spans if seen_name == name} == {False}
    warmup = [row["warmup"] for row in read_json_lines(folder.lines("steps"))]
    assert warmup == [not counts for counts in counted[::2]]
