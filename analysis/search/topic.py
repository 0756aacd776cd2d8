"""The section on a search: its trials, and the grid that was measured around the best ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from rich.console import Console

from batchscape.analysis.cells import Cells, launched_batches, setting_label
from batchscape.analysis.estimates import LEVEL
from batchscape.analysis.figures.chart import Axis, Chart, Look, Marks
from batchscape.analysis.figures.style import GREY, loss_axis, palette, shades
from batchscape.analysis.numbers import MISSING, significant, with_spread
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section
from batchscape.analysis.report.writers import show
from batchscape.analysis.search.measured import best_measured, means_along, setting_text
from batchscape.record.folder import SweepFolder
from batchscape.record.trial_counts import FAILED_TRIALS
from batchscape.record.trials import TRIALS, read_grid_results, read_trials
from batchscape.text import count_text, list_text

_LABELS = {
    "loss": "held-out loss",
    "steps_to_target": "optimizer steps to target",
    "samples_to_target": "samples to target",
    "time_to_target_s": "time to target (s)",
    "device_hours_to_target": "device-hours to target",
    "peak_allocated_gib": "peak memory (GiB)",
}
_MOST_NAMED = 6
"""Points or studies named in a sentence."""
_OTHERS = ", others"
"""Suffix of the trials of a study that are not its best."""
_WIDE = 5.0
"""Ratio of values above which an axis is logarithmic."""


def search_section(cells: Cells) -> Section | None:
    """Show the searches beside the sweeps of `cells`; no estimate is made of trials."""
    folders = [SweepFolder(Path(path)) for path in sorted({*cells.runs["sweep_dir"]})]
    searches = [
        _SearchResults(folder, trials)
        for folder in folders
        if (trials := read_trials(folder)) is not None
    ]
    if not searches:
        return None
    several = len(searches) > 1
    best, scopes = [], []
    tables, pictures, curves = list[Table](), list[Chart](), dict[str, pd.DataFrame]()
    for number, search in enumerate(searches, 1):
        # Values of two objectives, or of different settings, share no table.
        prefix, suffix, of_folder = "", "", ""
        if several:
            prefix, suffix = f"In {search.folder.path}: ", f"_{number}"
            of_folder = f" of {search.folder.path}"
        if (best_text := search.best_text()) is not None:
            best.append(prefix + best_text)
        scopes.append(prefix + search.scope_text())
        if len(search.measured):
            title = f"The best, with new seeds{of_folder}"
            tables.append(search.table(f"search_measured{suffix}", title))
        caption = (
            f"Trials of each study{of_folder}; the best of each study are filled. Trials without a "
            "value are left out."
        )
        if search.grids:
            caption += " Lines: the grid around the best, means over new seeds."
        pictures.append(_chart(search, cells, f"search{suffix}", caption))
        curves[f"trials{suffix}"] = search.trials
    return Section(
        "Search",
        [
            *best,
            *scopes,
            "A sampler chose the trials for doing well, so no number elsewhere in this report "
            "rests on them: the runs here are the grid that was measured around the best of each "
            "study, with other seeds.",
        ],
        first_screen=best or scopes,
        tables=tables,
        pictures=pictures,
        chart_data=curves,
    )


def print_search_result(sweep: SweepFolder, console: Console) -> None:
    """Print the best points of the grid around a search, or else its best trials."""
    trials = read_trials(sweep)
    if trials is None:
        return
    search = _SearchResults(sweep, trials)
    best_text = search.best_text()
    if best_text is None:
        console.print(search.best_trials_text(), soft_wrap=True)
        return
    console.print(best_text, soft_wrap=True)
    show(console, search.table("search_measured", "The best, with new seeds"))


class _SearchResults:
    """The trials of one folder, and the grids around their best."""

    def __init__(self, folder: SweepFolder, trials: pd.DataFrame) -> None:
        self.folder, self.trials = folder, trials
        self.objective = next(name for name in map(str, trials) if name in _LABELS)
        self.keys = [name for name in map(str, trials) if name not in {*TRIALS, self.objective}]
        self.grids = read_grid_results(folder)
        self.measured = best_measured(self.grids, self.objective)
        self._objective_text = _LABELS[self.objective]

    def scope_text(self) -> str:
        """Say which settings were searched, for which objective, by how many trials."""
        studies = self.trials["study"].nunique()
        n_trials = int(self.trials["outcome"].notna().sum())
        return (
            f"{list_text(self.keys, 'and')} {'was' if len(self.keys) == 1 else 'were'} searched "
            f"for the least {self._objective_text}: "
            f"{count_text(n_trials, 'trial')} in {count_text(studies, 'study', 'studies')}."
        )

    def best_text(self) -> str | None:
        """Write the best points of the grids in a sentence; None without a grid."""
        rows = self.measured.to_dict("records")
        if not rows:
            return None
        places = {str(grid["study"]): _place_text(grid["values"]) for grid in self.grids}
        points = []
        for row in rows:
            value = with_spread(row[self.objective], row[f"{self.objective}_ci95"])
            place = f"{_point_text(row)} {places[row['study']]}".strip()
            points.append(f"{place} ({value})")
        seeds = f"over {count_text(int(self.measured['n'].max()), 'new seed')}"
        if self.measured["best"].isna().all():
            text = f"Chosen by the trials: {_few(points)}; {self._objective_text}, {seeds}"
        else:
            text = f"Least {self._objective_text}: {_few(points)}; {seeds}"
            text += _bracket_text(rows, places)
        without_result = [
            place for study, place in places.items() if study not in {*self.measured["study"]}
        ]
        text += f"; no result {_few(without_result)}" if without_result else ""
        reported = self.trials[~self.trials["outcome"].isin(FAILED_TRIALS)]
        n_trials = reported.groupby("study")["outcome"].count()
        n_before = {str(grid["study"]): int(grid["trials"]) for grid in self.grids}
        if any(n_before.get(str(study)) != count for study, count in n_trials.items()):
            text += "; there were more trials since, around whose best nothing is measured yet"
        return f"{text}."

    def best_trials_text(self) -> str:
        """Write the best trials in a sentence."""
        best = self.trials[self.trials["is_best"].astype(bool)].to_dict("records")
        if not best:
            return "No trial has a result."
        points = [
            f"{', '.join(f'{setting_label(key)} {setting_text(row[key])}' for key in self.keys)} "
            f"of study {row['study']} "
            f"({significant(float(row[self.objective]), 4)})"
            for row in best
        ]
        text = f"Best trials by {self._objective_text}, one run a point: {_few(points)}"
        return f"{text}; nothing with new seeds has a result around them."

    def table(self, name: str, title: str) -> Table:
        """Show the best of each grid."""
        rows = self.measured.to_dict("records")
        has_brackets = self.measured["best"].notna().any()
        columns = [Column("study", is_left=True)]
        notes = [f"Means ± half-widths of {LEVEL:.0%} t-intervals over n seeds that no trial had."]
        neighbours = []
        if has_brackets:
            best = [f"{setting_label(row['setting'])} {setting_text(row['best'])}" for row in rows]
            columns.append(Column("best", texts=best))
            for side in ("below", "above"):
                texts = [
                    MISSING
                    if pd.isna(row[side])
                    else f"{setting_text(row[side])} ({significant(float(row[f'{side}_mean']), 4)})"
                    for row in rows
                ]
                neighbours.append(Column(side, f"next {side}", texts=texts))
            notes.append(
                "Next below and above: the neighbours in the grid, in brackets their means, "
                "infinite where a seed has no result."
            )
        held = [row["held"] or MISSING for row in rows]
        columns += [
            Column("held", "other settings" if has_brackets else "point", texts=held),
            Column(self.objective, self._objective_text, spread=f"{self.objective}_ci95"),
            Column("n"),
            *neighbours,
        ]
        return Table(name, title, self.measured, columns, notes=notes)


def _point_text(row: Mapping[Any, Any]) -> str:
    if row["setting"] is None:
        return str(row["held"])
    text = f"{setting_label(row['setting'])} {setting_text(row['best'])}"
    return f"{text} with {row['held']}" if row["held"] else text


def _few(texts: Sequence[str]) -> str:
    if len(texts) > _MOST_NAMED:
        texts = [*texts[:2], f"{len(texts) - 3} more in the table", texts[-1]]
    return ", ".join(texts)


def _bracket_text(rows: Sequence[Mapping[Any, Any]], places: Mapping[str, str]) -> str:
    """Say whether the best values have worse neighbours on both sides."""
    open_ = [row["study"] for row in rows if pd.isna(row["below"]) or pd.isna(row["above"])]
    if not open_:
        return ", no lower at the next values on either side"
    where = _few([places[study] for study in dict.fromkeys(open_)] if len(places) > 1 else [])
    return f"; not bracketed {where}".rstrip() + ", where it is the last value of the grid"


def _place_text(values: Mapping[str, Any]) -> str:
    """Name a study by its settings; empty if it has none."""
    names = ("B" if key == "batch.global_batch_size" else setting_label(key) for key in values)
    parts = zip(names, map(setting_text, values.values()), strict=True)
    return "at " * bool(values) + ", ".join(f"{name} = {value}" for name, value in parts)


def _chart(search: _SearchResults, cells: Cells, name: str, caption: str) -> Chart:
    """Draw the objective against each searched number, with the grids."""
    y = search.objective
    numbers = [key for key in search.keys if pd.api.types.is_numeric_dtype(search.trials[key])]
    columns = numbers or search.keys[:1]
    trials = search.trials[np.isfinite(pd.to_numeric(search.trials[y]))]
    is_best = trials["is_best"].astype(bool)
    trials = trials.assign(series=trials["study"])[[*columns, y, "series"]]
    others = trials[~is_best].assign(series=trials["series"] + _OTHERS)
    tables = [_lines(search, x, y) for x in columns]
    marks = [Marks("line", table) for table in tables if len(table)]
    marks += [Marks("point", table, size=20) for table in (others, trials[is_best])]
    # A dot in the name of a field leads into it.
    fields = {x: x.replace(".", "_") for x in columns}
    marks = [replace(mark, table=mark.table.rename(columns=fields)) for mark in marks]
    looks: dict[str, Look] = {}
    for study, look in _looks(search.trials, launched_batches(cells.runs)).items():
        looks |= {study: look, study + _OTHERS: replace(look, hollow=True)}
    series = {*trials["series"], *others["series"]}
    titles = {fields[x]: setting_label(x) for x in columns}
    label = loss_axis(_LABELS[y], cells.runs) if y == "loss" else _LABELS[y]
    kind: Literal["linear", "log", "names"] = "names"
    if all(pd.api.types.is_numeric_dtype(trials[x]) for x in columns):
        kind = "log" if _is_wide(trials, columns) else "linear"
    return Chart(
        name,
        "What was searched",
        caption,
        Axis(titles, "Against", kind=kind),
        Axis({y: label}, kind="log" if _is_wide(trials, [y]) else "linear"),
        marks,
        {name: look for name, look in looks.items() if name in series},
        panels="x",
        tables=[f"tables/{name.replace('search', 'trials')}.csv"],
    )


def _lines(search: _SearchResults, x: str, y: str) -> pd.DataFrame:
    """Return the means of each grid along a setting."""
    parts = [pd.DataFrame()]
    for grid in search.grids:
        if any(bracket["key"] == x for bracket in grid["brackets"]):
            means = means_along(grid, x)
            means = means[np.isfinite(means)]
            line = pd.DataFrame({x: means.index, y: means.to_numpy()})
            parts.append(line.assign(series=str(grid["study"])))
    return pd.concat(parts)


def _looks(trials: pd.DataFrame, launched: Sequence[int]) -> dict[str, Look]:
    """Colour studies; a study of a global batch like that batch elsewhere, or grey."""
    names = [str(name) for name in trials["study"].unique()]
    batches = {name: name.removeprefix("batch.global_batch_size=") for name in names}
    if not all(batch.isdecimal() for batch in batches.values()):
        return palette(names)
    batch_looks = shades(launched)
    names = sorted(names, key=lambda name: int(batches[name]))
    return {name: batch_looks.get(batches[name], GREY) for name in names}


def _is_wide(trials: pd.DataFrame, names: Sequence[str]) -> bool:
    low, high = trials[[*names]].min(), trials[[*names]].max()
    return bool((low.gt(0) & high.gt(_WIDE * low)).all())
