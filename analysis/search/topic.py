"""The section on a search: its trials, and the grid that was measured around the best ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from rich.console import Console

from batchscape.analysis.cells import Cells, setting_label
from batchscape.analysis.estimates import LEVEL
from batchscape.analysis.figures.chart import Axis, Chart, Marks
from batchscape.analysis.figures.style import loss_axis, palette
from batchscape.analysis.numbers import MISSING, significant, with_spread
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section, join_sections
from batchscape.analysis.report.writers import show
from batchscape.analysis.search.measured import (
    best_measured,
    means_along,
    setting_text,
    settings_text,
)
from batchscape.record.folder import SweepFolder
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
"""Points named in a sentence."""
_OTHERS = ", others"
"""Suffix of the trials of a study that are not its best."""
_WIDE = 5.0
"""Ratio of values above which an axis is logarithmic."""
_RESERVE = (
    "A sampler chose the trials for doing well, so no number elsewhere in this report rests on "
    "them: the runs here are the grid that was measured around the best of each study, with other "
    "seeds."
)


def search_section(cells: Cells) -> Section | None:
    """Show the searches beside the sweeps of `cells`; no estimate is made of trials."""
    folders = [SweepFolder(Path(path)) for path in sorted({*cells.runs["sweep_dir"]})]
    trials_by_folder = [(folder, read_trials(folder)) for folder in folders]
    searches = [(folder, trials) for folder, trials in trials_by_folder if trials is not None]
    if not searches:
        return None
    several = len(searches) > 1
    parts = [
        _Search(folder, trials, f"_{n}" * several, f" of {folder.path}" * several).section(cells)
        for n, (folder, trials) in enumerate(searches, 1)
    ]
    section = join_sections("Search", parts)
    return replace(section, answer=[*section.answer, _RESERVE])


def print_search_result(sweep: SweepFolder, console: Console) -> None:
    """Print the best points of the grid around a search, or else its best trials."""
    trials = read_trials(sweep)
    if trials is None:
        return
    search = _Search(sweep, trials)
    if len(search.measured):
        console.print(search.best_text(), soft_wrap=True)
        show(console, search.table())
    else:
        console.print(search.best_trials_text(), soft_wrap=True)


class _Search:
    """The trials of one folder, and the grids around their best."""

    def __init__(
        self, folder: SweepFolder, trials: pd.DataFrame, suffix: str = "", of_folder: str = ""
    ) -> None:
        """Read the grids; of several searches, a suffix names the files and a text the folder."""
        self.trials, self.suffix, self.of_folder = trials, suffix, of_folder
        self.objective = next(name for name in map(str, trials) if name in _LABELS)
        self.keys = [name for name in map(str, trials) if name not in {*TRIALS, self.objective}]
        self.grids = read_grid_results(folder)
        self.measured = best_measured(self.grids, self.objective)

    def section(self, cells: Cells) -> Section:
        """Show it."""
        studies = self.trials["study"].nunique()
        n_trials = int(self.trials["outcome"].notna().sum())
        scope = (
            f"{list_text(self.keys, 'and')} {'was' if len(self.keys) == 1 else 'were'} searched "
            f"for the least {_LABELS[self.objective]}{self.of_folder}: "
            f"{count_text(n_trials, 'trial')} in {count_text(studies, 'study', 'studies')}."
        )
        has_best = len(self.measured) > 0
        return Section(
            "Search",
            [self.best_text(), scope] if has_best else [scope],
            [self.table()] if has_best else [],
            [self.chart(cells)],
            chart_data={f"trials{self.suffix}": self.trials},
        )

    def best_text(self) -> str:
        """Write the best points of the grids in a sentence."""
        places = {str(grid["study"]): _place_text(grid["values"]) for grid in self.grids}
        points = []
        for row in self.measured.to_dict("records"):
            value = with_spread(row[self.objective], row[f"{self.objective}_ci95"])
            point = row["held"]
            if row["setting"] is not None:
                point = (
                    settings_text({row["setting"]: row["best"]}) + " with " * bool(point) + point
                )
            points.append(" ".join(filter(None, (point, places[row["study"]], f"({value})"))))
        head, end = f"Least {_LABELS[self.objective]}: {_few(points)}; ", ""
        n_open = int(self.measured[["below", "above"]].isna().any(axis=1).sum())
        if self.measured["best"].isna().all():
            head = f"Chosen by the trials: {_few(points)}; {_LABELS[self.objective]}, "
        elif n_open:
            end = f"; {n_open} of {len(points)} not bracketed: the best is the last of its grid"
        else:
            end = ", no lower at the next values on either side"
        seeds = f"over {count_text(int(self.measured['n'].max()), 'new seed')}"
        lost = [place for study, place in places.items() if study not in {*self.measured["study"]}]
        return head + seeds + end + (f"; no result {_few(lost)}" if lost else "") + "."

    def best_trials_text(self) -> str:
        """Write the best trials in a sentence."""
        best = self.trials[self.trials["is_best"].astype(bool)].to_dict("records")
        if not best:
            return "No trial has a result."
        points = [
            f"{settings_text({key: row[key] for key in self.keys})} of study {row['study']} "
            f"({significant(float(row[self.objective]), 4)})"
            for row in best
        ]
        return (
            f"Best trials by {_LABELS[self.objective]}, one run a point: {_few(points)}; nothing "
            "with new seeds has a result around them."
        )

    def table(self) -> Table:
        """Show the best of each grid."""
        rows = self.measured.to_dict("records")
        best = [
            MISSING if row["setting"] is None else settings_text({row["setting"]: row["best"]})
            for row in rows
        ]
        below, above = (
            [
                MISSING
                if pd.isna(row[side])
                else f"{setting_text(row[side])} ({significant(row[f'{side}_mean'], 4)})"
                for row in rows
            ]
            for side in ("below", "above")
        )
        return Table(
            f"search_measured{self.suffix}",
            f"The best, with new seeds{self.of_folder}",
            self.measured,
            [
                Column("study", is_left=True),
                Column("best", texts=best),
                Column("held", "at", texts=[row["held"] or MISSING for row in rows]),
                Column(self.objective, _LABELS[self.objective], spread=f"{self.objective}_ci95"),
                Column("n"),
                Column("below", "next below", texts=below),
                Column("above", "next above", texts=above),
            ],
            notes=[
                f"Means ± half-widths of {LEVEL:.0%} t-intervals over n seeds that no trial had. "
                "Next below and above: the neighbours in the grid, in brackets their means, "
                "infinite where a seed has no result."
            ],
        )

    def chart(self, cells: Cells) -> Chart:
        """Draw the objective against each searched number, with the grids."""
        objective = self.objective
        numbers = [key for key in self.keys if pd.api.types.is_numeric_dtype(self.trials[key])]
        columns = numbers or self.keys[:1]
        trials = self.trials[np.isfinite(pd.to_numeric(self.trials[objective]))]
        is_best = trials["is_best"].astype(bool)
        trials = trials.assign(series=trials["study"])[[*columns, objective, "series"]]
        other_trials = trials[~is_best].assign(series=trials["series"] + _OTHERS)
        # A dot in the name of a field leads into it.
        fields = {x: x.replace(".", "_") for x in columns}
        marks = [
            *(Marks("line", line) for x in columns for line in self._lines(x)),
            *(Marks("point", points, size=20) for points in (other_trials, trials[is_best])),
        ]
        series_names = {*trials["series"], *other_trials["series"]}
        looks = {
            name: replace(look, hollow=name != study)
            for study, look in palette(self.trials["study"].unique()).items()
            for name in (study, study + _OTHERS)
            if name in series_names
        }
        grid_note = ""
        if self.grids:
            grid_note = " Lines: the grid around the best, means over new seeds."
        label = (
            loss_axis(_LABELS[objective], cells.runs) if objective == "loss" else _LABELS[objective]
        )
        return Chart(
            f"search{self.suffix}",
            "What was searched",
            f"Trials of each study{self.of_folder}; the best of each study are filled. Trials "
            f"without a value are left out.{grid_note}",
            Axis({fields[x]: setting_label(x) for x in columns}, "Against", _kind(trials, columns)),
            Axis({objective: label}, kind=_kind(trials, [objective])),
            [replace(mark, table=mark.table.rename(columns=fields)) for mark in marks],
            looks,
            panels="x",
            tables=[f"tables/trials{self.suffix}.csv"],
        )

    def _lines(self, x: str) -> Iterator[pd.DataFrame]:
        """Return the means of each grid along a setting."""
        for grid in self.grids:
            if any(bracket["key"] == x for bracket in grid["brackets"]):
                line = means_along(grid, x).rename(self.objective).rename_axis(x)
                yield line[np.isfinite(line)].reset_index().assign(series=str(grid["study"]))


def _few(texts: Sequence[str]) -> str:
    more = len(texts) - _MOST_NAMED
    return ", ".join([*texts[:_MOST_NAMED], *([f"{more} more in the table"] if more > 0 else [])])


def _place_text(values: Mapping[str, Any]) -> str:
    """Name a study by its settings; empty if it has none."""
    names = ("B" if key == "batch.global_batch_size" else setting_label(key) for key in values)
    parts = zip(names, map(setting_text, values.values()), strict=True)
    return "at " * bool(values) + ", ".join(f"{name} = {value}" for name, value in parts)


def _kind(trials: pd.DataFrame, names: Sequence[str]) -> Literal["linear", "log", "names"]:
    if not all(pd.api.types.is_numeric_dtype(trials[name]) for name in names):
        return "names"
    low, high = trials[[*names]].min(), trials[[*names]].max()
    return "log" if (low.gt(0) & high.gt(_WIDE * low)).all() else "linear"
