"""What a report says of a search: which trials there were, and what was found by them."""

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
from batchscape.record.trials import TRIALS, read_measured, read_trials
from batchscape.text import count_text, list_text

__all__ = ["print_found", "search_section"]

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
"""Of a study: trials that are not its best."""
_WIDE = 5.0
"""Values whose ratio is larger are drawn on a logarithmic axis."""


def search_section(cells: Cells) -> Section | None:
    """Say what a search found, of sweeps that are the grid around it.

    Trials were chosen for having done well: they stand here alone, and no estimate is made of them.

    Parameters
    ----------
    cells : Cells
        Of the grids; `sweep_dir` of its runs says where their searches are.

    Returns
    -------
    Section or None
        None where nothing was searched.
    """
    folders = [SweepFolder(Path(of)) for of in sorted({*cells.runs["sweep_dir"]})]
    searches = [
        _SearchResults(f, trials) for f in folders if (trials := read_trials(f)) is not None
    ]
    if not searches:
        return None
    several = len(searches) > 1
    named = [f"In {one.folder.path}: " if several else "" for one in searches]
    found = [name + one.found for name, one in zip(named, searches, strict=True) if one.found]
    section = Section(
        "Search",
        [
            *found,
            *(name + one.what_was_searched for name, one in zip(named, searches, strict=True)),
            "A sampler chose the trials for doing well, so no number elsewhere in this report "
            "rests on them: the runs here are the grid that was measured around the best of each "
            "study, with other seeds.",
        ],
        short=found
        or [name + one.what_was_searched for name, one in zip(named, searches, strict=True)],
    )
    tables, pictures, curves = list[Table](), list[Chart](), dict[str, pd.DataFrame]()
    for number, one in enumerate(searches, 1):
        # Values of different objectives, or of different settings, share no table.
        ending, of = (f"_{number}", f" of {one.folder.path}") if several else ("", "")
        if len(one.measured):
            what = "The trials of the front" if one.is_front else "The best"
            tables.append(one.table(f"search_measured{ending}", f"{what}, with new seeds{of}"))
        what = "The front of two objectives" if one.is_front else "Trials of each study"
        caption = (
            f"{what}{of}; the best of each study are filled. Trials without a value are left out."
        )
        if not one.is_front and one.grids:
            caption += " Lines: the grid around the best, means over new seeds."
        pictures.append(_chart(one, cells, f"search{ending}", caption))
        curves[f"trials{ending}"] = one.trials
    return replace(section, tables=tables, pictures=pictures, curves=curves)


def print_found(sweep: SweepFolder, console: Console) -> None:
    """Print the best of what a search measured, as its report will have it; else its best trials.

    Parameters
    ----------
    sweep : SweepFolder
        Of the grid.
    console : Console
    """
    trials = read_trials(sweep)
    if trials is None:
        return
    one = _SearchResults(sweep, trials)
    if one.found is None:
        console.print(one.best_trials, soft_wrap=True)
        return
    console.print(one.found, soft_wrap=True)
    show(console, one.table("search_measured", "The best, with new seeds"))


