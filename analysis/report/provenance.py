"""What was asked, what was trained, and where: in the words of the files, as small tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import resources

import pandas as pd

from batchscape.analysis.cells import plain_texts
from batchscape.analysis.hardware import was_started
from batchscape.analysis.report.grids import Grid
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


def provenance(runs: pd.DataFrame) -> dict[str, Grid]:
    """Say what was trained, where, and with which software.

    Parameters
    ----------
    runs : DataFrame
        As `Cells.runs`.

    Returns
    -------
    dict of str to Grid
        By title; only those of which something is recorded.
    """
    grids = {
        "What was trained": _settings(runs),
        "What ran where": _where(runs),
        "Software and machines in full": _environment(runs),
    }
    return {title: grid for title, grid in grids.items() if grid.rows}


def _where(runs: pd.DataFrame) -> Grid:
    launched = runs[was_started(runs)]
    names = ["hardware", "device_type", "precision", *_VERSIONS, "environment.git.revision"]
    columns = [name for name in names if name in launched and launched[name].notna().any()]
    if launched.empty or not columns:
        return Grid(headers=[], rows=[])
    dirty = launched.get("environment.git.dirty", pd.Series(dtype=object)).eq(True)
    groups = launched[columns].astype("string").fillna("unknown").value_counts(sort=False)
    rows = [list(map(str, row)) for row in groups.reset_index().itertuples(index=False)]
    headers = [name.rpartition(".")[2].replace("_", " ") for name in columns]
    changed = f"{dirty.sum()} runs came from a working tree with uncommitted changes."
    return Grid(
        headers=[*headers, "runs"],
        rows=rows,
        n_left=len(columns),
        notes=[changed] if dirty.any() else [],
    )


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


def _settings(runs: pd.DataFrame) -> Grid:
    """List the settings that decide a loss curve, and which of them vary."""
    rows = []
    for group, same, vary in trained(runs):
        shown = ", ".join(f"{name}={value}" for name, value in same.items())
        more = f"; varies: {', '.join(vary)}" if vary else ""
        if shown or more:
            rows.append([group, shown + more])
    return Grid(headers=["group", "settings"], rows=rows, n_left=2)


def _environment(runs: pd.DataFrame) -> Grid:
    rows = []
    for name in sorted(name for name in map(str, runs) if name.startswith("environment.")):
        values = [text for text in plain_texts(runs[name]).unique() if text not in {"null", "[]"}]
        if values:
            shown = list_text(values, "", _MAX_VALUES)
            rows.append([name.removeprefix("environment."), shown])
    return Grid(headers=["what", "found"], rows=rows, n_left=2)
