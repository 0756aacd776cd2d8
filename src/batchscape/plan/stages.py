"""From batch, budget and scaling rules to the stages of a training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from batchscape.config import Optimizer, RunConfig, Scaling, Sgd
from batchscape.errors import ConfigError, GeometryError
from batchscape.geometry import COUNT_LIMIT, BatchGeometry, solve
from batchscape.record.spec import Stage
from batchscape.text import near_multiples


def scale_optimizer(
    optimizer: Optimizer,
    scaling: Scaling,
    global_batch_size: int,
    learning_rate_factor: float | None = None,
) -> Optimizer:
    """Return the optimizer's settings for a global batch.

    Parameters
    ----------
    optimizer : AdamW, Sgd or Muon
        Settings for the reference batch B0.
    scaling : Scaling
        The rules, and B0.
    global_batch_size : int
        The global batch B, in samples.
    learning_rate_factor : float, optional
        New learning rate over the given one, in place of a rule.

    Returns
    -------
    Optimizer
        Of the same kind; the very same settings where B is B0, or neither a rule nor a factor is
        given.

    Raises
    ------
    ConfigError
        If a rule has nothing to apply to, or its outcome leaves the range of the setting.

    Notes
    -----
    With k = B / B0:

    * Learning rate: `linear` k (Goyal et al. 2017, arXiv 1706.02677, section 2.1), `sqrt` root of k
      (for Adam: Malladi et al. 2022, arXiv 2205.10287), or the factor of a stage. Both of Muon's
      learning rates follow.
    * Betas of Adam, `half_life`: beta to the power k. A step then forgets as much as k steps of the
      reference batch did, and half-lives in tokens are held (Marek et al. 2025, arXiv 2507.07101,
      for the second moment; as in Malladi et al., both moments follow). The momenta of SGD and of
      Muon are not Adam's betas and stay as given: no such rule is established for them.
    * Weight decay, `timescale`: times k x old / new learning rate, so that B / (learning rate x
      weight decay), the tokens over which weights are averaged, is held (Wang and Aitchison 2024,
      arXiv 2405.13698; in tokens Bergsma et al. 2025, arXiv 2505.13738). The penalty of
      SGD shrinks the weights by the same product in each step, and follows the same rule.
    """
    if scaling.betas != "none" and isinstance(optimizer, Sgd):
        raise ConfigError(
            "scaling.betas=half_life is a rule for Adam's betas, and optimizer=sgd has none; use "
            "scaling.betas=none, or optimizer=adamw or muon"
        )
    reference = scaling.reference_global_batch_size or global_batch_size
    if reference == global_batch_size and learning_rate_factor is None:
        return optimizer
    k = global_batch_size / reference
    rules = {"none": 1.0, "linear": k, "sqrt": math.sqrt(k)}
    rate = learning_rate_factor or rules[scaling.learning_rate]
    changed: dict[str, Any] = {"learning_rate": optimizer.learning_rate * rate}
    if not isinstance(optimizer, Sgd):
        if optimizer.name == "muon":
            changed["adamw_learning_rate"] = optimizer.adamw_learning_rate * rate
        if scaling.betas == "half_life":
            changed |= {"beta1": optimizer.beta1**k, "beta2": optimizer.beta2**k}
    if scaling.weight_decay == "timescale":
        changed["weight_decay"] = optimizer.weight_decay * k / rate
    try:
        return replace(optimizer, **changed)
    except ValidationError as error:
        field = error.errors()[0]
        raise ConfigError(
            f"scaling from a global batch of {reference} to {global_batch_size} makes "
            f"optimizer.{field['loc'][0]} {field['input']}, which no optimizer can use; choose a "
            "nearer scaling.reference_global_batch_size, or another learning_rate_factor"
        ) from None


def solve_geometries(config: RunConfig) -> tuple[BatchGeometry, ...]:
    """Return the geometry of every stage, the one that the batch settings determine last.

    Stages of a ramp have the ranks of the last one; what is given of micro-batch and accumulation
    holds in each, and the rest is derived.
    """
    batch = config.batch
    last = solve(
        nodes=batch.nodes,
        data_parallel_size=batch.data_parallel_size,
        micro_batch_size=batch.micro_batch_size,
        gradient_accumulation_steps=batch.gradient_accumulation_steps,
        global_batch_size=batch.global_batch_size,
        global_batch_tokens=batch.global_batch_tokens,
        sequence_length=config.sequence_length if batch.global_batch_tokens else None,
    )
    solved = []
    for number, stage in enumerate(batch.ramp, start=1):
        try:
            geometry = solve(
                nodes=last.nodes,
                data_parallel_size=last.data_parallel_size,
                micro_batch_size=batch.micro_batch_size,
                gradient_accumulation_steps=batch.gradient_accumulation_steps,
                global_batch_size=stage.global_batch_size,
            )
        except GeometryError as error:
            raise GeometryError(f"{_stage_name(number, config)}: {error}", error.nearest) from None
        solved.append(geometry)
    return (*solved, last)


def make_stages(config: RunConfig, geometries: Sequence[BatchGeometry]) -> tuple[Stage, ...]:
    """Cut the budget into stages, each with the optimizer's settings for its global batch.

    Neighbours that are alike are one stage, so that equal trainings have equal stages.
    """
    sizes = _samples_of_ramp(config)
    for number, (samples, geometry) in enumerate(zip(sizes, geometries, strict=False), start=1):
        _check_whole(f"{_stage_name(number, config)}: samples", samples, geometry)
    last = _samples_of_last(config, geometries, sizes)
    _check_whole("the rest of the budget, after batch.ramp,", last, geometries[-1])
    factors = [*(stage.learning_rate_factor for stage in config.batch.ramp), None]
    stages: list[Stage] = []
    for samples, geometry, factor in zip([*sizes, last], geometries, factors, strict=True):
        if not samples:  # of the last one, where a ramp fills the budget
            continue
        size = geometry.global_batch_size
        optimizer = scale_optimizer(config.optimizer, config.scaling, size, factor)
        if stages and (stages[-1].geometry, stages[-1].optimizer) == (geometry, optimizer):
            samples += stages.pop().samples  # noqa: PLW2901  (the two are one stage)
        stages.append(Stage(samples, geometry, optimizer))
    if (total := sum(stage.samples for stage in stages)) >= COUNT_LIMIT:
        raise ConfigError(
            f"a budget must be below 2**63 samples, as positions are 64-bit; given {total}"
        )
    return tuple(stages)


def check_evaluations(every_samples: int | None, stages: Sequence[Stage]) -> None:
    """Check that evaluations fall between optimizer steps, in every stage."""
    if every_samples is None:
        return
    problem = _evaluation_within_a_step(every_samples, stages)
    if problem is None:
        return
    common = math.lcm(*(stage.geometry.global_batch_size for stage in stages))
    raise ConfigError(
        f"{problem}; use multiples of {common} (the least common multiple of the global batches) "
        "for the samples of each stage and for evaluation.every_samples"
    )


def _evaluation_within_a_step(every_samples: int, stages: Sequence[Stage]) -> str | None:
    """Say which evaluation would fall within a step; None where none does."""
    begin = 0
    for stage in stages:
        size, end = stage.geometry.global_batch_size, begin + stage.samples
        first = (begin // every_samples + 1) * every_samples
        # When two that follow each other fall between steps, so do all others.
        for due in (first, first + every_samples):
            if due <= end and (due - begin) % size:
                return (
                    f"evaluation.every_samples={every_samples} is due after {due} samples, within "
                    f"an optimizer step: the stage of global batch {size} begins after {begin}"
                )
        begin = end
    return None


def _samples_of_ramp(config: RunConfig) -> list[int]:
    """Return the samples of every stage of a ramp."""
    return [
        _whole_samples(f"{_stage_name(number, config)}: tokens", stage.tokens, config)
        if stage.samples is None
        else stage.samples
        for number, stage in enumerate(config.batch.ramp, start=1)
    ]


def _whole_samples(what: str, tokens: int | None, config: RunConfig) -> int:
    """Return the samples that so many tokens are."""
    count, length = tokens or 0, config.sequence_length or 1
    if count % length:
        raise ConfigError(
            f"{what} must be whole samples of {length} tokens; given {count}; "
            f"use {near_multiples(count, length)}"
        )
    return count // length


def _samples_of_last(
    config: RunConfig, geometries: Sequence[BatchGeometry], ramp: Sequence[int]
) -> int:
    """Return what the budget leaves for the last stage, after the samples of a ramp."""
    budget = config.budget
    if budget.optimizer_steps is not None:
        before = sum(
            samples // geometry.global_batch_size
            for samples, geometry in zip(ramp, geometries, strict=False)
        )
        samples = (budget.optimizer_steps - before) * geometries[-1].global_batch_size
    elif budget.tokens is not None:
        samples = _whole_samples("budget.tokens", budget.tokens, config) - sum(ramp)
    elif budget.samples is not None:
        samples = budget.samples - sum(ramp)
    else:
        raise AssertionError("a budget has exactly one size")
    if samples < 0:
        raise ConfigError(
            f"batch.ramp must not go beyond the budget: its stages have {sum(ramp)} samples, "
            f"{-samples} too many; enlarge the budget, or shorten the ramp"
        )
    return samples


def _check_whole(what: str, samples: int, geometry: BatchGeometry) -> None:
    size = geometry.global_batch_size
    if samples % size:
        rule = f"must be a multiple of the global batch {size}"
        raise ConfigError(f"{what} {rule}; given {samples}; use {near_multiples(samples, size)}")


def _stage_name(number: int, config: RunConfig) -> str:
    return f"batch.ramp, stage {number} of {len(config.batch.ramp)}"
