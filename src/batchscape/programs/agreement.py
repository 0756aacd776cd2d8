"""Whether a program trained what was planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from batchscape.programs.metrics import Log
from batchscape.record.spec import RunSpec

NOT_OBSERVED = "not observed"
_NAMES = (
    "world_size",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
    "tokens_per_optimizer_step",
)


def observed_batch(log: Log, launcher_world_size: int | None) -> dict[str, Any]:
    """Return what was observed of the batch, and where."""
    observed: dict[str, Any] = {}
    for name in _NAMES:
        value = getattr(log.observed, name)
        source = log.observed.sources.get(name, "the program's metrics")
        if value is None and name == "world_size" and launcher_world_size is not None:
            value, source = launcher_world_size, "WORLD_SIZE in the environment of its processes"
        observed[name] = value
        observed[f"{name}_source"] = NOT_OBSERVED if value is None else source
    return observed


def contradictions(spec: RunSpec, log: Log, observed: Mapping[str, Any]) -> list[str]:
    """Return in which respects a program did not train with the batch that was planned.

    What was not observed contradicts nothing.
    """
    geometry, length = spec.geometry, spec.config.sequence_length
    planned: dict[str, tuple[int, ...]] = {
        "world_size": (geometry.data_parallel_size,),
        "micro_batch_size": (geometry.micro_batch_size,),
        "gradient_accumulation_steps": (geometry.gradient_accumulation_steps,),
        "global_batch_size": (geometry.global_batch_size,),
    }
    if length is not None:
        # Programs count the tokens that they read, or those that they predict, one less.
        batch = geometry.global_batch_size
        planned["tokens_per_optimizer_step"] = (batch * length, batch * (length - 1))
    problems = [
        f"the program trained with {name}={observed[name]} ({observed[f'{name}_source']}), "
        f"the plan says {values[0]}"
        for name, values in planned.items()
        if observed[name] is not None and observed[name] not in values
    ]
    return problems + [problem for problem in log.problems if problem not in problems]


def unfinished(spec: RunSpec, steps: Sequence[Mapping[str, Any]]) -> str | None:
    """Return how the logged number of optimizer steps contradicts the plan, if it does.

    A program that logs every n-th step may have done up to n - 1 more than its log says.
    """
    if not steps:
        return "the program ended without having recorded an optimizer step"
    done = [int(row["optimizer_step"]) for row in steps]
    planned = spec.optimizer_steps
    gaps = [after - before for before, after in zip([0, *done], done, strict=False)]
    if done[-1] > planned or done[-1] + max(gaps) <= planned:
        return f"the program did {done[-1]} optimizer steps, the plan says {planned}"
    return None


def begins_late(steps: Sequence[Mapping[str, Any]]) -> str | None:
    """Return which optimizer steps are missing at the start of a log; None: none are.

    A program that logs every n-th step begins with one of the first n. Fewer than three rows do
    not tell how often it logs: the last one may come early, as the end of the training.
    """
    done = [int(row["optimizer_step"]) for row in steps]
    gaps = [after - before for before, after in pairwise(done)]
    if len(gaps) < 2 or done[0] <= max(gaps):
        return None
    first = done[0]
    missing = "optimizer step 1 is" if first == 2 else f"optimizer steps 1 to {first - 1} are"
    return (
        f"its metrics begin with optimizer step {first}: {missing} missing, and a target that was "
        "reached there counts as reached later"
    )
