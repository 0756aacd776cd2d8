from __future__ import annotations

import ctypes
import gc
import json
import math
import mmap
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks

from batchscape.measure.memory_cpu import CpuProbe
from batchscape.measure.memory_cuda import CudaMemory
from batchscape.measure.memory_process import process_memory
from batchscape.record.figures import COLUMNS

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from small_training import GIB, RANKS, Model, batch, bytes_of, in_bytes, measure, rehearse

sys.path.pop(0)


@pytest.fixture(autouse=True, scope="module")
def _one_rank_of_the_launcher() -> Iterator[None]:
    """One thread, and the collector kept off what was loaded before, as in a forked rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


def test_closed_forms() -> None:
    model = Model()
    parameters, tensors = bytes_of(model), len(list(model.parameters()))
    sizes = in_bytes(measure(micro_batch_size=2))
    assert sizes["allocated_after_model"] == parameters
    # Parameters, gradients, two moments, and one float of Adam's step count a tensor.
    updating = sizes["peak_allocated_first_optimizer_step"] - 4 * parameters - 4 * tensors
    assert 0 <= updating <= 16  # scalars in passing
    # The same backward meets the moments from the second optimizer step on.
    added = sizes["peak_allocated_steady"] - sizes["peak_allocated_first_backward"]
    assert added == 2 * parameters + 4 * tensors
    assert sizes["peak_allocated"] == sizes["peak_allocated_steady"]
    assert bytes_of(model) > 0.8 * 2**20  # or the small numbers above would prove little


@pytest.mark.slow
def test_linear_in_micro_batch_size() -> None:
    small, middle, large = (
        in_bytes(measure(micro, 2))["peak_allocated_steady"] for micro in (32, 48, 96)
    )
    assert middle > small
    assert large - middle == 3 * (middle - small)


@pytest.mark.slow
def test_accumulation_costs_one_set_of_gradients_once() -> None:
    gradients = bytes_of(Model())
    one, two, three = (in_bytes(measure(16, a)) for a in (1, 2, 3))
    for name in ("peak_allocated_first_backward", "peak_allocated_steady"):
        assert two[name] - one[name] == gradients
    assert three == two
    # As much as gradients that are kept between optimizer steps.
    kept = in_bytes(measure(16, 1, set_to_none=False))
    assert kept["peak_allocated_steady"] == two["peak_allocated_steady"]


@pytest.mark.parametrize(
    ("micro_batch_size", "accumulation"), [(1, 1), pytest.param(16, 2, marks=pytest.mark.slow)]
)
def test_agrees_with_a_tracker_of_tensors(micro_batch_size: int, accumulation: int) -> None:
    """Torch's own tracker sees tensors where Python does; without DDP that is all of them."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    peaks: dict[str, int] = {}

    def peak() -> int:
        snapshot = tracker.get_tracker_snapshot("peak")
        return int(snapshot[torch.device("cpu")]["Total"]) if snapshot else 0

    def phase(name: str) -> None:
        peaks[name] = peak()  # so far, when the phase begins

    with tracker:
        rehearse(phase, micro_batch_size, accumulation, after_micro_step=tracker.reset_mod_stats)
    sizes = in_bytes(measure(micro_batch_size, accumulation))
    assert sizes["allocated_after_model"] == peaks["first_backward"]
    assert sizes["peak_allocated_first_backward"] == peaks["first_optimizer_step"]
    assert sizes["peak_allocated"] == peak()


