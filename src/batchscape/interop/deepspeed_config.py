"""DeepSpeed's configuration, written from a solved geometry."""

from __future__ import annotations

from typing import Any

from batchscape.errors import ConfigError
from batchscape.geometry import BatchGeometry

__all__ = ["deepspeed_config"]

_BUCKET_ELEMENTS = 25 * 2**20 // 4
"""Gradients exchanged at a time: 25 MiB of float32, as DDP does. DeepSpeed's own 5 x 10^8 keep a
buffer of 2 GB beside the smallest model."""


def deepspeed_config(
    geometry: BatchGeometry,
    *,
    zero_stage: int,
    precision: str,
    gradient_clip_norm: float | None,
) -> dict[str, Any]:
    """Return what DeepSpeed's JSON file holds, for a script that trains with a geometry.

    All three batch numbers are written, and DeepSpeed checks their product. It would derive what
    is missing: of a train_batch_size alone, one micro-step of all of it.

    Parameters
    ----------
    zero_stage : int
        From 0 to 3: nothing is sharded; optimizer state; gradients too; parameters too.
    precision : str
        `float32`, or `bfloat16`: autocast over float32 parameters, whose gradients are exchanged
        in float32 too.
    gradient_clip_norm : float or None
        Largest norm of the whole gradient; None: not clipped.

    Returns
    -------
    dict
        Plain values that JSON can carry.

    Raises
    ------
    ConfigError
        If DeepSpeed has no such stage or precision.

    Notes
    -----
    Source: https://www.deepspeed.ai/docs/config-json/, DeepSpeed 0.19.8.
    """
    if zero_stage not in range(4):
        msg = f"zero_stage is 0, 1, 2 or 3; given {zero_stage=}"
        raise ConfigError(msg)
    if precision not in {"float32", "bfloat16"}:
        msg = (
            f"DeepSpeed is configured for float32 or bfloat16, given {precision=}: ZeRO keeps its "
            "weights in float32, so float64 would be lost, and float16 is not offered"
        )
        raise ConfigError(msg)
    return {
        "train_batch_size": geometry.global_batch_size,
        "train_micro_batch_size_per_gpu": geometry.micro_batch_size,
        "gradient_accumulation_steps": geometry.gradient_accumulation_steps,
        "gradient_clipping": gradient_clip_norm or 0.0,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "communication_data_type": "fp32",
        "torch_autocast": {
            "enabled": precision == "bfloat16",
            "dtype": "bfloat16",
            # Of the modules named here DeepSpeed exchanges gradients in the lower precision.
            "lower_precision_safe_modules": [],
        },
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": zero_stage,
            "reduce_bucket_size": _BUCKET_ELEMENTS,
            "overlap_comm": zero_stage == 3,
        },
        "wall_clock_breakdown": False,
    }
