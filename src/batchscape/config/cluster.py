"""Devices and links: of this machine, or of one that is declared and planned for only."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal, cast

import yaml
from pydantic import Field, TypeAdapter

from batchscape.config.types import Count, Positive, settings

_FILES = Path(__file__).parents[1] / "conf" / "cluster"
_THIS_MACHINE = "this_machine"

Product = Literal["float64", "float32", "tf32", "float16", "bfloat16"]


@settings
class Cluster:
    """Devices and links that a plan is made for.

    Peaks are dense, at boost clock: half of what a datasheet lists with sparsity only; products of
    halves accumulate in float32, as PyTorch's do; float64 uses tensor cores where there are such.
    Bandwidths are of one direction.
    """

    device: str | None = None
    """Name of a declared device; null: the devices of this machine."""
    known_as: str | None = None
    """Regular expression of the name that a driver gives such a device, without its maker: by it
    the figures of a device that was found are looked up."""
    compute_capability: Positive | None = None
    """NVIDIA's number of what a device can compute (https://developer.nvidia.com/cuda-gpus); from
    8.0 on bfloat16."""
    memory_gib: Positive | None = None
    """Memory of one device, of which driver and CUDA context take their part."""
    tflops: dict[Product, Positive | None] = Field(default_factory=dict)
    """Peak by the kind of products, in 10^12 FLOP/s: `float64`, `float32`, `tf32` (of
    `engine.float32_matmul=high`; null: it has none, float32 counts), `float16`, `bfloat16`. MFU
    refers to it; null: of the device's file, or not listed. Finished runs keep theirs."""
    memory_gb_per_s: Positive | None = None
    """Bandwidth of the device's memory, 10^9 bytes a second."""
    link_gb_per_s: Positive | None = None
    """Bandwidth of a device to the others of its node, 10^9 bytes a second in one direction; null:
    not known."""
    network_gb_per_s: Positive | None = None
    """Bandwidth of one network card to other nodes, likewise; null: not known. Each CUDA device has
    one, and all send at a time; the cores of a CPU node share one."""
    devices_per_node: Count | None = None
    """Devices of a node of the declared machine; with `launcher=slurm` and no device, its cores."""
    nodes: Count | None = None
    """Nodes of the declared machine."""

    def __post_init__(self) -> None:
        """Refuse a declared machine that lacks a figure of every plan."""
        required = ("compute_capability", "memory_gib", "devices_per_node", "nodes")
        absent_names = [name for name in required if getattr(self, name) is None]
        if self.device is not None and absent_names:
            raise ValueError(
                f"a declared device needs {', '.join(absent_names)} too; given device={self.device}"
            )
        try:
            re.compile(self.known_as or "")
        except re.error as error:
            raise ValueError(
                f"known_as must be a regular expression; {self.known_as!r}: {error}"
            ) from None

    def is_called(self, name: str) -> bool:
        """Whether a driver's name for a device is of this kind."""
        model_name = name.removeprefix("NVIDIA ").removeprefix("Tesla ")
        return self.known_as is not None and bool(re.fullmatch(self.known_as, model_name))

    def peak_tflops(self, precision: str, float32_matmul: str) -> tuple[Product, float | None]:
        """Return the kind of products that a precision uses, and its peak in 10^12 FLOP/s."""
        is_tf32 = precision == "float32" and float32_matmul == "high" and self.tflops.get("tf32")
        kind = cast("Product", "tf32" if is_tf32 else precision)
        return kind, self.tflops.get(kind)

    def over(self, sheet: Cluster) -> Cluster:
        """Return the figures of a device's file where none are given here."""
        figures = {name: value for name, value in asdict(self).items() if value is not None}
        peaks = {kind: peak for kind, peak in self.tflops.items() if peak is not None}
        return replace(sheet, **figures | {"tflops": sheet.tflops | peaks})


def known_devices() -> str:
    """Name the options of `cluster` that declare a device."""
    return ", ".join(
        path.stem for path in sorted(_FILES.glob("*.yaml")) if path.stem != _THIS_MACHINE
    )


@functools.cache
def datasheets() -> tuple[Cluster, ...]:
    """Return the devices that have a file in `conf/cluster/`."""
    contents = (yaml.safe_load(path.read_text()) for path in sorted(_FILES.glob("*.yaml")))
    sheets = (_ADAPTER.validate_json(json.dumps(content)) for content in contents)
    return tuple(sheet for sheet in sheets if sheet.device is not None)


def datasheet_of(name: str) -> Cluster | None:
    """Return the file of a device, by the name that its driver gives; None where there is none."""
    return next((sheet for sheet in datasheets() if sheet.is_called(name)), None)


_ADAPTER = TypeAdapter(Cluster)
