"""One rank of many, in a process without the others.

The libraries that train exchange through a process group. Here it is one that exchanges nothing,
and what cannot do without numbers or without other ranks gives way to a rule, which is stated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from batchscape.config import DeepSpeed, Fsdp
from batchscape.engines.environment import environment
from batchscape.engines.optimizers import build_optimizer
from batchscape.engines.replicated import ReplicatedEngine
from batchscape.errors import BatchscapeError
from batchscape.record.spec import RunSpec

_CPU = torch.device("cpu")
_WRAPPED_IN = {
    "ddp": "batchscape.engines.ddp",
    "accelerate": "torch.nn.parallel",
    "fabric": "lightning_fabric.strategies.ddp",
}
"""Where an engine finds the class `DistributedDataParallel`."""
_move = nn.Module.to


@contextmanager
def one_rank(spec: RunSpec, ranks: int) -> Iterator[Callable[[nn.Module], None]]:
    """Let this process be the rank that holds most."""
    engine = spec.config.engine
    with ExitStack() as cleanup:
        _replace(cleanup, nn.Module, "to", _stay)
        if ranks == 1 and not isinstance(engine, DeepSpeed):
            yield lambda _: None
            return
        if dist.is_initialized():
            raise BatchscapeError(
                "memory of several ranks, and of engine=deepspeed, is predicted in a process that "
                "has no process group"
            )

        def join(module: nn.Module) -> None:
            rank = _fullest_rank(spec, module, ranks) if isinstance(engine, DeepSpeed) else 0
            dist.init_process_group("fake", rank=rank, world_size=ranks)
            if isinstance(engine, DeepSpeed):
                _open_deepspeed(cleanup)
                return
            cleanup.callback(dist.destroy_process_group)
            if isinstance(engine, Fsdp):
                _open_fsdp(cleanup)
            else:
                owner = import_module(_WRAPPED_IN[engine.name])
                _replace(cleanup, owner, "DistributedDataParallel", _Buckets)
                _replace(cleanup, ReplicatedEngine, "_is_so_anywhere", lambda _, here: here)

        yield join


def _replace(cleanup: ExitStack, owner: Any, name: str, value: object) -> None:  # noqa: ANN401  (module, class or object)
    cleanup.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _stay(module: nn.Module, *arguments: Any, **keywords: Any) -> nn.Module:  # noqa: ANN401  (of `nn.Module.to`)
    """Leave a module on the only device there is: torch would swap fake parameters for others."""
    values = (*arguments, *keywords.values())
    has_type = any(isinstance(each, torch.dtype | Tensor) for each in values)
    return _move(module, *arguments, **keywords) if has_type else module


def _fullest_rank(spec: RunSpec, module: nn.Module, ranks: int) -> int:
    """Return the rank that holds most in stages 1 and 2 of ZeRO; in others all hold alike.

    The parameters of each group of the optimizer lie one after the other, and ranks have equal
    stretches of them. A rank keeps the whole gradient of each parameter that its stretch touches.
    Source: `get_flat_partition` in deepspeed/runtime/zero/stage_1_and_2.py, 0.19.8.
    """
    numbers_by_rank = np.zeros(ranks)
    for group in build_optimizer(spec.stages[0].optimizer, module).param_groups:
        sizes = [p.numel() for p in group["params"]]
        stretch = max(1, -(-sum(sizes) // ranks))
        begin = 0
        for size in sizes:
            numbers_by_rank[begin // stretch : (begin + size - 1) // stretch + 1] += size
            begin += size
    return int(numbers_by_rank.argmax())


def _open_deepspeed(cleanup: ExitStack) -> None:
    """Let DeepSpeed run without numbers, and forget the group in the end."""
    from batchscape.engines.deepspeed_setup import deepspeed_on

    # The variable by which it chooses a kind of device must not reach later trainings.
    cleanup.enter_context(environment({"DS_ACCELERATOR": _CPU.type}, without=()))
    library = cleanup.enter_context(deepspeed_on(_CPU, alone=False))

    def leave() -> None:
        # The library's own way, once it has met the group, forgets the copies that it keeps of it.
        met = library.comm.is_initialized()
        (library.comm if met else dist).destroy_process_group()

    cleanup.callback(leave)
    # It would remark upon every optimizer that is not its own, on standard output.
    _replace(cleanup, library.utils.logger, "disabled", True)
    # Stage 3 compares numbers with those of the first rank, which are not here.
    coordinator = import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
    _replace(cleanup, coordinator, "assert_ints_same_as_other_ranks", lambda _: None)
    cleanup.enter_context(warnings.catch_warnings())
    # Stages 1 and 2 look whether parts are aligned: fake ones begin at 0.
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")


def _open_fsdp(cleanup: ExitStack) -> None:
    """Let FSDP cut for the first rank, and distributed tensors ask for shapes where no mode looks.

    To know the shape that an operator gives, they call it on fake tensors of the whole size, which
    take no memory on any rank. The mesh is made of real numbers, which torch looks at.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    shape_of = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(*arguments: Any) -> Any:  # noqa: ANN401  (torch's)
        with _disable_current_modes():
            return shape_of(*arguments)

    with unset_fake_temporarily():
        mesh = DeviceMesh.from_group(_group(), _CPU.type)
    _replace(cleanup, DeviceMesh, "from_group", lambda *_: mesh)
    _replace(cleanup, _fsdp_param, "_chunk_with_empty", _first_chunk)
    _replace(cleanup, ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen)


def _group() -> dist.ProcessGroup:
    """Return the group of all ranks."""
    return cast("dist.ProcessGroup", dist.group.WORLD)


def _first_chunk(tensor: Tensor, ranks: int, dim: int) -> list[Tensor]:
    """Return the part of the first rank alone, the one that it uses.

    FSDP makes an empty tensor for each rank that has no part of a parameter, 1,024 of them for a
    bias of 32 numbers.
    """
    rows = tensor.size(dim)
    return [tensor.narrow(dim, 0, min(-(-rows // ranks), rows))]


class _Buckets(DistributedDataParallel):
    """What DDP allocates: room for all gradients.

    With `gradient_as_bucket_view` the last micro-step moves gradients into it. Without, they are
    copied there and back, and stay where they were.

    DDP's own reducer is C++ and wants tensors with numbers. Source: `Reducer` in
    torch/csrc/distributed/c10d/reducer.cpp.
    """

    def __init__(self, module: nn.Module, **settings: Any) -> None:  # noqa: ANN401  (of DDP)
        # Not that of DDP, which makes the reducer.
        nn.Module.__init__(self)
        self.module = module
        self.process_group = _group()
        self._moves = bool(settings.get("gradient_as_bucket_view"))
        self._exchanges = True
        self._comm_state: Any = None
        trained = [p for p in module.parameters() if p.requires_grad]
        self._views = {p: torch.empty_like(p) for p in trained}
        self._hooks = [p.register_post_accumulate_grad_hook(self._exchange) for p in trained]

    def forward(self, *batch: Tensor) -> Any:  # noqa: ANN401  (the module's)
        return self.module(*batch)

    def register_comm_hook(self, state: object, _hook: Callable[..., Any]) -> None:
        self._comm_state = state

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._exchanges = False
        try:
            yield
        finally:
            self._exchanges = True

    def _exchange(self, parameter: Tensor) -> None:
        if not self._exchanges:
            return
        if self._moves:
            parameter.grad = self._views[cast("nn.Parameter", parameter)]
        self._comm_state.exchange_is_whole = True
