"""Whether a program trained what was planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from batchscape.config.metrics import GEOMETRY_NAMES
from batchscape.programs.metrics import Log
from batchscape.record.spec import RunSpec

NOT_OBSERVED = "not observed"


def compare_batch(
    spec: RunSpec, log: Log, launcher_world_size: int | None
) -> tuple[dict[str, Any], list[str]]:
    """Return what was observed of the batch, and where; and how that contradicts the plan.

    A number that was read with several values was not observed.
    """
    geometry, length = spec.geometry, spec.config.sequence_length
    batch = geometry.global_batch_size
    planned: dict[str, tuple[int, ...]] = {
        "world_size": (geometry.data_parallel_size,),
        "micro_batch_size": (geometry.micro_batch_size,),
        "gradient_accumulation_steps": (geometry.gradient_accumulation_steps,),
        "global_batch_size": (batch,),
    }
    factors = list(planned)
    readings = dict(log.readings)
    names = {name for name, _ in readings}
    if length is not None:
        # Programs count the tokens that they read, or those that they predict: one less a sample.
        planned["tokens_per_optimizer_step"] = (batch * length, batch * (length - 1))
        if "tokens_per_optimizer_step" in names:
            names.add("global_batch_size")
    # Ranks that share a model are processes, too: what a script says of its batch goes before.
    is_known = "world_size" in names or names.issuperset(factors[1:])
    if launcher_world_size is not None and not is_known:
        source = "WORLD_SIZE in the environment of its processes"
        readings["world_size", launcher_world_size] = source
    problems = [
        f"the program trained with {name}={value} ({source}), the plan says {planned[name][0]}"
        for (name, value), source in readings.items()
        if name in planned and value not in planned[name]
    ] + log.problems
    counts = Counter(name for name, _ in readings)
    observed = {
        name: (value, source) for (name, value), source in readings.items() if counts[name] == 1
    }
    if not problems:
        if length is not None and "tokens_per_optimizer_step" in observed:
            observed.setdefault("global_batch_size", (batch, "tokens / sequence length"))
        unknown = [name for name in factors if name not in observed]
        if len(unknown) == 1:
            observed[unknown[0]] = planned[unknown[0]][0], "follows from the other three"
    answer: dict[str, Any] = {}
    for name in GEOMETRY_NAMES:
        answer[name], answer[f"{name}_source"] = observed.get(name, (None, NOT_OBSERVED))
    return answer, problems


def why_unfinished(spec: RunSpec, steps: Sequence[Mapping[str, Any]]) -> str | None:
    """Return how the logged number of optimizer steps contradicts the plan, if it does.

    A program that logs every n-th step may have done up to n - 1 more than its log says.
    """
    if not steps:
        return "the program ended without having recorded an optimizer step"
    logged_steps = [row["optimizer_step"] for row in steps]
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
    logged_steps = [row["optimizer_step"] for row in steps]
    gaps = [after - before for before, after in pairwise(logged_steps)]
    if len(gaps) < 2 or logged_steps[0] <= max(gaps):
        return None
    return (
        f"its metrics begin with optimizer step {logged_steps[0]}: a target that was reached "
        "before counts as reached later"
    )
