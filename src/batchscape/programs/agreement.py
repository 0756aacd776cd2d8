"""Whether a program trained what was planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from batchscape.config.metrics import GEOMETRY_NAMES
from batchscape.programs.metrics import Log
from batchscape.record.spec import RunSpec

NOT_OBSERVED = "not observed"


def observed_batch(log: Log, launcher_world_size: int | None) -> dict[str, Any]:
    """Return what was observed of the batch, and where."""
    observed: dict[str, Any] = {}
    for name in GEOMETRY_NAMES:
        value = getattr(log.observed, name)
        source = log.observed.sources.get(name, "the program's metrics")
        if value is None and name == "world_size" and launcher_world_size is not None:
            value, source = launcher_world_size, "WORLD_SIZE in the environment of its processes"
        observed[name] = value
        observed[f"{name}_source"] = NOT_OBSERVED if value is None else source
    return observed


def contradictions(spec: RunSpec, log: Log, observed: Mapping[str, Any]) -> list[str]:
    """Return how the batch of a program, where it was observed, differs from the planned one."""
    geometry, length = spec.geometry, spec.config.sequence_length
    planned: dict[str, tuple[int, ...]] = {
        "world_size": (geometry.data_parallel_size,),
        "micro_batch_size": (geometry.micro_batch_size,),
        "gradient_accumulation_steps": (geometry.gradient_accumulation_steps,),
        "global_batch_size": (geometry.global_batch_size,),
    }
    if length is not None:
        # Programs count the tokens that they read, or those that they predict: one less a sample.
        batch = geometry.global_batch_size
        planned["tokens_per_optimizer_step"] = (batch * length, batch * (length - 1))
    problems = [
        f"the program trained with {name}={observed[name]} ({observed[f'{name}_source']}), "
        f"the plan says {values[0]}"
        for name, values in planned.items()
        if observed[name] is not None and observed[name] not in values
    ]
    return problems + [problem for problem in log.problems if problem not in problems]


def why_unfinished(spec: RunSpec, steps: Sequence[Mapping[str, Any]]) -> str | None:
    """Return how the logged number of optimizer steps contradicts the plan, if it does.

    A program that logs every n-th step may have done up to n - 1 more than its log says.
    """
    if not steps:
        return "the program ended without having recorded an optimizer step"
    logged_steps = [int(row["optimizer_step"]) for row in steps]
    planned = spec.optimizer_steps
    gaps = [after - before for before, after in zip([0, *logged_steps], logged_steps, strict=False)]
    if logged_steps[-1] > planned or logged_steps[-1] + max(gaps) <= planned:
        return f"the program did {logged_steps[-1]} optimizer steps, the plan says {planned}"
    return None


def why_late(steps: Sequence[Mapping[str, Any]]) -> str | None:
    """Return which optimizer steps are missing at the start of a log; None: none are.

    A program that logs every n-th step begins with one of the first n. Fewer than three rows do
    not tell n: the last one may come early, at the end of the training.
    """
    logged_steps = [int(row["optimizer_step"]) for row in steps]
    gaps = [after - before for before, after in pairwise(logged_steps)]
    if len(gaps) < 2 or logged_steps[0] <= max(gaps):
        return None
    first_step = logged_steps[0]
    absent_steps = (
        "optimizer step 1 is" if first_step == 2 else f"optimizer steps 1 to {first_step - 1} are"
    )
    return (
        f"its metrics begin with optimizer step {first_step}: {absent_steps} missing, and a target "
        "that was reached there counts as reached later"
    )
