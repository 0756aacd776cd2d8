"""What was asked, what was trained, and where: in the words of the files, as small tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import resources

import pandas as pd

from batchscape.analysis.cells import plain_texts
from batchscape.analysis.hardware import was_started
from batchscape.analysis.report.table import Column, Table
from batchscape.text import list_text

__all__ = ["provenance", "questions", "trained"]

_VERSIONS = ("environment.batchscape", "environment.python", "environment.packages.torch")
_MAX_VALUES = 4
_GROUPS = ("model", "data", "optimizer", "schedule", "scaling", "budget", "evaluation", "engine")
"""Groups of settings that say what was trained."""


def questions(names: Sequence[str]) -> Iterator[str]:
    """Quote what prepared studies ask, from the first comment line of their files.

    Parameters
    ----------
    names : sequence of str
        Of sweeps; those of others ask nothing.
    """
    for name in names:
        # A hash of fixed settings may follow the name of the study.
        study = re.sub("-[0-9a-f]{8}$", "", name)
        if not study.isidentifier():
            continue
        file = resources.files("batchscape").joinpath("sweeps", f"{study}.yaml")
        if not file.is_file():
            continue
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if "?" in line]
        if lines and lines[0].startswith("#"):
            yield lines[0].lstrip("# ").partition("?")[0] + "?"


def provenance(runs: pd.DataFrame) -> list[Table]:
    """Say what was trained, where, and with which software.

    Parameters
    ----------
    runs : DataFrame
        As `Cells.runs`.

    Returns
    -------
    list of Table
        Only those of which something is recorded.
    """
    tables = [_settings(runs), _where(runs), _environment(runs)]
    return [table for table in tables if table.positions]


def _where(runs: pd.DataFrame) -> Table:
    launched = runs[was_started(runs)]
    names = ["hardware", "device_type", "precision", *_VERSIONS, "environment.git.revision"]
    columns = [name for name in names if name in launched and launched[name].notna().any()]
    found = launched[columns].astype("string").fillna("unknown")
    counts = found.value_counts(sort=False).reset_index(name="runs") if columns else found
    dirty = launched.get("environment.git.dirty", pd.Series(dtype=object)).eq(True)
    changed = f"{dirty.sum()} runs came from a working tree with uncommitted changes."
    headers = [name.rpartition(".")[2].replace("_", " ") for name in columns]
    left = [Column(*of, is_left=True) for of in zip(columns, headers, strict=True)]
    shown = [*left, Column("runs")]
    notes = [changed] if dirty.any() else []
    return Table("", "What ran where", counts if columns else pd.DataFrame(), shown, notes=notes)


def trained(runs: pd.DataFrame) -> Iterator[tuple[str, dict[str, str], list[str]]]:
    """Sort the settings that decide a loss curve into those that are the same and those that vary.

    Parameters
    ----------
    runs : DataFrame
        As `Cells.runs`.

    Yields
    ------
    str
        Name of a group of settings, such as `model`.
    dict of str to str
        Values of those that all runs share, by name within the group; `name` first.
    list of str
        Names of those that vary, or that only some of the runs have.
    """
    for group in _GROUPS:
        same, vary = {}, []
        for name in (name for name in map(str, runs) if name.startswith(f"{group}.")):
            values = plain_texts(runs[name]).unique().tolist()
            leaf = name.partition(".")[2]
            if leaf == "manifest_hash":
                continue
            if len(values) > 1:
                vary.append(leaf)
            elif values not in ([], ["null"]):
                same[leaf] = values[0]
        yield group, dict(sorted(same.items(), key=lambda item: item[0] != "name")), vary


def _settings(runs: pd.DataFrame) -> Table:
    """List the settings that decide a loss curve, and which of them vary."""
    rows = []
    for group, same, vary in trained(runs):
        shown = ", ".join(f"{name}={value}" for name, value in same.items())
        more = f"; varies: {', '.join(vary)}" if vary else ""
        if shown or more:
            rows.append([group, shown + more])
    return _listed("What was trained", ["group", "settings"], rows)


def _environment(runs: pd.DataFrame) -> Table:
    rows = []
    for name in sorted(name for name in map(str, runs) if name.startswith("environment.")):
        values = [text for text in plain_texts(runs[name]).unique() if text not in {"null", "[]"}]
        if values:
            shown = list_text(values, "", _MAX_VALUES)
            rows.append([name.removeprefix("environment."), shown])
    return _listed("Software and machines in full", ["what", "found"], rows)


def _listed(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    frame = pd.DataFrame(rows, columns=pd.Index(headers))
    return Table("", title, frame, [Column(header, is_left=True) for header in headers])
