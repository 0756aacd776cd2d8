"""Cells: the runs of one geometry and one set of settings, whatever their seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.hardware import add_machines, was_started
from batchscape.analysis.joins import column_of
from batchscape.analysis.numbers import MISSING, TIMES
from batchscape.config import Affects, affects_of, tells_apart
from batchscape.errors import RecordError
from batchscape.record.figures import FIGURES

GEOMETRY_WORDS = {
    "data_parallel_size": "devices",
    "micro_batch_size": "micro-batch",
    "gradient_accumulation_steps": "accumulation",
    "global_batch_size": "global batch",
}
GEOMETRY = tuple(GEOMETRY_WORDS)
"""Columns of a geometry: the three factors and their product."""

SEEDS = ("seed", "init_seed", "data_seed")
"""Settings that runs of one cell may differ in, beside `timing_repeat`."""

UPDATE_GROUPS = ("optimizer.", "scaling.", "schedule.")
"""Groups of settings whose best values depend on the global batch."""

PROGRAMS = "command"
"""The engine of users' programs. We do not know their steps: whether cuts of a global batch train
alike is measured, and no curve stands for that of another cut."""

_KIND_OF_FIGURE = {name: figure.kind for name, figure in FIGURES.items() if figure.kind}
"""Kind of each figure that cells are compared by."""
_ORDER = (
    "global_batch_size",
    "data_parallel_size",
    "gradient_accumulation_steps",
    "micro_batch_size",
)
_DATA = "data.manifest_hash"
RATE = "optimizer.learning_rate"
_SCALED = "learning_rate"
"""The learning rate that a scaling rule gave; a setting only where there is such a rule."""
_UNITS = {"gib": "GiB", "s": "s"}
"""Units that names of settings end with."""
_LONG = 40
"""Letters of a value that fit into a table."""
_MOST_NAMED = 3
"""Settings of one group that a label names although they vary together."""
WHERE = ("hardware", "device_type", "precision", "nodes", _DATA, "source_hash")
"""Surroundings of a launched run. A run that was not launched may lack them, and varies in none."""
# Columns of what a run was and did. A column of a user's own counts as a setting, so that those
# which are no settings are listed.
_NOT_SETTINGS = {
    *GEOMETRY,
    *SEEDS,
    *FIGURES,
    *WHERE,
    "attempts",
    "cause",
    "devices_per_node",
    "evaluation_every_samples",
    "learning_rate",
    "rank",
    "reason",
    "run_id",
    "stages",
    "started_at",
    "status",
    "stop_reason",
    "task",
    "timing_note",
    "timed_steps",
    "timing_valid",
    "train_samples",
    "trajectory_id",
}
_NOT_SETTING_PREFIXES = (
    *("environment.", "launch.", "observed.", "planned_", "predicted."),
    # Columns of `GEOMETRY` and `WHERE` stand for these settings.
    *("batch.", "engine.precision", "launcher.device"),
)


@dataclass(frozen=True)
class Cells:
    """Runs sorted into cells."""

    runs: pd.DataFrame
    """One row a run, as loaded, with `cell`, `hardware`, `timing_valid` and `timing_note`."""
    table: pd.DataFrame
    """One row a cell, indexed by `cell` in the order of every table: geometry, then settings."""
    settings: list[str]
    """Every setting that varies between runs, seeds and timing repeats aside."""
    key_settings: list[str]
    """Those of the settings that distinguish cells. Settings that follow from a name, a learning
    rate, or three others of their group are left out."""
    contexts: list[str]
    """Key settings that do not follow from the global batch, or that distinguish machines. Cells
    that agree in them are compared with each other."""
    replaced: pd.DataFrame
    """Failed runs that are left out, as the same settings and seeds completed later with other
    files of the program."""

    @cached_property
    def figures(self) -> pd.DataFrame:
        """The figures of the runs that count, as `valid_figures` returns them."""
        return valid_figures(self.runs)

    @cached_property
    def context_of(self) -> pd.Series[int]:
        """The number of each cell by the settings in `contexts`; indexed by `cell`."""
        if not self.contexts:
            return pd.Series(0, index=self.table.index)
        return self.table.groupby(self.contexts, dropna=False, sort=False).ngroup()

    def by_batch(self) -> pd.Series[int]:
        """Number the cells by global batch and `contexts`, except settings of the update."""
        settings = [name for name in self.contexts if not name.startswith(UPDATE_GROUPS)]
        return self.table.groupby(["global_batch_size", *settings], dropna=False).ngroup()

    def labels(self, settings: Sequence[str] | None = None) -> pd.Series[str]:
        """Name each cell by its geometry and some settings, by default all of `contexts`."""
        labels = geometry_label(self.table)
        for name in self.contexts if settings is None else settings:
            values = setting_texts(self.table, name)
            labels = labels + ", " + setting_label(name) + " " + values
        return labels

    def label_of(self, name: str) -> str:
        """Name a setting of cells that differ in their global batch."""
        is_scaled = name == RATE and _SCALED in self.settings
        return "base learning rate" if is_scaled else setting_label(name)

    def incomplete(self) -> pd.Series[bool]:
        """Return whether each cell has a started run that did not complete; indexed by `cell`."""
        started = self.runs[was_started(self.runs)]
        failed = started["status"].ne("completed").groupby(started["cell"]).any()
        return failed.reindex(self.table.index, fill_value=False)

    def of_programs(self) -> pd.Series[bool]:
        """Return whether each cell is of `engine=command`; indexed by `cell`."""
        name = column_of(self.runs, "engine.name")
        return name.eq(PROGRAMS).groupby(self.runs["cell"]).any().reindex(self.table.index)

    def cost_settings(self) -> list[str]:
        """Return the settings that distinguish cells by their memory or time, as `contexts`."""
        affects = {name: affects_of(name) for name in (*self.contexts, *self.dependent_settings())}
        names = [
            name
            for name, affected in affects.items()
            if affected is None or affected & Affects.COST
        ]
        return _essential(self.table, names)

    def by_cost(self) -> Cells:
        """Merge cells that do not differ in memory or time; the first one's number stays."""
        settings, table = self.cost_settings(), self.table.reset_index()
        first = table.groupby([*GEOMETRY, *settings], dropna=False, sort=False)["cell"]
        cells = self.runs["cell"].map(first.transform("first"))
        return replace(self, runs=self.runs.assign(cell=cells), contexts=settings)

    def without(self, rows: Sequence[int]) -> Cells:
        """Leave rows of `runs` out; cells keep their numbers, and settings that vary no more go."""
        rest = _sort(self.runs.drop(index=rows, columns="cell"))
        number = self.runs["cell"].groupby(rest.runs["cell"]).first()
        runs = rest.runs.assign(cell=rest.runs["cell"].map(number))
        return replace(rest, runs=runs, table=self.table, replaced=self.replaced)

    def dependent_settings(self) -> list[str]:
        """Return the settings that vary only together with key settings."""
        return [name for name in self.settings if name not in (*self.key_settings, _SCALED)]


