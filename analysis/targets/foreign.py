"""Foreign tables, with a note or a question wherever a value could mean two things.

They hold curves, steps to target, or one final loss a run.

Missing, and not a number
-------------------------
A loss that was not measured says nothing, and its row is left out. A loss that training logged as
NaN meets no target, and a run that ends with one diverged. Files tell the two apart: an empty cell,
`NA`, `null` or `None` is missing, the text `nan` was logged; JSON's null against its NaN; Arrow's
null against its NaN in Parquet. pandas does not: its floats have NaN for both, its `Float64` NA,
and Parquet that it wrote has a null for both. There a loss without a number is asked about, by
`nan`, rather than taken for one of the two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchscape.analysis.joins import column_of
from batchscape.analysis.targets.columns import ALIASES, plain, recognise
from batchscape.analysis.targets.curves import PROGRESS
from batchscape.analysis.targets.ends import TO_TARGET, find_run_rows, last_losses
from batchscape.analysis.targets.schema import MISSING, check, refuse_rows
from batchscape.analysis.targets.summary import tidy_reaches
from batchscape.analysis.targets.tidy import tidy_curves
from batchscape.errors import AnalysisError
from batchscape.record.status import Status
from batchscape.text import count_text, list_text

_ENDINGS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".jsonl": "lines",
    ".ndjson": "lines",
}
_SEPARATORS = {"csv": (",", "','"), "tsv": ("\t", "a tab")}
"""What stands between the columns of a text file, and its name."""
_SHOWN = 60
"""Characters of a line that a message quotes at most."""
_CURVES = ("a table of losses", ("global_batch_size", "loss"), (*PROGRESS, "loss"))
_REACHES = (
    "a table without a loss (--column loss=COLUMN names it) is one of steps to target and",
    ("global_batch_size", "steps_to_target"),
    (*TO_TARGET, "target_loss"),
)
"""What a table should be, the columns that it needs, and the numbers that are read."""
_TEXTS = ("status", "outcome", "trajectory_id")
STATUS_WORDS = {
    status: words.split()
    for status, words in {
        Status.COMPLETED: "complete finished finish done success succeeded successful",
        Status.DIVERGED: "",
        Status.PRUNED: "",
        Status.FAILED: "fail failure error errored crashed crash node_fail boot_fail",
        Status.OOM: "out_of_memory",
        Status.TIMEOUT: "timed_out time_out deadline",
        Status.INTERRUPTED: "killed cancelled canceled aborted preempted preempting user_canceled "
        "sys_canceled",
        Status.RUNNING: "in_progress completing",
        Status.PENDING: "waiting queued scheduled not_started paused suspended",
        Status.REJECTED: "",
    }.items()
}
"""Beside our own words those of W&B, Optuna, MLflow, Slurm, Ax and NNI, each of one meaning in all
of them. What is `TERMINATED` to Ray, `stopped` to ClearML or
`early_stopped` to Ax is not."""
_STATUS_OF = {
    word: status.value for status, words in STATUS_WORDS.items() for word in (status.value, *words)
}
_SAME_UNIT = 0.01
_NAMED = 6


@dataclass(frozen=True)
class ReadOptions:
    """What a foreign table does not say of itself."""

    group: Sequence[str] = ()
    """Columns whose values must not be pooled, such as the model; a column `group` is always
    one."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our name of a column to the table's, where it cannot be told."""
    minimise: Literal["loss", "steps"] | None = None
    """What a learning rate is chosen by: `loss`, the final one of a run, or `steps` to a target
    loss; by default `loss` where every run has one."""
    nan: Literal["missing", "diverged"] | None = None
    """What a loss of NaN stands for: no measurement, or one that training logged as NaN; needed
    where the table cannot tell (see above), and decides where it can."""
    first_step: int | None = None
    """Number that the table gives to the first optimizer step; by default 1, where no run shows
    another."""


DEFAULT_OPTIONS = ReadOptions()


