"""A rehearsal of a run's training on tensors that hold no numbers, and what it allocates.

The code is the training's own, from the model to the optimizer, and that of the library behind the
engine; only the other ranks are missing (`plan.one_rank`). torch is imported here: `plan.memory`
asks for this module once there is something to predict.

Source: `FakeTensorMode` computes shapes, types and strides and allocates nothing,
https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from batchscape.config import DeepSpeed, Transformers
from batchscape.data.datasets import open_dataset
from batchscape.engines import build_engine
from batchscape.errors import BatchscapeError
from batchscape.geometry import BatchGeometry
from batchscape.measure.flops import Operator, tensors_in
from batchscape.measure.memory_report import AllocatedBytes
from batchscape.models.hugging_face import nothing_packed
from batchscape.models.source import without_weights
from batchscape.plan.one_rank import one_rank
from batchscape.record.spec import RunSpec
from batchscape.train.accumulation import rehearse
from batchscape.train.batches import to_device
from batchscape.train.loader import BatchLoader, StepBatches

_CPU = torch.device("cpu")
_OPTIMIZER_STEPS = 2
"""The first makes the optimizer's state, the second is like all later ones."""
_SHAPES_COMPARED = 4
"""Samples whose shapes are compared, spread over the data."""
_CUDA_BLOCK = 512
"""Bytes that CUDA's allocator rounds up to, and counts: `kMinBlockSize` of
c10/cuda/CUDACachingAllocator.cpp."""


class Sample(NamedTuple):
    """Inputs or labels of one sample, as the training is handed them."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Of a batch, in numbers."""
    dtype: torch.dtype
    is_counted: bool
    """Whether the device's meter sees it: a CPU's meter does not see what NumPy allocates."""


