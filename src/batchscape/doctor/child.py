"""What is asked in a process of its own: `python -m batchscape.doctor.child QUESTION`.

The answer is one JSON object on the last line of the standard output.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["QUESTIONS", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one question.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those of the command line by default: the question.

    Returns
    -------
    int
        Exit code: 0 with any answer, also an error.
    """
    (question,) = sys.argv[1:] if arguments is None else arguments
    warnings.simplefilter("ignore")
    try:
        answer = QUESTIONS[question]()
    except Exception as error:  # noqa: BLE001  (the error is the answer)
        # Some libraries say the cause on the first line, some on the last; the first names it.
        lines = str(error).strip().splitlines() or [""]
        answer = {"error": f"{type(error).__name__}: {lines[0]}".rstrip(": ")}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()
    return 0


def torch_build() -> dict[str, Any]:
    """Return what torch was built with and what it sees."""
    import torch

    mkldnn = torch.ops.mkldnn
    answer: dict[str, Any] = {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "hip_build": torch.version.hip,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_bf16": bool(mkldnn._is_mkldnn_bf16_supported()),
        "cpu_fp16": bool(mkldnn._is_mkldnn_fp16_supported()),
        "gloo": torch.distributed.is_gloo_available(),
        "nccl": None,
        "devices": [],
        "cuda_problem": None,
    }
    if torch.version.cuda is not None:
        answer |= _cuda(torch)
    return answer


def _cuda(torch: ModuleType) -> dict[str, Any]:
    try:
        torch.cuda.init()
    except Exception as error:  # noqa: BLE001  (drivers fail in many ways)
        return {"cuda_problem": str(error).splitlines()[0]}
    nccl = torch.distributed.is_nccl_available()
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        with torch.cuda.device(index):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        devices.append(
            {
                "name": properties.name,
                "memory_gib": properties.total_memory / 2**30,
                "capability": f"{properties.major}.{properties.minor}",
                "bf16": bf16,
                # Half precision in hardware: NVIDIA CUDA C++ Programming Guide, "Arithmetic
                # Instructions"; TF32: the same, from 8.0.
                "fp16": capability >= (5, 3),
                "tf32": capability >= (8, 0),
            }
        )
    return {
        "devices": devices,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        "flash": torch.backends.cuda.is_flash_attention_available(),
    }


def gloo() -> dict[str, Any]:
    """Form a group of two ranks, sum a number over them."""
    import torch
    from torch import distributed

    with tempfile.TemporaryDirectory(prefix="batchscape-doctor-") as folder:
        started = time.monotonic()
        other = os.fork()
        rank = 0 if other else 1
        try:
            store = distributed.FileStore(str(Path(folder) / "store"), 2)
            distributed.init_process_group(
                "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20)
            )
            total = torch.tensor([rank + 1.0])
            distributed.all_reduce(total)
            found = total.item()
            distributed.destroy_process_group()
        except BaseException:
            if rank:
                os._exit(1)
            # It may have only begun, and would wait for a store that is gone.
            os.kill(other, signal.SIGKILL)
            os.waitpid(other, 0)
            raise
        if rank:
            os._exit(0)
        os.waitpid(other, 0)
    if found != 3.0:
        msg = f"1 + 2 over two ranks gave {found}"
        raise ArithmeticError(msg)
    return {"seconds": time.monotonic() - started}


def compiled() -> dict[str, Any]:
    """Compile a tiny function from nothing, and compare what it says."""
    with tempfile.TemporaryDirectory(prefix="batchscape-doctor-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        os.environ["TRITON_CACHE_DIR"] = folder
        os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        numbers = torch.linspace(0, 1, 64, device=device)

        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x) * 2 + 1

        started = time.monotonic()
        result = torch.compile(function)(numbers)
        seconds = time.monotonic() - started
        if not torch.allclose(result, function(numbers)):
            msg = "the compiled function computes something else"
            raise ArithmeticError(msg)
    return {"seconds": seconds, "device": device}


def tracker() -> dict[str, Any]:
    """Return whether W&B knows a key (not the key), and where it would go."""
    import wandb

    try:
        known = bool(wandb.login(verify=False))
    except wandb.Error:
        known = False
    return {"version": wandb.__version__, "known": known, "url": wandb.setup().settings.base_url}


QUESTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "torch_build": torch_build,
    "gloo": gloo,
    "compiled": compiled,
    "tracker": tracker,
}
"""What can be asked, by name."""


if __name__ == "__main__":
    sys.exit(main())
