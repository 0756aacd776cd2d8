"""Time of an optimizer step before anything has run, from operations, bytes and peaks.

A device attains some share of its peaks, and nobody knows which before a model has run on it. So
each coefficient of the form in `batchscape.step_time` has a middle and two ends. On CUDA the middle
is fitted to public rows, MosaicML's of MPT models in bfloat16 on A100 and H100
(https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking); the ends enclose
these rows, and where no row tells, they are our estimate. The ends of a step time are those of all
terms together: a range, and no confidence interval.

How many rows it holds, as tests/plan/test_published_step_times.py counts them:

| rows | n | inside | published / middle, 2.5 to 97.5 % | high / low, median |
| --- | ---: | ---: | ---: | ---: |
| fitted: 125M, 350M, 1B, 7B, 13B, 30B | 140 | 140 | 0.79 to 1.52 | 2.8 |
| kept out: 760M, 3B, 70B | 69 | 69 | 0.87 to 1.66 | 2.9 |
| of both over nodes (two to 64) | 67 | 67 | 0.83 to 1.19 | 3.1 |
| torchtitan, kept out | 4 | 4 | 1.11 to 1.32 | 3.4 |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from batchscape.config import AdamW, Command, DeepSpeed, Fsdp, Muon, RunConfig, Sgd, cuts_updates
from batchscape.errors import BatchscapeError
from batchscape.geometry import BatchGeometry
from batchscape.models.source import without_weights
from batchscape.plan.machine import Machine
from batchscape.record.spec import DataIdentity, RunSpec
from batchscape.step_time import weights

if TYPE_CHECKING:
    import torch

    from batchscape.models.build import LossModule


class Range(NamedTuple):
    """A middle and two ends of a figure."""

    low: float
    middle: float
    high: float


_PEAK_SHARE = {"cuda": Range(0.66 / 1.8, 0.66, 0.66 * 1.5), "cpu": Range(0.10, 0.32, 1.0)}
"""Share of the peak that matrix products attain by themselves, recomputed ones included. CUDA: 0.66
is fitted, together with the two middles below, to the logarithms of the step times of MosaicML's
rows but those of 760M, 3B and 70B; all of these were within 1.5 times faster and 1.8 times slower.
CPU: the peak is a product that was timed here; how much less smaller ones attain is our own."""
_TRAFFIC = {"cuda": Range(0.6 / 1.5, 0.6, 0.6 * 1.8), "cpu": Range(0.0, 0.6, 2.0)}
"""Bytes that operators read and write one by one, in the model's own types, which are moved in the
end, over the memory's bandwidth. CUDA: fitted, as above; a compiler's fused kernels move less. CPU:
our own."""
_LINK_TIME_FACTOR = {"cuda": Range(0.78, 0.78, 2.5), "cpu": Range(1.0, 4.5, 20.0)}
"""Time of an exchange over that of its bytes at the link's bandwidth. CUDA, middle: fitted, as
above; of large messages nccl-tests on eight H100 get 370 to 480 of 450 GB/s
(https://github.com/NVIDIA/nccl-tests/issues/212). Low: the same, and the backward hides it. High:
on eight devices at PCIe 5.0 they get 28 of 64 GB/s (https://github.com/NVIDIA/nccl/issues/1639).
CPU: gloo over the loopback, in shares of a copy in memory: our own."""
_MEMORY_SHARE = Range(0.5, 0.7, 1.0)
"""Share of the memory's bandwidth that an update attains, which only reads and writes: our own."""
_KERNEL_S = {"cuda": Range(1e-6, 4e-6, 20e-6), "cpu": Range(0.5e-6, 4e-6, 30e-6)}
"""Time of an operator that does next to nothing. CUDA: an addition of 1,024 numbers takes 1.1 to
1.3 us (https://github.com/pytorch/pytorch/issues/161104); a kernel of 2.9 us takes 3.8 us with its
launch, and 9.6 us where each is waited for (https://developer.nvidia.com/blog/cuda-graphs/). The
high end, with Python, dispatch and autograd before it, is our own, and so are all of a CPU."""
_LOOP_S = Range(0.0, 0.2e-3, 2e-3)
"""Of a micro-step outside the model: its batch is fetched and moved, its loss is kept. Our own."""
_EXCHANGE_S = {"cuda": Range(0.0, 1e-5, 1e-4), "cpu": Range(0.0, 2e-4, 2e-3)}
"""Latency of the exchange of a bucket: our own."""
_BUCKET_BYTES = 25 * 2**20
"""The default of PyTorch's DistributedDataParallel."""
_PROBED_SAMPLES = (2, 4)
"""Samples whose operations are counted: a line through both gives those of any micro-batch."""
_RECOMPUTE_FACTOR = 4 / 3
"""Forward, backward (twice a forward) and forward again, over the first two."""


@dataclass(frozen=True)
class OperationCounts:
    """What a training step of a model consists of."""

    flops: tuple[float, float]
    """Operations of a micro-step: fixed, and a sample."""
    traffic_bytes: tuple[float, float]
    """Bytes that operators of a micro-step read and write: fixed, and a sample."""
    kernels: float
    """Operators of a micro-step."""
    gradient_bytes: int
    tensors: int
    """Tensors of them."""
    orthogonalised_flops: float
    """Operations of one Newton-Schulz iteration on all matrices (Muon)."""


@dataclass(frozen=True)
class Coefficients:
    """Ranges of the coefficients of one training step, and of what lies outside the form."""

    terms: dict[str, Range]
    """By their names in `weights`."""
    rings: tuple[float, float]
    """All-reduces of the whole gradient an optimizer step: fixed, and a micro-step."""

    def step_time_s(self, devices: int, micro: int, accumulation: int) -> Range:
        """Return the range of the step time of a geometry, in seconds.

        At the low end the backward of a micro-step hides an exchange that takes no longer.
        """
        factors = weights(float(devices), float(micro), float(accumulation))
        factors["exchange_s"] *= self.rings[0] + self.rings[1] * accumulation
        low, middle, high = (
            sum(self.terms[name][end] * weight for name, weight in factors.items())
            for end in range(3)
        )
        one = self.terms["micro_step_fixed_s"].low + self.terms["per_sample_s"].low * micro
        hidden = one * (accumulation if self.rings[1] else 1)
        low -= min(hidden, self.terms["exchange_s"].low * factors["exchange_s"])
        return Range(low, middle, high)


class StepTimeRanges:
    """Ranges of step times on one machine.

    A model is built, without values where it can be, and its operations are counted, once for all
    runs that differ in nothing that decides them.

    Parameters
    ----------
    machine : Machine
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._operations: dict[tuple[str, ...], OperationCounts | str] = {}
        self._coefficients: dict[tuple[object, ...], Coefficients | str] = {}
        self._of_cpu: dict[str, float] = {}

    @property
    def way(self) -> str:
        """How these figures were got."""
        return "datasheet" if self._machine.cuda_devices else "peaks of this CPU"

    def of(self, spec: RunSpec, geometry: BatchGeometry) -> Range | str:
        """Return the range of a step time in seconds, or why it is not known."""
        coefficients = self.coefficients(spec, geometry)
        if isinstance(coefficients, str):
            return coefficients
        cut = geometry.micro_batch_size, geometry.gradient_accumulation_steps
        return coefficients.step_time_s(geometry.data_parallel_size, *cut)

    def coefficients(self, spec: RunSpec, geometry: BatchGeometry) -> Coefficients | str:
        """Return the coefficients of a training step, or why they are not known."""
        config = spec.config
        if isinstance(config.engine, Command):
            return "only the program knows its model"
        ranks, nodes = geometry.data_parallel_size, geometry.nodes
        key = (
            *(model := (repr(config.model), repr(config.data), spec.precision)),
            repr(config.engine),
            repr(replace(config.optimizer, learning_rate=1.0)),
            *(ranks, nodes),
        )
        if key not in self._coefficients:
            if model not in self._operations:
                self._operations[model] = _count_operations(config, spec.data, spec.precision)
            facts = self._operations[model]
            self._coefficients[key] = (
                facts if isinstance(facts, str) else self._price(facts, spec, ranks, nodes)
            )
        return self._coefficients[key]

    def _price(
        self, facts: OperationCounts, spec: RunSpec, ranks: int, nodes: int
    ) -> Coefficients | str:
        config, kind, precision = spec.config, spec.device_type, spec.precision
        engine, cluster = config.in_process, self._machine.cluster
        listed_peak = cluster.peak_tflops(precision, engine.float32_matmul)[1]
        peak = listed_peak or self._measure_peak(kind, precision)
        memory = cluster.memory_gb_per_s or self._measure_peak(kind, "memory")
        links = self._links(kind, ranks, nodes)
        missing = {f"cluster.tflops.{precision}": peak, "cluster.memory_gb_per_s": memory} | links
        if unknown := [name for name, value in missing.items() if value is None]:
            return f"no datasheet here has it: give {', '.join(unknown)}"
        flops_per_s, bytes_per_s = 1e12 * (peak or 0), 1e9 * (memory or 0)
        sent_s = facts.gradient_bytes / (
            1e9 * min((each or 0 for each in links.values()), default=1)
        )
        shared = max(1.0, ranks / self._machine.devices(kind))
        # The cores of a machine have one memory.
        ranks_per_memory = float(ranks) if kind == "cpu" else shared
        recompute_factor = _RECOMPUTE_FACTOR if engine.activation_checkpointing else 1.0
        launch_s = _KERNEL_S[kind]._replace(low=0.0) if engine.compile else _KERNEL_S[kind]

        def micro(flops: float, traffic: float, kernels: float, loop: Range) -> Range:
            ends = zip(reversed(_PEAK_SHARE[kind]), _TRAFFIC[kind], launch_s, loop, strict=True)
            return Range(
                *(
                    recompute_factor * shared * (flops / (flops_per_s * share) + kernels * launched)
                    + recompute_factor * ranks_per_memory * traffic * done / bytes_per_s
                    + outside
                    for share, done, launched, outside in ends
                )
            )

        parts = zip(facts.flops, facts.traffic_bytes, (facts.kernels, 0.0), strict=True)
        fixed, sample = (
            micro(*part, loop) for part, loop in zip(parts, (_LOOP_S, Range(0, 0, 0)), strict=True)
        )
        buckets = math.ceil(facts.gradient_bytes / _BUCKET_BYTES)
        update = _update(
            facts, config, ranks, bytes_per_s=bytes_per_s, flops_per_s=flops_per_s, kind=kind
        )
        terms = {
            "micro_step_fixed_s": fixed,
            "per_sample_s": sample,
            "exchange_s": Range(
                *(
                    shared * (sent_s * times + buckets * latency)
                    for times, latency in zip(
                        _LINK_TIME_FACTOR[kind], _EXCHANGE_S[kind], strict=True
                    )
                )
            ),
            "optimizer_s": Range(*(ranks_per_memory * end for end in update)),
        }
        return Coefficients(terms, rings(config))

    def _links(self, kind: str, ranks: int, nodes: int) -> dict[str, float | None]:
        """Return the bandwidths that a rank's part of an exchange goes through, by their settings.

        NCCL lays a ring through each card of a node, so that all of them send at a time. Source:
        https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/.
        """
        cluster, on_node = self._machine.cluster, ranks // nodes
        links = {}
        if on_node > 1:
            link = cluster.link_gb_per_s or self._measure_peak(kind, "memory")
            links["cluster.link_gb_per_s"] = link
        if nodes > 1:
            card = cluster.network_gb_per_s
            cards = on_node if kind == "cuda" else 1
            links["cluster.network_gb_per_s"] = None if card is None else card * cards
        return links

    def _measure_peak(self, kind: str, what: str) -> float | None:
        """Measure a peak of this CPU with one thread, as a rank has."""
        if kind != "cpu":
            return None
        if what not in self._of_cpu:
            import torch

            from batchscape.measure.peak import copy_gb_per_s, product_tflops

            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                self._of_cpu[what] = copy_gb_per_s() if what == "memory" else product_tflops(what)
            finally:
                torch.set_num_threads(threads)
        return self._of_cpu[what]


def rings(config: RunConfig) -> tuple[float, float]:
    """Return what engines exchange, in all-reduces of the whole gradient.

    Parameters
    ----------
    config : RunConfig

    Returns
    -------
    fixed, a_micro_step : float
        An all-reduce is a reduction and a gathering of the same bytes. Where parameters are
        sharded they are gathered for the forward, and again for the backward if they were given
        back (ZeRO, Rajbhandari et al. 2020, arXiv 1910.02054, section 7).
    """
    engine = config.engine
    if isinstance(engine, Fsdp):
        gathered = 1.0 if engine.reshard_after_forward else 0.5
        return 0.5, gathered
    if isinstance(engine, DeepSpeed) and engine.zero_stage == 3:
        return 0.0, 1.5
    if isinstance(engine, DeepSpeed) and engine.zero_stage == 2:
        return 0.5, 0.5
    return 1.0, 0.0


def _update(
    facts: OperationCounts,
    config: RunConfig,
    ranks: int,
    *,
    bytes_per_s: float,
    flops_per_s: float,
    kind: str,
) -> Range:
    """Return the time of clipping and update: bytes, Muon's products, and a kernel a tensor."""
    optimizer = config.optimizer
    # Parameter, gradient and moments are read, parameter and moments are written.
    if isinstance(optimizer, AdamW):
        touched = 7
    elif isinstance(optimizer, Sgd):
        touched = 5 if optimizer.momentum else 3
    else:
        touched = 5
    # A norm reads the gradient, clipping reads and writes it, and it is set to zero; Muon gives
    # some parameters two moments.
    more = 4 if optimizer.gradient_clip_norm else 1
    more += 2 if isinstance(optimizer, Muon) else 0
    number = facts.gradient_bytes
    parts = ranks if cuts_updates(config.engine) else 1
    products = facts.orthogonalised_flops * (
        optimizer.newton_schulz_steps if isinstance(optimizer, Muon) else 0
    )
    shares = zip((0, more / 2, more), reversed(_MEMORY_SHARE), strict=True)
    low, middle, high = (
        (touched + extra) * number / bytes_per_s / share for extra, share in shares
    )
    launches = (touched + more) * facts.tensors
    return Range(
        low / parts,
        # Where kernels are fused each launch is of many tensors.
        middle / parts + products / (flops_per_s * _PEAK_SHARE[kind].middle) + _LOOP_S.middle,
        high
        + products / (flops_per_s * _PEAK_SHARE[kind].low)
        + launches * _KERNEL_S[kind].high
        + _LOOP_S.high,
    )


def _count_operations(
    config: RunConfig, data: DataIdentity, precision: str
) -> OperationCounts | str:
    """Count the operations of a model; return the reason where that is not possible."""
    import numpy as np
    import torch

    from batchscape.data.datasets import open_dataset
    from batchscape.measure.flops import model_operations
    from batchscape.train.batches import to_device

    config = without_weights(config)
    try:
        with torch.random.fork_rng(devices=[]):
            module = _build_without_values(config, data, precision)
            dataset = open_dataset(config, data, "train")
            operations = []
            for samples in _PROBED_SAMPLES:
                indices = np.arange(samples, dtype=np.int64) % dataset.num_samples
                batch = to_device(dataset.batch(indices), torch.device("cpu"), precision)
                operations.append(model_operations(module, *batch))
    except BatchscapeError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  (of the user's own code; its run will tell)
        return f"the model cannot be built here: {type(error).__name__}: {error}"
    fewer, more = operations
    if fewer is None or more is None:
        return "operations of this model cannot be counted"

    def line(low: float, high: float) -> tuple[float, float]:
        slope = (high - low) / (_PROBED_SAMPLES[1] - _PROBED_SAMPLES[0])
        return max(0.0, low - slope * _PROBED_SAMPLES[0]), slope

    trained = [p for p in module.parameters() if p.requires_grad]
    return OperationCounts(
        flops=line(fewer.flops, more.flops),
        traffic_bytes=line(fewer.traffic_bytes, more.traffic_bytes),
        kernels=fewer.kernels,
        gradient_bytes=sum(p.nbytes for p in trained),
        tensors=len(trained),
        orthogonalised_flops=sum(_newton_schulz(p) for p in trained),
    )


def _build_without_values(config: RunConfig, data: DataIdentity, precision: str) -> LossModule:
    """Build a model without values, or really where its code does not let that be."""
    import torch

    from batchscape.models.build import build_model

    try:
        with torch.device("meta"):
            return build_model(config, data, precision)
    except Exception:  # noqa: BLE001  (of the user's own code)
        return build_model(config, data, precision)


def _newton_schulz(parameter: torch.Tensor) -> float:
    """Count an iteration aX + (bA + cA^2)X with A = XX^T, of a matrix n x m: n is the smaller side.

    Source: K. Jordan, Muon, 2024, https://kellerjordan.github.io/posts/muon/.
    """
    if parameter.ndim != 2:
        return 0.0
    small, large = sorted(parameter.shape)
    return 4.0 * small * small * large + 2.0 * small**3
