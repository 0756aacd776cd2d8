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
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchscape.analysis.joins import column_of
from batchscape.analysis.targets.columns import plain, recognise
from batchscape.analysis.targets.curves import PROGRESS
from batchscape.analysis.targets.ends import TO_TARGET, find_run_rows, last_losses
from batchscape.analysis.targets.schema import MISSING, NAN, check, refuse_rows
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
_SEPARATORS = (";", "\t", ",", "|")
_SHOWN = 60
"""Characters of a line that a message quotes at most."""
_CURVES = ("a table of losses", ("global_batch_size", "loss"), (*PROGRESS, "loss"))
_REACHES = (
    "a table without a loss (--column loss=COLUMN names it) is one of steps to target and",
    ("global_batch_size", "steps_to_target"),
    (*TO_TARGET, "target_loss"),
)
"""What a table should be, the columns that it needs, and the numbers that are read."""
STATUS_WORDS: dict[Status, tuple[str, ...]] = {
    Status.COMPLETED: (
        *("complete", "finished", "finish", "done", "success", "succeeded", "successful"),
    ),
    Status.DIVERGED: (),
    Status.PRUNED: (),
    Status.FAILED: (
        *("fail", "failure", "error", "errored", "crashed", "crash", "node_fail", "boot_fail"),
    ),
    Status.OOM: ("out_of_memory",),
    Status.TIMEOUT: ("timed_out", "time_out", "deadline"),
    Status.INTERRUPTED: (
        *("killed", "cancelled", "canceled", "aborted", "preempted", "preempting"),
        *("user_canceled", "sys_canceled"),
    ),
    Status.RUNNING: ("in_progress", "completing"),
    Status.PENDING: ("waiting", "queued", "scheduled", "not_started", "paused", "suspended"),
    Status.REJECTED: (),
}
"""Beside our own words those of W&B, Optuna, MLflow, Slurm, Ax and NNI, each of one meaning in all
of them. What is `TERMINATED` to Ray, `stopped` to ClearML or
`early_stopped` to Ax is not."""
_STATUS_OF = {
    word: status for status, words in STATUS_WORDS.items() for word in (status.value, *words)
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
    for name in options.group:
        if name not in table:
            have = ", ".join(map(str, table.columns))
            msg = f"--group {name}: the table has no such column; it has: {have}"
            raise AnalysisError(msg)
    foreign, (table, notes) = table, recognise(table, options.columns)
    group, labels, numbers = _groups(foreign, table, options.group)
    has_loss = _has_loss(table, options.minimise)
    what, needed, others = _CURVES if has_loss else _REACHES
    # What is missing and what was logged as NaN are one once they are numbers.
    losses, columns = column_of(table, "loss"), ("global_batch_size", "learning_rate", *others)
    texts = ("seed", "run") if has_loss else ("seed", "run", "outcome")
    table = check(table, what, needed, (*columns, *texts)).reset_index(drop=True)
    rows = table[[name for name in columns if name in table]].assign(group=numbers)
    names = ("status", "outcome", "trajectory_id")
    rows = rows.assign(**{n: table[n].to_numpy(dtype=object) for n in names if n in table})
    rows = _steps_done(_statuses(rows, notes), options.first_step)
    rows["seed"] = _seeds(table, notes)
    if has_loss:
        rows = _runs(table, rows, notes)
    elif "run" in table:
        rows["run_id"] = table["run"].astype(str)
    _refuse_mixed_units(rows)
    if len(labels) > 1:
        group_names = list_text(labels.values(), "and", _NAMED)
        notes.append(f"{len(labels)} groups, never pooled: {group_names}")
    notes += _unused(table, rows, group)
    if not has_loss:
        return ForeignTable("reaches", _reaches(rows), labels, tuple(notes))
    minimise = options.minimise
    has_progress = bool({"optimizer_step", "samples"} & set(rows))
    # Where nothing says how far a run was, its only loss is its last.
    rows = rows if has_progress else rows.assign(optimizer_step=1.0)
    rows = _measured(rows, losses, options.nan, notes)
    is_run_unique = rows["run"].is_unique
    if not has_progress and (minimise == "steps" or not is_run_unique):
        msg = (
            "a table of loss curves needs optimizer_step or samples: how far a run was at each "
            "loss. A table of final losses needs neither, but has one row a run: a column `seed` "
            "or `run` tells runs apart"
        ) + (_LOG_CALLS if {"_step", "Step"} & set(table) else "")
        raise AnalysisError(msg)
    _refuse_steps_from_0(rows, options.first_step)
    curves = tidy_curves(rows)
    if minimise == "steps" or (minimise is None and not is_run_unique):
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
        msg = (
            "the table has both loss and steps_to_target, and one is analysed: choose "
            "--minimise loss or --minimise steps"
        )
        raise AnalysisError(msg)
    charts = [str(name) for name in table if _OF_CHART.search(str(name))]
    if "global_batch_size" not in table and charts:
        msg = (
            f"the table is that of a chart, as W&B exports it: one column a run ({charts[0]}), and "
            "nothing says its global batch. The analysis reads one row a measurement (run, "
            "global_batch_size, optimizer_step, loss): write the history of each run with its "
            "batch from its config (wandb.Api().runs(...), run.history())"
        )
        raise AnalysisError(msg)
    return minimise == "loss" or ("loss" in table and not has_both)


_OF_CHART = re.compile(r" - .*(?<!__MIN)(?<!__MAX)$")
"""How W&B names the column of a run in a chart: `b8s0 - eval/loss`."""


def read_file(path: Path) -> pd.DataFrame:
    """Read a file as text and objects, so that a missing value (None) and `nan` stay apart."""
    kind = _ENDINGS.get(path.suffix.lower())
    if kind is None:
        msg = f"{path}: a table is a file that ends in {', '.join(_ENDINGS)}"
        raise AnalysisError(msg)
    try:
        _refuse_separator(path, kind)
        if kind == "parquet":
            # pandas writes one NaN for both; other writers keep null and NaN apart.
            from_pandas = pq.read_schema(path).pandas_metadata is not None
            return (
                pd.read_parquet(path)
                if from_pandas
                else pd.read_parquet(path, dtype_backend="pyarrow")
            )
        if kind == "lines":
            return _lines(path)
        separator = "," if kind == "csv" else "\t"
        texts = pd.read_csv(
            path, sep=separator, skipinitialspace=True, dtype=str, keep_default_na=False
        )
        texts = texts.astype(object).apply(lambda column: column.str.strip())
        filled: pd.DataFrame = texts.where(texts.ne(""), None)
        return filled
    except FileNotFoundError:
        msg = f"{path}: there is no such file"
        raise AnalysisError(msg) from None
    except (OSError, ValueError, OverflowError, TypeError, AttributeError) as error:
        # Whatever a parser stumbles over (its errors are ValueErrors, pyarrow's too).
        reason = " ".join(str(error).split()) or type(error).__name__
        msg = f"{path} cannot be read as {kind}: {reason}"
        raise AnalysisError(msg) from None


def _lines(path: Path) -> pd.DataFrame:
    """Read JSON lines; pandas would read null, NaN and an absent key alike."""
    with path.open(encoding="utf-8") as file:
        rows: list[dict[str, Any]] = [json.loads(line) for line in file if line.strip()]
    names = dict.fromkeys(name for row in rows for name in row.keys())  # noqa: SIM118
    columns = {
        name: ["nan" if _is_nan(row.get(name)) else row.get(name) for row in rows] for name in names
    }
    return pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in columns.items()})


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and value != value  # noqa: PLR0124


