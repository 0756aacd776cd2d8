"""Whether decompositions of a global batch train alike, found out before the first step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from batchscape.errors import ConfigError
from batchscape.models.undisturbed import undisturbed

PROBED_SAMPLES = 4
"""Two halves of two samples: batch statistics need two."""

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Largest relative difference between a sum of losses and the sum over its halves. Rounding of
another batch shape was measured at 7e-7 in float32 and 4e-15 in float64; losses that look at
other samples differ by far more than the tolerance."""
_MEAN_TOLERANCE = 0.1
"""A loss is a mean if doubling a batch multiplies it by one, up to this; it doubles a sum. Dropout
moves either by a few percent."""
_NORMALISATION_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DROPOUT_LAYERS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
_Forward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def why_not_invariant(
    module: nn.Module, batch: tuple[Tensor, Tensor], forward: _Forward | None = None
) -> str | None:
    """Return why decompositions of one global batch may train unlike one another.

    The module runs forward on parts of the batch, without gradients; random state and buffers are
    as before afterwards.

    Parameters
    ----------
    module : nn.Module
        Takes inputs and labels and returns a sum of losses first, as `LossModule`; in training
        mode.
    batch : tuple of Tensor
        Inputs and labels of `PROBED_SAMPLES` real samples, on the module's device.
    forward : callable, optional
        Runs the module as it was written; needed where ranks that hold parts of it do so together.

    Returns
    -------
    str or None
        None where nothing was found: batch normalisation, dropout, buffers that change in forward,
        any other randomness, a loss that is not additive over samples.

    Raises
    ------
    ConfigError
        If the loss is a mean instead of a sum.
    """
    reasons = _reasons_of_layers(module)
    # A compiled module is called as it was written: these shapes are not the training's.
    forward = forward or module.forward
    half = len(batch[0]) // 2
    first, second = (
        [tensor[part] for tensor in batch] for part in (slice(half), slice(half, None))
    )
    doubled = [torch.cat([tensor] * 2) for tensor in first]
    with torch.no_grad(), undisturbed(module) as buffers, _without_noise(module):
        *half_losses, whole_loss, repeated_loss = (
            float(forward(*part)[0]) for part in (first, second, batch, batch)
        )
        ratio = float(forward(*doubled)[0]) / half_losses[0] if half_losses[0] else math.nan
        for buffer in buffers:
            is_reported = isinstance(buffer.owner, _NORMALISATION_LAYERS) and buffer.owner.training
            if not is_reported and buffer.has_changed():
                reasons.append(f"buffers change in forward: {buffer.full_name}")
                break
    if abs(ratio - 1) < _MEAN_TOLERANCE:
        raise ConfigError(
            "the model's loss is a mean: doubling the samples does not double it. It must be the "
            "sum over the labels that bear a loss, which is divided once, by their global number; "
            "use reduction='sum'"
        )
    if not all(map(math.isfinite, (*half_losses, whole_loss, repeated_loss))):
        return "; ".join(reasons) or None  # the training will report the loss that is not finite
    is_explained = any(not reason.startswith("dropout") for reason in reasons)
    if not is_explained and whole_loss != repeated_loss:
        is_explained = True
        # Some attention drops numbers without a dropout layer.
        if not reasons:
            reasons.append("dropout or other randomness: two forwards of the same samples differ")
    tolerance = _TOLERANCE.get(next(module.parameters()).dtype, _TOLERANCE[torch.float32])
    if not is_explained and abs(sum(half_losses) - whole_loss) > tolerance * abs(whole_loss):
        reasons.append("loss not additive over samples")
    return "; ".join(reasons) or None


def _reasons_of_layers(module: nn.Module) -> list[str]:
    """Name the first layer that looks at other samples, and the first that draws numbers."""
    layers = [(name, layer) for name, layer in module.named_modules() if layer.training]
    normalising = [
        f"batch normalisation: {name}"
        for name, layer in layers
        if isinstance(layer, _NORMALISATION_LAYERS)
    ]
    dropping = [
        f"dropout: {name}, p={layer.p:g}"
        for name, layer in layers
        if isinstance(layer, _DROPOUT_LAYERS) and layer.p > 0
    ]
    return normalising[:1] + dropping[:1]


@contextmanager
def _without_noise(module: nn.Module) -> Iterator[None]:
    """Switch dropout layers and TF32 off: their noise would hide other reasons."""
    precision_before = torch.get_float32_matmul_precision()
    dropout_layers = [m for m in module.modules() if isinstance(m, _DROPOUT_LAYERS) and m.training]
    torch.set_float32_matmul_precision("highest")
    for layer in dropout_layers:
        layer.training = False
    try:
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision_before)
        for layer in dropout_layers:
            layer.training = True
