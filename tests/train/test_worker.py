"""What a rank decides before and after its training."""

from __future__ import annotations

import pytest
import torch

from batchscape.train import failures, worker


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
    try:
        worker._set_float32_products(precision)
        assert torch.backends.cuda.matmul.allow_tf32 is in_tf32
        assert torch.backends.cudnn.allow_tf32 is in_tf32
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


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
        (ValueError("out of memory"), False),
    ],
    ids=str,
)
def test_what_memory_that_is_out_is_told_by(error, is_oom):
    assert failures.is_out_of_memory(error) == is_oom
    wrapped = KeyError("wrapped")
    wrapped.__cause__ = error
    assert failures.is_out_of_memory(wrapped) == is_oom