class Trace(NamedTuple):
    """What a rehearsal allocated and freed, in order."""

    sizes: NDArray[np.int64]
    """Bytes of each storage, by the number of its birth."""
    events: NDArray[np.int64]
    """Number of a storage, from 1, at its birth; the negative number at its death."""
    phases: tuple[tuple[str, int], ...]
    """Phases in order, each with the number of events before it."""
    attends_by_parts: bool
    """Whether attention kept all scores, as a CPU does with dropout and CUDA never does."""
    lingering: tuple[int, ...]
    """Numbers of storages that a thread of gloo may hold a moment longer than its exchange."""

    def allocated(self, device_type: str, *, lingering: bool = False) -> dict[str, AllocatedBytes]:
        """Return the bytes of each phase, as the meter of a device counts them."""
        block = _CUDA_BLOCK if device_type == "cuda" else 1
        sizes = -(-self.sizes // block) * block
        if not lingering:
            sizes[np.array(self.lingering, dtype=np.int64) - 1] = 0
        totals = np.cumsum(np.sign(self.events) * sizes[np.abs(self.events) - 1])
        totals = np.concatenate(([0], totals))
        ends = [begin for _, begin in self.phases[1:]] + [len(self.events)]
        bytes_by_phase: dict[str, AllocatedBytes] = {}
        for (name, begin), end in zip(self.phases, ends, strict=True):
            phase = bytes_by_phase.setdefault(name, AllocatedBytes())
            phase.see(int(totals[begin : end + 1].max()))
            phase.see(int(totals[end]))
        return bytes_by_phase

    def is_like(self, other: Trace) -> bool:
        """Whether the same storages come and go in the same order, whatever their sizes.

        Storages that die together, such as autocast's casts, have no order among themselves.
        """
        one, two = ((each.phases, each.lingering, each.attends_by_parts) for each in (self, other))
        return one == two and np.array_equal(self._sorted(), other._sorted())

    def _sorted(self) -> NDArray[np.int64]:
        """Return the events, with deaths sorted that neither a birth nor a new phase separates."""
        order = np.arange(len(self.events))
        dies = self.events < 0
        stretches = np.cumsum(np.diff(dies, prepend=False))
        stretches += np.searchsorted([begin for _, begin in self.phases], order, side="right")
        return self.events[np.lexsort((np.where(dies, self.events, order), stretches))]


def sample_of(spec: RunSpec) -> tuple[Sample, Sample]:
    """Return the layout of a few training samples of a run."""
    dataset = open_dataset(spec.config, spec.data, "train")
    spread = np.linspace(0, dataset.num_samples - 1, min(_SHAPES_COMPARED, dataset.num_samples))
    indices = spread.astype(np.int64)
    batches = [to_device(dataset.batch(indices), _CPU, spec.precision)]
    batches += [to_device(dataset.batch(indices[i : i + 1]), _CPU, "") for i in range(len(indices))]
    inputs, labels = zip(*batches, strict=True)
    on_cuda = spec.device_type == "cuda"
    return _common_layout(inputs, on_cuda=on_cuda), _common_layout(labels, on_cuda=on_cuda)


def _common_layout(tensors: tuple[Tensor, ...], *, on_cuda: bool) -> Sample:
    shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
    if len(shapes) > 1:
        raise BatchscapeError(
            f"samples differ in their shape ({', '.join(map(str, sorted(shapes)))}), so that a "
            "micro-batch is as large as the samples in it; pad all of them alike"
        )
    batch = tensors[0]
    return Sample(
        tuple(batch.shape[1:]),
        batch.stride(),
        batch.dtype,
        # What torch has not allocated itself it cannot make larger.
        on_cuda or batch.untyped_storage().resizable(),
    )


def trace(spec: RunSpec, sample: tuple[Sample, Sample], geometry: BatchGeometry) -> Trace:
    """Rehearse a run's training on the rank that holds most; return what it allocates.

    Parameters
    ----------
    spec : RunSpec
        Of an engine that trains in this process, not compiled.
    sample : tuple of Sample
        Of inputs and labels.
    geometry : BatchGeometry
        Of the stage that holds most.

    Raises
    ------
    Exception
        Any error of the model's code, as tensors hold no numbers.
    """
    spec = replace(spec, config=without_weights(spec.config))
    place = one_rank(spec, geometry.data_parallel_size)
    unpacked = nothing_packed() if isinstance(spec.config.model, Transformers) else nullcontext()
    with (
        _caller_undisturbed(),
        place as join,
        unpacked,
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        counter = _StorageCounter(on_cpu=spec.device_type == "cpu")

        def examine(module: nn.Module) -> None:
            join(module)
            if isinstance(spec.config.engine, DeepSpeed):
                counter.answer_outside(module)

        loader = _BlankLoader(sample, geometry, counter)
        # On CUDA the first rank draws outside of the device.
        build = partial(build_engine, spec, _CPU, examine, spec.device_type == "cpu")
        with counter, counter.resizes_seen():
            rehearse(spec, loader, build, counter.phase, _OPTIMIZER_STEPS)
    return counter.trace()


@dataclass
class _LivingStorage:
    """A storage that lives."""

    reference: weakref.ref[Any]
    """Tells of its death."""
    number: int
    """Number of its birth, or of the last change of its size."""


_DEVICE = torch.ops.prim.device.default
_NUMBER = torch.ops.aten._local_scalar_dense.default
_CONVOLUTION = torch.ops.aten.convolution.default
_VIEWS = frozenset(
    {
        torch.ops.aten.as_strided.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.permute.default,
        torch.ops.aten.select.int,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.t.default,
        torch.ops.aten.transpose.int,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten.view.default,
    }
)
_GATHER = torch.ops.c10d._allgather_base_.default
_REDUCE_SCATTER = torch.ops.c10d._reduce_scatter_base_.default
_LINGER_OPERATORS = 100
"""Operators (about a millisecond) for which a thread of gloo may hold a tensor."""


def _view(func: Operator, args: tuple[Any, ...]) -> FakeTensor:
    """Return another view of a tensor without numbers.

    `FakeTensorMode` makes the same, but looks it up in a cache, which takes longer. Half of a
    training's operators are views.
    """
    source: FakeTensor = args[0]
    with in_kernel_invocation_manager(source.fake_mode):
        shape = func(*args)
    return FakeTensor(source.fake_mode, shape, source.fake_device)


class _StorageCounter(TorchDispatchMode):
    """Notes births and deaths of storages."""

    def __init__(self, *, on_cpu: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._on_cpu = on_cpu
        self._alive: dict[int, _LivingStorage] = {}
        self._left_out: set[int] = set()
        self._sizes: list[int] = []
        self._events: list[int] = []
        self._phases: list[tuple[str, int]] = []
        self._attends_by_parts = False
        self._exchanged: set[int] = set()
        """Storages that the last exchange got, while its thread may hold them."""
        self._since_exchange = 0
        """Operators since the last exchange."""
        self._held_by_gloo: list[int] = []
        """Numbers of storages that have died, and that a thread of gloo may still hold."""
        self._lingering: list[int] = []
        """Numbers of all storages that were ever held so."""
        self._answers_zero = False
        """Whether a question for a number is answered, by 0."""

    def answer_outside(self, module: nn.Module) -> None:
        """Let a library read numbers, all of them zeros, outside of the model's forward.

        It reads norms of gradients, and whether they are finite.
        """
        self._answers_zero = True
        module.register_forward_pre_hook(lambda *_: setattr(self, "_answers_zero", False))
        module.register_forward_hook(lambda *_: setattr(self, "_answers_zero", True))

    def phase(self, name: str) -> None:
        self._release_held()  # as the probe does
        self._phases.append((name, len(self._events)))

    def leave_out(self, tensor: Tensor) -> None:
        """Leave a tensor out of the count; it must live as long as this object."""
        self._left_out.add(id(tensor.untyped_storage()))

    def trace(self) -> Trace:
        sizes, events = (np.array(some, dtype=np.int64) for some in (self._sizes, self._events))
        return Trace(
            sizes, events, tuple(self._phases), self._attends_by_parts, tuple(self._lingering)
        )

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Any,  # noqa: ANN401  (of its arguments)
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  (its result)
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two calls in three ask for it
        if func is _NUMBER and self._answers_zero:
            return 0.0 if args[0].dtype.is_floating_point else 0
        self._since_exchange += 1
        if self._since_exchange == _LINGER_OPERATORS:
            self._release_held()
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local part computes, and is counted
        if func is torch.ops.aten._safe_softmax.default:
            self._attends_by_parts = True  # only scaled_dot_product_attention calls it
        source = args[0] if func in _VIEWS and not kwargs else None
        # A tensor that the code makes of numbers keeps them.
        if isinstance(source, FakeTensor) and source.constant is None:
            result = _view(func, args)
        else:
            result = func(*args, **(kwargs or {}))
        if self._on_cpu:
            self._check_kernel(func, args)
        for tensor in tensors_in(result):
            if not isinstance(tensor, DTensor):
                self._record_storage(tensor)
        return result

    def _check_kernel(self, func: Operator, args: tuple[Any, ...]) -> None:
        if func is _CONVOLUTION:
            raise BatchscapeError(
                "a convolution on a CPU copies what it needs within its kernel, as much as the "
                "processor likes; memory of convolutions is predicted only for CUDA devices"
            )
        if func.namespace == "c10d":
            self._exchange(func, args)

    def _exchange(self, func: Operator, args: tuple[Any, ...]) -> None:
        """Count gloo's buffers, and note what its thread may still hold.

        The thread of the earlier exchange holds nothing any more. Gloo gathers into a buffer of its
        own, and copies what it reduces and scatters. Source: torch/csrc/distributed/c10d/
        ProcessGroupGloo.cpp; the sizes as the profiler shows them.
        """
        self._release_held()
        if func is _GATHER:
            self._record_end(self._record_birth(args[0].nbytes))
        elif func is _REDUCE_SCATTER:
            self._record_end(self._record_birth(args[1].nbytes))
            self._hold_for_gloo(args[1].nbytes)
        self._exchanged = {id(tensor.untyped_storage()) for tensor in tensors_in(args)}
        self._since_exchange = 0

    def _hold_for_gloo(self, size: int) -> None:
        if number := self._record_birth(size):
            self._held_by_gloo.append(number)
            self._lingering.append(number)

    def _release_held(self) -> None:
        for number in self._held_by_gloo:
            self._record_end(number)
        self._held_by_gloo.clear()
        self._exchanged.clear()

    def _record_storage(self, tensor: Tensor) -> None:
        if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "meta":
            return  # a library notes a shape by it
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps one object for each storage
        if key not in self._alive and key not in self._left_out:
            number = self._record_birth(storage.nbytes())
            reference = weakref.ref(storage, lambda _: self._record_death(key))
            self._alive[key] = _LivingStorage(reference, number)

    def _record_death(self, key: int) -> None:
        number = self._alive.pop(key).number
        self._record_end(number)
        if key in self._exchanged and number:
            self._hold_for_gloo(self._sizes[number - 1])

    def _record_birth(self, size: int) -> int:
        """Record the birth of a storage; return its number, 0 for one without bytes."""
        if size == 0:
            return 0
        self._sizes.append(size)
        number = len(self._sizes)
        self._events.append(number)
        return number

    def _record_end(self, number: int) -> None:
        if number:
            self._events.append(-number)

    @contextmanager
    def resizes_seen(self) -> Iterator[None]:
        """Record changes of the size of a storage, which are no operators."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:  # noqa: ANN401  (torch's)
            alive = self._alive.get(id(storage))
            if alive is not None:
                self._record_end(alive.number)
                alive.number = self._record_birth(size)
            return resize(storage, size)

        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment, method-assign]  # put back
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]  # as it was


class _BlankLoader(BatchLoader):
    """Micro-batches without content."""

    def __init__(
        self, sample: tuple[Sample, Sample], geometry: BatchGeometry, counter: _StorageCounter
    ) -> None:
        self._sample = sample
        self._geometry = geometry
        # Made once, and left out of the count.
        self._uncounted = {each: self._blank(each) for each in sample if not each.is_counted}
        for tensor in self._uncounted.values():
            counter.leave_out(tensor)

    def step(self, optimizer_step: int, *, sampling: bool = True) -> StepBatches:  # noqa: ARG002
        """Return the micro-batches of a step, with one label."""
        micro_steps = self._geometry.gradient_accumulation_steps
        inputs, labels = self._sample
        batches = ((self._tensor(inputs), self._tensor(labels)) for _ in range(micro_steps))
        return StepBatches(1, micro_steps, batches)

    def _tensor(self, sample: Sample) -> Tensor:
        return self._uncounted[sample] if sample in self._uncounted else self._blank(sample)

    def _blank(self, sample: Sample) -> Tensor:
        shape = (self._geometry.micro_batch_size, *sample.shape)
        return torch.empty_strided(shape, sample.strides, dtype=sample.dtype)


@contextmanager
def _caller_undisturbed() -> Iterator[None]:
    """Restore the random states, which a model's code may use, and stop the garbage collector.

    The collector would free what a rank still holds.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    of_python, of_numpy = random.getstate(), np.random.get_state()
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        if collects:
            gc.enable()