@dataclass(frozen=True)
class ForeignTable:
    """A foreign table with our column names."""

    kind: Literal["curves", "reaches", "final losses"]
    table: pd.DataFrame
    """Tidy, with the columns of its kind in `docs/analysis_tables.md`."""
    groups: dict[int, str]
    """What each `group` is."""
    notes: tuple[str, ...]
    """Columns that were renamed, values that were translated, and columns that were not used."""


def read_table(path: Path, options: ReadOptions = DEFAULT_OPTIONS) -> ForeignTable:
    """Read a file of curves, of steps to target, or of final losses.

    Parameters
    ----------
    path : Path
        `.csv`, `.tsv`, `.parquet`, or JSON lines (`.jsonl`, `.ndjson`).
    options : ReadOptions, optional
        What the table does not say of itself.

    Raises
    ------
    AnalysisError
        If the file cannot be read as its ending says, or the table is refused by `as_table`.
    """
    return as_table(read_file(path), options)


def as_table(table: pd.DataFrame, options: ReadOptions = DEFAULT_OPTIONS) -> ForeignTable:
    """Understand a DataFrame as curves, as steps to target, or as final losses.

    Parameters
    ----------
    table : DataFrame
        With a column of losses: curves, or final losses where every run has one; with one of
        steps to target: reaches.
    options : ReadOptions, optional
        What the table does not say of itself.

    Raises
    ------
    AnalysisError
        If columns are missing or ambiguous, units are mixed, values are not what they must be, one
        run is there twice, a NaN, a status or the number of a step may stand for two things, or of
        final losses none is left.
    """
    foreign, (table, notes) = table, recognise(table, options.columns)
    group, labels, numbers = _groups(foreign, table, options.group)
    has_loss = _has_loss(table, options.minimise)
    what, needed, others = _CURVES if has_loss else _REACHES
    # What is missing and what was logged as NaN are one once they are numbers.
    losses, columns = column_of(table, "loss"), ("global_batch_size", "learning_rate", *others)
    texts = ("seed", "run") if has_loss else ("seed", "run", "outcome")
    table = check(table, what, needed, (*columns, *texts)).reset_index(drop=True)
    rows = table.filter(columns).assign(group=numbers).join(table.filter(_TEXTS).astype(object))
    _translate_statuses(rows, notes)
    _count_from_1(rows, options.first_step)
    rows["seed"] = _seeds(table, notes)
    if has_loss:
        rows["run"] = _runs(table, rows, notes)
    if "run" in table:
        rows["run_id"] = table["run"].astype(str)
    _refuse_mixed_units(rows)
    if len(labels) > 1:
        group_names = list_text(labels.values(), "and", _NAMED)
        notes.append(f"{len(labels)} groups, never pooled: {group_names}")
    notes += _unused(table.drop(columns=[*ALIASES, *group], errors="ignore"), rows)
    if not has_loss:
        return ForeignTable("reaches", _reaches(rows), labels, tuple(notes))
    has_progress = bool({"optimizer_step", "samples"} & set(rows))
    # Where nothing says how far a run was, its only loss is its last.
    rows = rows if has_progress else rows.assign(optimizer_step=1.0)
    rows = _measured(rows, losses, options.nan, notes)
    is_run_unique, minimise = rows["run"].is_unique, options.minimise
    if not has_progress and (minimise == "steps" or not is_run_unique):
        calls = _LOG_CALLS if {"_step", "Step"} & set(table) else ""
        raise AnalysisError(
            "a table of loss curves needs optimizer_step or samples: how far a run was at each "
            "loss. A table of final losses needs neither, but has one row a run: a column `seed` "
            f"or `run` tells runs apart{calls}"
        )
    if options.first_step is None:
        _refuse_steps_from_0(rows)
    curves = tidy_curves(rows)
    if (minimise or ("loss" if is_run_unique else "steps")) == "steps":
        return ForeignTable("curves", curves, labels, tuple(notes))
    if minimise is None:
        notes.append(
            "one loss a run: taken for the final losses, of which the lowest is sought; "
            "--minimise steps takes them for curves"
        )
    finals = _finals(curves, notes, has_progress=has_progress)
    return ForeignTable("final losses", finals, labels, tuple(notes))


