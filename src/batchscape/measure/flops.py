"""Operations of a model, counted from the shapes of what it computes: nothing is computed.

Convention: a multiply-add is two operations; matrix products, convolutions and attention count,
attention in full (a causal mask halves nothing), nothing else does. Whatever the kernel, and
whether activations are computed anew in the backward, a model has the same operations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

Operator: TypeAlias = Any
"""An `OpOverload` of torch, whose class has no public name."""

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


_PLAIN = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of arguments of operators beside tensors."""


class _UncountedError(Exception):
    """Something multiplies matrices that cannot be counted."""


class Operations(NamedTuple):
    """What one forward and backward asks of a device."""

    flops: int
    """Floating-point operations, by the convention above."""
    kernels: int
    """Operators that compute something; views do not."""
    traffic_bytes: int
    """Bytes of the tensors that these read and write, each operator for itself; torch's attention
    counts as one operator each way, which never writes its scores."""


class TensorLayout(NamedTuple):
    """All of a strided tensor but its numbers."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        """Return the layout of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _is_on_meta(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but a layout."""
    is_usual = type(tensor) in {Tensor, nn.Parameter} and tensor.layout is torch.strided
    return is_usual and tensor.is_meta


def _key_of(value: object) -> tuple[Any, ...] | None:
    """Return what decides the layouts of an operator's results; None where that is not known."""
    if isinstance(value, Tensor):
        return TensorLayout.of(value) if _is_on_meta(value) else None
    if isinstance(value, list | tuple | dict):
        parts = []
        for entry in value.items() if isinstance(value, dict) else value:
            if (part := _key_of(entry)) is None:
                return None
            parts.append(part)
        return type(value), *parts
    # By type too: 1, 1.0 and True are equal.
    return (type(value), value) if value is None or isinstance(value, _PLAIN) else None


class _OperationCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total, self.kernels, self.traffic_bytes = 0, 0, 0
        self.within_attention = False
        self._layouts_by_key: dict[tuple[Any, ...], list[TensorLayout]] = {}
        """Layouts of results, by operator and arguments: torch works shapes out in Python."""

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        out = self._result(func, args, kwargs)
        formula: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=out)
        elif func.namespace not in {"aten", "prim", "prims", "profiler"} or (
            func.overloadpacket.__name__.startswith(_NO_FORMULA)
        ):
            raise _UncountedError(str(func))
        if not func.is_view and not self.within_attention:
            self.touch(tensors_in((args, kwargs, out)))
        return out

    def _result(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Return what an operator gives: layers that are alike ask for the same many times."""
        key_of_arguments = None
        if not func.is_view and not func._schema.is_mutable:
            key_of_arguments = _key_of((args, kwargs))
        if key_of_arguments is None:
            return func(*args, **kwargs)
        key = func, torch.get_default_dtype(), key_of_arguments
        if layouts := self._layouts_by_key.get(key):
            tensors = [
                torch.empty_strided(each.shape, each.strides, dtype=each.dtype, device="meta")
                for each in layouts
            ]
            return tensors[0] if len(tensors) == 1 else tuple(tensors)
        out = func(*args, **kwargs)
        results = out if isinstance(out, tuple) and len(out) > 1 else (out,)
        if all(isinstance(each, Tensor) and _is_on_meta(each) for each in results):
            self._layouts_by_key[key] = [TensorLayout.of(each) for each in results]
        return out

    def touch(self, tensors: Iterable[Tensor]) -> None:
        """Count an operator that reads and writes some tensors."""
        self.kernels += 1
        self.traffic_bytes += sum(tensor.nbytes for tensor in tensors)


class _FusedAttention(TorchFunctionMode):
    """Counts the traffic of torch's attention as that of one kernel forward and one backward.

    Autograd runs the latest operators first, so that between the gradient of the output and those
    of the inputs nothing else runs.
    """

    def __init__(self, counter: _OperationCounter) -> None:
        self._counter = counter

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401  (a function of torch)
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        # Views: their gradients are those of this call alone.
        args = tuple(map(_view, args))
        kwargs = {name: _view(value) for name, value in kwargs.items()}
        inputs = list(tensors_in((args, kwargs)))
        self._counter.within_attention = True
        out: Tensor = func(*args, **kwargs)
        self._counter.within_attention = False
        self._counter.touch([*inputs, out])
        trained = [each for each in inputs if each.requires_grad]
        gradients_due = len(trained)

        def begin(_: Tensor) -> None:
            self._counter.touch(2 * [*inputs, out])
            self._counter.within_attention = True

        def end(_: Tensor) -> None:
            nonlocal gradients_due
            gradients_due -= 1
            self._counter.within_attention = gradients_due > 0

        if trained:
            out.register_hook(begin)
        for each in trained:
            each.register_hook(end)
        return out


def _view(value: object) -> object:
    return value.view_as(value) if isinstance(value, Tensor) else value


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors of what an operator takes or gives, in lists and mappings too.

    Parameters
    ----------
    value : object
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)


def model_flops(module: nn.Module, inputs: Tensor, labels: Tensor) -> int | None:
    """Count the floating-point operations of `model_operations`."""
    operations = model_operations(module, inputs, labels)
    return None if operations is None else operations.flops or None


def model_operations(module: nn.Module, inputs: Tensor, labels: Tensor) -> Operations | None:
    """Count the operations of one forward and backward, without doing them.

    Parameters
    ----------
    module : nn.Module
        Takes inputs and labels and returns a sum of losses first; its tensors may be on `meta`.
    inputs, labels : Tensor
        A batch; its shapes and types count, its content does not.

    Returns
    -------
    Operations or None
        Of the whole batch; None where they cannot be counted: operators without a formula,
        recomputation in the model's own code, or a forward that depends on values.

    Notes
    -----
    For a transformer the floating-point operations are Chowdhery et al. 2022 (arXiv 2204.02311),
    appendix B: 6N + 12LHQT a token, N without the tables that are looked up. Formulas:
    `torch.utils.flop_counter`.
    """
    batch = inputs, labels
    # Whatever a model does that needs values, there is no figure then.
    with torch.random.fork_rng(devices=[]), _gradients_kept(module):
        with suppress(Exception):
            return _count(module, batch, lambda tensor: tensor.to("meta"))
        # Slower, and for models that look at devices, or hold tensors that are no buffers.
        with suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            return _count(module, batch, fake.from_tensor)
    return None


def _count(
    module: nn.Module, batch: tuple[Tensor, ...], pretend: Callable[[Tensor], Tensor]
) -> Operations:
    """Run a forward and backward on tensors without values that `pretend` makes of real ones."""
    stand_ins: dict[int, Any] = {
        id(tensor): nn.Parameter(pretend(tensor.detach()), requires_grad=tensor.requires_grad)
        for tensor in module.parameters()
    }
    stand_ins |= {id(tensor): pretend(tensor) for tensor in module.buffers()}
    # A copy: what the model keeps of a forward must not reach the training. It is not compiled.
    imitation = copy.deepcopy(module, stand_ins)
    inputs = tuple(pretend(tensor) for tensor in batch)
    counter = _OperationCounter()
    # Written out, attention is counted like any product, on every device.
    with sdpa_kernel(SDPBackend.MATH), _FusedAttention(counter), counter:
        loss = imitation(*inputs)[0]
        # Recomputation hooks into what is saved; it must not count as the model's work.
        with torch.autograd.graph.disable_saved_tensors_hooks("operations are counted"):
            loss.backward()
    if any(tensor.grad is not None for tensor in module.parameters()):
        raise _UncountedError("the copy computes with parameters of the original")
    return Operations(counter.total, counter.kernels, counter.traffic_bytes)


@contextmanager
def _gradients_kept(module: nn.Module) -> Iterator[None]:
    """Set gradients aside, and put them back."""
    before = [(tensor, tensor.grad) for tensor in module.parameters()]
    module.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        for tensor, gradient in before:
            tensor.grad = gradient