class _SearchResults:
    """The trials of one folder, and the best of what was measured around them."""

    def __init__(self, folder: SweepFolder, trials: pd.DataFrame) -> None:
        self.folder, self.trials = folder, trials
        # In the order of the search, as the values of the grid are.
        self.objectives = [name for name in map(str, trials) if name in _LABELS]
        self.keys = [name for name in map(str, trials) if name not in {*TRIALS, *self.objectives}]
        self.is_front = len(self.objectives) > 1
        self.grids = read_measured(folder)
        self.measured = best_measured(self.grids, self.objectives)

    @property
    def what_was_searched(self) -> str:
        """Which settings, for what, by how many trials."""
        studies = self.trials["study"].nunique()
        done = int(self.trials["outcome"].notna().sum())
        return (
            f"{list_text(self.keys, 'and')} {'was' if len(self.keys) == 1 else 'were'} searched "
            f"for the least {self._objectives_text}: "
            f"{count_text(done, 'trial')} in {count_text(studies, 'study', 'studies')}."
        )

    @property
    def _objectives_text(self) -> str:
        return list_text([_LABELS[name] for name in self.objectives], "and")

    @property
    def found(self) -> str | None:
        """The best that was measured, in a sentence; None where nothing was."""
        rows = self.measured.to_dict("records")
        if self.is_front:
            rows = [row for row in rows if row["on_front"]]
        if not rows:
            return None
        at = {str(grid["study"]): _at(grid["values"]) for grid in self.grids}
        points = [
            f"{_point(row)} {at[row['study']]}".strip() + f" ({self._values_text(row)})"
            for row in rows
        ]
        over = f"over {count_text(int(self.measured['n'].max()), 'new seed')}"
        if self.is_front:
            text = f"Front of {self._objectives_text}: {_few(points)}; {over}"
        elif self.measured["best"].isna().all():
            text = f"Chosen by the trials: {_few(points)}; {self._objectives_text}, {over}"
        else:
            text = f"Least {self._objectives_text}: {_few(points)}; {over}{_brackets(rows, at)}"
        return f"{text}{self._lost(at)}."

    def _values_text(self, row: Mapping[Any, Any]) -> str:
        return ", ".join(with_spread(row[name], row[f"{name}_ci95"]) for name in self.objectives)

    def _lost(self, at: Mapping[str, str]) -> str:
        """Say which studies have no result, and whether there were trials since."""
        lost = [where for study, where in at.items() if study not in {*self.measured["study"]}]
        text = f"; no result {_few(lost)}" if lost else ""
        told = self.trials[~self.trials["outcome"].isin(FAILED_TRIALS)]
        done = told.groupby("study")["outcome"].count()
        before = {str(grid["study"]): int(grid["trials"]) for grid in self.grids}
        if any(before.get(str(study)) != count for study, count in done.items()):
            text += "; there were more trials since, around whose best nothing is measured yet"
        return text

    @property
    def best_trials(self) -> str:
        """The best trials in a sentence, which nothing was measured around."""
        best = self.trials[self.trials["is_best"].astype(bool)].to_dict("records")
        if not best:
            return "No trial has a result."
        points = [
            f"{', '.join(f'{setting_label(key)} {setting_text(row[key])}' for key in self.keys)} "
            f"of study {row['study']} "
            f"({', '.join(significant(float(row[name]), 4) for name in self.objectives)})"
            for row in best
        ]
        text = f"Best trials by {self._objectives_text}, one run a point: {_few(points)}"
        return f"{text}; nothing with new seeds has a result around them."

    def table(self, name: str, title: str) -> Table:
        """Show the best of each grid."""
        rows = self.measured.to_dict("records")
        has_brackets = self.measured["best"].notna().any()
        columns = [Column("study", is_left=True)]
        notes = [f"Means ± half-widths of {LEVEL:.0%} t-intervals over n seeds that no trial had."]
        beside = []
        if has_brackets:
            best = [f"{setting_label(row['setting'])} {setting_text(row['best'])}" for row in rows]
            columns.append(Column("best", texts=best))
            beside = [
                Column(side, f"next {side}", texts=_beside(rows, side))
                for side in ("below", "above")
            ]
            notes.append(
                "Next below and above: the neighbours in the grid, in brackets their means, "
                "infinite where a seed has no result."
            )
        held = [row["held"] or MISSING for row in rows]
        columns += [
            Column("held", "other settings" if has_brackets else "point", texts=held),
            *(Column(of, _LABELS[of], spread=f"{of}_ci95") for of in self.objectives),
            *([Column("on_front", "on the front", words=_ON_FRONT)] if self.is_front else []),
            Column("n"),
            *beside,
        ]
        return Table(name, title, self.measured, columns, notes=notes)


_ON_FRONT = {True: "yes", False: "no"}


def _beside(rows: Sequence[Mapping[Any, Any]], side: str) -> list[str]:
    return [
        MISSING
        if pd.isna(row[side])
        else f"{setting_text(row[side])} ({significant(float(row[f'{side}_mean']), 4)})"
        for row in rows
    ]


def _point(row: Mapping[Any, Any]) -> str:
    if row["setting"] is None:
        return str(row["held"])
    text = f"{setting_label(row['setting'])} {setting_text(row['best'])}"
    return f"{text} with {row['held']}" if row["held"] else text


def _few(texts: Sequence[str]) -> str:
    if len(texts) > _MOST_NAMED:
        texts = [*texts[:2], f"{len(texts) - 3} more in the table", texts[-1]]
    return ", ".join(texts)


