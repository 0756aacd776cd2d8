"""How the metrics of a program that is not ours are read, for the engine `command`."""

from __future__ import annotations

import re
from collections.abc import Set
from pathlib import PurePath
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field

from batchscape.config.types import keyword_settings, settings

PROGRESS_COLUMNS = ("optimizer_step", "samples", "tokens", "train_time_s")
STEP_COLUMNS = (
    *PROGRESS_COLUMNS,
    *("loss", "learning_rate", "gradient_norm"),
    *("step_time_s", "data_s", "forward_backward_s", "exchange_s", "optimizer_s"),
)
"""Columns of the table of steps that a program's log can fill."""
EVALUATION_COLUMNS = (
    *PROGRESS_COLUMNS,
    *("eval_loss", "eval_accuracy", "eval_labels", "evaluation_s"),
)
"""Columns of the table of evaluations that it can fill."""
GEOMETRY_NAMES = (
    *("world_size", "micro_batch_size", "gradient_accumulation_steps"),
    *("global_batch_size", "tokens_per_optimizer_step"),
)
"""Figures that a program may log about the batch that it really uses."""
_NAMES = tuple(dict.fromkeys(STEP_COLUMNS + EVALUATION_COLUMNS + GEOMETRY_NAMES))


def _is_below(path: str) -> str:
    # A file elsewhere may be the log of another run, or of an earlier one.
    if not path or PurePath(path).is_absolute() or ".." in PurePath(path).parts:
        raise ValueError(
            f"path must be relative to the folder of the run and below it, got {path!r}; let the "
            "program write to {run_dir}"
        )
    return path


LogPath = Annotated[str, AfterValidator(_is_below)]
LossOf = Literal["global_batch", "other"]
TimeUnit = Literal["s", "ms", "us", "min", "h"]


@settings
class RecorderMetrics:
    """The program calls `batchscape.recorder` or `batchscape.transformers_callback`."""

    kind: Literal["recorder"]


@settings
class TrainerStateMetrics:
    """The `trainer_state.json` of a Hugging Face `Trainer`."""

    kind: Literal["trainer_state"]
    path: LogPath = "."
    """The file, or the output folder: its own file, else that of its latest checkpoint; relative
    to the folder of the run."""
    eval_loss: str | None = None
    """Key of the held-out loss, such as `eval_validation_loss` of a Trainer with several evaluation
    sets; null: `eval_loss`, or that of the only set."""


@keyword_settings
class _LoggedMetrics:
    """Settings of logs whose columns the user names."""

    path: LogPath = "log.txt"
    """The file, relative to the folder of the run; `log.txt` is what the program printed."""
    units: dict[str, TimeUnit] = Field(default_factory=dict)
    """Unit of every time that is read: s, ms, us, min or h."""
    loss_of: LossOf | None = None
    """What the program's loss is a mean over: `global_batch`, or `other`, such as the part of one
    rank, one micro-batch, or the steps since the last line. Needed for a loss. One that is smoothed
    over more steps than that is the loss of no step: leave it out."""
    first_step: int = 1
    """Number that the program gives to its first optimizer step."""

    def check_read(self, names: Set[str]) -> None:
        """Refuse times without a unit, units without a time, and a loss that may be any mean."""
        times = {name for name in names if name.endswith("_s")}
        if times != set(self.units):
            raise ValueError(
                f"units must say the unit of each time that is read, one of "
                f"{', '.join(get_args(TimeUnit))}; read: {sorted(times)}, given {self.units}"
            )
        if "loss" in names and self.loss_of is None:
            raise ValueError(
                "loss is read, and loss_of is not set: set it to global_batch or other"
            )
        if "loss" not in names and self.loss_of is not None:
            raise ValueError(
                f"loss_of={self.loss_of} is set, and no loss is read: read a loss or leave loss_of "
                f"out; read: {', '.join(sorted(names))}"
            )


@settings
class JsonlMetrics(_LoggedMetrics):
    """A file with one JSON object a line."""

    kind: Literal["jsonl"]
    columns: dict[str, str]
    """Our name to the program's key, such as `{optimizer_step: iter, loss: train/loss}`."""

    def __post_init__(self) -> None:
        """Check the rules between settings."""
        _check_names({*self.columns}, "columns", _NAMES)
        if "optimizer_step" not in self.columns:
            raise ValueError(
                "columns needs optimizer_step with the program's key of it, as in "
                f"{{optimizer_step: iter}}; given {self.columns}"
            )
        self.check_read(self.columns.keys())


@settings
class RegexMetrics(_LoggedMetrics):
    r"""Regular expressions over the text that the program prints.

    The groups of a pattern are named like the columns that they fill:
    `iter (?P<optimizer_step>\d+): loss (?P<loss>\S+), time (?P<step_time_s>\S+)ms`.
    """

    kind: Literal["regex"]
    pattern: str
    """Matches a line about an optimizer step; searched in every line."""
    evaluation_pattern: str | None = None
    """Matches a line about an evaluation; one without its step is of the step printed last."""
    geometry_pattern: str | None = None
    """Matches a line about the batch that the program uses, such as `world_size`."""

    def __post_init__(self) -> None:
        """Check the rules between settings."""
        names: set[str] = set()
        for setting, readable in (
            ("pattern", STEP_COLUMNS),
            ("evaluation_pattern", EVALUATION_COLUMNS),
            ("geometry_pattern", GEOMETRY_NAMES),
        ):
            pattern = getattr(self, setting)
            if pattern is not None:
                names |= _groups_of(pattern, setting, readable)
        self.check_read(names)


def _groups_of(pattern: str, setting: str, readable: tuple[str, ...]) -> set[str]:
    try:
        groups = set(re.compile(pattern).groupindex)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{setting} is no regular expression: {error}; got {pattern!r}") from None
    _check_names(groups, setting, readable)
    if setting == "pattern" and "optimizer_step" not in groups:
        raise ValueError(
            rf"{setting} must have a group (?P<optimizer_step>\d+); its groups: {sorted(groups)}"
        )
    if not groups - {"optimizer_step"}:
        raise ValueError(
            f"{setting} must have a group beside the step, such as (?P<{readable[-1]}>...)"
        )
    return groups


def _check_names(names: set[str], setting: str, readable: tuple[str, ...]) -> None:
    if unknown := sorted(names.difference(readable)):
        raise ValueError(
            f"{setting} names {', '.join(unknown)}; what can be read: {', '.join(readable)}"
        )


Metrics = Annotated[
    RecorderMetrics | TrainerStateMetrics | JsonlMetrics | RegexMetrics,
    Field(discriminator="kind"),
]
