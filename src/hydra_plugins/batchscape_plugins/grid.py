"""A sweeper that hands the whole grid over at once.

Hydra's own sweeper composes every job from scratch (33 ms each) and runs it. This one parses the
same override grammar, composes once per combination of group choices, sets the other values on
plain dictionaries, and gives the task function one `SweepCells` with all cells.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    IntervalSweep,
    Override,
    OverrideType,
    QuotedString,
    RangeSweep,
    Transformer,
)
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf, open_dict

from batchscape.errors import ConfigError
from batchscape.plan.expand import (
    MOST_CELLS,
    Cell,
    Interval,
    SweepCells,
    SweptSetting,
    expand,
    set_values,
)
from batchscape.record.commands import hydra_text

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction


# A plain mapping: Hydra runs plugin modules before it registers them, where annotations of a
# dataclass cannot be resolved. `params` holds the axes: a key and its values, as a list or in
# Hydra's grammar ("1,2", "range(1,5)").
_CONFIG = {
    "_target_": "hydra_plugins.batchscape_plugins.grid.GridSweeper",
    "params": None,
}
ConfigStore.instance().store(
    group="hydra/sweeper", name="grid", node=_CONFIG, provider="batchscape"
)
# A budget that goes on for a while after a stage: ${sum:${batch.ramp.0.samples},1024}.
OmegaConf.register_new_resolver("sum", lambda *numbers: sum(numbers), replace=True)


def _share(part: float, total: float) -> float:
    """Return a part of another setting, as an integer where it is one: `${share:0.25,1024}`."""
    share = part * total
    return round(share) if math.isclose(share, round(share), rel_tol=1e-12) else share


OmegaConf.register_new_resolver("share", _share, replace=True)

_LOGGED = "what a run prints is in log.txt of its folder"
_UNREAD: dict[str, tuple[Any, str]] = {
    "run.dir": (".", "sweep_dir=DIR is the folder of the runs"),
    "sweep.subdir": (
        "${hydra.job.num}",
        "runs are named by their content; sweep_dir=DIR is the folder of all",
    ),
    "output_subdir": (None, "config.json of each run has its settings"),
    "job.name": ("batchscape", "sweep_name=NAME names a sweep"),
    "job.chdir": (None, "runs stay in the folder of the command; engine.cwd=DIR moves a program"),
    "job.env_set": (
        {},
        "runs have the environment of the command, as in NAME=VALUE batchscape sweep ...; "
        "+engine.environment.NAME=VALUE sets a variable of a program",
    ),
    "job.env_copy": ([], "runs have the environment of the command"),
    "launcher": (
        {"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"},
        "batchscape launches runs itself; choose with launcher=..., without the hydra",
    ),
    "job_logging": ({"version": 1, "root": None, "disable_existing_loggers": False}, _LOGGED),
    "verbose": (False, _LOGGED),
}
"""Settings of Hydra without an effect: their defaults, and the settings in their place."""
_READ = (
    "hydra.searchpath.",
    "hydra.sweep.dir.",
    "hydra.sweeper.",
    "hydra.callbacks.",
    "hydra.mode.",
)
"""Settings of Hydra that a command line may give; `compose` refuses the last, and sets it."""


class GridSweeper(Sweeper):
    """Expand a grid and call the task function once with all cells."""

    def __init__(self, params: DictConfig | None = None) -> None:
        self._params = {} if params is None else _container(params)

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep Hydra's objects; refuse settings of Hydra that would have no effect."""
        hydra_settings = _container(config.hydra)
        for key, (unset, instead) in _UNREAD.items():
            value = functools.reduce(operator.getitem, key.split("."), hydra_settings)
            if value != unset:
                raise ConfigError(f"hydra.{key}={value} has no effect; {instead}")
        for override in OverridesParser.create().parse_overrides(
            hydra_settings["overrides"]["hydra"]
        ):
            if not f"{_key(override).replace('/', '.')}.".startswith(_READ):
                raise ConfigError(f"{override.input_line} has no effect; leave it out")
        self._loader = hydra_context.config_loader
        self._task_function = task_function
        self._config = config

    def sweep(self, arguments: list[str]) -> Any:  # noqa: ANN401  (Hydra's interface)
        """Expand the axes of the sweep file and of the command line, and hand the grid over."""
        return self._task_function(self.expand(arguments))

    def expand(self, arguments: Sequence[str]) -> SweepCells:
        """Return the grid of the sweep file and of the overrides of a command line."""
        parser = OverridesParser.create(config_loader=self._loader)
        from_file = parser.parse_overrides([f"{k}={_text(v)}" for k, v in self._params.items()])
        from_line = parser.parse_overrides(list(arguments))
        overrides = {_key(override): override for override in (*from_file, *from_line)}
        swept = [override for override in overrides.values() if override.is_sweep_override()]
        axis_keys = {_key(override) for override in (*from_file, *swept)}
        if "sweeps" in axis_keys:
            raise ConfigError(
                "one sweep file at a time: sweeps=NAME, and further axes as key=value1,value2"
            )
        choices = self._config.hydra.runtime.choices
        axes, intervals = list[SweptSetting](), list[Interval]()
        for override in swept:
            if override.is_discrete_sweep():
                axes.append(_axis(override, overrides, choices))
            else:
                intervals.append(_interval(override, choices))
        fixed = [o.input_line or "" for o in overrides.values() if not o.is_sweep_override()]
        composed = [o.input_line or "" for o in from_line if not o.is_sweep_override()]
        # Of lines with the same key the last one counts.
        last_lines = {_key(override): override for override in from_line}.items()

        def cells(ends: Mapping[str, float]) -> list[Cell]:
            all_axes = [*axes, *(SweptSetting(key, (end,)) for key, end in ends.items())]
            return expand(all_axes, lambda chosen: self._compose([*fixed, *chosen], composed))

        low_cells = cells({interval.key: interval.low for interval in intervals})
        if intervals:
            highs = {interval.key: interval.high for interval in intervals}
            _refuse_followers(low_cells, cells(highs), highs)
        return SweepCells(
            cells=low_cells,
            axis_keys=frozenset(axis_keys),
            fixed={o.get_key_element(): o.value() for k, o in last_lines if k not in axis_keys},
            sweep_file=choices.get("sweeps"),
            intervals=tuple(intervals),
        )

    def _compose(
        self, lines: list[str], composed: list[str]
    ) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        """Compose lines, unless Hydra has; return a function from plain values to all settings."""
        if lines == composed:
            config = copy.deepcopy(self._config)
        else:
            config = self._loader.load_sweep_config(self._config, lines)
        HydraConfig.instance().set_config(config)  # for interpolations of ${hydra:...}
        # Hydra's name of sweep_dir.
        if (folder := config.hydra.sweep.dir) != ".":
            if config.sweep_dir not in {None, folder}:
                raise ConfigError(
                    f"hydra.sweep.dir={folder} and sweep_dir={config.sweep_dir} are two names of "
                    "one folder; give one of them"
                )
            config.sweep_dir = folder
        with open_dict(config):
            del config["hydra"]
        missing = OmegaConf.missing_keys(config)
        plain = _container(config)
        interpolated = "${" in json.dumps(plain, default=str)

        def settings(values: Mapping[str, Any]) -> dict[str, Any]:
            if absent := missing - values.keys():
                raise ConfigError(
                    f"a value is needed: {', '.join(f'{key}=...' for key in sorted(absent))}"
                )
            if not interpolated:
                return set_values(plain, values)
            cell = copy.deepcopy(config)
            for key, value in values.items():
                OmegaConf.update(cell, key, value)
            return _container(cell, resolve=True)

        return settings


