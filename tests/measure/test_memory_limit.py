"""Limits of memory: real allocations against them, and trainings that fit and that do not."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from batchscape.measure.memory_limit import lift_memory_limit, memory_limit, not_charged
from batchscape.measure.memory_process import PrivatePeak, process_memory
from batchscape.record.folder import RunFolder
from batchscape.record.spec import RunSpec
from batchscape.record.tables import read_table

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is of Linux")

CPU = torch.device("cpu")
MIB = 2**20
Numbers = dict[str, Any]


def use_up_the_heap() -> None:
    """Take what the C library keeps of earlier tests: blocks from there meet no limit."""
    malloc, here = ctypes.CDLL(None).malloc, psutil.Process()
    malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    before = here.memory_info().data
    while here.memory_info().data == before:
        malloc(16 * MIB)


def in_a_child(body: Callable[[], Numbers]) -> Numbers:
    """Fork, so that no limit and no fragment stays; return what the child found."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            # The threads that torch had started are not in the child, which would wait for them.
            torch.set_num_threads(1)
            use_up_the_heap()
            os.write(writing, json.dumps(body()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text)


def private(mib: int) -> mmap.mmap:
    """Map private memory of the kernel's, which no block that the C library keeps can stand for."""
    return mmap.mmap(-1, mib * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def touched(mib: int) -> mmap.mmap:
    memory = private(mib)
    for page in range(0, len(memory), mmap.PAGESIZE):
        memory[page] = 1
    return memory


def fits(mib: int) -> bool:
    """Whether a tensor of that size can be had now."""
    try:
        torch.ones(mib * MIB // 4)
    except RuntimeError as error:
        if "DefaultCPUAllocator: can't allocate" not in str(error):
            raise
        return False
    return True


def test_what_a_process_takes_above_its_start_is_limited() -> None:
    def body() -> Numbers:
        before = torch.ones(300 * MIB // 4)  # not charged: it was there before
        with memory_limit(CPU, 0.25):
            under = [fits(192), fits(320)]
            held = torch.ones(128 * MIB // 4)
            beside = [fits(64), fits(192)]
        return {"under": under, "beside": beside, "after": fits(512), "n": len(before) + len(held)}

    result = in_a_child(body)
    assert result["under"] == [True, False]
    assert result["beside"] == [True, False]
    assert result["after"], "the limit ends with its block"


@pytest.mark.slow
def test_other_allocators_meet_the_limit_with_a_memory_error() -> None:
    def body() -> Numbers:
        results = []
        with memory_limit(CPU, 0.125):
            for take in (lambda: bytearray(256 * MIB), lambda: np.ones(32 * MIB)):
                try:
                    take()
                except MemoryError:
                    results.append(take.__name__)
        return {"refused": len(results)}

    assert in_a_child(body) == {"refused": 2}


def test_mapped_files_and_shared_memory_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "data.npy"
    np.save(path, np.zeros(32 * MIB))

    def body() -> Numbers:
        with memory_limit(CPU, 0.03125):
            total = float(np.load(path, mmap_mode="r").sum())
            with mmap.mmap(-1, 128 * MIB) as shared:
                shared[-1] = 1
        return {"total": total}

    assert in_a_child(body) == {"total": 0.0}


KEPT = """
import contextlib, sys
import psutil, torch
from batchscape.measure.memory_limit import memory_limit

torch.set_num_threads(1)
limited = sys.argv[1] == "limited"
with memory_limit(torch.device("cpu"), 1.0) if limited else contextlib.nullcontext():
    before = psutil.Process().memory_info().data
    torch.ones(2**22)  # once freed, from here on the C library would keep as much
    several = [torch.ones(2**18) for _ in range(64)]
    del several[::2]
    print(psutil.Process().memory_info().data - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "least", "most"), [("limited", 31, 34), ("free", 60, 90)])
def test_freed_memory_goes_back_as_on_a_device(how: str, least: int, most: int) -> None:
    """Of 64 MiB each second one is freed, in an interpreter whose heap has no room yet."""
    process = subprocess.run([sys.executable, "-c", KEPT, how], capture_output=True, check=True)
    assert least <= int(process.stdout) / MIB <= most


def test_what_is_done_aside_is_not_charged_nor_what_it_leaves() -> None:
    def body() -> Numbers:
        with memory_limit(CPU, 0.25):
            with not_charged():
                kept = torch.ones(512 * MIB // 4)
            return {"fits": [fits(192), fits(320)], "n": len(kept)}

    assert in_a_child(body)["fits"] == [True, False]


def test_a_process_that_a_limited_one_forks_can_be_free() -> None:
    def body() -> Numbers:
        with memory_limit(CPU, 0.125):
            forked = in_a_child(lambda: {"inherited": fits(256)})

            def lifted() -> Numbers:
                lift_memory_limit()
                return {"lifted": fits(256)}

            return {**forked, **in_a_child(lifted)}

    assert in_a_child(body) == {"inherited": False, "lifted": True}


@pytest.mark.slow
def test_a_users_own_limit_stays_in_force() -> None:
    """`ulimit -d` below ours decides, and is there again afterwards."""
    code = (
        "import resource, torch\n"
        "from batchscape.measure.memory_limit import memory_limit\n"
        "with memory_limit(torch.device('cpu'), 64.0):\n"
        "    print(resource.getrlimit(resource.RLIMIT_DATA)[0])\n"
        "print(resource.getrlimit(resource.RLIMIT_DATA)[0])\n"
    )
    command = ["/bin/sh", "-c", 'ulimit -S -d 4194304; exec "$0" -c "$1"', sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(4 * 2**30)] * 2


def test_no_limit_does_nothing() -> None:
    def body() -> Numbers:
        with memory_limit(CPU, None), not_charged():
            lift_memory_limit()
            return {"fits": fits(256)}

    assert in_a_child(body) == {"fits": True}


def test_the_peak_above_the_start_leaves_out_what_was_done_aside() -> None:
    def body() -> Numbers:
        peak = PrivatePeak()
        touched(64).close()
        first = peak.taken_gib()
        peak.settle()
        touched(512).close()
        peak.resume()
        aside = peak.taken_gib()
        held = touched(128)
        return {"first": first, "aside": aside, "held": peak.taken_gib(), "n": len(held)}

    result = in_a_child(body)
    # The kernel rounds resident memory by some pages a core.
    assert 63.5 <= result["first"] * 1024 < 66
    assert result["aside"] == pytest.approx(result["first"], abs=0.008)
    assert 128 <= result["held"] * 1024 < 130


def test_the_peak_is_of_what_the_limit_counts(tmp_path: Path) -> None:
    """Not of files, nor of shared memory; of private memory also if it was never touched."""
    path = tmp_path / "data.npy"
    np.save(path, np.zeros(8 * MIB))

    def body() -> Numbers:
        results = {}
        with memory_limit(CPU, 0.125):
            peak = PrivatePeak()
            mapped = np.load(path, mmap_mode="r")
            mapped.sum()
            results["file"] = peak.taken_gib()
            shared = mmap.mmap(-1, 64 * MIB)
            for page in range(0, len(shared), mmap.PAGESIZE):
                shared[page] = 1
            results["shared"] = peak.taken_gib()
            held = private(48)
            results["untouched"] = peak.taken_gib()
            touched(32).close()
            results["both"] = peak.taken_gib()
        return {**results, "n": len(held) + len(mapped) + len(shared)}

    results = in_a_child(body)
    assert results["file"] * 1024 < 2
    assert results["shared"] * 1024 < 2
    assert 48 <= results["untouched"] * 1024 < 50
    assert 79.5 <= results["both"] * 1024 < 82


def test_a_peak_that_the_system_does_not_tell_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refuse)
    assert PrivatePeak().taken_gib() is None


def test_the_highest_resident_memory_of_the_process_is_not_forgotten() -> None:
    def body() -> Numbers:
        torch.ones(256 * MIB // 4)
        before = process_memory().peak_rss_gib
        PrivatePeak()
        return {"before": before, "after": process_memory().peak_rss_gib}

    result = in_a_child(body)
    assert result["after"] == pytest.approx(result["before"], abs=0.001)


@pytest.fixture(scope="module")
def limited(trainer: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunFolder]:
    """Train one small run, with a limit or without, to whatever end."""

    def train(gib: float | None, **settings: Any) -> RunFolder:
        spec: RunSpec = trainer.make_spec(
            (1, 32, 2),
            measure__memory=True,
            device={"memory_limit_gib": gib},
            **{"budget": {"optimizer_steps": 4}, **settings},
        )
        spec = replace(spec, run_id=f"limit-{gib}-{len(settings)}")
        folder: RunFolder = trainer.start(spec, tmp_path_factory.getbasetemp() / "limited")
        trainer.wait(spec)
        return folder

    return train


@pytest.mark.slow
def test_a_training_that_fits_is_the_same_with_a_limit_and_without(
    limited: Callable[..., RunFolder], steps: Callable[..., Any], outcome: Callable[..., Any]
) -> None:
    """Losses and every figure of allocated memory, byte for byte."""
    free, held = limited(None), limited(0.5)
    for folder in (free, held):
        assert outcome(folder)["status"] == "completed", folder.log.read_text()
    ours, theirs = (steps(folder)["loss"].to_numpy(float).tobytes() for folder in (free, held))
    assert ours == theirs
    (one,), (other,) = (read_table(f, "ranks").to_dict("records") for f in (free, held))
    names = [name for name in one if "allocated" in name]
    assert len(names) == 5
    assert {name: one[name] for name in names} == {name: other[name] for name in names}
    # The limit counts more than tensors do: about what the process took.
    assert one["peak_allocated_gib"] < other["peak_taken_gib"] < 0.5


@pytest.mark.slow
def test_the_peak_of_a_training_is_within_the_limit_and_grows_as_its_tensors_do(
    trainer: Any, tmp_path: Path, outcome: Callable[..., Any]
) -> None:
    limit, results = 0.25, []
    # At 128 a training in twenty runs out of memory: what threads take varies.
    for micro in (16, 48, 96):
        spec: RunSpec = trainer.make_spec(
            (1, micro, 2),
            measure__memory=True,
            budget={"optimizer_steps": 3},
            device={"memory_limit_gib": limit},
        )
        folder: RunFolder = trainer.start(spec, tmp_path)
        trainer.wait(spec)
        assert outcome(folder)["status"] == "completed", folder.log.read_text()
        (row,) = read_table(folder, "ranks").to_dict("records")
        results.append((row["peak_allocated_gib"], row["peak_taken_gib"]))
    tensors, taken = zip(*results, strict=True)
    page = mmap.PAGESIZE / 2**30
    assert all(one < other <= limit + page for one, other in results)
    assert taken[0] < 0.06, "without the pages of libraries, which are 0.05 alone"
    for number in (1, 2):
        more = tensors[number] - tensors[0]
        assert more <= taken[number] - taken[0] + 0.01
        # The C library keeps freed blocks, and gives large ones back late.
        assert taken[number] - taken[0] <= 6 * more, results


@pytest.mark.slow
def test_a_training_that_does_not_fit_ends_out_of_memory(
    limited: Callable[..., RunFolder], outcome: Callable[..., Any]
) -> None:
    folder = limited(0.01)
    ended = outcome(folder)
    assert ended["status"] == "oom"
    assert ended["cause"] == "out_of_memory"
    assert ended["phase"] in {"start", "forward", "backward", "optimizer"}
    assert ended["peak_memory_gib"] > 0.01
    assert ended["peak_memory_method"] == "resident"
    assert "out of memory" in ended["reason"]


@pytest.mark.slow
def test_workers_of_the_loader_are_not_limited(
    limited: Callable[..., RunFolder], outcome: Callable[..., Any]
) -> None:
    """A data set that takes more than the limit, for a moment, in each worker."""
    folder = limited(
        0.5,
        loader={"workers": 1},
        data={"name": "custom", "_target_": "own_data.Greedy"},
        model={"name": "mlp", "hidden_sizes": [8]},
        budget={"optimizer_steps": 2},
    )
    assert outcome(folder)["status"] == "completed", folder.log.read_text()
