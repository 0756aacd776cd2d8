"""What torch can do here: its build, devices, arithmetic, groups of ranks, compilation, forking."""

from __future__ import annotations

import shutil
import time
from typing import Any

from batchscape.doctor.children import ChildError, ask
from batchscape.doctor.finding import Finding
from batchscape.errors import LaunchError
from batchscape.launch.child import WORKER
from batchscape.launch.processes import open_processes
from batchscape.plan.machine import Machine

__all__ = ["compilation", "fork_server", "gloo", "no_compilation", "torch"]

_ANSWER_S = 60.0
_COMPILE_S = 120.0
_INSTALL = "pip install torch"
_CUDA_INSTALL = "install torch for this driver: https://pytorch.org/get-started/locally"


def torch() -> list[Finding]:
    """Examine torch and the devices that it sees."""
    try:
        build = ask("torch_build", _ANSWER_S)
    except ChildError as error:
        return [Finding("torch", "broken", str(error), _INSTALL, needed=True)]
    kind = f"CUDA {build['cuda_build']}" if build["cuda_build"] else "CPU only"
    detail = f"{build['version']} ({kind}), {build['threads']} threads, {build['cpu_capability']}"
    found = [Finding("torch", "ok", detail, needed=True)]
    found += _cuda_devices(build, len(Machine.detect().cuda_devices))
    return [*found, *_arithmetic(build)]


def gloo() -> list[Finding]:
    """Form a group of two ranks on this machine, as runs on CPU do."""
    try:
        answer = ask("gloo", _ANSWER_S)
    except ChildError as error:
        repair = "export GLOO_SOCKET_IFNAME=lo, where the host's name leads nowhere"
        return [Finding("gloo", "broken", str(error), repair, needed=True)]
    detail = f"two ranks met and summed in {answer['seconds']:.2f} s"
    return [Finding("gloo", "ok", detail, needed=True)]


def compilation() -> list[Finding]:
    """Compile a tiny function, as `engine.compile=true` does with a model."""
    compilers = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
    try:
        answer = ask("compiled", _COMPILE_S)
    except ChildError as error:
        if not compilers:
            repair = "apt-get install g++ (or another C++ compiler)"
            return [Finding("torch.compile", "missing", "no C++ compiler", repair)]
        return [Finding("torch.compile", "broken", str(error), f"{_INSTALL} --upgrade")]
    seconds, device = answer["seconds"], answer["device"]
    return [Finding("torch.compile", "ok", f"a tiny function on {device} in {seconds:.1f} s")]


def no_compilation() -> list[Finding]:
    """Say how compilation is probed, which nobody has asked for."""
    detail = "takes up to a minute; needed by engine.compile=true only"
    return [Finding("torch.compile", "not probed", detail, "batchscape doctor --compile")]


def fork_server() -> list[Finding]:
    """Boot the server that forks ranks."""
    started = time.monotonic()
    try:
        processes = open_processes(WORKER, lambda: time.monotonic() - started > _ANSWER_S, None)
    except LaunchError as error:
        said = str(error).splitlines()[-1]
        return [Finding("fork server", "broken", said, _INSTALL, needed=True)]
    seconds = time.monotonic() - started
    if processes is None:
        return [Finding("fork server", "broken", f"not ready within {seconds:.0f} s", needed=True)]
    processes.close()
    if processes.method != "fork":
        detail = processes.note or "ranks are started one by one, which takes seconds"
        return [Finding("fork server", "broken" if processes.note else "not needed", detail)]
    return [Finding("fork server", "ok", f"ready in {seconds:.1f} s, ranks start in milliseconds")]


def _cuda_devices(build: dict[str, Any], in_driver: int) -> list[Finding]:
    devices = build["devices"]
    if in_driver and not devices:
        why = build["cuda_problem"] or "this build of torch knows no CUDA"
        detail = f"{in_driver} visible to the driver, none to torch: {why}"
        return [Finding("CUDA", "broken", detail, _CUDA_INSTALL, needed=True)]
    if not devices:
        return [
            Finding("CUDA", "not needed", "no device: runs use CPU cores"),
            Finding("NCCL", "not needed", "ranks on CPU exchange through gloo"),
        ]
    found = [
        Finding(
            f"CUDA {index}",
            "ok",
            f"{device['name']}, {device['memory_gib']:.0f} GiB, "
            f"compute capability {device['capability']}",
            needed=True,
        )
        for index, device in enumerate(devices)
    ]
    if build["nccl"]:
        return [*found, Finding("NCCL", "ok", build["nccl"], needed=True)]
    several = len(devices) > 1
    lacking = Finding("NCCL", "missing", "not in this torch", _CUDA_INSTALL, needed=several)
    return [*found, lacking]


def _arithmetic(build: dict[str, Any]) -> list[Finding]:
    """Say which number formats the hardware computes in; without, a run uses float32."""
    devices = build["devices"]
    place = "CUDA" if devices else "CPU"
    native = {
        name: all(device[name] for device in devices) if devices else build[f"cpu_{name}"]
        for name in ("bf16", "fp16")
    }
    found = [
        Finding(name, "ok", f"native on {place}")
        if is_native
        else Finding(name, "not needed", f"not native on {place}; engine.precision=float32 is")
        for name, is_native in native.items()
    ]
    if not devices:
        return [
            *found,
            Finding("TF32", "not needed", "of CUDA devices only"),
            Finding("flash attention", "not needed", "of CUDA devices only"),
        ]
    if all(device["tf32"] for device in devices):
        found.append(Finding("TF32", "ok", "engine.float32_matmul=high uses it"))
    else:
        found.append(Finding("TF32", "not needed", "from compute capability 8.0 on"))
    if build["flash"]:
        return [*found, Finding("flash attention", "ok", "in this torch")]
    return [*found, Finding("flash attention", "missing", "not in this torch", _CUDA_INSTALL)]
