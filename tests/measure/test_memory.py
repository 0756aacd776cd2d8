from __future__ import annotations

import ctypes
import gc
import json
import math
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks

from batchscape.measure.memory_cpu import CpuProbe
from batchscape.measure.memory_cuda import CudaMemory
from batchscape.measure.memory_process import process_memory
from batchscape.measure.memory_report import MemoryReport
from batchscape.record.figures import COLUMNS

GIB = 2**30
WIDTH, CONTEXT, VOCABULARY, LAYERS = 64, 16, 128, 4
OPTIMIZER_STEPS = 3

Phase = Callable[[str], None]


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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(samples, length, 3, 4, WIDTH // 4)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, WIDTH))
        y: Tensor = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(tokens)))
        loss: Tensor = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return loss


def batch(micro_batch_size: int) -> Tensor:
    return torch.randint(VOCABULARY, (micro_batch_size, CONTEXT))


def bytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def rehearse(
    phase: Phase,
    micro_batch_size: int,
    accumulation: int = 1,
    *,
    ddp: bool = False,
    set_to_none: bool = True,
    after_micro_step: Callable[[], None] = lambda: None,
    device: str = "cpu",
) -> None:
    """Train for a few optimizer steps, and drop everything."""
    phase("after_model")
    model = Model().to(device)
    wrapped = (
        DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1)
        if ddp
        else None
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(OPTIMIZER_STEPS):
        phase("steady" if step else "first_backward")
        for micro_step in range(accumulation):
            last = micro_step == accumulation - 1
            with nullcontext() if wrapped is None or last else wrapped.no_sync():
                (wrapped or model)(batch(micro_batch_size).to(device)).backward()
            after_micro_step()
        phase("steady" if step else "first_optimizer_step")
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def measure(micro_batch_size: int, accumulation: int = 1, **options: Any) -> MemoryReport:
    with CpuProbe() as probe:
        rehearse(probe.phase, micro_batch_size, accumulation, **options)
    return probe.report()


def in_bytes(report: MemoryReport) -> dict[str, int]:
    assert report.problem is None, report.problem
    figures = report.as_columns()
    return {
        name.removesuffix("_gib"): int(value * GIB)
        for name, value in figures.items()
        if isinstance(value, float)
    }


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


def test_process_memory() -> None:
    before = process_memory()
    block = np.ones(1 << 23)
    after = process_memory()
    taken = block.nbytes / GIB
    assert math.isclose(after.uss_gib - before.uss_gib, taken, rel_tol=0.1)
    assert math.isclose(after.rss_gib - before.rss_gib, taken, rel_tol=0.1)
    assert after.uss_gib <= after.rss_gib
    rollup = Path("/proc/self/smaps_rollup")
    if rollup.exists():
        private = re.findall(r"^Private_\w+:\s+(\d+) kB$", rollup.read_text(), re.MULTILINE)
        assert math.isclose(sum(map(int, private)) / 2**20, after.uss_gib, rel_tol=0.02)
    if after.peak_rss_gib is not None:
        assert after.peak_rss_gib >= 0.99 * after.rss_gib


RANKS = 2


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, int]]]:
    """Run this file as two gloo ranks; each leaves its figures."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    # Neither the profiler nor the allocator may write into the log of a run.
    assert printed == [""] * RANKS
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


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


def _rank_main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=RANKS
    )
    names = {str(a): a for a in (1, 2, 3)} | {f"repeat {i}": 2 for i in range(3)}
    reports = {}
    for name, accumulation in names.items():
        dist.barrier()
        reports[name] = in_bytes(measure(16, accumulation, ddp=True))
    (folder / f"{rank}.json").write_text(json.dumps(reports))
    # Ending the group while a DDP model is alive can hang; by now all are dropped.
    gc.collect()
    dist.destroy_process_group()


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


if __name__ == "__main__":
    _rank_main(int(sys.argv[1]), Path(sys.argv[2]))
