"""What a rank decides before and after its training."""

from __future__ import annotations

import errno
import os
import traceback

import pytest
import torch
import torch.distributed as dist

from batchscape.programs.endings import ending
from batchscape.record import heartbeat
from batchscape.train import failures, ranks, worker
from batchscape.train.batches import to_device


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


@pytest.mark.parametrize(("variables", "expected"), [(None, "WARN"), ("INFO", "INFO")])
def test_nccl_says_why_it_fails_unless_it_was_told_otherwise(
    tmp_path, monkeypatch, variables, expected
):
    monkeypatch.setenv("NCCL_DEBUG", "to be put back")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "to be put back")
    monkeypatch.delenv("NCCL_DEBUG")
    if variables is not None:
        monkeypatch.setenv("NCCL_DEBUG", variables)
    calls = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda *_, **__: calls.append(os.environ["NCCL_DEBUG"])
    )
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    launch = launched("cuda", 2, 2) | {"rendezvous": str(tmp_path / "meeting")}
    with worker._process_group(launch, 0, torch.device("cuda", 0), 1.0):
        assert calls == [expected]


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


@pytest.mark.parametrize(("reduced", "column"), [(False, "float32"), (True, "reduced")])
def test_what_decides_rounding_is_read_from_torch_itself(monkeypatch, reduced, column):
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
        columns = ranks._cuda_columns()
    finally:
        products.allow_bf16_reduced_precision_reduction = before
        products.allow_fp16_reduced_precision_reduction = True
        torch.backends.cudnn.allow_tf32 = True
    assert columns == {
        "reduction_precision": column,
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


DEVICE = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
IN_PIN_THREAD = RuntimeError(
    "Caught AcceleratorError in pin memory thread for device 0.\nOriginal Traceback (most recent "
    "call last):\ntorch.AcceleratorError: CUDA error: out of memory"
)
ONEDNN = RuntimeError("could not create a primitive")
HOST, OUTSIDE = "; that is the memory of the host", "; it was not in an optimizer step"


def pinned(error):
    """Return what a batch raises whose memory cannot be pinned."""

    def refuse(_self):
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", refuse)
        with pytest.raises((MemoryError, RuntimeError)) as raised:
            to_device((torch.zeros(1), torch.zeros(1)), torch.device("cuda", 0), "float32")
    return raised.value


@pytest.mark.parametrize(
    ("error", "place", "phase", "others", "limit_gib", "message"),
    [
        (DEVICE, "cuda:0", "forward", 0, None, None),
        (DEVICE, "cuda:0", "forward", None, None, None),  # a driver that does not tell
        (DEVICE, "cuda:0", "data", 0, None, None),
        (DEVICE, "cuda:0", "start", 0, None, None),  # the model itself
        (RuntimeError("CUDA error: out of memory"), "cuda:0", "forward", 0, None, None),
        (DEVICE, "cuda:0", "backward", 1, None, "; 1 process of others holds memory of the device"),
        (DEVICE, "cuda:0", "backward", 2, None, "; 2 processes of others hold memory of"),
        (DEVICE, "cuda:0", "backward", 2, 8.0, None),  # a limit is a memory of its own
        (DEVICE, "cuda:0", "evaluation", 0, None, OUTSIDE),
        (DEVICE, "cuda:0", "evaluation", 0, 8.0, OUTSIDE),
        (DEVICE, "cuda:0", "checkpoint", 0, None, OUTSIDE),
        (MemoryError(), "cuda:0", "forward", 0, None, HOST),
        (IN_PIN_THREAD, "cuda:0", "data", 0, None, HOST),
        (pinned(RuntimeError("CUDA error: out of memory")), "cuda:0", "data", 0, None, HOST),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "cuda:0", "data", 0, None, HOST),
        (MemoryError(), "cpu", "forward", 0, None, None),  # there the host is the device
        (MemoryError(), "cpu", "evaluation", 0, 1.0, OUTSIDE),
        (ONEDNN, "cpu", "forward", 0, 1.0, None),
        (ONEDNN, "cpu", "evaluation", 0, 1.0, OUTSIDE),
    ],
)
def test_memory_that_is_out_is_the_trainings_end_only_where_it_is_the_trainings(
    spec_of, monkeypatch, error, place, phase, others, limit_gib, message
):
    devices = []

    def foreign(device, ranks_on_node):
        devices.append((str(device), ranks_on_node))
        return others

    monkeypatch.setattr(failures, "foreign_processes", foreign)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 * 2**30)
    spec = spec_of((2, 16, 1), device={"memory_limit_gib": limit_gib})
    heartbeat.beat(heartbeat.Phase(phase), 4)
    ended = failures.failure_of(error, 3, torch.device(place), spec)
    counted = "allocated" if place == "cuda:0" and message != HOST else "resident"
    assert ended.peak_memory_method == counted
    assert ended.reason.startswith(f"out of memory in {phase}")
    if message is None:
        assert (ended.status, ended.cause, ended.phase) == ("oom", "out_of_memory", phase)
        assert ended.reason.endswith(counted)
    else:
        assert (ended.status, ended.cause, ended.phase) == ("failed", "other_memory", phase)
        assert f"{counted}{message}" in ended.reason
    assert set(devices) <= {("cuda:0", 2)}


def test_what_onednn_cannot_make_is_for_want_of_memory_only_under_a_limit(spec_of):
    """It says the same of an error of its own."""
    ended = failures.failure_of(ONEDNN, 3, torch.device("cpu"), spec_of((1, 16, 1)))
    assert (ended.status, ended.cause) == ("failed", "exception")


def test_an_error_of_pinning_that_is_not_of_memory_stays_what_it_is():
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert pinned(error) is error
