"""Recomputed activations: the same training in less memory."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from batchscape.errors import ConfigError
from batchscape.measure.memory_cpu import CpuProbe
from batchscape.models.build import build_model
from batchscape.models.checkpointing import checkpoint_activations

GPT = {"name": "gpt", "n_layers": 3, "n_heads": 2, "d_model": 32}
LLAMA = {"name": "llama", "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_model": 32, "d_ff": 48}


def gradients(module, batch):
    torch.manual_seed(5)
    loss, _ = module(*batch)
    loss.backward()
    gradient_by_name = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    return loss.detach(), gradient_by_name


def batch_of(samples=3, length=32):
    tokens = torch.randint(256, (samples, length + 1), generator=torch.manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def assert_same(one, other):
    torch.testing.assert_close(one[0], other[0], rtol=1e-12, atol=0)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("model", [GPT, GPT | {"dropout": 0.2}, LLAMA], ids=str)
@pytest.mark.slow
def test_loss_and_gradients_are_the_same(config_of, text, model):
    module = build_model(config_of(model=model), text, "float64")
    batch = batch_of()
    names = list(module.state_dict())
    plain = gradients(module, batch)
    checkpoint_activations(module)
    assert list(module.state_dict()) == names
    assert_same(gradients(module, batch), plain)
    assert_same(gradients(copy.deepcopy(module), batch), plain)


def blocks_run(module, batch):
    """Count how often the first block runs in a forward and backward."""
    runs = []
    hook = module.model.blocks[0].mlp_norm.register_forward_hook(lambda *_: runs.append(1))
    gradients(module, batch)
    hook.remove()
    return len(runs)


def test_blocks_run_twice(config_of, text):
    module = build_model(config_of(model=GPT), text, "float64")
    batch = batch_of()
    assert blocks_run(module, batch) == 1
    checkpoint_activations(module)
    assert blocks_run(module, batch) == 2


def test_a_model_without_blocks_is_refused(config_of, vectors):
    config = config_of(model={"name": "mlp", "hidden_sizes": [4]}, data={"name": "digits"})
    module = build_model(config, vectors, "float64")
    with pytest.raises(ConfigError, match=r"no blocks in an nn\.ModuleList"):
        checkpoint_activations(module)


def test_lists_within_blocks_are_left_alone():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

        def forward(self, x):
            return sum(expert(x) for expert in self.experts)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.ModuleList([Block()])
            self.second = nn.ModuleList([Block()])

    model = Model()
    checkpoint_activations(model)
    recomputing = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert recomputing == ["first.0", "second.0"]


@pytest.mark.slow
def test_peak_memory_falls(config_of, text):
    """A deep narrow model: what is kept falls from whole blocks to their inputs."""

    def peak_gib(*, recomputes):
        deep = GPT | {"n_layers": 16}
        with CpuProbe() as probe:
            probe.phase("after_model")
            module = build_model(config_of(model=deep), text, "float32")
            if recomputes:
                checkpoint_activations(module)
            probe.phase("steady")
            module(*batch_of(8))[0].backward()
            del module
        report = probe.report()
        assert report.problem is None
        return report.peak_allocated_gib

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    kept, recomputed = peak_gib(recomputes=False), peak_gib(recomputes=True)
    torch.set_num_threads(threads)
    assert recomputed < 0.4 * kept


@pytest.mark.slow
def test_compiled_recomputation_is_one_graph_and_trains_alike(config_of, text):
    """With a backend that compiles nothing: what could break is the tracing."""
    module = build_model(config_of(model=GPT), text, "float64")
    batch = batch_of()
    plain = gradients(module, batch)
    checkpoint_activations(module)
    module.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    assert_same(gradients(module, batch), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("model", [GPT | {"dropout": 0.2}, LLAMA], ids=str)
def test_a_device_trains_alike_in_less_memory(config_of, text, model):
    batch = tuple(part.cuda() for part in batch_of(64))
    results, peaks = [], []
    for recomputes in (False, True):
        module = build_model(config_of(model=model | {"n_layers": 8}), text, "float32").cuda()
        if recomputes:
            checkpoint_activations(module)
        gradients(module, batch)
        torch.cuda.reset_peak_memory_stats()
        results.append(gradients(module, batch))
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < peaks[0]
    torch.testing.assert_close(results[1][0], results[0][0])
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)