_LOG_CALLS = (
    ". W&B's _step (or Step) counts calls of its log, and an optimizer step may make several or "
    "none: add a column of optimizer steps; where _step does count them, say --column "
    "optimizer_step=_step (or Step)"
)


def _has_loss(table: pd.DataFrame, minimise: str | None) -> bool:
    """Tell whether to read the losses of the table (else its steps to target)."""
    has_both = {"loss", "steps_to_target"} <= set(table)
    if has_both and minimise is None:
        raise AnalysisError(
            "the table has both loss and steps_to_target, and one is analysed: choose "
            "--minimise loss or --minimise steps"
        )
    charts = table.filter(regex=_OF_CHART).columns
    if "global_batch_size" not in table and len(charts):
        raise AnalysisError(
            f"the table is that of a chart, as W&B exports it: one column a run ({charts[0]}), and "
            "nothing says its global batch. The analysis reads one row a measurement (run, "
            "global_batch_size, optimizer_step, loss): write the history of each run with its "
            "batch from its config (wandb.Api().runs(...), run.history())"
        )
    return minimise == "loss" or ("loss" in table and not has_both)


_OF_CHART = r" - .*(?<!__MIN)(?<!__MAX)$"
"""How W&B names the column of a run in a chart: `b8s0 - eval/loss`."""


def read_file(path: Path) -> pd.DataFrame:
    """Read a file as text and objects, so that a missing value (None) and `nan` stay apart."""
    kind = _ENDINGS.get(path.suffix.lower())
    if kind is None:
        raise AnalysisError(f"{path}: a table is a file that ends in {', '.join(_ENDINGS)}")
    try:
        if kind == "parquet":
            # pandas writes one NaN for both; other writers keep null and NaN apart.
            from_pandas = pq.read_schema(path).pandas_metadata is not None
            if from_pandas:
                return pd.read_parquet(path)
            return pd.read_parquet(path, dtype_backend="pyarrow")
        if kind == "lines":
            # pandas would read null, NaN and an absent key alike.
            lines = path.read_text(encoding="utf-8").split("\n")
            rows = [json.loads(line, parse_constant=str) for line in lines if line.strip()]
            names = dict.fromkeys(name for row in rows for name in row)
            return pd.DataFrame({n: [row.get(n) for row in rows] for n in names}, dtype=object)
        separator, separator_name = _SEPARATORS[kind]
        _refuse_separator(path, separator, separator_name)
        texts = pd.read_csv(
            path, sep=separator, skipinitialspace=True, dtype=str, keep_default_na=False
        )
        texts = texts.astype(object).apply(lambda column: column.str.strip())
        filled: pd.DataFrame = texts.where(texts.ne(""), None)
        return filled
    except FileNotFoundError:
        raise AnalysisError(f"{path}: there is no such file") from None
    except (OSError, ValueError, OverflowError, TypeError, AttributeError) as error:
        # Whatever a parser stumbles over (its errors are ValueErrors, pyarrow's too).
        reason = " ".join(str(error).split()) or type(error).__name__
        raise AnalysisError(f"{path} cannot be read as {kind}: {reason}") from None


def _refuse_separator(path: Path, separator: str, name: str) -> None:
    """Refuse a text file whose first line has another separator than its ending says."""
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline().strip()
    likely = max(";\t,|", key=first.count)
    if separator in first or likely not in first:
        return
    likely_name = dict(_SEPARATORS.values()).get(likely, repr(likely))
    raise ValueError(
        f"a {path.suffix} file is read with {name} between its columns, and its first line, "
        f"{first[:_SHOWN]!r}, has none; the separator looks like {likely_name}. Write it with "
        f"{name}, and numbers with a decimal point"
    )


def pooled_groups(
    table: pd.DataFrame, options: ReadOptions, across: str
) -> tuple[dict[int, int], dict[int, str]]:
    """Return the group of each group of `as_table` without one column, and labels of these."""
    renamed, _ = recognise(table, options.columns)
    _, _, numbers = _groups(table, renamed, options.group)
    _, labels, pooled = _groups(table, renamed, [name for name in options.group if name != across])
    return dict(zip(numbers.tolist(), pooled.tolist(), strict=True)), labels


