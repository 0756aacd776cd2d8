"""What a rank refuses on the way, and what it forgets."""

from __future__ import annotations

import pytest
import torch

from batchscape.errors import BatchscapeError
from batchscape.measure.clock import CpuClock
from batchscape.record.folder import RunFolder
from batchscape.train.evaluation import Evaluator
from batchscape.train.loop import Training

CPU = torch.device("cpu")


@pytest.mark.parametrize("geometry", [(1, 8, 1), (2, 4, 1)], ids=str)
def test_a_batch_without_targets_ends_its_run_with_the_reason(trainer, outcome, tmp_path, geometry):
    spec = trainer.make_spec(geometry)
    folder = trainer.start(spec, tmp_path, target="faulty_workers:without_targets")
    assert any(trainer.wait(spec))
    left = outcome(folder)
    assert left["status"] == "failed"
    assert "optimizer step 3 has no target that bears a loss" in left["reason"]
    assert "Traceback" not in folder.log.read_text()


def test_an_evaluation_without_targets_is_refused(spec_of, monkeypatch):
    evaluator = Evaluator(spec_of(), CPU, 0)
    monkeypatch.setattr(type(evaluator._dataset), "count_targets", lambda *_: 0)

    class Silent(torch.nn.Module):
        def forward(self, inputs, _targets):
            return inputs.new_zeros(()), inputs.new_zeros(())

    with pytest.raises(BatchscapeError, match="the evaluation has no target that bears a loss"):
        evaluator.evaluate(Silent(), None)


@pytest.mark.usefixtures("trainer")
def test_compilation_leaves_buffers_and_random_state_alone(spec_of, tmp_path):
    model = {"name": "custom", "_target_": "own_models.Normalised"}
    training = Training(spec_of((1, 8, 1), model=model), RunFolder(tmp_path), 0, CPU, 0)
    training._build(CpuClock())
    module = training._engine.module
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    drawn = torch.get_rng_state()
    training._compile()
    assert "model.norm.num_batches_tracked" in before
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(parameter.grad is None for parameter in module.parameters())
