"""Tables that batchscape did not write: curves, or steps to target, read with all doubts stated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.targets.columns import recognise
from batchscape.analysis.targets.crossings import OUTCOMES, TO_TARGET
from batchscape.analysis.targets.summary import tidy_reaches
from batchscape.analysis.targets.tidy import refuse_missing, tidy_curves
from batchscape.errors import AnalysisError

__all__ = ["ForeignTable", "as_table", "read_table"]

_ENDINGS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".jsonl": "lines",
    ".ndjson": "lines",
}
_SEPARATORS = (";", "\t", ",", "|")
_SHOWN = 60
"""Characters of a line that a message quotes."""
_CURVE_NUMBERS = ("optimizer_step", "samples", "tokens", "train_time_s", "loss")
_REACH_NUMBERS = (*TO_TARGET, "target_loss")
_MAY_BE_MISSING = {*TO_TARGET, "loss", "tokens", "train_time_s"}
_MAY_BE_INFINITE = {*TO_TARGET, "loss"}
_LARGEST_BATCH = 2**53
_SAME_UNIT = 0.01


@dataclass(frozen=True)
class ForeignTable:
    """A table, what kind it is, and how it was understood."""

    kind: Literal["curves", "reaches"]
    table: pd.DataFrame
    """Tidy, with the columns of its kind in `docs/analysis_tables.md`."""
    groups: dict[int, str]
    """What each `group` is."""
    notes: tuple[str, ...]
    """What was taken for what, and what was not used."""


def read_table(
    path: Path, *, group: Sequence[str] = (), columns: Mapping[str, str] | None = None
) -> ForeignTable:
    """Read a file of curves or of steps to target.

    Parameters
    ----------
    path : Path
        `.csv`, `.tsv`, `.parquet`, or JSON lines (`.jsonl`, `.ndjson`).
    group : sequence of str
        Columns whose values must not be pooled, such as the model.
    columns : mapping of str to str, optional
        Our name of a column to the table's, where it cannot be told.

    Returns
    -------
    ForeignTable

    Raises
    ------
    AnalysisError
        If the file cannot be read as its ending says, or the table is refused by `as_table`.
    """
    return as_table(_read(path), group=group, columns=columns)


def as_table(
    table: pd.DataFrame, *, group: Sequence[str] = (), columns: Mapping[str, str] | None = None
) -> ForeignTable:
    """Understand a DataFrame as curves or as steps to target.

    Parameters
    ----------
    table : DataFrame
        With a column of losses: curves; with one of steps to target: reaches.
    group, columns
        As for `read_table`.

    Returns
    -------
    ForeignTable

    Raises
    ------
    AnalysisError
        If columns are missing or ambiguous, units are mixed, values are not what they must be, or
        one run is there twice.
    """
    for name in group:
        if name not in table:
            have = ", ".join(map(str, table.columns))
            msg = f"--group {name}: the table has no such column; it has: {have}"
            raise AnalysisError(msg)
    labels, numbers = _groups(table, group)
    table, notes = recognise(table, columns)
    kind: Literal["curves", "reaches"] = "curves" if "loss" in table else "reaches"
    if kind == "reaches":
        needed = ["global_batch_size", "steps_to_target"]
        refuse_missing(table, needed, "a table without a loss is one of steps to target and")
    else:
        refuse_missing(table, ["global_batch_size"], "a table of curves")
    known = _CURVE_NUMBERS if kind == "curves" else _REACH_NUMBERS
    found = _numbers(table, ("global_batch_size", "learning_rate", *known)).assign(group=numbers)
    found = found.assign(**{n: table[n] for n in ("status", "outcome") if n in table})
    _refuse_batches(found["global_batch_size"])
    found["global_batch_size"] = found["global_batch_size"].astype("int64")
    found["seed"], said = _seeds(table)
    notes += said
    if kind == "curves":
        found, said = _runs(table, found)
        notes += said
    elif "run" in table:
        found["run_id"] = table["run"].reset_index(drop=True).astype(str)
    _refuse_mixed_units(found, kind)
    notes += _unused(table, found, group)
    tidy = tidy_curves(found) if kind == "curves" else _reaches(found)
    return ForeignTable(kind, tidy, labels, tuple(notes))


def _read(path: Path) -> pd.DataFrame:
    kind = _ENDINGS.get(path.suffix.lower())
    if kind is None:
        msg = f"{path}: a table is a file that ends in {', '.join(_ENDINGS)}"
        raise AnalysisError(msg)
    try:
        _refuse_separator(path, kind)
        if kind == "parquet":
            return pd.read_parquet(path)
        if kind == "lines":
            return pd.read_json(path, lines=True)
        return pd.read_csv(path, sep="," if kind == "csv" else "\t", skipinitialspace=True)
    except FileNotFoundError:
        msg = f"{path}: there is no such file"
        raise AnalysisError(msg) from None
    except (OSError, ValueError, OverflowError, TypeError, AttributeError) as error:
        # Whatever a parser stumbles over (its errors are ValueErrors, pyarrow's too).
        reason = " ".join(str(error).split()) or type(error).__name__
        msg = f"{path} cannot be read as {kind}: {reason}"
        raise AnalysisError(msg) from None


def _refuse_separator(path: Path, kind: str) -> None:
    """Refuse a text whose first line is one name by its ending's separator, several by another."""
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


