"""Where a run ran: versions, revision, hardware, threads (`environment.json`)."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from batchscape.cuda_devices import driver_and_devices
from batchscape.record.folder import FORMAT_VERSION
from batchscape.system import GIB, processor_name

PACKAGES = (
    "torch",
    "numpy",
    "pandas",
    "pyarrow",
    "pydantic",
    "hydra-core",
    "omegaconf",
    "scikit-learn",
    "scipy",
    "wandb",
)
"""Packages whose versions are recorded; null where one is not installed."""

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "OMP_WAIT_POLICY",
)
"""Environment variables of the processor's threads."""

KERNEL_VARIABLES = (
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "DISABLE_ADDMM_CUDA_LT",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_CUMEM_ENABLE",
    "NCCL_IB_DISABLE",
    "NCCL_MAX_CTAS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
)
"""Environment variables that decide kernels, the exchange, or what the allocator reserves.

With those of threads the only ones that are recorded: others may hold secrets.
"""

_GIT_TIMEOUT_S = 10.0


def environment(variables: Mapping[str, str], usable_cores: int) -> dict[str, Any]:
    """Describe this machine and its software, without the names of machine and user.

    Parameters
    ----------
    variables : mapping
        Environment variables of the processes described; only `THREAD_VARIABLES` and
        `KERNEL_VARIABLES` are read.
    usable_cores : int
        Cores that the processes described may use.

    Returns
    -------
    dict
        Plain values for JSON; null where a value is not known. `git` is the checkout of the working
        directory.
    """
    driver, devices = driver_and_devices()
    return {
        "format_version": FORMAT_VERSION,
        "batchscape": _version("batchscape"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in (*PACKAGES, *_cuda_packages(*sys.path))},
        "git": _git(Path.cwd()),
        "cpu": {
            "name": processor_name(),
            "logical_cores": psutil.cpu_count(logical=True),
            "physical_cores": psutil.cpu_count(logical=False),
            "usable_cores": usable_cores,
        },
        "memory_gib": psutil.virtual_memory().total / GIB,
        # A device that cannot be opened has no name.
        "cuda": {"driver": driver, "devices": [device and device.name for device in devices]},
        "threads": {name: variables.get(name) for name in THREAD_VARIABLES},
        "kernels": {name: variables.get(name) for name in KERNEL_VARIABLES},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def _cuda_packages(*path: str) -> list[str]:
    """Name the packages of torch's CUDA builds: cuDNN, cuBLAS, NCCL and others, and Triton."""
    names = {str(package.metadata["Name"]) for package in metadata.distributions(path=list(path))}
    return sorted(name for name in names if name == "triton" or name.startswith("nvidia-"))


def _git(folder: Path) -> dict[str, Any]:
    revision = _git_output(folder, "rev-parse", "HEAD")
    changes = _git_output(folder, "status", "--porcelain", "--untracked-files=no")
    is_known = None not in (revision, changes)
    return {"revision": revision, "dirty": bool(changes) if is_known else None}


def _git_output(folder: Path, *arguments: str) -> str | None:
    try:
        process = subprocess.run(
            ["git", "--no-optional-locks", *arguments],  # noqa: S607  (the user's own git)
            cwd=folder,
            capture_output=True,
            check=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()
