"""Operations of a model, counted from the shapes of its matrix products.

Convention: a multiply-add is two operations; matrix products, convolutions and attention count,
attention in full (a causal mask halves nothing), nothing else does. Whatever the kernel, and
whether activations are computed anew in the backward, a model has the same operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["model_flops"]

_NO_FORMULA = (
    "_cudnn_rnn",
    "_flash_attention",
    "_grouped_mm",
    "_int_mm",
    "_scaled_dot_product",
    "_scaled_grouped_mm",
    "_sparse_mm",
    "_trilinear",
    "addmv",
    "addr",
    "dot",
    "linalg_",
    "lstm",
    "mkldnn_rnn",
    "mv",
    "vdot",
)
"""Beginnings of names of operators that multiply matrices and have no formula in torch."""


class _UncountedError(Exception):
    """An operator multiplies matrices and tells no number of operations."""


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  (an operator)
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=out)
        elif func.namespace not in {"aten", "prim", "prims", "profiler"} or (
            func.overloadpacket.__name__.startswith(_NO_FORMULA)
        ):
            raise _UncountedError(str(func))
        return out


class _AsWritten(nn.Module):
    """Calls a module's forward, compiled or not, as it was written."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *batch: Tensor) -> Tensor:
        loss: Tensor = self.module.forward(*batch)[0]
        return loss


def model_flops(module: nn.Module, inputs: Tensor, targets: Tensor) -> int | None:
    """Count the operations of one forward and backward, without doing them.

    Parameters
    ----------
    module : nn.Module
        Takes inputs and targets and returns a sum of losses first.
    inputs, targets : Tensor
        A batch; its shapes and types count, its content does not.

    Returns
    -------
    int or None
        Floating-point operations of the whole batch; None where they cannot be counted: operators
        without a formula, recomputation in the model's own code, or a forward that depends on
        values.

    Notes
    -----
    For a transformer this is Chowdhery et al. 2022 (arXiv 2204.02311), appendix B: 6N + 12LHQT a
    token, N without the tables that are looked up. Formulas: `torch.utils.flop_counter`.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            return _count(module, (inputs, targets)) or None
    except Exception:  # noqa: BLE001  (whatever a model does without values: there is no figure)
        return None


def _count(module: nn.Module, batch: tuple[Tensor, ...]) -> int:
    wrapped = _AsWritten(module)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        tensors: dict[str, Tensor] = {
            name: fake.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)
            for name, tensor in wrapped.named_parameters()
        }
        tensors |= {name: fake.from_tensor(tensor) for name, tensor in wrapped.named_buffers()}
        inputs = tuple(fake.from_tensor(tensor) for tensor in batch)
        # Written out, attention is counted like any product, on every device.
        counter = _Counter()
        with sdpa_kernel(SDPBackend.MATH), counter:
            loss = torch.func.functional_call(wrapped, tensors, inputs)
            # Recomputation hooks into what is saved; it must not count as the model's work.
            with torch.autograd.graph.disable_saved_tensors_hooks("operations are counted"):
                loss.backward()
    return counter.total
