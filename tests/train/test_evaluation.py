"""What an evaluation passes through the model, and what comes of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from batchscape.engines.ddp import DdpEngine
from batchscape.measure.memory_cpu import CpuProbe
from batchscape.record.folder import RunFolder
from batchscape.train import evaluation, loop
from batchscape.train.evaluation import Evaluator
from batchscape.train.failures import failure_of

CPU = torch.device("cpu")


class Predicts(nn.Module):
    """The next byte from each byte alone; what a forward was given is in `seen`."""

    def __init__(self, classes=256, *, normalises=False, compares=False, rows=None):
        super().__init__()
        self.table = nn.Embedding(256, 8)
        self.norm = nn.BatchNorm1d(8) if normalises else nn.Identity()
        self.head = nn.Linear(8, rows or classes)
        self.compares = compares
        self.seen = []

    def forward(self, inputs, labels):
        self.seen.append(len(inputs))
        hidden = self.norm(self.table(inputs).flatten(0, 1)).unflatten(0, inputs.shape)
        if self.compares:
            hidden = hidden - hidden.mean(dim=0, keepdim=True)
        logits = self.head(hidden)
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, (logits.argmax(-1) == labels).sum()


@pytest.fixture(autouse=True)
def nothing_is_little(monkeypatch):
    """Models of tests are small; what is told of slices holds for large ones."""
    monkeypatch.setattr(evaluation, "_SMALL_OUTPUT", 0)


def test_small_models_pass_whole_batches(spec_of, monkeypatch):
    """32 tokens of 256 kinds a sample: 2**20 numbers are 128 samples."""
    monkeypatch.undo()
    for little, sizes in ((2**20, [16, 5]), (2**16, [8, 8, 5])):
        monkeypatch.setattr(evaluation, "_SMALL_OUTPUT", little)
        spec = spec_of((1, 1, 32), evaluation__samples=21, evaluation__batch_size=16)
        assert spec.data.classes * spec.config.sequence_length == 8192
        module = Predicts()
        evaluated(spec, module)
        assert module.seen[-len(sizes) :] == sizes


def engine_of(module, *, state_is_whole=True):
    return SimpleNamespace(module=module, forward=module.forward, state_is_whole=state_is_whole)


def evaluated(spec, module, rank=0, **engine):
    return Evaluator(spec, CPU, rank).evaluate(engine_of(module, **engine), None)


def whole(spec, module):
    """The mean loss of all held-out samples in one forward, as the definition says."""
    evaluator = Evaluator(spec, CPU, 0)
    indices = [index for batch in evaluator._batches for index in batch]
    with torch.no_grad():
        loss, _ = module.eval()(*evaluator._dataset.batch(torch.tensor(indices).numpy()))
    return float(loss) / (len(indices) * spec.config.data.sequence_length)


@pytest.mark.parametrize(
    ("micro_batch_size", "compiles", "slices"),
    [
        (1, False, [1] * 21),
        (4, False, [4, 4, 4, 4, 4, 1]),
        (16, False, [16, 5]),
        (32, False, [16, 5]),  # no more than evaluation.batch_size
        (16, True, [4, 4, 4, 4, 4, 1]),
        (2, True, [1] * 21),
    ],
)
def test_a_forward_takes_no_more_than_a_micro_batch(spec_of, micro_batch_size, compiles, slices):
    spec = spec_of(
        (1, micro_batch_size, 32 // micro_batch_size),
        evaluation__samples=21,
        evaluation__batch_size=16,
        engine__compile=compiles,
    )
    module = Predicts()
    evaluator = Evaluator(spec, CPU, 0)
    evaluator.evaluate(engine_of(module), None)
    first = module.seen
    module.seen = []
    evaluator.evaluate(engine_of(module), None)
    assert module.seen == slices
    looked = first[: len(first) - len(slices)]
    assert first[len(looked) :] == slices
    assert looked == ([] if slices[0] == 16 else [2, 1, 1]), "once, before the first slice"


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("micro_batch_size", [4, 32])
def test_the_loss_is_that_of_one_forward_over_all_samples(spec_of, micro_batch_size, normalises):
    """Batch normalisation too: in evaluation it has its running means."""
    torch.manual_seed(1)
    module = Predicts(normalises=normalises).double()
    module(torch.randint(256, (5, 32)), torch.randint(256, (5, 32)))  # moves the running means
    spec = spec_of(
        (1, micro_batch_size, 32 // micro_batch_size),
        evaluation__samples=21,
        evaluation__batch_size=16,
    )
    result = evaluated(spec, module)
    assert result.eval_loss == pytest.approx(whole(spec, module), rel=1e-13)
    assert result.eval_labels == 21 * spec.config.data.sequence_length


def test_a_loss_that_looks_at_other_samples_has_its_whole_batch(spec_of):
    """Its definition is over the fixed batch of evaluation, whatever the geometry."""
    torch.manual_seed(2)
    module = Predicts(compares=True)
    results = {}
    for micro in (1, 8, 32):
        spec = spec_of((1, micro, 32 // micro), evaluation__samples=21, evaluation__batch_size=16)
        module.seen = []
        results[micro] = evaluated(spec, module).eval_loss
        assert module.seen[-2:] == [16, 5]
    assert results[1] == results[8] == results[32]


def test_ranks_evaluate_each_batch_once_the_last_ones_too(spec_of, monkeypatch):
    """Batches of 8, 8 and 5 on two ranks; each looks at 4 samples first, whether it may slice."""
    sums = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: sums.append(tensor.clone()))
    spec = spec_of((2, 8, 1), evaluation__samples=21, evaluation__batch_size=8)
    for rank in range(2):
        evaluated(spec, Predicts(), rank)
    labels = [int(row[2]) // spec.config.data.sequence_length for row in sums]
    assert labels == [8 + 5, 8]


def test_ranks_that_forward_together_do_so_equally_often(spec_of, monkeypatch):
    """Batches of 8, 8 and 5 in slices of 2: four forwards, four, and three and one."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    spec = spec_of((3, 2, 1), evaluation__samples=21, evaluation__batch_size=8)
    forwards = []
    for rank in range(3):
        module = Predicts()
        evaluated(spec, module, rank, state_is_whole=False)
        forwards.append(module.seen)
    looked = [2, 1, 1]
    assert forwards == [[*looked, *slices] for slices in ([2, 2, 2, 2], [2, 2, 2, 2], [2, 2, 1, 2])]