def _refuse_separator(path: Path, kind: str) -> None:
    """Refuse a text file whose first line has another separator than its ending says."""
    separator = {"csv": ",", "tsv": "\t"}.get(kind)
    if separator is None:
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline().strip()
    likely = max(_SEPARATORS, key=first.count)
    if separator in first or not first.count(likely):
        return
    names = {",": "','", "\t": "a tab"}
    msg = (
        f"{path}: a {path.suffix} file is read with {names[separator]} between its columns, and "
        f"its first line, {first[:_SHOWN]!r}, has none; the separator looks like "
        f"{names.get(likely, repr(likely))}. Write it with {names[separator]}, and numbers with a "
        "decimal point"
    )
    raise AnalysisError(msg)


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
    """Number the groups by the columns asked for and the table's own column of them."""
    if "group" in renamed:
        group_column = str(table.columns[renamed.columns.get_loc("group")])
        names = [group_column, *(name for name in names if name != group_column)]
    if not names:
        return names, {0: ""}, np.zeros(len(table), dtype=np.int64)
    missing = table[list(names)].isna().any(axis=1)
    if missing.any():
        msg = f"each row says its group; {missing.sum()} rows lack {list_text(names)}"
        raise AnalysisError(msg)
    texts = table[list(names)].astype(str)
    joined = [", ".join(row) for row in texts.itertuples(index=False)]
    codes, unique_texts = pd.factorize(np.array(joined, dtype=object))
    labels = {number: str(label) for number, label in enumerate(unique_texts)}
    return names, labels, codes.astype(np.int64)


