"""What a rank refuses on the way, and what it forgets."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from batchscape.errors import BatchscapeError
from batchscape.measure.clock import CpuClock
from batchscape.record.folder import RunFolder
from batchscape.train import memory
from batchscape.train.evaluation import Evaluator
from batchscape.train.loop import Training

CPU = torch.device("cpu")


def test_a_batch_without_labels_ends_its_run_with_the_reason(trainer, outcome, tmp_path):
    spec = trainer.make_spec((2, 4, 1))
    folder = trainer.start(spec, tmp_path, entry="faulty_workers:without_labels")
    assert any(trainer.wait(spec))
    ended = outcome(folder)
    assert ended["status"] == "failed"
    assert "no label in the global batch of optimizer step 3 bears a loss" in ended["reason"]
    assert "Traceback" not in folder.log.read_text()


def silent_engine():
    """An engine whose model has no loss."""

    class Silent(torch.nn.Module):
        def forward(self, inputs, _labels):
            return inputs.new_zeros(()), inputs.new_zeros(())

    silent = Silent()
    return SimpleNamespace(module=silent, forward=silent, state_is_whole=True)


def test_an_evaluation_without_labels_is_refused(spec_of, monkeypatch):
    evaluator = Evaluator(spec_of(), CPU, 0)
    dataset = type(evaluator._dataset)
    plain = dataset.batch

    def unlabelled(self, indices):
        inputs, labels = plain(self, indices)
        return inputs, torch.full_like(labels, -100)

    monkeypatch.setattr(dataset, "batch", unlabelled)
    monkeypatch.setattr(dataset, "count_labels", lambda *_: 0)

    with pytest.raises(BatchscapeError, match="no label of the evaluated samples bears a loss"):
        evaluator.evaluate(silent_engine(), None)


@pytest.mark.usefixtures("trainer")
def test_what_data_say_of_held_out_samples_is_looked_at(spec_of):
    """And only batches that are counted wrong are refused."""
    data = {"name": "custom", "_target_": "own_data.Overcounting"}
    evaluator = Evaluator(spec_of(data=data, evaluation__samples=60), CPU, 0)
    wrong = 0
    for indices in evaluator._batches:
        labels = evaluator._dataset.batch(indices)[1]
        real = int((labels != -100).sum())
        miscounted = int(((indices >= 20) & (indices < 25)).sum())
        if not miscounted:
            assert evaluator._count_labels(indices, labels) == real
            continue
        wrong += miscounted
        message = (
            rf"count_labels returned {real + miscounted} for .* has {real} labels that are not -100"
        )
        with pytest.raises(BatchscapeError, match=message):
            evaluator._count_labels(indices, labels)
    assert wrong == 5
    with pytest.raises(BatchscapeError, match="count_labels returned"):
        evaluator.evaluate(silent_engine(), None)


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


@pytest.mark.slow
@pytest.mark.usefixtures("trainer")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning")  # torch's own
def test_a_model_that_was_compiled_ahead_is_gone_before_the_training(
    spec_of, tmp_path, monkeypatch
):
    """It refers to itself: beside the training's own model it would double the memory."""
    alive = []

    def compiled(training):
        alive.extend(weakref.ref(p) for p in training._engine.module.parameters())

    monkeypatch.setattr(Training, "_compile", compiled)
    gc.disable()
    try:
        spec = spec_of((1, 8, 1), engine__compile=True)
        Training(spec, RunFolder(tmp_path), 0, CPU, 0).compile_ahead()
        assert alive
        assert not [reference for reference in alive if reference() is not None]
    finally:
        gc.enable()


def test_nothing_is_compiled_ahead_where_nothing_is_rehearsed(monkeypatch):
    """A CUDA allocator counts during the training: a second model would be in its peaks."""
    monkeypatch.setattr(memory, "CudaMemory", lambda _: None)
    phases = memory.MemoryPhases(torch.device("cuda", 0), measure=True)
    phases.rehearse(None)  # no training is asked for anything
