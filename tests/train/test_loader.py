"""Micro-batches that are fetched ahead are those that would be fetched in place."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing import resource_sharer
from pathlib import Path

import psutil
import pytest
import torch

from batchscape.config import AdamW, Loader
from batchscape.geometry import solve
from batchscape.record.spec import Stage
from batchscape.train.loader import BatchLoader, WorkerLoader, build_loader
from batchscape.train.stream import SampleStream
from batchscape.train.timeline import Timeline
from exact import assert_same_rows

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

CPU = torch.device("cpu")
STEPS = 12
MEASURED = ["optimizer_step", "samples", "tokens", "loss", "learning_rate", "gradient_norm"]
BLOBS = {"name": "custom", "_target_": "own_data.Blobs"}
MLP = {"name": "mlp", "hidden_sizes": [8]}


def stream_of(dataset, rank, noise_scale_every=None, stages=((1, 4, 2), (1, 8, 2))):
    optimizer = AdamW(name="adamw", learning_rate=1e-3)
    planned = []
    for ranks, micro, accumulation in stages:
        geometry = solve(
            data_parallel_size=ranks,
            micro_batch_size=micro,
            gradient_accumulation_steps=accumulation,
        )
        samples = STEPS // len(stages) * geometry.global_batch_size
        planned.append(Stage(samples, geometry, optimizer))
    return SampleStream(dataset, 3, Timeline(tuple(planned)), rank, noise_scale_every)


def counting():
    from own_data import Counting

    return Counting("train")


def blobs(slow_s=0.0):
    from own_data import Blobs

    return Blobs("train", slow_s=slow_s)


def fetched(loader, steps):
    """Return everything that a loader hands out, and close it."""
    fetched_steps = []
    try:
        for k in steps:
            step = loader.step(k)
            batches = [next(step.batches) for _ in range(step.micro_steps)]
            fetched_steps.append((step.labels, step.micro_steps, batches))
    finally:
        loader.close()
    return fetched_steps


def assert_same(one, other):
    for (labels, micro_steps, batches), (total, count, expected) in zip(one, other, strict=True):
        assert (labels, micro_steps) == (total, count)
        for batch, expectation in zip(batches, expected, strict=True):
            for tensor, right in zip(batch, expectation, strict=True):
                assert tensor.dtype == right.dtype
                assert torch.equal(tensor, right)


@pytest.mark.parametrize(
    ("data", "workers", "first", "every"),
    [(counting, 3, 0, 2), (blobs, 2, 5, 2), (blobs, 1, STEPS, None)],
)
def test_workers_hand_out_the_same_micro_batches(data, workers, first, every):
    """Over stages of other sizes, micro-batches that are cut, and from any step on."""
    dataset = data()
    steps = range(first, STEPS)
    stages = ((1, 4, 2), (1, 8, 1))
    inline = BatchLoader(dataset, stream_of(dataset, 0, every, stages), CPU, "float64")
    ahead = build_loader(
        Loader(workers=workers),
        dataset,
        stream_of(dataset, 0, every, stages),
        CPU,
        "float64",
        steps=steps,
    )
    assert isinstance(ahead, WorkerLoader)
    expected = fetched(inline, steps)
    assert {count for _, count, _ in expected} <= {1, 2}
    assert_same(fetched(ahead, steps), expected)


def test_workers_draw_no_random_number_of_the_training():
    dataset = blobs()
    before = torch.get_rng_state()
    loader = WorkerLoader(
        dataset, stream_of(dataset, 0), CPU, "float32", workers=1, steps=range(STEPS)
    )
    fetched(loader, range(2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers do not fork")
def test_workers_are_children_of_their_rank_whatever_the_default(monkeypatch):
    """Python's default way to start processes is a server from 3.14 on."""
    server = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", server)
    dataset = blobs()
    inline = BatchLoader(dataset, stream_of(dataset, 0), CPU, "float32")
    ahead = WorkerLoader(
        dataset, stream_of(dataset, 0), CPU, "float32", workers=1, steps=range(STEPS)
    )
    assert_same(fetched(ahead, range(STEPS)), fetched(inline, range(STEPS)))


def test_steps_out_of_order_are_a_defect_of_ours():
    dataset = blobs()
    loader = WorkerLoader(
        dataset, stream_of(dataset, 0), CPU, "float32", workers=1, steps=range(STEPS)
    )
    with pytest.raises(AssertionError, match="in order"):
        fetched(loader, [1])


def test_closing_ends_the_workers_also_in_the_middle_of_a_batch(monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    before = set(psutil.Process().children())
    dataset = blobs(slow_s=3600)
    loader = WorkerLoader(
        dataset, stream_of(dataset, 0), CPU, "float32", workers=2, steps=range(STEPS)
    )
    workers = set(psutil.Process().children()) - before
    assert len(workers) == 2
    loader.close()
    assert not any(worker.is_running() for worker in workers)


# torch's handler of the signal may raise where Python has just opened its end of the socket.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_is_killed_while_it_hands_over_a_batch_is_no_fault_of_a_network(monkeypatch):
    """The rank is connected to the worker's socket, and reads its end before a signal comes."""
    monkeypatch.setattr(
        resource_sharer._resource_sharer, "_serve", lambda: die_when_connected(resource_sharer)
    )
    dataset = blobs()
    loader = WorkerLoader(
        dataset, stream_of(dataset, 0), CPU, "float32", workers=1, steps=range(STEPS)
    )
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid \d+\) is killed by signal"):
        fetched(loader, range(STEPS))