def _container(config: DictConfig, *, resolve: bool = False) -> dict[str, Any]:
    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=resolve))


def _key(override: Override) -> str:
    """Return the key that an override adds, changes or deletes."""
    return override.get_key_element().lstrip("+~")


def _interval(override: Override, choices: Collection[str]) -> Interval:
    interval = cast(IntervalSweep, override.value())
    low, high = interval.start, interval.end
    is_log = "log" in interval.tags
    if unknown := interval.tags - {"log"}:
        raise ConfigError(
            f"{override.input_line}: the tag {', '.join(sorted(unknown))} means nothing; an "
            "interval is searched by ratios as tag(log, interval(1e-4, 1e-2)), else evenly"
        )
    ends = [end for end in (low, high) if isinstance(end, int | float) and math.isfinite(end)]
    if len(ends) < 2 or not ends[0] < ends[1] or (is_log and ends[0] <= 0):
        raise ConfigError(
            f"{override.input_line}: an interval has two finite ends, the lower one first and "
            "above 0 where it is tagged log, as in tag(log, interval(1e-4, 1e-2))"
        )
    if override.type is not OverrideType.CHANGE or _key(override) in choices:
        raise ConfigError(
            f"{override.input_line}: an interval is searched for a number that is there, no group"
        )
    return Interval(_key(override), ends[0], ends[1], is_log)


