"""The engine on a CUDA device, step by step."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from batchscape.config import AdamW
from batchscape.engines.ddp import DdpEngine
from batchscape.engines.precision import autocast
from batchscape.geometry import BatchGeometry
from batchscape.measure.clock import DeviceClock
from batchscape.models.build import build_model
from unwaiting import no_waiting

pytestmark = pytest.mark.gpu

SETTINGS = AdamW(name="adamw", learning_rate=0.01)


@pytest.fixture
def device():
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def engine_of(spec, device, world_size=1):
    module = build_model(spec.config, spec.data, spec.precision).to(device)
    config = spec.config
    geometry = BatchGeometry(1, world_size, 8, 1)
    return DdpEngine(module, config.engine, config.optimizer, spec.precision, geometry)


def batch(device, count=8, length=32):
    tokens = torch.randint(256, (count, length + 1), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1].to(device), tokens[:, 1:].to(device)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_step_never_waits_for_the_device(cuda_spec, device, precision, optimizer):
    """PyTorch raises at every operation that would, loss scaling and clipping included."""
    spec = cuda_spec(
        engine__precision=precision,
        optimizer={"name": optimizer, "learning_rate": 0.01, "gradient_clip_norm": 1.0},
    )
    engine = engine_of(spec, device)
    inputs, labels = batch(device)
    clock = DeviceClock(torch.device("cuda"))
    engine.marks = clock

    def step():
        clock.begin()
        for last in (False, True):
            engine.micro_step(inputs, labels, 1 / 512, last=last)
        engine.optimizer_step(spec.config.optimizer, 1.0)
        clock.end()

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    with no_waiting():
        for _ in range(3):
            step()
            assert engine.gradient_scale is not None


def test_an_overflow_skips_the_update_and_halves_the_scale(cuda_spec, device):
    engine = engine_of(cuda_spec(engine__precision="float16"), device)
    inputs, labels = batch(device)
    before = copy.deepcopy(engine.module.state_dict())
    engine.micro_step(inputs, labels, 1e30, last=True)
    norm = engine.optimizer_step(SETTINGS, 1.0)
    assert engine.skipped.item()
    assert not norm.isfinite().item()
    assert float(engine.gradient_scale) == 2**15
    after = engine.module.state_dict()
    assert all((after[name] == before[name]).all().item() for name in before)
    restored = engine_of(cuda_spec(engine__precision="float16"), device)
    restored.restore(copy.deepcopy(engine.state()))
    for each in (engine, restored):
        each.micro_step(inputs, labels, 1 / 256, last=True)
        each.optimizer_step(SETTINGS, 1.0)
        assert not each.skipped.item()
    for mine, theirs in zip(engine.module.parameters(), restored.module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("default")  # NCCL's own, which differ by version
@pytest.mark.skipif(not dist.is_nccl_available(), reason="PyTorch was built without NCCL")
def test_nccl_with_a_single_rank_changes_nothing(cuda_spec, device, tmp_path):
    """DDP over NCCL with nobody to exchange with, against the bare module; and its marks."""
    spec = cuda_spec(engine__precision="float64")
    inputs, labels = batch(device)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{tmp_path / 'group'}",
        rank=0,
        world_size=1,
        device_id=device,
    )
    try:
        alone, wrapped = engine_of(spec, device), engine_of(spec, device, world_size=2)
        clock = DeviceClock(torch.device("cuda"))
        wrapped.marks = clock
        for _ in range(3):
            clock.begin()
            for engine in (alone, wrapped):
                for half in (slice(0, 4), slice(4, 8)):
                    last = half.start == 4
                    engine.micro_step(inputs[half], labels[half], 1 / 256, last=last)
                engine.optimizer_step(spec.config.optimizer, 1.0)
            clock.end()
        module = wrapped.module
        expected = sum(p.nbytes for p in module.parameters())
        assert wrapped.exchanged_bytes == 3 * expected
        for mine, theirs in zip(module.parameters(), alone.module.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
        for times in clock.read(3):
            assert 0 <= times.exchange_s <= times.exchange_span_s <= times.step_time_s
            assert times.exchange_span_s > 0
        wrapped.close()
        del wrapped, engine, module
    finally:
        dist.destroy_process_group()


def flash_takes(device):
    return torch.cuda.get_device_capability(device) >= (8, 0)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("length", [32, 1024])
def test_flash_attention_takes_our_tensors(cuda_spec, device, precision, length):
    """Forward and backward with no other kernel allowed, against the attention written out."""
    if not flash_takes(device):
        pytest.skip("PyTorch's flash attention needs compute capability 8.0")
    spec = cuda_spec(
        engine__precision=precision,
        model__d_model=128,
        data={"name": "stdlib", "sequence_length": length},
    )
    inputs, labels = batch(device, 2, length)
    gradients = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        module = build_model(spec.config, spec.data, spec.precision).to(device)
        with sdpa_kernel(backend), autocast("cuda", precision):
            loss = module(inputs, labels)[0] / labels.numel()
        loss.backward()
        gradients[backend] = torch.cat([p.grad.flatten() for p in module.parameters()])
    flash, written_out = gradients.values()
    assert ((flash - written_out).norm() / written_out.norm()).item() < 0.05


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_fused_attention_is_what_runs(cuda_spec, device, precision):
    """By the names of the operators that a profile of one forward holds."""
    if not flash_takes(device):
        pytest.skip("PyTorch's flash attention needs compute capability 8.0")
    spec = cuda_spec(
        engine__precision=precision,
        model__d_model=128,
        data={"name": "stdlib", "sequence_length": 256},
    )
    module = build_model(spec.config, spec.data, spec.precision).to(device)
    inputs, labels = batch(device, 4, 256)
    host = [torch.profiler.ProfilerActivity.CPU]
    profiler = torch.profiler.profile(activities=host, acc_events=True)
    with profiler as profile, autocast("cuda", precision):
        module(inputs, labels)
    names = {event.key for event in profile.key_averages()}
    fused = {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_cudnn_attention",
    }
    assert names & fused, sorted(name for name in names if "attention" in name)
