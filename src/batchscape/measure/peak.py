"""Peak of a device, which MFU refers to: given, or from a datasheet.

And what one core of a CPU attains now, measured for plans: its products of matrices and its memory.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from batchscape.config.cluster import Cluster, datasheet_of
from batchscape.device import is_accelerator, module_of


class Peak(NamedTuple):
    """Peak of one device in one precision."""

    tflops: float | None
    """10^12 floating-point operations a second; None where it is not known."""
    source: str
    """Where it comes from, or why there is none."""


_SIDE = 512
"""Rows of the matrices whose product is timed on a CPU; they fit a core's cache."""
_COPIED_BYTES = 64 * 2**20
"""More than the caches of a core hold."""
_ENOUGH_S, _MOST_S = 0.05, 0.2
"""Time spent on it: `_ENOUGH_S` for three products or more, `_MOST_S` for fewer."""


def peak_flops(device: torch.device, precision: str, float32_matmul: str, cluster: Cluster) -> Peak:
    """Return the peak that MFU refers to.

    Parameters
    ----------
    device : torch.device
    precision : str
        `float32`, `bfloat16`, `float16` or `float64`.
    float32_matmul : str
        `high` where products of float32 matrices may be in TF32, else `highest`.
    cluster : Cluster
        Whose figures stand for those of the device's file, unless it declares another device.

    Returns
    -------
    Peak
        Dense peak of the kind of product that this precision uses.
    """
    # Measured, that of a CPU would be another one in each run: what else runs moves it by half.
    name = module_of(device).get_device_name(device) if is_accelerator(device) else None
    return _listed(name, precision, float32_matmul, cluster)


def _listed(name: str | None, precision: str, float32_matmul: str, cluster: Cluster) -> Peak:
    """Look a device up by the name that its driver gives; None: a processor, which has no file."""
    is_of_device = cluster.device is None or (name is not None and cluster.is_called(name))
    settings = cluster if is_of_device else Cluster()
    sheet = None if name is None else datasheet_of(name)
    figures = settings if sheet is None else settings.over(sheet)
    kind, tflops = figures.peak_tflops(precision, float32_matmul)
    if tflops is not None:
        if sheet is None or sheet.tflops.get(kind) != tflops:
            return Peak(tflops, "given")
        return Peak(tflops, f"datasheet of {figures.device}, dense {kind}")
    if sheet is None:
        device = name or "a processor"
        return Peak(None, f"none: no datasheet of {device} is known; give cluster.tflops.{kind}")
    return Peak(None, f"none: the datasheet of {name} lists no {kind}; give cluster.tflops.{kind}")


def product_tflops(precision: str) -> float:
    """Return what a product of square matrices attains on this CPU, in 10^12 FLOP/s.

    By this process's threads, the best of some.
    """
    dtype: torch.dtype = getattr(torch, precision)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        a, b = (torch.rand(_SIDE, _SIDE).to(dtype) for _ in range(2))
        out = torch.mm(a, b)
        times_s: list[float] = []
        while sum(times_s) < (_ENOUGH_S if len(times_s) >= 3 else _MOST_S):
            began = time.perf_counter()
            torch.mm(a, b, out=out)
            times_s.append(time.perf_counter() - began)
    return 2 * _SIDE**3 / min(times_s) / 1e12


def copy_gb_per_s() -> float:
    """Return the bandwidth of this machine's memory, in 10^9 bytes read or written a second.

    That of a large copy by this process's threads, the best of five.
    """
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8)
    target = torch.ones_like(source)
    times_s = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        times_s.append(time.perf_counter() - began)
    return 2 * _COPIED_BYTES / min(times_s) / 1e9
