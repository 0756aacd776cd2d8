"""Which buffers ranks are given by the first one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from batchscape.engines.distributed import follow_first_rank


class Normalises(nn.Module):
    """Running means, a mask that never changes, and statistics that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(1024, 1024), persistent=False)
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T)
        self.other = nn.Module()
        self.other.register_buffer("shared", self.norm.running_mean)
        self.other.register_buffer("none", None)
        # Its checkpoints have other names, as where a library's own format is kept.
        self.register_state_dict_post_hook(renamed)


def renamed(_module: nn.Module, state: dict, prefix: str, _metadata: object) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}norm.")]:
        state[name.replace("norm.", "batch_norm.")] = state.pop(name)


def test_what_is_no_state_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []

    def broadcast(tensor: torch.Tensor, src: int) -> None:
        assert src == 0
        assert tensor.is_contiguous()
        sent.append(tensor.numel())
        tensor.fill_(7)

    monkeypatch.setattr(dist, "broadcast", broadcast)
    module = Normalises()
    follow_first_rank(module)
    assert sorted(sent) == [1, 4, 4, 6], "counter, two running figures, and the turned table"
    for name in ("norm.running_mean", "norm.running_var", "turned", "other.shared"):
        assert (module.get_buffer(name) == 7).all(), name
    assert (module.mask == 1).all()
