"""What a compiler does once a function has met more shapes than it was allowed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from batchscape.errors import BatchscapeError
from batchscape.train.worker import code_for_each_size


@pytest.fixture(autouse=True)
def _own_cache() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Doubles(torch.nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * inputs


def compiled(counter: CompileCounter) -> torch.nn.Module:
    module = Doubles()
    module.compile(dynamic=False, backend=counter)
    return module


def run(module: torch.nn.Module, sizes: int) -> None:
    for size in range(1, sizes + 1):
        assert module(torch.ones(size, 3)).sum() == 6 * size


def test_every_size_has_code_of_its_own() -> None:
    """Torch alone stops at eight and goes on without any, in silence."""
    counts = []
    for allowed in (nullcontext(), code_for_each_size(12)):
        torch._dynamo.reset()
        counter = CompileCounter()
        with allowed:
            run(compiled(counter), 12)
        assert torch._dynamo.config.recompile_limit == 8
        counts.append(counter.frame_count)
    assert counts == [8, 12]


def test_a_function_that_needs_more_ends_the_run_and_says_why() -> None:
    message = r"more than 8 times, 8 for 1 size of .*TORCH_LOGS.* engine.compile=false"
    with pytest.raises(BatchscapeError, match=message), code_for_each_size(1):
        run(compiled(CompileCounter()), 9)


def test_so_many_sizes_that_torch_has_another_limit_for_them() -> None:
    with code_for_each_size(40):
        assert torch._dynamo.config.recompile_limit == 320
        assert torch._dynamo.config.accumulated_recompile_limit == 320
    assert torch._dynamo.config.accumulated_recompile_limit == 256
