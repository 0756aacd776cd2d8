"""Values of the placeholders of a command, and the settings that reach the program by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from batchscape.config import OUR_GROUPS, Command, RunConfig, is_of_our_loop
from batchscape.config.template import placeholders
from batchscape.errors import ConfigError
from batchscape.text import did_you_mean, near_multiples, near_names

if TYPE_CHECKING:
    from batchscape.record.spec import Stage


PLACEHOLDERS: dict[str, str] = {
    "micro_batch_size": "samples per rank per forward and backward",
    "gradient_accumulation_steps": "micro-steps per optimizer step, per rank",
    "accumulation_over_ranks": "the same summed over all ranks, for programs that divide by them",
    "data_parallel_size": "data-parallel ranks in all",
    "nodes": "machines",
    "devices": "data-parallel ranks on this machine",
    "global_batch_size": "samples per optimizer step",
    "global_batch_tokens": "the same in tokens",
    "samples": "samples in all",
    "tokens": "tokens in all",
    "optimizer_steps": "optimizer steps in all",
    "micro_steps": "micro-steps in all, per rank",
    "sequence_length": "tokens a sample",
    "learning_rate": "peak learning rate, scaling rules applied",
    "warmup_optimizer_steps": "schedule.warmup_samples in optimizer steps",
    "evaluation_every_optimizer_steps": "evaluation.every_samples in optimizer steps",
    "seed": "seed",
    "init_seed": "seed of the initial parameters",
    "data_seed": "seed of the sample order",
    "precision": "engine.precision",
    "run_dir": "empty folder that the program may write to",
    "run_id": "name of the run",
    "python": "the Python interpreter that runs batchscape",
    "port": "a free port of this machine",
}
"""Placeholders and their meaning, beside those of `engine.values` and settings by their dotted
keys, such as `{optimizer.weight_decay}`."""

CUT_PLACEHOLDERS = frozenset(
    {
        "micro_batch_size",
        "gradient_accumulation_steps",
        "accumulation_over_ranks",
        "data_parallel_size",
        "nodes",
        "devices",
        "micro_steps",
    }
)
"""Placeholders that depend on the cut of the global batch; all cuts share the others."""

START_PLACEHOLDERS = ("run_dir", "run_id", "python", "port")
"""Placeholders that only the start of a run can fill in."""

_PLACEHOLDERS_OF_SETTING = {
    "seed": ("seed", "init_seed", "data_seed"),
    "init_seed": ("init_seed", "seed"),
    "data_seed": ("data_seed", "seed"),
    "optimizer.learning_rate": ("learning_rate",),
    "schedule.warmup_samples": ("warmup_optimizer_steps",),
    "evaluation.every_samples": ("evaluation_every_optimizer_steps",),
    "scaling.learning_rate": ("learning_rate", "optimizer.learning_rate"),
    "scaling.reference_global_batch_size": (
        *("learning_rate", "optimizer.learning_rate", "optimizer.weight_decay"),
        *("optimizer.beta1", "optimizer.beta2"),
    ),
    "scaling.betas": ("optimizer.beta1", "optimizer.beta2"),
    "scaling.weight_decay": ("optimizer.weight_decay",),
    "data.sequence_length": ("sequence_length", "tokens", "global_batch_tokens"),
}
"""Placeholders that pass a setting to the program, beside its own key, by setting."""


def used_placeholders(command: Command) -> list[str]:
    """Return the placeholders in argv and environment, each once, in their order.

    Raises
    ------
    ConfigError
        If a text is no template.
    """
    texts = (*command.argv, *command.environment.values())
    return list(dict.fromkeys(name for text in texts for name in placeholders(text)))


def placeholder_values(config: RunConfig, stages: Sequence[Stage]) -> dict[str, Any]:
    """Return the value of every placeholder that a plan can fill in; None where there is none.

    Parameters
    ----------
    config : RunConfig
        Of a command.
    stages : sequence of Stage
        One: commands have no ramp.

    Raises
    ------
    ConfigError
        If a placeholder is unknown, or counts optimizer steps that are not whole.
    """
    command = _command(config)
    (stage,) = stages
    geometry, length = stage.geometry, config.sequence_length
    batch = geometry.global_batch_size
    names = used_placeholders(command)
    settings = config.to_mapping() | {"optimizer": asdict(stage.optimizer)}
    values: dict[str, Any] = {
        "micro_batch_size": geometry.micro_batch_size,
        "gradient_accumulation_steps": geometry.gradient_accumulation_steps,
        "accumulation_over_ranks": batch // geometry.micro_batch_size,
        "data_parallel_size": geometry.data_parallel_size,
        "nodes": geometry.nodes,
        "devices": geometry.devices_per_node,
        "global_batch_size": batch,
        "global_batch_tokens": None if length is None else batch * length,
        "samples": stage.samples,
        "tokens": None if length is None else stage.samples * length,
        "optimizer_steps": stage.optimizer_steps,
        "micro_steps": stage.optimizer_steps * geometry.gradient_accumulation_steps,
        "sequence_length": length,
        "learning_rate": stage.optimizer.learning_rate,
        "seed": config.seed,
        "init_seed": config.resolved_init_seed,
        "data_seed": config.resolved_data_seed,
        "precision": command.precision,
        **{
            f"{group}.{name}": value
            for group in OUR_GROUPS
            for name, value in settings[group].items()
            if isinstance(value, str | int | float | None)
        },
        **command.values,
    }
    for name, key in (
        ("warmup_optimizer_steps", "schedule.warmup_samples"),
        ("evaluation_every_optimizer_steps", "evaluation.every_samples"),
    ):
        samples = values[key]
        if name in names and samples is not None and samples % batch:
            raise ConfigError(
                f"{{{name}}} needs {key} to be a multiple of the global batch {batch}; given "
                f"{samples}; use {near_multiples(samples, batch)}"
            )
        values[name] = None if samples is None else samples // batch
    _check_names(names, (*values, *START_PLACEHOLDERS))
    for name in names:
        if name in values and values[name] is None:
            key = next((key for key, by in _PLACEHOLDERS_OF_SETTING.items() if name in by), name)
            raise ConfigError(f"engine.argv names {{{name}}}, but {key} is null; give it a value")
    return values


def is_passed(key: str, names: Iterable[str]) -> bool:
    """Return whether a setting, or a group of settings, reaches the program.

    Parameters
    ----------
    key : str
        Dotted key of a setting, or a group such as `schedule`.
    names : iterable of str
        Placeholders of the command.
    """
    names = set(names)
    settings = [key]
    if key in OUR_GROUPS:
        known_settings = (*_PLACEHOLDERS_OF_SETTING, *names)
        settings = [name for name in known_settings if name.partition(".")[0] == key]
    elif not is_of_our_loop(key) and key not in _PLACEHOLDERS_OF_SETTING:
        return True
    return any(
        not names.isdisjoint((setting, *_PLACEHOLDERS_OF_SETTING.get(setting, ())))
        for setting in settings
    )


def unpassed_settings(config: RunConfig) -> list[str]:
    """Return the settings of our own loop that do not reach the program, by their dotted keys."""
    names = used_placeholders(_command(config))
    keys = [
        f"{group}.{name}" if isinstance(values, dict) else group
        for group, values in config.to_mapping().items()
        for name in (values if isinstance(values, dict) else (group,))
    ]
    return [key for key in keys if is_of_our_loop(key) and not is_passed(key, names)]


def _check_names(names: Iterable[str], valid: Sequence[str]) -> None:
    for name in names:
        if name not in valid:
            hint = did_you_mean([f"{{{near}}}" for near in near_names(name, valid)])
            listing = ", ".join(n for n in dict.fromkeys((*PLACEHOLDERS, *valid)) if "." not in n)
            raise ConfigError(
                f"engine.argv: there is no placeholder {{{name}}}{hint} Known: {listing}; settings "
                f"by their keys, such as {{optimizer.weight_decay}}; and your own, with "
                f"+engine.values.{name.replace('.', '_')}=VALUE"
            )


def _command(config: RunConfig) -> Command:
    if not isinstance(config.engine, Command):
        raise AssertionError(f"engine={config.engine.name} has no command")
    return config.engine