def _statuses(rows: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Translate statuses to our words; refuse words that are not known to have one meaning."""
    if "status" not in rows:
        return rows
    texts = rows["status"].dropna().astype(str)
    # `TrialState.FAIL` of Optuna, `CANCELLED by 1000` of Slurm.
    words = {text: text.rpartition(".")[2].partition(" by ")[0] for text in texts.unique()}
    unknown = [text for text, word in words.items() if plain(word) not in _STATUS_OF]
    if unknown:
        msg = (
            f"status {unknown[0]!r} ({texts.eq(unknown[0]).sum()} rows) may be that of a run that "
            f"ended, or was cut off; write what it was: {', '.join(Status)}. If the column says "
            "something else, rename it"
        )
        raise AnalysisError(msg)
    ours = {text: _STATUS_OF[plain(word)].value for text, word in words.items()}
    translations = [
        f"{text} for {status}" for text, status in ours.items() if text.lower() != status
    ]
    if translations:
        notes.append(f"of status, {', '.join(translations)} is taken")
    mapped = rows["status"].map(lambda text: ours[str(text)], na_action="ignore")
    return rows.assign(status=mapped.astype(object))


def _steps_done(rows: pd.DataFrame, first_step: int | None) -> pd.DataFrame:
    """Count optimizer steps from 1 where the table says that it does otherwise."""
    if first_step is None:
        return rows
    if first_step not in {0, 1}:
        msg = f"--first-step is 0 or 1, the number of the first optimizer step; got {first_step}"
        raise AnalysisError(msg)
    if "optimizer_step" not in rows:
        msg = f"--first-step {first_step} is of optimizer_step, which the table does not have"
        raise AnalysisError(msg)
    return rows.assign(optimizer_step=rows["optimizer_step"] + 1 - first_step)


def _refuse_steps_from_0(rows: pd.DataFrame, first_step: int | None) -> None:
    """Refuse steps that look counted from 0: each is one less than a multiple.

    Where a run is measured every n-th step, the first of them has the number n, or n - 1. A last
    measurement, at the end of the training, may be anywhere, and one at 0 may be of no step. Where
    every number from 0 on is there, nothing tells which it is.
    """
    if first_step is not None or "optimizer_step" not in rows:
        return
    widest, suspect = 1.0, None
    for _, steps in rows.groupby("run", sort=False)["optimizer_step"]:
        unique_steps = np.unique(steps.to_numpy())
        grid = unique_steps[unique_steps > 0]
        if len(grid) < _LEAST_ROWS:
            continue
        if unique_steps[0] == 0 and (np.diff(unique_steps) == 1).all():
            suspect = unique_steps if suspect is None else suspect
            continue
        grid = grid[: max(_LEAST_ROWS, len(grid) - 1)]
        interval = grid[0] + 1
        if ((grid + 1) % interval).any():
            continue
        if interval > widest and (interval == _EVERY_SECOND or (grid % grid[0]).any()):
            widest, suspect = interval, grid
    if suspect is not None:
        examples = ", ".join(f"{step:g}" for step in suspect[:3])
        multiples = f", each one less than a multiple of {widest:g}" if suspect[0] else ""
        msg = (
            f"optimizer_step counts what is done, and a run was measured at {examples}{multiples}: "
            "is its first optimizer step number 0? Say so by --first-step 0, or --first-step 1 if "
            "that many were done"
        )
        raise AnalysisError(msg)


_EVERY_SECOND = 2
"""Steps 1, 3, 5 fit either way of counting; the runs of other batches decide."""
_LEAST_ROWS = 3
"""Measurements of a run, beside one at 0, that show at which steps it is measured."""


def _measured(
    rows: pd.DataFrame, losses: pd.Series[Any], nan: str | None, notes: list[str]
) -> pd.DataFrame:
    """Drop the rows whose loss was not measured; a run without any loss keeps one row."""
    words = _words(losses)
    has_no_number, missing = rows["loss"].isna(), words.isin(MISSING)
    unclear = has_no_number & ~missing & ~words.isin(NAN)
    if unclear.any() and nan is None:
        row = int(np.flatnonzero(unclear)[0]) + 1
        msg = (
            f"loss has no number in {unclear.sum()} of {len(rows)} rows, such as row {row}, and "
            "pandas has one NaN for what was not measured and for what training logged as NaN. "
            "Say which: --nan missing (nan='missing') leaves the rows out, --nan diverged "
            "(nan='diverged') takes them for logged, which meets no target. Text files tell them "
            "apart: an empty cell is missing, and nan was logged"
        )
        raise AnalysisError(msg)
    is_left_out = has_no_number if nan == "missing" else missing
    if is_left_out.any():
        notes.append(
            f"{is_left_out.sum()} of {len(rows)} rows have no loss and are left out, as not "
            "measured (a NaN that training logged is written nan; pandas writes it with "
            "na_rep='nan')"
        )
    if (has_no_number & ~is_left_out).any():
        notes.append(
            f"{(has_no_number & ~is_left_out).sum()} of {len(rows)} losses are NaN, taken as "
            "logged: they meet no target, and a run that ends with one diverged; --nan missing "
            "leaves them out"
        )
    if is_left_out.all():
        msg = f"loss has a number in one row at least; all {len(rows)} have none"
        raise AnalysisError(msg)
    progress = [name for name in PROGRESS if name in rows]
    if "status" in rows:
        # How a run ended may stand in its last row alone, and that may be one without a loss.
        ordered = rows.sort_values(progress[:1], kind="stable")
        rows["status"] = ordered.groupby("run")["status"].transform("last")
    silent = is_left_out.groupby(rows["run"]).transform("all") & ~rows.duplicated("run")
    rows.loc[silent, progress] = 0.0
    return rows[~is_left_out | silent].reset_index(drop=True)


def _words(losses: pd.Series[Any]) -> pd.Series[str]:
    """Return the small-letter text of each value; `?` for a NaN that may be either."""
    is_arrow = isinstance(losses.dtype, pd.ArrowDtype)

    def word(value: object) -> str:
        if value is None or (is_arrow and value is pd.NA):
            return ""
        if isinstance(value, str):
            return value.strip().lower()
        return "nan" if is_arrow and _is_nan(value) else "?"

    return losses.astype(object).map(word).reset_index(drop=True).astype(object)


def _seeds(table: pd.DataFrame, notes: list[str]) -> pd.Series[float]:
    if "seed" not in table:
        notes.append("no column of seeds: all rows are of one")
        return pd.Series(0.0, index=range(len(table)))
    column = table["seed"]
    numbers = pd.to_numeric(column.astype(object), errors="coerce").astype("float64")
    if np.isfinite(numbers).all():
        return numbers
    codes, names = pd.factorize(column.astype(str))
    notes.append(f"seeds are names, numbered from 0: {len(names)} of them")
    return pd.Series(codes.astype(float))


def _runs(table: pd.DataFrame, rows: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    if "run" in table:
        run = table["run"].astype(str)
        return rows.assign(run=pd.factorize(run)[0], run_id=run)
    names = [n for n in ("group", "learning_rate", "global_batch_size", "seed") if n in rows]
    numbers = rows.groupby(names, sort=False).ngroup()
    counts = f"{len(rows)} rows, {count_text(numbers.nunique(), 'run')}"
    notes.append(f"no column of runs: rows of one {', '.join(names)} are a run ({counts})")
    return rows.assign(run=numbers)


def _finals(curves: pd.DataFrame, notes: list[str], *, has_progress: bool) -> pd.DataFrame:
    """Take the last loss of each run; infinite where it diverged."""
    finals = last_losses(curves).drop(columns="settled_loss")
    finals = finals.rename(columns={"final_loss": "final_eval_loss"})
    if has_progress:
        last = curves.loc[find_run_rows(curves).last, list(PROGRESS)].reset_index(drop=True)
        finals = finals.assign(**{name: last[name] for name in PROGRESS})
    early = ~finals["status"].isin([Status.COMPLETED, Status.DIVERGED]) & finals["status"].notna()
    missing = finals["final_eval_loss"].isna() & ~early
    left_out = []
    if early.any():
        statuses = ", ".join(sorted(finals.loc[early, "status"].unique()))
        left_out.append(
            f"{early.sum()} of {len(finals)} runs did not end ({statuses}) and are left out"
        )
    if missing.any():
        left_out.append(
            f"{missing.sum()} of {len(finals)} runs have no final loss and are left out"
        )
    ended = finals[~early & ~missing].reset_index(drop=True)
    if ended.empty:
        msg = f"a table of final losses needs a run that ended with one: {'; '.join(left_out)}"
        raise AnalysisError(msg)
    notes += left_out
    return ended


def _reaches(rows: pd.DataFrame) -> pd.DataFrame:
    names = ("group", "target_loss", "learning_rate", "global_batch_size", "seed")
    keys = [name for name in names if name in rows]
    is_repeat = rows.duplicated(keys)
    if "trajectory_id" in rows:
        # One training that was cut differently, of which one row will count.
        cuts = rows["trajectory_id"].notna() & rows.duplicated([*keys, "trajectory_id"])
        is_repeat &= ~cuts
    if is_repeat.any():
        row = rows.loc[is_repeat, keys].iloc[0]
        values = ", ".join(f"{name}={row[name]:g}" for name in keys if name != "group")
        msg = (
            f"a run reaches a target once; {values} is there more than once ({is_repeat.sum()} "
            "rows too many). Tell runs apart by a column `seed`, or groups of them with --group "
            "COLUMN"
        )
        raise AnalysisError(msg)
    if "outcome" in rows:
        reached = rows["outcome"].eq("reached")
        contradicts = reached != np.isfinite(rows["steps_to_target"])
        refuse_rows(
            contradicts,
            "outcome",
            rows["outcome"],
            "'reached' where steps are finite, only there",
        )
    elif "status" in rows:
        lost = rows["status"].eq("diverged")
        contradicts = lost & np.isfinite(rows["steps_to_target"])
        status = rows["status"].astype(str)
        refuse_rows(contradicts, "status", status, "not 'diverged' where a target was reached")
        rows["steps_to_target"] = rows["steps_to_target"].mask(lost, np.inf)
    return tidy_reaches(rows.assign(run=np.arange(len(rows)), crossing="as given"))


def _refuse_mixed_units(rows: pd.DataFrame) -> None:
    """Refuse samples that are not steps times batch: one of the three is in another unit."""
    steps, samples = "steps_to_target", "samples_to_target"
    if "loss" in rows:
        steps, samples = "optimizer_step", "samples"
    if not {steps, samples} <= set(rows):
        return
    expected = rows[steps] * rows["global_batch_size"]
    has_both = np.isfinite(expected) & np.isfinite(rows[samples])
    is_off = (rows[samples] - expected).abs() > _SAME_UNIT * expected + rows["global_batch_size"]
    if (has_both & is_off).any():
        row = int(np.flatnonzero((has_both & is_off).to_numpy())[0])
        factor = float(rows[samples].iloc[row] / max(float(expected.iloc[row]), 1.0))
        msg = (
            f"{samples} is {steps} times global_batch_size; row {row + 1} has {factor:.4g} times "
            "that. Is one of them in tokens, or counted a device? Give all in samples and "
            f"optimizer steps, or leave {samples} out"
        )
        raise AnalysisError(msg)


def _unused(table: pd.DataFrame, rows: pd.DataFrame, group: Sequence[str]) -> list[str]:
    """Name columns that vary between runs of one batch and learning rate, as a setting would."""
    understood = {"global_batch_size", "learning_rate", "seed", "status", "outcome", "run", "group"}
    understood |= {"trajectory_id", *_CURVES[2], *_REACHES[2], *group}
    unknown_columns = [n for n in table if n not in understood]
    texts = table[unknown_columns].astype(str).reset_index(drop=True)
    if "run" in rows:
        # What varies along a run was measured, and is no setting.
        varies = texts.groupby(rows["run"]).nunique().gt(1).any()
        texts = texts.loc[~rows.duplicated("run"), list(varies.index[~varies])]
    setting_columns = [n for n in texts if 1 < texts[n].nunique() <= len(texts) / 2]
    keys = ["group", "global_batch_size", *(["learning_rate"] * ("learning_rate" in rows))]
    apart = texts[setting_columns].groupby([rows.loc[texts.index, name] for name in keys]).nunique()
    suspects = [str(name) for name in apart if apart[name].gt(1).any()]
    if not suspects:
        return []
    listed = ", ".join(suspects)
    return [f"not used, and it varies: {listed}. If runs differ in it, say --group {suspects[0]}"]
