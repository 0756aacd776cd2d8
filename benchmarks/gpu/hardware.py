"""The device that a benchmark ran on, and where its figures go."""

from __future__ import annotations

import json
import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parents[1] / "results"


def cuda_device() -> torch.device:
    """Return the first CUDA device; leave with a word and code 0 where there is none."""
    if not torch.cuda.is_available():
        print("no CUDA device here; nothing was measured")
        sys.exit(0)
    return torch.device("cuda", 0)


def save(benchmark: str, figures: dict[str, Any]) -> Path:
    """Write figures beside the name of the hardware; return the file.

    Parameters
    ----------
    benchmark : str
        Names the file.
    figures : dict
        Plain values.
    """
    name = torch.cuda.get_device_name(0)
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    path = RESULTS / slug / f"{benchmark}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    hardware = {
        "device": name,
        "devices": torch.cuda.device_count(),
        "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    text = json.dumps({"benchmark": benchmark, "hardware": hardware, **figures}, indent=2)
    path.write_text(text + "\n")
    print(f"written: {path}")
    return path