def _groups(
    table: pd.DataFrame, renamed: pd.DataFrame, names: Sequence[str]
) -> tuple[Sequence[str], dict[int, str], NDArray[np.int64]]:
    """Number the groups by the table's own column of them and the columns asked for."""
    for name in names:
        if name not in table:
            have = ", ".join(map(str, table.columns))
            raise AnalysisError(f"--group {name}: the table has no such column; it has: {have}")
    names = [*dict.fromkeys([*table.columns[renamed.columns == "group"], *names])]
    values = table[names]
    missing = values.isna().any(axis=1)
    if missing.any():
        raise AnalysisError(
            f"each row says its group; {missing.sum()} rows lack {list_text(names)}"
        )
    joined = [", ".join(row) for row in values.astype(str).to_numpy(dtype=object)]
    codes, labels = pd.factorize(np.array(joined, dtype=object))
    return names, dict(enumerate(labels)), codes


def _translate_statuses(rows: pd.DataFrame, notes: list[str]) -> None:
    """Translate statuses to our words; refuse words that are not known to have one meaning."""
    texts = column_of(rows, "status").dropna().astype(str)
    # `TrialState.FAIL` of Optuna, `CANCELLED by 1000` of Slurm.
    words = {text: text.rpartition(".")[2].partition(" by ")[0] for text in texts.unique()}
    status_of_text = {text: _STATUS_OF.get(plain(word)) for text, word in words.items()}
    for text, status in status_of_text.items():
        if status is None:
            raise AnalysisError(
                f"status {text!r} ({texts.eq(text).sum()} rows) may be that of a run that ended, "
                f"or was cut off; write what it was: {', '.join(Status)}. If the column says "
                "something else, rename it"
            )
    translations = [
        f"{text} for {status}" for text, status in status_of_text.items() if text.lower() != status
    ]
    if translations:
        notes.append(f"of status, {', '.join(translations)} is taken")
    if "status" in rows:
        rows["status"] = texts.map(status_of_text).reindex(rows.index).astype(object)


def _count_from_1(rows: pd.DataFrame, first_step: int | None) -> None:
    """Count optimizer steps from 1 where the table says that it does otherwise."""
    if first_step is None:
        return
    if first_step not in {0, 1}:
        raise AnalysisError(
            f"--first-step is 0 or 1, the number of the first optimizer step; got {first_step}"
        )
    if "optimizer_step" not in rows:
        raise AnalysisError(
            f"--first-step {first_step} is of optimizer_step, which the table does not have"
        )
    rows["optimizer_step"] += 1 - first_step


def _refuse_steps_from_0(rows: pd.DataFrame) -> None:
    """Refuse steps that look counted from 0: each is one less than a multiple.

    Where a run is measured every n-th step, the first of them has the number n, or n - 1. A last
    measurement, at the end of the training, may be anywhere, and one at 0 may be of no step. Where
    every number from 0 on is there, nothing tells which it is.
    """
    suspects = []
    for _, steps in column_of(rows, "optimizer_step").groupby(rows["run"], sort=False):
        counted = np.unique(steps)
        grid = counted[counted > 0]
        if len(grid) < _LEAST_ROWS:
            continue
        if counted[0] == 0 and (np.diff(counted) == 1).all():
            suspects.append((1.0, counted))
            continue
        grid = grid[: max(_LEAST_ROWS, len(grid) - 1)]
        interval = grid[0] + 1
        is_either = interval != _EVERY_SECOND and not (grid % grid[0]).any()
        if not (is_either or ((grid + 1) % interval).any()):
            suspects.append((interval, grid))
    if suspects:
        widest, grid = max(suspects, key=lambda suspect: suspect[0])
        examples = ", ".join(f"{step:g}" for step in grid[:3])
        multiples = f", each one less than a multiple of {widest:g}" * bool(grid[0])
        raise AnalysisError(
            f"optimizer_step counts what is done, and a run was measured at {examples}{multiples}: "
            "is its first optimizer step number 0? Say so by --first-step 0, or --first-step 1 if "
            "that many were done"
        )