def find_cells(runs: pd.DataFrame) -> Cells:
    """Sort runs into cells of equal geometry, settings and hardware.

    Parameters
    ----------
    runs : DataFrame
        One row a run, as `load` returns it.

    Raises
    ------
    RecordError
        If there are no runs, or a column that identifies them is missing.
    """
    needed = {"run_id", "trajectory_id", "sweep_dir", "status", *GEOMETRY}
    if runs.empty or not needed <= set(runs.columns):
        lacking = ", ".join(sorted(needed - set(runs.columns)))
        raise RecordError(
            "there is no run to compare" if runs.empty else f"the runs lack columns: {lacking}"
        )
    runs = add_machines(runs)
    return _sort(runs.assign(**{name: runs[name].astype("Int64") for name in GEOMETRY}))


def _sort(runs: pd.DataFrame) -> Cells:
    candidates = [
        name
        for name in runs.columns
        if name not in _NOT_SETTINGS and not name.startswith(_NOT_SETTING_PREFIXES)
        if tells_apart(name)
    ]
    is_replaced = _replaced(runs, candidates)
    earlier, runs = runs[is_replaced], runs[~is_replaced]
    texts = pd.DataFrame({name: plain_texts(runs[name]) for name in candidates}, index=runs.index)
    where = [name for name in WHERE if name in runs and runs[name].nunique() > 1]
    settings = where + [name for name in candidates if texts[name].nunique() > 1]
    for name in where:
        texts[name] = plain_texts(runs[name]).where(runs[name].notna())
    keys = pd.concat([runs[list(GEOMETRY)], texts[settings]], axis=1)
    distinct = keys.drop_duplicates()
    key_settings = _essential(distinct, settings)
    # A learning rate may follow from the global batch by a rule. A setting that differs between
    # cuts of one global batch makes another experiment, even if each cut has its own value.
    contexts = [
        name
        for name in key_settings
        if name in WHERE or not follows(distinct, ["global_batch_size"], name)
    ]
    rejected = runs["status"].eq("rejected")
    cell, table = _ordered(keys, rejected, [*contexts, *_ORDER, *settings])
    if (rates := _scaled_rates(runs)) is not None:
        settings = [*settings, _SCALED]
        table[_SCALED] = plain_texts(rates.groupby(cell).first().reindex(table.index))
    # A copy keeps columns of one type together, so that selecting rows takes less time.
    return Cells(runs.assign(cell=cell).copy(), table, settings, key_settings, contexts, earlier)