# Each action allocates (a positive number of floats) or releases (by position) one tensor.
_Actions = st.lists(
    st.tuples(
        st.sampled_from(["first_backward", "first_optimizer_step", "steady", "outside"]),
        st.one_of(st.integers(1, 5000), st.integers(-30, -1)),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=25, deadline=None)
@given(_Actions)
def test_any_sequence_equals_a_brute_force_count(actions: list[tuple[str, int]]) -> None:
    living: list[int] = []
    peaks: dict[str, int] = {}
    with CpuProbe() as probe:
        held: list[Tensor] = []
        for phase, size in actions:
            probe.phase(phase)
            peaks[phase] = max(peaks.get(phase, 0), sum(living))
            if size > 0:
                held.append(torch.empty(size))
                living.append(4 * size)
            elif living:
                del held[size % len(living)], living[size % len(living)]
            peaks[phase] = max(peaks[phase], sum(living))
        held.clear()
    peaks.pop("outside", None)
    sizes = in_bytes(probe.report())
    for phase, expected in peaks.items():
        assert sizes[f"peak_allocated_{phase}"] == expected
    assert sizes.get("peak_allocated", 0) == max(peaks.values(), default=0)
    assert len(sizes) == len(peaks) + bool(peaks)


def test_sees_what_other_threads_allocate_and_release() -> None:
    box: list[Tensor] = []

    def replace() -> None:
        box.clear()
        box.append(torch.empty(1000))

    with CpuProbe() as probe:
        probe.phase("after_model")
        box.append(torch.empty(50_000))
        thread = threading.Thread(target=replace)
        thread.start()
        thread.join()
        probe.phase("first_backward")
        box.clear()
    assert in_bytes(probe.report())["allocated_after_model"] == 4000


def test_refuses_books_that_do_not_close() -> None:
    kept: list[Tensor] = []
    with CpuProbe() as probe:
        probe.phase("steady")
        kept.append(torch.empty(1 << 16))
    report = probe.report()
    assert report.problem is not None
    assert "still allocated" in report.problem
    assert report.peak_allocated_gib is report.peak_allocated_steady_gib is None
    assert str(report.as_columns()["memory_method"]).startswith("none: 0.000244 GiB")


def test_refuses_a_model_built_before_the_probe() -> None:
    model = Model()
    with CpuProbe() as probe:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        probe.phase("first_backward")
        model(batch(64)).backward()
        probe.phase("first_optimizer_step")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del optimizer
    report = probe.report()
    assert report.problem is not None
    assert "began too late" in report.problem
    assert report.peak_allocated_gib is None


def test_leaves_nothing_switched_on() -> None:
    flag = ctypes.c_bool.in_dll(
        ctypes.CDLL(torch._C.__file__), "FLAGS_caffe2_report_cpu_memory_usage"
    )
    sizes = []
    for fails in (False, True):
        with pytest.raises(ZeroDivisionError) if fails else nullcontext(), CpuProbe():
            sizes.append((flag.value, torch.autograd._profiler_enabled()))
            assert 1 / (not fails)
        assert not flag.value
        assert not torch.autograd._profiler_enabled()
    assert sizes == [(True, True)] * 2
    assert not _global_optimizer_post_hooks


def test_rows_have_the_columns_of_the_record() -> None:
    cells = measure(micro_batch_size=1).as_columns()
    assert set(cells) <= set(COLUMNS["ranks"])
    assert cells["memory_method"] == "cpu allocator events"
    assert cells["peak_reserved_gib"] is cells["device_used_gib"] is None


def private_gib() -> dict[str, float]:
    """Return the private pages of this process: `Dirty` are written, `Clean` as in their files."""
    rollup = Path("/proc/self/smaps_rollup")
    lines = rollup.read_text() if rollup.exists() else ""
    pages = re.findall(r"^Private_(Dirty|Clean):\s+(\d+) kB$", lines, re.MULTILINE)
    return {name: int(kib) / 2**20 for name, kib in pages}


def test_process_memory() -> None:
    clean, before = private_gib().get("Clean", 0.0), process_memory()
    # What malloc gives may be there already, freed by the tests before.
    with mmap.mmap(-1, 1 << 26, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(b"1" * len(block))
        after, private = process_memory(), private_gib()
    taken = (1 << 26) / GIB
    # Pages of a library are no longer private once another process maps it, too.
    shared = clean - private.get("Clean", 0.0)
    assert math.isclose(after.uss_gib - before.uss_gib + shared, taken, rel_tol=0.1)
    assert math.isclose(after.rss_gib - before.rss_gib, taken, rel_tol=0.1)
    assert after.uss_gib <= after.rss_gib
    if private:
        assert math.isclose(sum(private.values()), after.uss_gib, rel_tol=0.02)
    if after.peak_rss_gib is not None:
        assert after.peak_rss_gib >= 0.99 * after.rss_gib


@pytest.fixture(scope="module")
def two_ranks(
    trainer: Any, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, dict[str, int]]]:
    """Train as two gloo ranks; each leaves its figures."""
    spec = trainer.make_spec((RANKS, 1, 1))
    folder = trainer.train(spec, tmp_path_factory.mktemp("ranks"), entry="small_training:main")
    # Neither the profiler nor the allocator may write into the log of a run.
    assert folder.log.read_text() == ""
    return [json.loads((folder.path / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.slow
def test_ddp_holds_one_more_set_of_gradients(
    two_ranks: list[dict[str, dict[str, int]]],
) -> None:
    gradients = bytes_of(Model())
    for accumulation in (1, 2, 3):
        alone = in_bytes(measure(16, accumulation))
        for rank in two_ranks:
            ddp = rank[str(accumulation)]
            assert ddp["allocated_after_model"] - alone["allocated_after_model"] == gradients
            for name in ("peak_allocated_first_backward", "peak_allocated_steady"):
                assert ddp[name] - alone[name] == gradients
            # There the buckets are the gradients.
            name = "peak_allocated_first_optimizer_step"
            assert ddp[name] == alone[name]


@pytest.mark.slow
def test_ddp_repeats_exactly(two_ranks: list[dict[str, dict[str, int]]]) -> None:
    """Gloo threads release what they held at moments of their own; no figure may show it."""
    for rank in two_ranks:
        assert {json.dumps(rank[f"repeat {i}"]) for i in range(3)} == {json.dumps(rank["2"])}


@pytest.mark.gpu
def test_cuda() -> None:
    device = torch.device("cuda", 0)
    torch._C._cuda_clearCublasWorkspaces()  # of the tests before
    before = torch.cuda.memory_allocated(device)
    parameters = bytes_of(Model())
    reports = {}
    for accumulation in (1, 2):
        memory = CudaMemory(device)
        rehearse(memory.phase, 16, accumulation, device="cuda")
        memory.phase("outside")
        spike = torch.empty(1 << 30, dtype=torch.uint8, device=device)
        del spike
        reports[accumulation] = memory.report()
    one, two = (in_bytes(reports[accumulation]) for accumulation in (1, 2))
    # Blocks are multiples of 512 bytes; the samples and their gradients are small.
    close = 2 * 2**20
    assert 0 <= one["allocated_after_model"] - before - parameters < close
    of_step = one["peak_allocated_first_optimizer_step"] - one["workspace"]
    assert 0 <= of_step - 4 * parameters - before < close
    # Of a single micro-step the peak lies within the backward pass of the last block.
    model = Model()
    there = bytes_of(model.head) + bytes_of(model.blocks[-1])
    more = two["peak_allocated_steady"] - one["peak_allocated_steady"]
    assert parameters - there <= more <= parameters
    for report in (one, two):
        assert report["peak_allocated"] < GIB  # evaluation is not part of it
        assert report["peak_reserved"] >= report["peak_allocated"]
        assert report.get("device_used", GIB) >= report["peak_reserved"]
