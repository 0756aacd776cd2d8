"""Small tables of what was trained, where and with which software, in the words of the files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import resources

import pandas as pd

from batchscape.analysis.cells import plain_texts
from batchscape.analysis.hardware import was_started
from batchscape.analysis.report.table import Column, Table
from batchscape.text import list_text

_VERSIONS = ("environment.batchscape", "environment.python", "environment.packages.torch")
_MAX_VALUES = 4
_GROUPS = ("model", "data", "optimizer", "schedule", "scaling", "budget", "evaluation", "engine")
"""Groups of settings that say what was trained."""


def questions(names: Sequence[str]) -> Iterator[str]:
    """Quote the questions of prepared studies, which their files begin with, by sweep names."""
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
    """Say what was trained, where, and with which software, as far as it is recorded."""
    settings = []
    for group, constants, vary in trained(runs):
        text = ", ".join(f"{name}={value}" for name, value in constants.items())
        text += f"; varies: {', '.join(vary)}" if vary else ""
        if text:
            settings.append([group, text])
    environment = []
    for name in sorted(name for name in map(str, runs) if name.startswith("environment.")):
        values = [text for text in plain_texts(runs[name]).unique() if text not in {"null", "[]"}]
        if values:
            text = list_text(values, "", _MAX_VALUES)
            environment.append([name.removeprefix("environment."), text])
    tables = [
        _text_table("What was trained", ["group", "settings"], settings),
        _where(runs),
        _text_table("Software and machines in full", ["what", "found"], environment),
    ]
    return [table for table in tables if table.positions]


def _where(runs: pd.DataFrame) -> Table:
    launched = runs[was_started(runs)]
    names = ["hardware", "device_type", "precision", *_VERSIONS, "environment.git.revision"]
    columns = [name for name in names if name in launched and launched[name].notna().any()]
    places = launched[columns].astype("string").fillna("unknown")
    counts = places.value_counts(sort=False).reset_index(name="runs") if columns else places
    dirty = launched.get("environment.git.dirty", pd.Series(dtype=object)).eq(True)
    changed = f"{dirty.sum()} runs came from a working tree with uncommitted changes."
    headers = [name.rpartition(".")[2].replace("_", " ") for name in columns]
    row_names = [Column(*part, is_left=True) for part in zip(columns, headers, strict=True)]
    notes = [changed] if dirty.any() else []
    frame = counts if columns else pd.DataFrame()
    return Table("", "What ran where", frame, [*row_names, Column("runs")], notes=notes)


def trained(runs: pd.DataFrame) -> Iterator[tuple[str, dict[str, str], list[str]]]:
    """Yield groups of settings that decide a loss, with the shared values and the varying names."""
    for group in _GROUPS:
        constants, vary = {}, []
        for name in (name for name in map(str, runs) if name.startswith(f"{group}.")):
            values = plain_texts(runs[name]).unique().tolist()
            leaf = name.partition(".")[2]
            if leaf == "manifest_hash":
                continue
            if len(values) > 1:
                vary.append(leaf)
            elif values not in ([], ["null"]):
                constants[leaf] = values[0]
        yield group, dict(sorted(constants.items(), key=lambda item: item[0] != "name")), vary


def _text_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    frame = pd.DataFrame(rows, columns=pd.Index(headers))
    return Table("", title, frame, [Column(header, is_left=True) for header in headers])
