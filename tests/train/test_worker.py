"""What a rank decides before and after its training."""

from __future__ import annotations

import os
import traceback

import pytest
import torch
import torch.distributed as dist

from batchscape.programs.endings import ending
from batchscape.train import failures, ranks, worker


def launched(device_type, ranks, devices):
    return {
        "device_type": device_type,
        "world_size": ranks,
        "devices": list(range(10, 10 + devices)),
    }


@pytest.mark.parametrize(
    ("launch", "backend"),
    [
        (launched("cpu", 2, 2), "gloo"),
        (launched("cpu", 4, 2), "gloo"),
        (launched("cuda", 2, 2), "nccl"),
        (launched("cuda", 3, 2), "gloo"),
        (launched("cuda", 2, 1), "gloo"),
    ],
)
def test_ranks_that_share_a_device_exchange_through_gloo(launch, backend):
    assert worker._backend(launch) == backend


def test_ranks_take_the_devices_of_their_run_in_turn(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    launch = launched("cuda", 5, 2)
    devices = [worker._device(launch, rank) for rank in range(5)]
    # Numbers within CUDA_VISIBLE_DEVICES, not those of the machine.
    assert [device.index for device in devices] == [0, 1, 0, 1, 0]
    assert chosen == devices
    assert worker._device(launched("cpu", 2, 2), 1) == torch.device("cpu")


@pytest.mark.parametrize(("precision", "in_tf32"), [("high", True), ("highest", False)])
def test_all_products_of_float32_are_in_the_precision_asked_for(precision, in_tf32):
    """Those of convolutions too, which cuDNN allows in TF32 by a flag of its own, by default."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    products = torch.backends.cuda.matmul
    try:
        worker._set_precision_of_products(precision)
        assert products.allow_tf32 is in_tf32
        assert torch.backends.cudnn.allow_tf32 is in_tf32
        # Parts of products of halves: PyTorch's own default is to add them up in halves.
        assert not products.allow_bf16_reduced_precision_reduction
        assert not products.allow_fp16_reduced_precision_reduction
    finally:
        products.allow_bf16_reduced_precision_reduction = True
        products.allow_fp16_reduced_precision_reduction = True
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize(("given", "expected"), [(None, "WARN"), ("INFO", "INFO")])
def test_nccl_says_why_it_fails_unless_it_was_told_otherwise(
    tmp_path, monkeypatch, given, expected
):
    monkeypatch.setenv("NCCL_DEBUG", "to be put back")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "to be put back")
    monkeypatch.delenv("NCCL_DEBUG")
    if given is not None:
        monkeypatch.setenv("NCCL_DEBUG", given)
    seen = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda *_, **__: seen.append(os.environ["NCCL_DEBUG"])
    )
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    launch = launched("cuda", 2, 2) | {"rendezvous": str(tmp_path / "meeting")}
    with worker._process_group(launch, 0, torch.device("cuda", 0), 1.0):
        assert seen == [expected]


def test_the_reason_of_an_error_of_nccl_is_what_it_met():
    """Its first line is the same for every call of the system that fails."""
    kind = (
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled system "
        "error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5"
    )
    met = "Error while creating shared memory segment /dev/shm/nccl-LeXlEJ (size 9637888)"
    text = f"{kind}\nncclSystemError: System call failed. \nLast error:\n{met}"
    failed = failures.failure_of(dist.DistBackendError(text), 0, None)
    assert failed.reason == f"DistBackendError: {kind}; {met}"
    assert failures.failure_of(RuntimeError(f"{kind}\nLast error:"), 0, None).reason.endswith(kind)
    assert failures.failure_of(RuntimeError("one\ntwo"), 0, None).reason == "RuntimeError: one"


@pytest.mark.parametrize(("reduced", "said"), [(False, "float32"), (True, "reduced")])
def test_what_decides_rounding_is_read_from_torch_itself(monkeypatch, reduced, said):
    """Code of the user's own may have set it after the run began."""
    products = torch.backends.cuda.matmul
    before = products.allow_bf16_reduced_precision_reduction
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    try:
        worker._set_precision_of_products("highest")
        products.allow_bf16_reduced_precision_reduction = reduced
        found = ranks._cuda_facts()
    finally:
        products.allow_bf16_reduced_precision_reduction = before
        products.allow_fp16_reduced_precision_reduction = True
        torch.backends.cudnn.allow_tf32 = True
    assert found == {
        "reduction_precision": said,
        "libraries": "CUDA 13.0, cuDNN 92000, NCCL 2.29.7",
    }


@pytest.mark.parametrize(
    ("error", "is_oom"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("NCCL error: Failed to CUDA calloc async 608 bytes"), True),
        (RuntimeError("Cuda failure 2 'out of memory'"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"), True),
        (ValueError("out of memory"), False),
    ],
    ids=str,
)
def test_what_memory_that_is_out_is_told_by(error, is_oom, tmp_path):
    """By an exception of our loop, and by the log of a program that dies of it."""
    assert failures.is_out_of_memory(error) == is_oom
    wrapped = KeyError("wrapped")
    wrapped.__cause__ = error
    assert failures.is_out_of_memory(wrapped) == is_oom
    log = tmp_path / "log.txt"
    log.write_text("".join(traceback.format_exception_only(error)))
    ended = ending(1, log, 0)
    assert (ended.status == "oom") == is_oom
