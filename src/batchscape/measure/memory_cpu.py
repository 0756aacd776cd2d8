"""Peak memory on CPU: a rehearsal of the training, under the allocator's own events."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function

from batchscape.measure.memory_report import (
    OUTSIDE,
    AllocatedBytes,
    MemoryReport,
)
from batchscape.system import GIB

_METHOD = "cpu allocator events"
_MARK = "batchscape memory phase: "
_BEGIN, _END = "begin", "end"
_CPU = 0
"""Device type of the CPU in a trace (`c10::DeviceType`)."""
_SETTLE_S = 0.01
"""Time for a communication thread to let go of what it has just exchanged."""
_LAST_SETTLE_S = 0.25
"""The same once at the end, where on a busy machine a late thread would cost all figures."""
_MAX_UNEXPLAINED = 1e-3
"""Part of the peak that may stay alive after the rehearsal: caches that a library keeps."""

_ProfilerEvent = Mapping[str, Any]


class CpuProbe:
    """Counts the bytes of living CPU tensors while a training is rehearsed.

    ::

        with CpuProbe() as probe:
            rehearse(probe.phase)  # builds model, engine and optimizer; does three steps
        report = probe.report()

    Everything must be built within the `with` (memory that was there before is not counted) and
    dropped before it ends: then the books close, and a block whose release was missed is found
    out. Under several ranks each has its own probe, at the same time. The caller resets the
    random state afterwards. Two micro-steps stand for any higher number: the second one meets
    the gradients of the first, and the third meets nothing more.

    Every allocation of torch's CPU allocator counts, in C++ too, with its requested size; memory
    that libraries take by themselves (scratch space of oneDNN, sockets, NumPy) does not.

    Notes
    -----
    Source: the profiler's `[memory]` events, https://docs.pytorch.org/docs/stable/profiler.html.
    Torch writes one line to stderr when a tensor from before is released under the probe.
    """

    def __init__(self) -> None:
        self._phase = OUTSIDE
        self._trained_bytes = 0
        self._opened = ExitStack()
        self._report: MemoryReport | None = None

    def __enter__(self) -> CpuProbe:
        # Or garbage from before would be released, and remarked upon, under the probe.
        gc.collect()
        with ExitStack() as opening:
            opening.enter_context(_count_all_threads())
            hook = register_optimizer_step_post_hook(self._note_trained)
            opening.callback(hook.remove)
            # Without `acc_events`, which makes Python objects of all events: the trace is read.
            self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            with _quiet_profiler():
                self._profiler.start()
            opening.callback(self._profiler.stop)
            self._opened = opening.pop_all()
        _mark(_BEGIN)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._opened:
            if kind is None:
                gc.collect()
                _mark(_END, _LAST_SETTLE_S)
        profiler = self._profiler
        del self._profiler
        if kind is None:
            with tempfile.TemporaryDirectory(prefix="batchscape-") as folder_name:
                path = Path(folder_name) / "trace.json"
                profiler.export_chrome_trace(str(path))
                events: list[_ProfilerEvent] = json.loads(path.read_bytes())["traceEvents"]
            self._report = _judge(_replay(events), self._trained_bytes)

    def phase(self, name: str) -> None:
        """Begin one of `PHASES`, or `OUTSIDE`, which ends the one before.

        Naming the current one changes nothing.
        """
        if name != self._phase:
            _mark(name)
            self._phase = name

    def report(self) -> MemoryReport:
        """Return what was measured, once the rehearsal has ended."""
        if self._report is None:
            raise AssertionError(
                "a CpuProbe reports after its `with` block has ended without an error"
            )
        return self._report

    def _note_trained(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        """Note the bytes of parameters, gradients and state that an optimizer works on."""
        parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        gradients = [tensor.grad for tensor in parameters]
        states = [value for state in optimizer.state.values() for value in state.values()]
        storages: dict[int, int] = {}
        for tensor in (*parameters, *gradients, *states):
            if isinstance(tensor, torch.Tensor):
                # Of a tensor that is cut over ranks, only this rank's part is here.
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                storage = local.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        self._trained_bytes = max(self._trained_bytes, sum(storages.values()))


def _mark(name: str, settle_s: float = _SETTLE_S) -> None:
    """Put a mark into the trace, and read the allocator's total within it."""
    if dist.is_available() and dist.is_initialized():
        time.sleep(settle_s)
    with record_function(_MARK + name):
        torch.empty(1, device="cpu")