def valid_figures(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the figures of completed runs; times that are not valid are NaN.

    Parameters
    ----------
    runs : DataFrame
        Runs of `Cells`.

    Returns
    -------
    DataFrame
        `cell`, `trajectory_id`, and a float column for each figure whose `Figure.kind` is not
        empty, NaN where missing.
    """
    names = list(_KIND_OF_FIGURE)
    completed = runs[runs["status"].eq("completed")]
    columns = completed.reindex(columns=names)
    if len(texts := columns.select_dtypes(object).columns):
        columns[texts] = columns[texts].apply(pd.to_numeric)
    figures = columns.to_numpy(dtype=float, na_value=np.nan, copy=True)
    figures[~np.isfinite(figures)] = np.nan
    times = np.array([kind == "time" for kind in _KIND_OF_FIGURE.values()])
    valid = completed["timing_valid"].eq(True).fillna(value=False).to_numpy(dtype=bool)
    figures[np.ix_(~valid, times)] = np.nan
    table = pd.DataFrame(figures, index=completed.index, columns=names)
    return pd.concat([completed[["cell", "trajectory_id"]], table], axis=1)


def _replaced(runs: pd.DataFrame, candidates: Sequence[str]) -> pd.Series[bool]:
    """Mark failed runs whose settings and seeds completed later with other files of the program."""
    versions = column_of(runs, "source_hash")
    failed = runs["status"].eq("failed") & versions.notna()
    completed = runs["status"].eq("completed") & versions.notna()
    if not failed.any() or not completed.any() or versions.nunique() < 2:
        return pd.Series(False, index=runs.index)
    others = (*SEEDS, "timing_repeat", "device_type", "hardware")
    names = [*GEOMETRY, *(name for name in others if name in runs), *candidates]
    texts = pd.DataFrame({name: plain_texts(runs[name]) for name in names}, index=runs.index)
    same_settings = texts.groupby(names, dropna=False, sort=False).ngroup()
    started = pd.to_numeric(column_of(runs, "started_at"), errors="coerce")
    last = started[completed].groupby(same_settings[completed]).max()
    return failed & started.lt(same_settings.map(last))


def _scaled_rates(runs: pd.DataFrame) -> pd.Series[float] | None:
    """Return the learning rates of runs; None where all are those of their settings."""
    columns = runs.reindex(columns=[RATE, _SCALED])
    base, rates = (pd.to_numeric(columns[name], errors="coerce") for name in columns)
    is_scaled = ((rates - base).abs() > 1e-9 * base.abs()).any()
    return rates if is_scaled else None


def status_counts(statuses: pd.Series[str]) -> str:
    """Count runs by status, as in "3 completed, 1 diverged"."""
    counts = statuses.value_counts().sort_index()
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def launched_batches(runs: pd.DataFrame) -> list[int]:
    """Return the sorted global batches of runs that were not rejected."""
    columns = runs.reindex(columns=["status", "global_batch_size"])
    batches = columns.loc[columns["status"].ne("rejected"), "global_batch_size"].dropna()
    return sorted(map(int, batches.unique()))


def geometry_label(table: pd.DataFrame) -> pd.Series[str]:
    """Write geometries as devices x micro x accumulation, `?` where one is unknown."""
    factors = [table[name].astype("string").fillna("?") for name in GEOMETRY[:3]]
    return (factors[0] + TIMES + factors[1] + TIMES + factors[2]).astype(str)


def setting_texts(table: pd.DataFrame, name: str) -> pd.Series[str]:
    """Write a setting of each cell of `Cells.table`; for the learning rate, the scaled one."""
    if name not in {RATE, _SCALED} or _SCALED not in table:
        return shorten_values(table[name].fillna(MISSING))
    rates = pd.to_numeric(table[_SCALED], errors="coerce")
    # As few digits as distinguish all rates, but at least three.
    for digits in range(3, 18):
        texts = rates.map(f"{{:.{digits}g}}".format, na_action="ignore")
        if texts.nunique() == rates.nunique():
            break
    return texts.fillna(MISSING).astype(str)


def shorten_values(texts: pd.Series[str]) -> pd.Series[str]:
    """Drop the words that all long values of a setting begin or end with, if they stay distinct."""
    values = texts.astype(str)
    words = {value: _words_of(value) for value in values.unique()}
    if len(words) < 2 or max(map(len, words)) <= _LONG:
        return values
    parts = list(words.values())
    shortest = min(map(len, parts))
    head = next((i for i in range(shortest) if len({p[i] for p in parts}) > 1), shortest)
    rest = shortest - head
    tail = next((i for i in range(rest) if len({p[-1 - i] for p in parts}) > 1), rest)
    short = {value: " ".join(part[head : len(part) - tail]) for value, part in words.items()}
    return values.map(short) if len(set(short.values())) == len(short) else values


def _words_of(value: str) -> list[str]:
    with suppress(ValueError):
        listed = json.loads(value)
        return [str(part) for part in listed] if isinstance(listed, list) else [value]
    return value.split()


def setting_label(name: str) -> str:
    """Shorten the dotted key of a setting for a table header."""
    if name == "source_hash":
        return "version of the code"
    group, _, leaf = name.rpartition(".")
    if leaf == "name":
        return group or name
    head, _, last = leaf.rpartition("_")
    label = (f"{head} ({_UNITS[last]})" if head and last in _UNITS else leaf).replace("_", " ")
    # A rule is called after the setting that it changes.
    is_rule = group == "scaling" and leaf != "reference_global_batch_size"
    return f"scaling of the {label}" if is_rule else label


def _ordered(
    keys: pd.DataFrame, rejected: pd.Series[bool], order: Sequence[str]
) -> tuple[pd.Series[int], pd.DataFrame]:
    """Number the cells in the order of tables: by their keys, with rejected ones last."""
    group = keys.groupby(list(keys.columns), dropna=False, sort=False).ngroup()
    table = keys.assign(cell=group).drop_duplicates("cell").set_index("cell")
    ranks: dict[str, pd.Series[Any]] = {"rejected": rejected.groupby(group).all()}
    for name in dict.fromkeys(order):
        numbers = pd.to_numeric(table[name], errors="coerce")
        ranks[name] = (numbers if numbers.notna().all() else table[name]).rank(method="dense")
    ranked = pd.DataFrame(ranks).sort_values(list(ranks), kind="stable")
    position = pd.Series(range(len(ranked)), index=ranked.index)
    table = table.loc[ranked.index].set_axis(pd.RangeIndex(len(ranked), name="cell"))
    return group.map(position), table


def plain_texts(column: pd.Series[Any]) -> pd.Series[str]:
    """Write each value of a setting as text; a missing one is `null`, as in the config."""
    # Thousands of runs share a few values; lists are told apart as they are written.
    keys = column.map(repr) if column.dtype == object else column
    codes, _ = pd.factorize(keys, use_na_sentinel=False)
    _, places = np.unique(codes, return_index=True)
    texts = np.array([_text(value) for value in column.iloc[places].tolist()], dtype=object)
    return pd.Series(texts[codes], index=column.index, dtype=str, name=column.name)


def _text(value: Any) -> str:  # noqa: ANN401  (any scalar that `pd.isna` takes, or a list)
    if isinstance(value, (list, tuple, dict)):
        return json.dumps(value)
    if value is None or pd.isna(value):
        return "null"
    # A column of integers with a gap was read as floats.
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value)


def _essential(table: pd.DataFrame, settings: Sequence[str]) -> list[str]:
    """Drop settings that follow from others of their group, as a model's sizes from one."""
    key_settings: dict[str, list[str]] = {}
    # The name of a group tells more than its settings, and a hash tells least.
    for name in sorted(settings, key=lambda name: (name == _DATA, not name.endswith(".name"))):
        group = key_settings.setdefault(name.partition(".")[0] if "." in name else "", [])
        if not (group and follows(table, group, name)):
            group.append(name)
    # A label that names one of several suggests that the others are equal.
    for prefix, group in key_settings.items():
        # A name stands for all settings that follow from it. Runs are pooled over learning rates,
        # and settings that follow from the rate must not separate them.
        leaders = [name for name in group if name.endswith(".name") or name == RATE]
        companions = [
            name
            for name in settings
            if name.startswith(f"{prefix}.")
            and name not in (*group, _DATA)
            and not (leaders and follows(table, leaders, name))
        ]
        group.extend(companions[: max(_MOST_NAMED - (len(group) - len(leaders)), 0)])
    chosen = {name for group in key_settings.values() for name in group}
    return [name for name in settings if name in chosen]


def follows(table: pd.DataFrame, keys: Sequence[str], name: str) -> bool:
    """Tell whether columns determine another one, wherever all have a value."""
    if not keys:
        return bool(table[name].nunique() <= 1)
    return not table.groupby(list(keys))[name].nunique().gt(1).any()