def _refuse_followers(low: Sequence[Cell], high: Sequence[Cell], ends: Mapping[str, float]) -> None:
    """Refuse to search a setting to which others refer: a trial sets the one value alone."""
    for one, other in zip(low, high, strict=True):
        if set_values(one.settings, ends) != other.settings:
            raise ConfigError(
                f"another setting refers to one of {', '.join(ends)} by ${{...}}, and would not "
                "follow it in a search; give that one a value of its own"
            )


def _axis(
    override: Override, overrides: Mapping[str, Override], choices: Collection[str]
) -> SweptSetting:
    _refuse_endless(override)
    # Once only: a shuffled list comes in another order every time.
    elements = list(override.sweep_iterator())
    if not elements:
        raise ConfigError(f"{override.input_line}: there is no value in it")
    values = tuple(_plain(element) for element in elements)
    lines = tuple(f"{override.get_key_element()}={Transformer.str(e)}" for e in elements)
    key = _key(override)
    nested = any(
        f"{other}.".startswith(f"{key}.") or f"{key}.".startswith(f"{other}.")
        for other in overrides.keys() - {key}
    )
    # Hydra composes groups, added keys and merged dictionaries by its own rules.
    is_plain = (
        override.type is OverrideType.CHANGE
        and key not in choices
        and not nested
        and not any(isinstance(value, dict) or "${" in str(value) for value in values)
    )
    return SweptSetting(key, values, None if is_plain else lines)


def _refuse_endless(override: Override) -> None:
    """Refuse a range of more values than any grid has, before they are listed."""
    values = override.value()
    if not isinstance(values, RangeSweep):
        return
    try:
        start, stop, step = (Fraction(n or 0) for n in (values.start, values.stop, values.step))
    except (OverflowError, ValueError):
        raise ConfigError(f"{override.input_line}: a range needs finite numbers") from None
    if not step:
        raise ConfigError(f"{override.input_line}: the step of a range must not be 0")
    if (count := math.ceil((stop - start) / step)) > MOST_CELLS:
        number = f"{count:,}" if count < 10**15 else "far more"
        raise ConfigError(
            f"{override.input_line}: a sweep has at most {MOST_CELLS:,} cells, and this range has "
            f"{number} values; take a larger step"
        )


def _plain(value: Any) -> Any:  # noqa: ANN401  (any value of Hydra's grammar)
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_plain(element) for element in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(element) for key, element in value.items()}
    return value


def _text(value: Any) -> str:  # noqa: ANN401  (any value of YAML)
    """Write a value of a sweep file in Hydra's grammar; a list is a choice of values."""
    if isinstance(value, list):
        return ",".join(v if isinstance(v, str) else _quoted(v) for v in value)
    return value if isinstance(value, str) else _quoted(value)


def _quoted(value: Any) -> str:  # noqa: ANN401  (any value of YAML)
    """Write a value in Hydra's grammar, which takes keys without quotes only."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_quoted(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_quoted, value))}]"
    return hydra_text(value) if isinstance(value, str) else json.dumps(value)