def _groups(table: pd.DataFrame, names: Sequence[str]) -> tuple[dict[int, str], NDArray[np.int64]]:
    if not names:
        return {0: ""}, np.zeros(len(table), dtype=np.int64)
    missing = table[list(names)].isna().any(axis=1)
    if missing.any():
        msg = f"each row says its group; {missing.sum()} rows lack {' or '.join(names)}"
        raise AnalysisError(msg)
    texts = table[list(names)].astype(str)
    joined = [", ".join(row) for row in texts.itertuples(index=False)]
    codes, found = pd.factorize(np.array(joined, dtype=object))
    return {number: str(label) for number, label in enumerate(found)}, codes.astype(np.int64)


def _numbers(table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Take columns as numbers; refuse what is none, is missing, negative or infinite."""
    found = {}
    for name in (name for name in names if name in table):
        column = table[name]
        numbers = pd.to_numeric(column.astype(object), errors="coerce").astype("float64")
        odd = numbers.isna() & column.notna() & ~column.astype(str).str.strip().isin(["", "nan"])
        _refuse(odd, name, column, "is a number in every row")
        if name not in _MAY_BE_MISSING:
            _refuse(numbers.isna(), name, column, "is there in every row")
        if name not in _MAY_BE_INFINITE:
            _refuse(numbers.abs() == np.inf, name, column, "is finite")
        if name not in {"loss", "target_loss"}:
            _refuse(numbers < 0, name, column, "is not negative")
        if name in {*TO_TARGET, "learning_rate"}:
            _refuse(numbers == 0, name, column, "is above 0")
        found[name] = numbers.reset_index(drop=True)
    return pd.DataFrame(found)


def _refuse(wrong: pd.Series[bool], name: str, column: pd.Series[str], rule: str) -> None:
    bad = wrong.to_numpy(dtype=bool)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        msg = (
            f"{name} {rule}; {bad.sum()} of {len(bad)} rows have another value, such as "
            f"{str(column.iloc[row])!r} in row {row + 1}"
        )
        raise AnalysisError(msg)


def _refuse_batches(batch: pd.Series[float]) -> None:
    wrong = (batch < 1) | (batch != np.floor(batch)) | (batch > _LARGEST_BATCH)
    rule = "is a positive whole number of samples (for tokens, divide by those of a sample)"
    _refuse(wrong, "global_batch_size", batch.astype(str), rule)


def _seeds(table: pd.DataFrame) -> tuple[pd.Series[float], list[str]]:
    if "seed" not in table:
        return pd.Series(0.0, index=range(len(table))), ["no column of seeds: all rows are of one"]
    column = table["seed"].reset_index(drop=True)
    _refuse(column.isna(), "seed", column.astype(str), "is there in every row")
    numbers = pd.to_numeric(column.astype(object), errors="coerce").astype("float64")
    if np.isfinite(numbers).all():
        return numbers, []
    codes, names = pd.factorize(column.astype(str))
    return pd.Series(codes.astype(float)), [
        f"seeds are names, numbered from 0: {len(names)} of them"
    ]


def _runs(table: pd.DataFrame, found: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    if "run" in table:
        run = table["run"].reset_index(drop=True)
        _refuse(run.isna(), "run", run.astype(str), "is there in every row")
        return found.assign(run=pd.factorize(run.astype(str))[0], run_id=run.astype(str)), []
    names = [n for n in ("group", "learning_rate", "global_batch_size", "seed") if n in found]
    run = found.groupby(names, sort=False).ngroup()
    return found.assign(run=run), [f"no column of runs: rows of one {', '.join(names)} are a run"]


def _reaches(found: pd.DataFrame) -> pd.DataFrame:
    names = ("group", "target_loss", "learning_rate", "global_batch_size", "seed")
    keys = [name for name in names if name in found]
    again = found.duplicated(keys)
    if again.any():
        row = found.loc[again, keys].iloc[0]
        said = ", ".join(f"{name}={row[name]:g}" for name in keys if name != "group")
        msg = (
            f"a run reaches a target once; {said} is there more than once ({again.sum()} rows too "
            "many). Tell runs apart by a column `seed`, or groups of them with --group COLUMN"
        )
        raise AnalysisError(msg)
    if "outcome" in found:
        wrong = ~found["outcome"].isin(OUTCOMES)
        _refuse(wrong, "outcome", found["outcome"].astype(str), f"is one of {', '.join(OUTCOMES)}")
        reached = found["outcome"].eq("reached")
        odd = reached != np.isfinite(found["steps_to_target"])
        _refuse(odd, "outcome", found["outcome"], "is 'reached' where steps are finite, only there")
    elif "status" in found:
        lost = found["status"].eq("diverged")
        odd = lost & np.isfinite(found["steps_to_target"])
        status = found["status"].astype(str)
        _refuse(odd, "status", status, "is not 'diverged' where a target was reached")
        found["steps_to_target"] = found["steps_to_target"].mask(lost, np.inf)
    return tidy_reaches(found.assign(run=np.arange(len(found)), crossing="as given"))


def _refuse_mixed_units(found: pd.DataFrame, kind: str) -> None:
    """Refuse samples that are not steps times batch: one of the three is in another unit."""
    steps = "optimizer_step" if kind == "curves" else "steps_to_target"
    samples = "samples" if kind == "curves" else "samples_to_target"
    if not {steps, samples} <= set(found):
        return
    expected = found[steps] * found["global_batch_size"]
    both = np.isfinite(expected) & np.isfinite(found[samples])
    off = (found[samples] - expected).abs() > _SAME_UNIT * expected + found["global_batch_size"]
    if (both & off).any():
        row = int(np.flatnonzero((both & off).to_numpy())[0])
        factor = float(found[samples].iloc[row] / max(float(expected.iloc[row]), 1.0))
        msg = (
            f"{samples} is {steps} times global_batch_size; row {row + 1} has {factor:.4g} times "
            "that. Is one of them in tokens, or counted a device? Give all in samples and "
            f"optimizer steps, or leave {samples} out"
        )
        raise AnalysisError(msg)


def _unused(table: pd.DataFrame, found: pd.DataFrame, group: Sequence[str]) -> list[str]:
    """Name columns that tell apart rows which nothing else does, as a setting would."""
    known = {"global_batch_size", "learning_rate", "seed", "status", "outcome", "run"}
    known |= {*_CURVE_NUMBERS, *_REACH_NUMBERS, *group}
    left = [n for n in table if n not in known]
    left = [n for n in left if 1 < table[n].astype(str).nunique() <= len(table) / 2]
    same = ["group", "global_batch_size", "seed", *(["learning_rate"] * ("learning_rate" in found))]
    texts = table[left].astype(str).reset_index(drop=True)
    varies = texts.groupby([found[name] for name in same]).nunique().gt(1).any()
    suspects = [str(name) for name in varies.index[varies]]
    if not suspects:
        return []
    said = ", ".join(suspects)
    return [f"not used, and it varies: {said}. If runs differ in it, say --group {suspects[0]}"]
