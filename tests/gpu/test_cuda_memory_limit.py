"""A smaller CUDA device, emulated: the allocator's own limit, and runs under it."""

from __future__ import annotations

import pytest
import torch

from batchscape.errors import ConfigError
from batchscape.measure.memory_limit import memory_limit

pytestmark = pytest.mark.gpu

GIB = 2**30


@pytest.fixture
def device():
    torch.cuda.set_device(0)
    torch.cuda.empty_cache()
    yield torch.device("cuda", 0)
    torch.cuda.empty_cache()


def fits(gib, device):
    try:
        torch.empty(int(gib * GIB), dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.empty_cache()
    return True


def test_the_allocator_is_limited_until_the_block_ends(device):
    with memory_limit(device, 1.0):
        assert [fits(0.9, device), fits(1.1, device)] == [True, False]
    assert fits(1.1, device)


def test_a_fraction_that_somebody_set_is_there_again(device):
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(0.25, device)
    try:
        with memory_limit(device, 1.0):
            assert fits(1.1, device) is False
        assert torch.cuda.get_per_process_memory_fraction(device) == pytest.approx(0.25)
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def test_ranks_that_share_a_device_share_the_limit(device):
    with memory_limit(device, 1.0, ranks_on_device=2):
        assert [fits(0.4, device), fits(0.6, device)] == [True, False]


def test_a_device_cannot_be_made_larger(device):
    with pytest.raises(ConfigError, match="at most the memory of the device"):  # noqa: SIM117
        with memory_limit(device, 10_000.0):
            pass


def test_an_evaluation_of_large_batches_fits_where_its_training_fits(cuda_spec, launch):
    """64 x 1024 tokens of 50,304 classes: logits of 12.3 GiB, in the memory of 2 x 1024."""
    settings = {
        "model": {
            "name": "gpt",
            "n_layers": 2,
            "n_heads": 4,
            "d_model": 256,
            "vocabulary_size": 50304,
        },
        "data": {"name": "stdlib", "sequence_length": 1024},
        "engine__precision": "bfloat16",
        "budget__optimizer_steps": 3,
        "evaluation": {"samples": 64, "batch_size": 64},
    }
    (free,) = launch(cuda_spec((1, 2, 1), **settings))
    assert free.status.status == "completed", free.status.reason
    peak_gib = free.status.summary["peak_reserved_gib"]
    assert peak_gib < 4
    limit = {"memory_limit_gib": round(1.2 * peak_gib, 3)}
    (held,) = launch(cuda_spec((1, 2, 1), **settings, device=limit))
    assert held.status.status == "completed", held.status.reason
    assert held.status.summary["foreign_processes"] in {0, None}


def test_a_run_that_fits_is_the_same_and_one_that_does_not_is_out_of_memory(cuda_spec, launch):
    free = cuda_spec((1, 32, 1))
    model = {"name": "gpt", "n_layers": 2, "n_heads": 2, "d_model": 256}
    (alone,) = launch(free)
    held = cuda_spec((1, 32, 1), device={"memory_limit_gib": 2.0})
    (limited,) = launch(held)
    assert alone.status.status == limited.status.status == "completed"
    names = [name for name in alone.status.summary if name.startswith("peak_allocated")]
    # How many losses of steps wait to be read depends on how far the device is behind: 512 bytes
    # each.
    unread = 64 * 512 / GIB
    assert {n: alone.status.summary[n] for n in names} == pytest.approx(
        {n: limited.status.summary[n] for n in names}, rel=0, abs=unread
    )
    assert limited.launch["device_memory_gib"] > 2.0
    tight = cuda_spec(
        (1, 32, 1),
        model=model,
        device={"memory_limit_gib": 0.02},
        launcher__skip_unfit=False,  # what is predicted not to fit is launched all the same
    )
    (ended,) = launch(tight)
    assert ended.status.status == "oom"
    assert ended.status.cause == "out_of_memory"
    assert ended.status.phase is not None
    assert 0 < ended.status.peak_memory_gib <= 0.021
    assert ended.status.peak_memory_method == "allocated"