def die_when_connected(sharer):
    with sharer._resource_sharer._listener.accept():
        os.kill(os.getpid(), signal.SIGKILL)


def settings(workers, **more):
    return {
        "data": BLOBS,
        "model": MLP,
        "loader": {"workers": workers},
        "budget__optimizer_steps": 40,
        "checkpoint__every_s": 0.0,
        "evaluation__every_samples": 640,
        **more,
    }


@pytest.mark.slow
def test_runs_are_the_same_bit_for_bit_with_workers_and_after_a_kill(trainer, steps, tmp_path):
    plain = trainer.make_spec((2, 8, 2), **settings(0))
    expected = steps(trainer.train(plain, tmp_path / "plain"))[MEASURED]
    ahead = trainer.make_spec((2, 8, 2), **settings(2))
    undisturbed = steps(trainer.train(ahead, tmp_path / "ahead"))[MEASURED]
    assert_same_rows(undisturbed, expected)
    folder = trainer.start(ahead, tmp_path / "killed", entry="faulty_workers:hanging")
    wait_for(folder, "hangs-", 2)
    trainer.kill(ahead)
    trainer.train(ahead, tmp_path / "killed", attempt=1)
    rows = steps(folder)
    assert set(rows["attempt"]) == {0, 1}
    assert_same_rows(rows[MEASURED], expected)


def wait_for(folder, name, count):
    deadline = time.monotonic() + 60
    while len(list(folder.path.glob(f"{name}*"))) < count:
        assert time.monotonic() < deadline, folder.log.read_text()
        time.sleep(0.005)


def workers_of_ranks():
    """Return the processes of each rank, by the process of the rank."""
    tables = {}
    for process in psutil.Process().children(recursive=True):
        parent = process.parent()
        if process.status() != psutil.STATUS_ZOMBIE and parent is not None:
            tables.setdefault(parent.pid, []).append(process)
    return tables


@pytest.mark.slow
def test_workers_end_with_their_rank_and_with_the_run(trainer, tmp_path):
    """Also where they are in the middle of a batch, and cannot notice that nobody waits for it."""
    before = set(psutil.Process().children(recursive=True))
    more = {
        "data": {**BLOBS, "arguments": {"stuck_after": 25}},
        "loader": {"workers": 2},
    }
    spec = trainer.make_spec((2, 8, 2), **settings(2, **more))
    folder = trainer.start(spec, tmp_path, entry="faulty_workers:hanging_far_ahead")
    wait_for(folder, "hangs-", 2)
    new = set(psutil.Process().children(recursive=True)) - before
    tree = workers_of_ranks()
    ranks = [process for process in new if len(tree.get(process.pid, [])) == 2]
    assert len(ranks) == 2
    orphans, others = (tree[rank.pid] for rank in ranks)
    time.sleep(0.5)  # until they are stuck, far ahead; before that they would end as well
    # One rank alone dies, of a signal that it cannot answer; the other one is still there.
    os.kill(ranks[0].pid, signal.SIGKILL)
    psutil.wait_procs(orphans, timeout=30)
    assert not any(alive(worker) for worker in orphans)
    assert all(alive(worker) for worker in others)
    trainer.kill(spec)
    psutil.wait_procs(others, timeout=30)
    assert not any(alive(worker) for worker in others)


def alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_request_to_stop_is_the_ranks_to_answer(trainer, outcome, tmp_path):
    """The signal goes to the whole process group: workers must not die of it."""
    more = {"checkpoint__every_s": None, "budget__optimizer_steps": 120}
    spec = trainer.make_spec((2, 8, 2), **settings(2, **more))
    folder = trainer.start(spec, tmp_path, entry="faulty_workers:waiting")
    wait_for(folder, "hangs-", 2)
    trainer.kill(spec, signal.SIGTERM)
    assert outcome(folder)["status"] == "interrupted", folder.log.read_text()
    assert list(folder.checkpoints.glob("step-*.pt"))


def test_what_fails_in_a_worker_ends_the_run_with_its_reason(trainer, tmp_path):
    data = {**BLOBS, "_target_": "own_data.Failing"}
    spec = trainer.make_spec((1, 16, 2), **settings(2, data=data))
    folder = trainer.start(spec, tmp_path)
    assert trainer.wait(spec) == [1]
    content = json.loads(folder.outcome(0).read_text())
    assert content["status"] == "failed"
    assert "sample 77 is damaged" in folder.log.read_text()
    assert "ValueError" in content["reason"]


def test_workers_fetch_at_the_same_time(tmp_path):
    """Four batches wait for each other: one after the other they would wait for ever."""
    from own_data import Meeting

    dataset = Meeting("train", folder=str(tmp_path), parties=4)
    loader = WorkerLoader(
        dataset, stream_of(dataset, 0), CPU, "float32", workers=4, steps=range(STEPS)
    )
    assert len(fetched(loader, range(STEPS))) == STEPS
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_on_the_device(workers):
    device = torch.device("cuda", 0)
    dataset = counting()
    expected = fetched(BatchLoader(dataset, stream_of(dataset, 0), CPU, "float32"), range(STEPS))
    loader = build_loader(
        Loader(workers=workers),
        dataset,
        stream_of(dataset, 0),
        device,
        "float32",
        steps=range(STEPS),
    )
    batches = fetched(loader, range(STEPS))
    assert all(tensor.device == device for _, _, b in batches for batch in b for tensor in batch)
    moved = [(t, n, [tuple(x.cpu() for x in batch) for batch in b]) for t, n, b in batches]
    assert_same(moved, expected)
