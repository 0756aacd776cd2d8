"""Whether a program of the user's own would do what a plan says."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from batchscape.config import Command, Constant, Evaluation, RunConfig
from batchscape.config.metrics import JsonlMetrics, RegexMetrics, TrainerStateMetrics
from batchscape.errors import ConfigError
from batchscape.geometry import BatchGeometry
from batchscape.programs.script import check_program
from batchscape.record.placeholders import (
    PLACEHOLDERS,
    START_PLACEHOLDERS,
    is_passed,
    used_placeholders,
)
from batchscape.record.timing import LET_IT_LOG
from batchscape.recorder import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from batchscape.text import list_text

_FACTORS = ("data_parallel_size", "micro_batch_size", "gradient_accumulation_steps")
_FACTORS_PASSED = {
    "data_parallel_size": {"data_parallel_size"},
    "devices": {"data_parallel_size"},
    "micro_batch_size": {"micro_batch_size"},
    "gradient_accumulation_steps": {"gradient_accumulation_steps"},
    "accumulation_over_ranks": {"gradient_accumulation_steps", "data_parallel_size"},
    "global_batch_size": set(_FACTORS),
    "global_batch_tokens": set(_FACTORS),
}
"""By placeholder: the factors of which it passes the product."""

_OF_SWEPT = {
    "engine.precision": ("precision",),
    "budget": ("optimizer_steps", "samples", "tokens", "micro_steps"),
}
"""Placeholders by any of which a setting or group reaches the program, for those that the script
itself may fix unless they are swept."""


def without_unpassed(config: RunConfig) -> RunConfig:
    """Return a configuration with default evaluation and schedule where they are not passed.

    Their rules (whole optimizer steps, room in the budget) would refuse runs that know of neither.
    """
    if not isinstance(config.engine, Command):
        return config
    placeholders = used_placeholders(config.engine)
    if not is_passed("evaluation", placeholders):
        config = replace(config, evaluation=Evaluation())
    if not is_passed("schedule", placeholders):
        config = replace(config, schedule=Constant(name="constant"))
    return config


def check_commands(
    configs: Iterable[RunConfig], swept: Collection[str], fixed: Collection[str]
) -> None:
    """Check that every setting that a user has chosen reaches the program."""
    engines: dict[str, Command] = {}
    for config in configs:
        if isinstance(config.engine, Command):
            _check_config(config, config.engine)
            engines[repr(config.engine)] = config.engine
    for command in engines.values():
        _check_engine(command, swept, fixed)


def check_varied(launched: Iterable[tuple[RunConfig, BatchGeometry]]) -> None:
    """Check that every factor of the batch that differs between runs is passed to their program."""
    by_argv: dict[tuple[str, ...], list[BatchGeometry]] = {}
    for config, geometry in launched:
        if isinstance(config.engine, Command):
            by_argv.setdefault(tuple(used_placeholders(config.engine)), []).append(geometry)
    for placeholders, cells in by_argv.items():
        values = {name: sorted({getattr(cell, name) for cell in cells}) for name in _FACTORS}
        unpassed = {name for name, sizes in values.items() if len(sizes) > 1}
        factors_passed = [_FACTORS_PASSED[name] for name in placeholders if name in _FACTORS_PASSED]
        # A placeholder passes a product: it tells a factor once all others of it are known.
        while single_factors := [
            names & unpassed for names in factors_passed if len(names & unpassed) == 1
        ]:
            unpassed -= single_factors[0]
        for name in _FACTORS:
            if name in unpassed:
                raise ConfigError(
                    f"{name} differs between the runs ({', '.join(map(str, values[name]))}), but "
                    f"the program is not told: put {{{name}}} into engine.argv, or placeholders "
                    "from which it can be computed"
                )


def too_wide(geometry: BatchGeometry, config: RunConfig) -> str | None:
    """Return why a geometry exceeds `engine.max_devices`; None where it does not."""
    engine = config.engine
    ranks = geometry.data_parallel_size
    if not isinstance(engine, Command) or engine.max_devices is None or ranks <= engine.max_devices:
        return None
    return (
        f"the program takes at most engine.max_devices={engine.max_devices} data-parallel ranks; "
        f"data_parallel_size={ranks}"
    )


def unlogged(command: Command) -> list[str]:
    """Return the columns that the metrics of a program lack, with what follows from it."""
    metrics = command.metrics
    if isinstance(metrics, TrainerStateMetrics):
        options = " ".join(command.argv).replace("=", " ")
        columns = {"eval_loss"}
        if re.search(r"--logging_steps 1(?:\.0)?(?: |$)", options):
            columns.add("loss")
            counts = r"--include_num_input_tokens_seen(?! (?:no|false)(?: |$))"
            if re.search(counts, options, re.IGNORECASE):
                columns.add("step_time_s")
    elif isinstance(metrics, JsonlMetrics):
        columns = set(metrics.columns)
    elif isinstance(metrics, RegexMetrics):
        texts = metrics.pattern, metrics.evaluation_pattern or ""
        columns = {name for text in texts for name in re.compile(text).groupindex}
    else:
        return []
    loss_helps = (
        "--logging_steps=1" if metrics.kind == "trainer_state" else "a group or column loss"
    )
    consequences = {
        ("step_time_s", "train_time_s"): (
            "the time of an optimizer step, so that no run has a step time, throughput or time to "
            f"a target that counts (what helps: {LET_IT_LOG})"
        ),
        ("loss",): f"the loss of each optimizer step (what helps: {loss_helps})",
        ("eval_loss",): (
            "a held-out loss, so that there are no steps to a target and no recommendation (what "
            "helps: a group or column eval_loss)"
        ),
    }
    return [text for names, text in consequences.items() if columns.isdisjoint(names)]


def _check_config(config: RunConfig, command: Command) -> None:
    if config.batch.ramp:
        raise ConfigError(
            "batch.ramp: a program has one global batch from begin to end; leave the ramp out"
        )
    if config.budget.target_loss is not None:
        raise ConfigError(
            f"budget.target_loss={config.budget.target_loss}: a program cannot be stopped at a "
            "target; leave it null, targets are found in its losses afterwards"
        )
    is_scaled = config.scaling.reference_global_batch_size is not None
    if is_scaled and not is_passed("scaling", used_placeholders(command)):
        raise ConfigError(
            "scaling: the rule is given, but what it scales does not reach the program; put "
            "{learning_rate} into engine.argv, or scaling=none"
        )


def _check_engine(command: Command, swept: Collection[str], fixed: Collection[str]) -> None:
    placeholders = set(used_placeholders(command))
    reserved_names = sorted(set(command.values) & {*PLACEHOLDERS, *START_PLACEHOLDERS})
    if reserved_names:
        raise ConfigError(
            f"engine.values: {', '.join(reserved_names)} is a placeholder already; choose another "
            "name"
        )
    if unused_names := sorted(command.values.keys() - placeholders):
        raise ConfigError(
            f"engine.values.{unused_names[0]} is given, but {{{unused_names[0]}}} is nowhere in "
            "engine.argv or engine.environment"
        )
    # A sequence length that is given and not swept only says how tokens are counted.
    for verb, keys in (("swept", swept), ("given", set(fixed) - {"data.sequence_length"})):
        for setting in sorted(key.lstrip("+~") for key in keys):
            names: Sequence[str] = ()
            if verb == "swept":
                names = _OF_SWEPT.get(setting) or _OF_SWEPT.get(setting.partition(".")[0], ())
            is_told = not names or not placeholders.isdisjoint(names)
            if is_told and is_passed(setting, placeholders):
                continue
            placeholder = setting.rpartition(".")[2]
            if placeholder not in PLACEHOLDERS:
                placeholder = setting if "." in setting else f"{setting}.NAME"
            alternatives = list_text(f"{{{name}}}" for name in names or [placeholder])
            raise ConfigError(
                f"{setting} is {verb}, but the program is not told: {alternatives} is nowhere in "
                "engine.argv or engine.environment"
            )
    _check_environment(command)
    check_program(command)


def _check_environment(command: Command) -> None:
    for name in (RUN_DIR_VARIABLE, ATTEMPT_VARIABLE):
        if name in command.environment:
            raise ConfigError(f"engine.environment: {name} is batchscape's own; leave it out")
    if devices := command.environment.get("CUDA_VISIBLE_DEVICES"):
        raise ConfigError(
            f"engine.environment: CUDA_VISIBLE_DEVICES={devices} would put every run on the same "
            "devices; leave it out: each run is given devices of its own"
        )