@contextmanager
def _count_all_threads() -> Iterator[None]:
    """Let the allocator's total see every thread, not only those that the profiler follows.

    A gloo thread is often the last to hold what it has exchanged: one DDP construction in
    twenty then seems to keep a copy of the model for ever. The switch is a flag of torch's core
    library that has no door in Python. Where it is missing, such a rehearsal ends with books
    that do not close, and reports no figures.
    """
    try:
        flag = ctypes.c_bool.in_dll(
            ctypes.CDLL(torch._C.__file__), "FLAGS_caffe2_report_cpu_memory_usage"
        )
    except ValueError:
        yield
        return
    before = flag.value
    flag.value = True
    try:
        yield
    finally:
        flag.value = before


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Keep the tracing library, which reads its log level at its first start, from printing.

    And some releases of torch from warning that events of one cycle only are kept.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        if "KINETO_LOG_LEVEL" in os.environ:
            yield
            return
        os.environ["KINETO_LOG_LEVEL"] = "99"
        try:
            yield
        finally:
            del os.environ["KINETO_LOG_LEVEL"]


def _replay(events: Sequence[_ProfilerEvent]) -> dict[str, AllocatedBytes]:
    """Return what was allocated in each phase, relative to the begin of the probe.

    Each `[memory]` event carries the allocator's total after it, so a phase's peak needs no sum
    over events, and events of several threads may come in any order. A phase ends with the total
    read within the next mark: other threads may have released memory since its last event.
    """
    points: list[tuple[float, int | str | None]] = []
    for event in events:
        name = event.get("name", "")
        if name == "[memory]" and event["args"]["Device Type"] == _CPU:
            points.append((event["ts"], event["args"]["Total Allocated"]))
        elif name.startswith(_MARK):
            points.append((event["ts"], None))
            points.append((event["ts"] + event["dur"], name.removeprefix(_MARK)))
    points.sort(key=itemgetter(0))
    bytes_by_phase: dict[str, AllocatedBytes] = {}
    current: AllocatedBytes | None = None
    in_mark = False
    total = base = 0
    for _, point in points:
        if isinstance(point, int):
            total = point
            if current is not None and not in_mark:
                current.see(total - base)
        elif point is None:
            in_mark = True
        else:
            if current is None:
                base = total
            else:
                current.last = total - base
            in_mark = False
            current = bytes_by_phase.setdefault(point, AllocatedBytes())
            current.see(total - base)
    return bytes_by_phase


def _judge(phases: Mapping[str, AllocatedBytes], trained_bytes: int) -> MemoryReport:
    """Return the figures, or why they cannot be trusted."""
    if _BEGIN not in phases or _END not in phases:
        return MemoryReport(_METHOD, problem="the profiler recorded no allocations")
    kept_bytes = phases[_END].last
    peak = max(phase.peak for phase in phases.values())
    if abs(kept_bytes) > _MAX_UNEXPLAINED * peak:
        problem = (
            f"{kept_bytes / GIB:.6f} GiB of a peak of {peak / GIB:.6f} were still allocated after "
            "the rehearsal: something was kept, or its release was not seen"
        )
        return MemoryReport(_METHOD, problem=problem)
    updating = phases["first_optimizer_step"].peak if "first_optimizer_step" in phases else peak
    if updating < trained_bytes:
        problem = (
            f"{updating / GIB:.6f} GiB were seen in the optimizer step, but its parameters, "
            f"gradients and state hold {trained_bytes / GIB:.6f}: the probe began too late"
        )
        return MemoryReport(_METHOD, problem=problem)
    return MemoryReport.from_bytes(_METHOD, phases)