def _brackets(rows: Sequence[Mapping[Any, Any]], at: Mapping[str, str]) -> str:
    """Say whether the best stand between others."""
    open_ = [row["study"] for row in rows if pd.isna(row["below"]) or pd.isna(row["above"])]
    if not open_:
        return ", no lower at the next values on either side"
    where = _few([at[study] for study in dict.fromkeys(open_)] if len(at) > 1 else [])
    return f"; not bracketed {where}".rstrip() + ", where it is the last value of the grid"


def _at(values: Mapping[str, Any]) -> str:
    """Name a study in a sentence: nothing where it is the only one."""
    if not values:
        return ""
    named = {
        "B" if key == "batch.global_batch_size" else setting_label(key): setting_text(value)
        for key, value in values.items()
    }
    return "at " + ", ".join(f"{name} = {value}" for name, value in named.items())


def _chart(one: _SearchResults, cells: Cells, name: str, caption: str) -> Chart:
    """Draw the objective against each searched number, with the grids; or one against the other."""
    *across, y = one.objectives
    numbers = [key for key in one.keys if pd.api.types.is_numeric_dtype(one.trials[key])]
    shown = across or numbers or one.keys[:1]
    trials = one.trials[np.isfinite(pd.to_numeric(one.trials[y]))]
    trials = trials.assign(series=trials["study"])[[*shown, y, "series", "is_best"]]
    # A dot in the name of a field leads into it.
    plain = {x: x.replace(".", "_") for x in shown}
    is_best = trials["is_best"].astype(bool)
    told = trials.drop(columns="is_best")
    others = told[~is_best].assign(series=told["series"] + _OTHERS)
    marks = [Marks("point", others, size=20), Marks("point", told[is_best], size=20)]
    lines = [_lines(one, x, y) for x in shown]
    marks = [Marks("line", line) for line in lines if len(line)] + marks
    marks = [replace(mark, table=mark.table.rename(columns=plain)) for mark in marks]
    looks: dict[str, Look] = {}
    for study, look in _looks(one.trials, launched_batches(cells.runs)).items():
        looks |= {study: look, study + _OTHERS: replace(look, hollow=True)}
    used = {*told["series"], *others["series"]}
    titles = {plain[x]: _axis_text(x, cells) if across else setting_label(x) for x in shown}
    is_number = all(pd.api.types.is_numeric_dtype(told[x]) for x in shown)
    kind: Literal["linear", "log", "names"] = (
        "log" if is_number and _is_wide(told, shown) else "linear"
    )
    return Chart(
        name,
        "What was searched",
        caption,
        Axis(titles, "Against", kind=kind if is_number else "names"),
        Axis({y: _axis_text(y, cells)}, kind="log" if _is_wide(told, [y]) else "linear"),
        marks,
        {name: look for name, look in looks.items() if name in used},
        panels="x",
        tables=[f"tables/{name.replace('search', 'trials')}.csv"],
    )


def _axis_text(objective: str, cells: Cells) -> str:
    name = _LABELS[objective]
    return loss_axis(name, cells.runs) if objective == "loss" else name


def _lines(one: _SearchResults, x: str, y: str) -> pd.DataFrame:
    """Follow the means of the grid of each study along a setting, or the front of its trials."""
    if one.is_front:
        best = one.trials[one.trials["is_best"].astype(bool)].sort_values(x)
        return best.assign(series=best["study"])[[x, y, "series"]]
    parts = [pd.DataFrame()]
    for grid in one.grids:
        if any(found["key"] == x for found in grid["brackets"]):
            means = means_along(grid, x)
            means = means[np.isfinite(means)]
            line = pd.DataFrame({x: means.index, y: means.to_numpy()})
            parts.append(line.assign(series=str(grid["study"])))
    return pd.concat(parts)


def _looks(trials: pd.DataFrame, launched: Sequence[int]) -> dict[str, Look]:
    """Colour studies; those of global batches as in the other figures, grey if in none of them."""
    names = [str(name) for name in trials["study"].unique()]
    batches = {name: name.removeprefix("batch.global_batch_size=") for name in names}
    if not all(batch.isdecimal() for batch in batches.values()):
        return palette(names)
    known = shades(launched)
    names = sorted(names, key=lambda name: int(batches[name]))
    return {name: known.get(batches[name], GREY) for name in names}


def _is_wide(told: pd.DataFrame, names: Sequence[str]) -> bool:
    return all(
        told[name].min() > 0 and told[name].max() > _WIDE * told[name].min() for name in names
    )