_EVERY_SECOND = 2
"""Steps 1, 3, 5 fit either way of counting; the runs of other batches decide."""
_LEAST_ROWS = 3
"""Measurements of a run, beside one at 0, that show at which steps it is measured."""


def _measured(
    rows: pd.DataFrame, losses: pd.Series[Any], nan: str | None, notes: list[str]
) -> pd.DataFrame:
    """Drop the rows whose loss was not measured; a run without any loss keeps one row."""
    values = losses.astype(object).reset_index(drop=True)
    is_none = values.map(lambda value: value is None)
    is_clear = isinstance(losses.dtype, pd.ArrowDtype) | is_none | values.notna()
    has_no_number, n = rows["loss"].isna(), len(rows)
    unclear = has_no_number & ~is_clear
    if unclear.any() and nan is None:
        raise AnalysisError(
            f"loss has no number in {unclear.sum()} of {n} rows, such as row "
            f"{unclear.argmax() + 1}, and "
            "pandas has one NaN for what was not measured and for what training logged as NaN. "
            "Say which: --nan missing (nan='missing') leaves the rows out, --nan diverged "
            "(nan='diverged') takes them for logged, which meets no target. Text files tell them "
            "apart: an empty cell is missing, and nan was logged"
        )
    is_left_out = is_clear & values.map(str).str.strip().str.lower().isin(MISSING)
    is_left_out = has_no_number if nan == "missing" else is_left_out
    if is_left_out.all():
        raise AnalysisError(f"loss has a number in one row at least; all {n} have none")
    counts = {
        "rows have no loss and are left out, as not measured (a NaN that training logged is "
        "written nan; pandas writes it with na_rep='nan')": is_left_out.sum(),
        "losses are NaN, taken as logged: they meet no target, and a run that ends with one "
        "diverged; --nan missing leaves them out": (has_no_number & ~is_left_out).sum(),
    }
    notes += [f"{count} of {n} {what}" for what, count in counts.items() if count]
    progress = [*rows.filter([*PROGRESS]).columns]
    if "status" in rows:
        # How a run ended may stand in its last row alone, and that may be one without a loss.
        ordered = rows.sort_values(progress[:1], kind="stable")
        rows["status"] = ordered.groupby("run")["status"].transform("last")
    silent = is_left_out.groupby(rows["run"]).transform("all") & ~rows.duplicated("run")
    rows.loc[silent, progress] = 0.0
    return rows[~is_left_out | silent].reset_index(drop=True)


def _seeds(table: pd.DataFrame, notes: list[str]) -> pd.Series[float] | float:
    if "seed" not in table:
        notes.append("no column of seeds: all rows are of one")
        return 0.0
    column = table["seed"]
    numbers = pd.to_numeric(column.astype(object), errors="coerce").astype("float64")
    if np.isfinite(numbers).all():
        return numbers
    codes, names = pd.factorize(column.astype(str))
    notes.append(f"seeds are names, numbered from 0: {len(names)} of them")
    return pd.Series(codes.astype(float))


def _runs(table: pd.DataFrame, rows: pd.DataFrame, notes: list[str]) -> pd.Series[int]:
    """Number the runs, by their names where they have some."""
    if "run" in table:
        return pd.Series(pd.factorize(table["run"].astype(str))[0])
    names = [*rows.filter(["group", "learning_rate", "global_batch_size", "seed"]).columns]
    numbers = rows.groupby(names, sort=False).ngroup()
    counts = f"{len(rows)} rows, {count_text(numbers.nunique(), 'run')}"
    notes.append(f"no column of runs: rows of one {', '.join(names)} are a run ({counts})")
    return numbers


