"""Peak of a device, which MFU refers to: given, from a datasheet, or on a CPU measured."""

from __future__ import annotations

import re
import time
from typing import NamedTuple

import torch

__all__ = ["Peak", "peak_flops"]


class Peak(NamedTuple):
    """Peak of one device in one precision."""

    tflops: float | None
    """10^12 floating-point operations a second; None where it is not known."""
    source: str
    """Where it comes from, or why there is none."""


class _Datasheet(NamedTuple):
    """Dense peaks in 10^12 FLOP/s, without sparsity, at boost clock; None: not listed.

    Products of halves accumulate in float32, as PyTorch's do; float64 uses tensor cores where
    there are such.
    """

    name: str
    """Regular expression of the name that the driver gives, without its maker."""
    float64: float | None
    float32: float
    tf32: float | None
    float16: float
    bfloat16: float | None
    url: str


_V100 = (
    "https://images.nvidia.com/content/technologies/volta/pdf/"
    "volta-v100-datasheet-update-us-1165301-r5.pdf"
)
_T4 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/"
    "t4-tensor-core-datasheet-951643.pdf"
)
_A10 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/datasheet-new/"
    "nvidia-a10-datasheet.pdf"
)
_A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_L4 = "https://resources.nvidia.com/en-us-data-center-overview/l4-gpu-datasheet"
_L40S = "https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413"
_RTX_30 = (
    "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
)
_RTX_40 = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_H100 = "https://www.nvidia.com/en-us/data-center/h100/"
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"
_GH200 = "https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip"
_B200 = "https://www.nvidia.com/en-us/data-center/hgx/"

_DATASHEETS = (
    # Where a datasheet lists figures with sparsity only, these are half of them.
    _Datasheet(r"V100-SXM2-(16|32)GB", 7.8, 15.7, None, 125.0, None, _V100),
    _Datasheet(r"V100-PCIE-(16|32)GB", 7.0, 14.0, None, 112.0, None, _V100),
    _Datasheet(r"T4", None, 8.1, None, 65.0, None, _T4),
    _Datasheet(r"A10", None, 31.2, 62.5, 125.0, 125.0, _A10),
    _Datasheet(
        r"A100-(SXM4?|PCIE)-(40|80)GB|A100 80GB PCIe", 19.5, 19.5, 156.0, 312.0, 312.0, _A100
    ),
    _Datasheet(r"L4", None, 30.3, 60.0, 121.0, 121.0, _L4),
    _Datasheet(r"L40S", None, 91.6, 183.0, 362.05, 362.05, _L40S),
    _Datasheet(r"GeForce RTX 3090", None, 35.6, 35.6, 71.0, 71.0, _RTX_30),
    _Datasheet(r"GeForce RTX 4090", None, 82.6, 82.6, 165.2, 165.2, _RTX_40),
    _Datasheet(r"H100 PCIe", 51.0, 51.0, 378.0, 756.5, 756.5, _H100),
    _Datasheet(r"H100 80GB HBM3", 67.0, 67.0, 494.5, 989.5, 989.5, _H100),
    _Datasheet(r"H100 NVL", 60.0, 60.0, 417.5, 835.5, 835.5, _H100),
    _Datasheet(r"H200", 67.0, 67.0, 494.5, 989.5, 989.5, _H200),
    _Datasheet(r"H200 NVL", 60.0, 60.0, 417.5, 835.5, 835.5, _H200),
    _Datasheet(r"GH200 (120GB|480GB|144G HBM3e)", 67.0, 67.0, 494.5, 989.5, 989.5, _GH200),
    _Datasheet(r"B200", 37.0, 75.0, 1100.0, 2250.0, 2250.0, _B200),
)

_SIDE = 512
"""Rows of the matrices whose product is timed on a CPU; they fit a core's cache."""
_ENOUGH_S, _MOST_S = 0.05, 0.2
"""Time spent on it: `_ENOUGH_S` for three products or more, `_MOST_S` for fewer."""


def peak_flops(
    device: torch.device, precision: str, float32_matmul: str, given: float | None
) -> Peak:
    """Return the peak that MFU refers to.

    Parameters
    ----------
    device : torch.device
    precision : str
        `float32`, `bfloat16`, `float16` or `float64`.
    float32_matmul : str
        `high` where products of float32 matrices may be in TF32, else `highest`.
    given : float or None
        The user's own figure, in 10^12 FLOP/s, which wins.

    Returns
    -------
    Peak
        Dense peak of the kind of product that this precision uses.
    """
    if given is not None:
        return Peak(given, "given")
    if device.type == "cpu":
        return _measured(precision)
    if device.type == "cuda":
        return _listed(torch.cuda.get_device_name(device), precision, float32_matmul)
    return Peak(None, f"none: no datasheet of a {device.type} device is known")


def _listed(name: str, precision: str, float32_matmul: str) -> Peak:
    """Look a device up by the name that its driver gives."""
    bare = name.removeprefix("NVIDIA ").removeprefix("Tesla ")
    sheet = next((sheet for sheet in _DATASHEETS if re.fullmatch(sheet.name, bare)), None)
    if sheet is None:
        return Peak(None, f"none: no datasheet of {name} is known; give measure.peak_tflops")
    kind = precision
    if precision == "float32" and float32_matmul == "high" and sheet.tf32 is not None:
        kind = "tf32"
    tflops: float | None = getattr(sheet, kind)
    if tflops is None:
        return Peak(None, f"none: the datasheet of {name} lists no {kind}: {sheet.url}")
    return Peak(tflops, f"datasheet, dense {kind}: {sheet.url}")


def _measured(precision: str) -> Peak:
    """Time a product of square matrices with this process's threads; the best of some counts."""
    dtype: torch.dtype = getattr(torch, precision)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        left, right = (torch.rand(_SIDE, _SIDE).to(dtype) for _ in range(2))
        out = torch.mm(left, right)
        times_s: list[float] = []
        while sum(times_s) < (_ENOUGH_S if len(times_s) >= 3 else _MOST_S):
            began = time.perf_counter()
            torch.mm(left, right, out=out)
            times_s.append(time.perf_counter() - began)
    threads = torch.get_num_threads()
    return Peak(
        2 * _SIDE**3 / min(times_s) / 1e12,
        f"measured: matrix product {_SIDE} x {_SIDE} in {precision}, threads: {threads}",
    )
