"""Properties of a model, measured on a few real samples before the training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from batchscape.data.datasets import Dataset
from batchscape.engines.precision import autocast
from batchscape.measure.flops import model_flops
from batchscape.models.invariance import PROBED_SAMPLES, why_not_invariant
from batchscape.models.undisturbed import undisturbed
from batchscape.train.batches import to_device


class ModelColumns(NamedTuple):
    """Columns of a row of `ranks` that follow from the model and the shape of a sample."""

    not_invariant: str | None = None
    """Why decompositions may train unlike one another."""
    parameters: int | None = None
    """Trained parameters."""
    model_flops_per_sample: float | None = None
    """Operations on a sample, forward and backward, padding included."""
    attention_kernel: str | None = None
    """Kernels of `scaled_dot_product_attention`, as torch chooses them for the first samples."""


def examine(
    module: nn.Module,
    dataset: Dataset,
    device: torch.device,
    precision: str,
    micro_batch_size: int,
    *,
    forward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    outline: nn.Module | None = None,
) -> ModelColumns:
    """Measure the properties of a model before its training; nothing of it changes."""
    indices = np.arange(PROBED_SAMPLES, dtype=np.int64) % dataset.num_samples
    batch = to_device(dataset.batch(indices), device, precision)
    whole_model = outline or module
    operations = model_flops(whole_model, *batch)
    return ModelColumns(
        not_invariant=why_not_invariant(module, batch, forward),
        parameters=sum(p.numel() for p in whole_model.parameters() if p.requires_grad),
        model_flops_per_sample=None if operations is None else operations / PROBED_SAMPLES,
        attention_kernel=_attention_kernel(
            module, tuple(tensor[:micro_batch_size] for tensor in batch), precision, forward
        ),
    )


class _AttentionCalls(TorchFunctionMode):
    """Counts calls of torch's attention."""

    count = 0

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401  (a function of torch)
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        self.count += func is scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


class _FusedKernels(TorchDispatchMode):
    """Notes which fused kernels of attention run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  (an operator)
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        _, is_attention, kernel = func.overloadpacket.__name__.partition("_scaled_dot_product_")
        if is_attention:
            self.names.append(kernel.partition("_attention")[0])
        return func(*args, **(kwargs or {}))


def _attention_kernel(
    module: nn.Module,
    batch: tuple[Tensor, ...],
    precision: str,
    forward: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> str | None:
    """Name the kernels that torch chooses for a forward in the arithmetic of the training."""
    calls, fused = _AttentionCalls(), _FusedKernels()
    # Where ranks share a model, one may lack memory for all of it and its activations.
    with suppress(torch.OutOfMemoryError), undisturbed(module):
        with autocast(batch[0].device.type, precision), fused, calls:
            (forward or module.forward)(*batch)
        unfused = ["math"] if calls.count > len(fused.names) else []
        return ", ".join(sorted({*fused.names, *unfused})) or None
    return None
