"""What a step takes with weights cast once, a padded vocabulary, and a loss in parts, on a CPU.

Each is printed beside the plain one, measured in turns in the same process: time of an optimizer
step (the fastest of the rounds), and the peak of living tensors. The last column is the largest
difference from the plain one's losses, of the same samples from the same weights.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from batchscape.config import RunConfig
from batchscape.engines import Engine, build_engine
from batchscape.geometry import solve
from batchscape.measure.memory_cpu import CpuProbe
from batchscape.record.spec import DataIdentity, RunSpec, Stage

LENGTH = 32
PLAIN: dict[str, Any] = {}
"""Settings of the model."""
LOGITS = {
    "plain": PLAIN,
    "loss_chunk=32": {"loss_chunk": 32},
}


def make_run(
    precision: str,
    vocabulary: int,
    width: int,
    *,
    micro_batch_size: int,
    micro_steps: int,
    model: dict[str, Any],
) -> RunSpec:
    config = RunConfig.from_mapping(
        {
            "batch": {
                "micro_batch_size": micro_batch_size,
                "gradient_accumulation_steps": micro_steps,
                "data_parallel_size": 1,
            },
            "model": {"name": "gpt", "n_layers": 2, "n_heads": 4, "d_model": width, **model},
            "data": {"name": "stdlib", "sequence_length": LENGTH},
            "optimizer": {"name": "adamw", "learning_rate": 1e-3},
            "schedule": {"name": "constant"},
            "scaling": {},
            "budget": {"optimizer_steps": 1},
            "evaluation": {"samples": 8},
            "engine": {"name": "ddp", "precision": precision},
            "loader": {},
            "checkpoint": {},
            "measure": {},
            "launcher": {"name": "local", "device": "cpu"},
            "tracker": {"name": "none"},
        }
    )
    geometry = solve(
        data_parallel_size=1,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=micro_steps,
    )
    return RunSpec(
        run_id="benchmark",
        trajectory_id="benchmark",
        sweep_name="benchmark",
        stages=(Stage(geometry.global_batch_size, geometry, config.optimizer),),
        device_type="cpu",
        precision=precision,
        evaluation_every_samples=None,
        data=DataIdentity("hash", "folder", 1000, 100, classes=vocabulary, task="next_token"),
        config=config,
    )


def step(engine: Engine, spec: RunSpec, number: int, *, cast_always: bool) -> float:
    """Do one optimizer step on samples that are drawn for it; return its loss a label."""
    geometry = spec.geometry
    generator = torch.Generator().manual_seed(number)
    shape = (geometry.gradient_accumulation_steps, geometry.micro_batch_size, LENGTH + 1)
    samples = torch.randint(spec.data.classes, shape, generator=generator)
    labels = samples[..., 1:].numel()
    loss_sum = torch.zeros((), dtype=torch.float64)
    for a, tokens in enumerate(samples):
        last = a == len(samples) - 1
        loss_sum += engine.micro_step(tokens[:, :-1], tokens[:, 1:], 1 / labels, last=last)
        if cast_always:
            engine._casts.forget()  # type: ignore[attr-defined]
    engine.optimizer_step(spec.config.optimizer, 1.0)
    return float(loss_sum) / labels


def peak_gib(spec: RunSpec, *, cast_always: bool) -> float:
    with CpuProbe() as probe:
        probe.phase("after_model")
        engine = build_engine(spec, torch.device("cpu"))
        for number, phase in enumerate(("first_backward", "steady", "steady")):
            probe.phase(phase)
            step(engine, spec, number, cast_always=cast_always)
        engine.close()
        del engine
    return probe.report().peak_allocated_gib or 0.0


def compare(title: str, variants: dict[str, tuple[RunSpec, bool]], rounds: int) -> None:
    engines = {}
    for name, (spec, _) in variants.items():
        torch.manual_seed(0)
        engines[name] = build_engine(spec, torch.device("cpu"))
    times: dict[str, list[float]] = {name: [] for name in variants}
    losses: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, (spec, cast_always) in variants.items():
            began = time.perf_counter()
            losses[name].append(step(engines[name], spec, number, cast_always=cast_always))
            times[name].append(time.perf_counter() - began)
    plain = next(iter(variants))
    for engine in engines.values():
        engine.close()
    peaks = {
        name: peak_gib(spec, cast_always=cast_always)
        for name, (spec, cast_always) in variants.items()
    }
    print(title, flush=True)
    for name in variants:
        fastest, reference = (min(times[of][1:]) for of in (name, plain))
        far = max(abs(a - b) for a, b in zip(losses[name], losses[plain], strict=True))
        print(
            f"  {name:28} step {1e3 * fastest:7.1f} ms ({fastest / reference:.2f}x)   "
            f"peak {1024 * peaks[name]:7.1f} MiB ({peaks[name] / peaks[plain]:.2f}x)   "
            f"loss within {far:.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    small = make_run("bfloat16", 256, 128, micro_batch_size=1, micro_steps=8, model=PLAIN)
    compare(
        f"8 micro-steps of 1 x {LENGTH} tokens, vocabulary 256, width 128, bfloat16",
        {"cast in every forward": (small, True), "cast once": (small, False)},
        rounds,
    )
    compare(
        f"1 micro-step of 4 x {LENGTH} tokens, vocabulary 50257, width 32, float32",
        {
            name: (
                make_run("float32", 50257, 32, micro_batch_size=4, micro_steps=1, model=model),
                False,
            )
            for name, model in LOGITS.items()
        },
        rounds,
    )


if __name__ == "__main__":
    main()