def test_an_evaluation_takes_no_more_memory_than_a_micro_step(spec_of):
    """Measured: 64 samples an evaluation batch, micro-batches of 2, 20,000 classes."""
    spec = spec_of((1, 2, 16), evaluation__samples=64, evaluation__batch_size=64)
    module = Predicts(rows=20_000)
    samples = torch.randint(256, (2, 2, 32))
    with CpuProbe() as probe:
        probe.phase("first_backward")
        module(*samples)[0].backward()
        module.zero_grad()
        probe.phase("steady")
        evaluated(spec, module)
    report = probe.report()
    step, evaluation = (
        report.peak_allocated_first_backward_gib,
        report.peak_allocated_steady_gib,
    )
    logits = 64 * 32 * 20_000 * 4 / 2**30
    assert evaluation <= step
    assert evaluation < logits / 8, "a whole batch has logits of this many GiB alone"


OUT = "CUDA out of memory. Tried to allocate 2.00 GiB."


def test_memory_that_is_out_for_the_examination_ends_no_training(spec_of, tmp_path, monkeypatch):
    def hungry(*_, **__):
        raise torch.OutOfMemoryError(OUT)

    monkeypatch.setattr(loop, "examine", hungry)
    spec = spec_of((1, 32, 1), budget__optimizer_steps=1)
    training = loop.Training(spec, RunFolder(tmp_path), 0, CPU, 0)
    assert training.run(lambda _: None).status == "completed"
    assert training.model_columns.not_invariant == "not examined: memory was out for it", (
        "cannot tell"
    )


@pytest.mark.parametrize(
    ("largest", "fails_in", "status", "cause", "phase"),
    [
        (32, None, "failed", "other_memory", "evaluation"),  # a micro-batch trains
        (16, "forward", "oom", "out_of_memory", "forward"),  # it does not: so would its step
        (32, "backward", "oom", "out_of_memory", "backward"),
    ],
)
def test_memory_that_is_out_in_an_evaluation_lets_a_micro_batch_say_where_it_ends(
    spec_of, tmp_path, monkeypatch, largest, fails_in, status, cause, phase
):
    def hungry(*_):
        raise torch.OutOfMemoryError(OUT)

    def forward(self, inputs, labels):
        if len(inputs) > largest:
            raise torch.OutOfMemoryError(OUT)
        loss, right = self.module.forward(inputs, labels)
        if fails_in == "backward" and loss.requires_grad:
            loss.register_hook(hungry)
        return loss, right

    monkeypatch.setattr(Evaluator, "evaluate", hungry)
    monkeypatch.setattr(DdpEngine, "forward", forward)
    training = loop.Training(spec_of((1, 32, 1)), RunFolder(tmp_path), 0, CPU, 0)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        training.run(lambda _: None)
    ended = failure_of(raised.value, 0, CPU)
    assert (ended.status, ended.cause, ended.phase) == (status, cause, phase)
