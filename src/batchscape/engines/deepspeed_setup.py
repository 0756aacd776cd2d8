"""What DeepSpeed insists on around a model: a device, a process group, an environment."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from batchscape.engines.environment import environment

_OLD_NAMES = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
"""Said of collectives that the library calls."""
_COMPILED = "deepspeed.runtime.zero.muon.muon_optimizer"
"""An optimizer of the library's own, which it imports to see whether a run's is one."""


@contextmanager
def deepspeed_on(device: torch.device, *, alone: bool) -> Iterator[Any]:
    """Yield DeepSpeed, set up to build an engine on a device; undo the setup at the end.

    Notes
    -----
    With a CPU the library would compile a shared-memory kernel at its first use, for a minute and
    with a C++ compiler. Only its inference uses that kernel; gradients are exchanged by PyTorch's
    process group. So its table of compilable operations is told that this one is not.
    """
    # By default the library chooses by what the machine has, when it is first imported; a run may
    # have something else.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    makes_group = alone and not dist.is_initialized()
    variables = {
        "LOCAL_RANK": str(device.index or 0),
        # Without it the library starts a process to look for NUMA nodes, in every exchange of
        # stage 3.
        "LOCAL_SIZE": str(1 if makes_group else dist.get_world_size()),
    }
    with environment(variables, without=()):
        import deepspeed

        # Names that PyTorch 2.13 still has; a run cannot change that the library uses them.
        warnings.filterwarnings("ignore", _OLD_NAMES, FutureWarning)
        _import_uncompiled()
        try:
            if device.type == "cpu":
                deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            if makes_group:
                backend = dist.get_default_backend_for_device(device.type)
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            yield deepspeed
        finally:
            _forget_models(deepspeed)
            if makes_group and dist.is_initialized():
                # The library's own, which forgets the copies that it keeps of the group.
                deepspeed.comm.destroy_process_group()


def _import_uncompiled() -> None:
    """Import the library's own optimizer, which no run has, without torch's compiler.

    Its functions are decorated with `torch.compile`, which takes each rank seconds to import.
    """
    if _COMPILED in sys.modules:
        return
    compile_function = torch.compile
    torch.compile = _leave_uncompiled  # type: ignore[assignment]  # of its overloads one suffices here
    try:
        with suppress(ImportError):  # of a version without it
            import_module(_COMPILED)
    finally:
        torch.compile = compile_function


def _leave_uncompiled(
    function: Callable[..., Any] | None = None, **_: object
) -> Callable[..., Any]:
    """Decorate as `torch.compile` does, with or without options, and change nothing."""
    return (lambda decorated: decorated) if function is None else function


def _forget_models(deepspeed: ModuleType) -> None:
    """Empty what stage 3 keeps for the life of the process: the last model, and its modules.

    The one is a list, the other are the keys of caches around methods.
    """
    zero = deepspeed.runtime.zero
    zero.parameter_offload.FWD_MODULE_STACK.clear()
    coordinator = zero.partitioned_param_coordinator.PartitionedParameterCoordinator
    for method in vars(coordinator).values():
        for cell in getattr(method, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()