def _finals(curves: pd.DataFrame, notes: list[str], *, has_progress: bool) -> pd.DataFrame:
    """Take the last loss of each run; infinite where it diverged."""
    finals = last_losses(curves).drop(columns="settled_loss")
    finals = finals.rename(columns={"final_loss": "final_eval_loss"})
    if has_progress:
        last = curves.loc[find_run_rows(curves).last, [*PROGRESS]]
        finals = finals.join(last.reset_index(drop=True))
    status = finals["status"]
    early = status.notna() & ~status.isin([Status.COMPLETED, Status.DIVERGED])
    missing = finals["final_eval_loss"].isna() & ~early
    reasons = {
        f"did not end ({', '.join(sorted(status[early].unique()))})": early,
        "have no final loss": missing,
    }
    left_out = [
        f"{is_out.sum()} of {len(finals)} runs {reason} and are left out"
        for reason, is_out in reasons.items()
        if is_out.any()
    ]
    ended = finals[~early & ~missing].reset_index(drop=True)
    if ended.empty:
        raise AnalysisError(
            f"a table of final losses needs a run that ended with one: {'; '.join(left_out)}"
        )
    notes += left_out
    return ended


def _reaches(rows: pd.DataFrame) -> pd.DataFrame:
    keys = [
        *rows.filter(["group", "target_loss", "learning_rate", "global_batch_size", "seed"]).columns
    ]
    # Of one training that was cut differently one row will count.
    has_name = column_of(rows, "trajectory_id").notna()
    cuts = has_name & rows.duplicated([*keys, *rows.filter(["trajectory_id"]).columns])
    is_repeat = rows.duplicated(keys) & ~cuts
    if is_repeat.any():
        row = rows.loc[is_repeat, keys[1:]].iloc[0]
        values = ", ".join(f"{name}={value:g}" for name, value in row.items())
        raise AnalysisError(
            f"a run reaches a target once; {values} is there more than once ({is_repeat.sum()} "
            "rows too many). Tell runs apart by a column `seed`, or groups of them with --group "
            "COLUMN"
        )
    is_finite = np.isfinite(rows["steps_to_target"])
    if "outcome" in rows:
        outcome = rows["outcome"]
        rule = "'reached' where steps are finite, only there"
        refuse_rows(outcome.eq("reached") != is_finite, "outcome", outcome, rule)
    elif "status" in rows:
        status, lost = rows["status"].astype(str), rows["status"].eq("diverged")
        rule = "not 'diverged' where a target was reached"
        refuse_rows(lost & is_finite, "status", status, rule)
        rows["steps_to_target"] = rows["steps_to_target"].mask(lost, np.inf)
    return tidy_reaches(rows.assign(run=np.arange(len(rows)), crossing="as given"))


def _refuse_mixed_units(rows: pd.DataFrame) -> None:
    """Refuse samples that are not steps times batch: one of the three is in another unit."""
    steps, samples = "steps_to_target", "samples_to_target"
    if "loss" in rows:
        steps, samples = "optimizer_step", "samples"
    sample_counts, batch = column_of(rows, samples), rows["global_batch_size"]
    expected = column_of(rows, steps) * batch
    is_off = (sample_counts - expected).abs().gt(_SAME_UNIT * expected + batch) & np.isfinite(
        sample_counts
    )
    if is_off.any():
        row = is_off.idxmax()
        raise AnalysisError(
            f"{samples} is {steps} times global_batch_size; row {row + 1} has "
            f"{sample_counts[row] / max(expected[row], 1.0):.4g} times "
            "that. Is one of them in tokens, or counted a device? Give all in samples and "
            f"optimizer steps, or leave {samples} out"
        )


def _unused(unknown: pd.DataFrame, rows: pd.DataFrame) -> list[str]:
    """Name columns that vary between runs of one batch and learning rate, as a setting would."""
    texts = unknown.astype(str)
    if "run" in rows:
        # What varies along a run was measured, and is no setting.
        varies = texts.groupby(rows["run"]).nunique().gt(1).any()
        texts = texts.loc[~rows.duplicated("run"), ~varies]
    counts = texts.nunique()
    settings = texts.loc[:, counts.gt(1) & counts.le(len(texts) / 2)]
    cells = rows.groupby(
        [*rows.filter(["group", "global_batch_size", "learning_rate"]).columns]
    ).ngroup()
    apart = settings.groupby(cells).nunique().gt(1).any()
    suspects = [str(name) for name in apart.index[apart]]
    if not suspects:
        return []
    listed = ", ".join(suspects)
    return [f"not used, and it varies: {listed}. If runs differ in it, say --group {suspects[0]}"]
