"""What a report says of a search: which trials there were, and what was found by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from batchscape.analysis.cells import Cells, launched_batches, setting_label
from batchscape.analysis.estimates import LEVEL
from batchscape.analysis.figures.style import PAGE_IN, colour_of, loss_axis, plain_ticks, shades_of
from batchscape.analysis.numbers import MISSING, significant, with_spread
from batchscape.analysis.report.grids import Column, Grid, columns_grid
from batchscape.analysis.report.topic import Picture, Section, TableView
from batchscape.analysis.search.measured import best_measured, means_along, setting_text
from batchscape.record.folder import SweepFolder
from batchscape.record.trial_counts import UNTOLD
from batchscape.record.trials import TRIALS, read_measured, read_trials
from batchscape.text import count_text, list_text

__all__ = ["search_section"]

_LABELS = {
    "loss": "held-out loss",
    "steps_to_target": "optimizer steps to target",
    "samples_to_target": "samples to target",
    "time_to_target_s": "time to target (s)",
    "device_hours_to_target": "device-hours to target",
    "peak_allocated_gib": "peak memory (GiB)",
}
_MOST_STUDIES = 6
"""Studies named in a sentence."""
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
            *(name + one.answer for name, one in zip(named, searches, strict=True)),
            "A sampler chose the trials for doing well, so no number elsewhere in this report "
            "rests on them: the runs here are the grid that was measured around the best of each "
            "study, with other seeds.",
        ],
        short=found or [name + one.answer for name, one in zip(named, searches, strict=True)],
    )
    tables, pictures, curves = list[TableView](), list[Picture](), dict[str, pd.DataFrame]()
    for number, one in enumerate(searches, 1):
        # Values of different objectives, or of different settings, share no table.
        ending = f"_{number}" if several else ""
        of = f" of {one.folder.path}" if several else ""
        is_front = len(one.objectives) > 1
        if len(one.measured):
            title = f"{'The trials of the front' if is_front else 'The best'}, with new seeds{of}"
            grid = _measured_grid(one.measured, one.objectives)
            tables.append(TableView(f"search_measured{ending}", title, one.measured, grid))
        best = one.trials[one.trials["is_best"].astype(bool)]
        grid = _grid(one.trials, best, one.keys, one.objectives)
        tables.append(
            TableView(f"search{ending}", f"The best trials of each study{of}", best, grid)
        )
        what = "The front of two objectives" if is_front else "Trials of each study"
        caption = f"{what}{of}; the best are filled. Trials without a value are left out."
        if not is_front and one.grids:
            caption += " Lines: the grid around the best, means over new seeds."
        draw = _draw_front if is_front else _draw_trials
        axes = [
            loss_axis(_LABELS[n], cells.runs) if n == "loss" else _LABELS[n] for n in one.objectives
        ]
        figure = draw(one, axes, _colours(one.trials, launched_batches(cells.runs)))
        pictures.append(Picture(f"search{ending}", caption, figure))
        curves[f"trials{ending}"] = one.trials
    return replace(section, tables=tables, pictures=pictures, curves=curves)


class _SearchResults:
    """The trials of one folder, and the best of what was measured around them."""

    def __init__(self, folder: SweepFolder, trials: pd.DataFrame) -> None:
        self.folder, self.trials = folder, trials
        # In the order of the search, as the values of the grid are.
        self.objectives = [name for name in map(str, trials) if name in _LABELS]
        self.keys = [name for name in map(str, trials) if name not in {*TRIALS, *self.objectives}]
        self.done = int(trials["outcome"].notna().sum())
        self.grids = read_measured(folder)
        self.measured = best_measured(self.grids, self.objectives)

    @property
    def answer(self) -> str:
        """What was searched."""
        studies = self.trials["study"].nunique()
        return (
            f"{list_text(self.keys, 'and')} {'was' if len(self.keys) == 1 else 'were'} searched "
            f"for the least {list_text([_LABELS[name] for name in self.objectives], 'and')}: "
            f"{count_text(self.done, 'trial')} in {count_text(studies, 'study', 'studies')}."
        )

    @property
    def found(self) -> str | None:
        """The answer in a sentence; None: nothing was measured."""
        if self.measured.empty:
            return None
        if len(self.objectives) > 1:
            return self._front()
        values = {str(grid["study"]): grid["values"] for grid in self.grids}
        at = {study: _at(own) for study, own in values.items()}
        rows = self.measured.to_dict("records")
        seeds = int(self.measured["n"].max())
        fresh = count_text(seeds, "new seed")
        around = f"the best of {self._trials_text()}"
        is_of_one = len(self.keys) == 1
        said = [
            f"{_point(row, named=not (place and is_of_one))} {at[row['study']]}".strip()
            + f" ({self._values_text(row)})"
            for place, row in enumerate(rows)
        ]
        listed = _few(said, ", " if is_of_one else "; ")
        what = _LABELS[self.objectives[0]]
        if self.measured["best"].isna().all():
            by = f"{what}, over {fresh} each" if len(rows) > 1 else f"{what}, over {fresh}"
            return f"Chosen by trials, as {around}: {listed} ({by}){self._lost(at)}."
        over = f"means over {fresh}" if seeds > 1 else fresh
        return (
            f"Least {what}: {listed}; {over}, in a grid around {around}"
            f"{_brackets(rows, at)}{self._lost(at)}."
        )

    def _front(self) -> str | None:
        """Say how large the front is, and its ends."""
        front = self.measured[self.measured["on_front"].astype(bool)]
        if front.empty:
            return None
        ends = front.sort_values(self.objectives).iloc[[0, -1]].drop_duplicates("held")
        if front["study"].nunique() > 1:
            ends = ends.iloc[:0]
        said = " to ".join(
            f"{row['held']} ({self._values_text(row)})" for row in ends.to_dict("records")
        )
        said = said or f"in {front['study'].nunique()} studies, see the table"
        of = list_text([_LABELS[name] for name in self.objectives], "and")
        fresh = count_text(int(front["n"].max()), "new seed")
        return f"Front of {of}, by {fresh}: {count_text(len(front), 'point')}, {said}."

    def _values_text(self, row: Mapping[Any, Any]) -> str:
        return ", ".join(with_spread(row[name], row[f"{name}_ci95"]) for name in self.objectives)

    def _trials_text(self) -> str:
        """Say how many trials each grid was laid around."""
        counts = sorted({int(grid["trials"]) for grid in self.grids})
        text = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        text += " trial" if counts == [1] else " trials"
        return text + (" each" if len(self.grids) > 1 else "")

    def _lost(self, at: Mapping[str, str]) -> str:
        """Say which studies have no result, and whether there were trials since."""
        lost = [where for study, where in at.items() if study not in {*self.measured["study"]}]
        text = f"; no result {_few(lost, ', ')}" if lost else ""
        told = self.trials[~self.trials["outcome"].isin(UNTOLD)]
        done = told.groupby("study")["outcome"].count()
        before = {str(grid["study"]): int(grid["trials"]) for grid in self.grids}
        if any(before.get(str(study)) != count for study, count in done.items()):
            text += "; there were more trials since, around whose best nothing is measured yet"
        return text


def _point(row: Mapping[Any, Any], *, named: bool) -> str:
    if row["setting"] is None:
        return str(row["held"])
    text = setting_text(row["best"])
    if named:
        text = f"{setting_label(row['setting'])} {text}"
    return f"{text} with {row['held']}" if row["held"] else text


def _few(texts: Sequence[str], apart: str) -> str:
    if len(texts) > _MOST_STUDIES:
        texts = [*texts[:2], f"{len(texts) - 3} more in the table", texts[-1]]
    return apart.join(texts)


def _brackets(rows: Sequence[Mapping[Any, Any]], at: Mapping[str, str]) -> str:
    """Say whether the best stand between others."""
    open_ = [row["study"] for row in rows if pd.isna(row["below"]) or pd.isna(row["above"])]
    if not open_:
        return ", no lower at the next values on either side"
    where = [at[study] for study in dict.fromkeys(open_)] if len(open_) < len(rows) else []
    which = f" {_few(where, ', ')}" if any(where) else ""
    return f"; not bracketed{which}, where it is the last value of the grid"


def _at(values: Mapping[str, Any]) -> str:
    """Name a study in a sentence: nothing where it is the only one."""
    if not values:
        return ""
    named = {
        "B" if key == "batch.global_batch_size" else setting_label(key): setting_text(value)
        for key, value in values.items()
    }
    return "at " + ", ".join(f"{name} = {value}" for name, value in named.items())


def _measured_grid(measured: pd.DataFrame, objectives: Sequence[str]) -> Grid:
    rows = measured.to_dict("records")
    has_brackets = measured["best"].notna().any()
    columns: list[Column] = []
    if has_brackets:
        columns += [
            ("setting", [setting_label(row["setting"]) for row in rows]),
            ("best", [setting_text(row["best"]) for row in rows]),
        ]
    held = "other settings" if has_brackets else "point"
    columns.append((held, [row["held"] or MISSING for row in rows]))
    for name in objectives:
        pairs = zip(measured[name], measured[f"{name}_ci95"], strict=True)
        columns.append((_LABELS[name], [with_spread(*pair) for pair in pairs]))
    if len(objectives) > 1:
        columns.append(("on the front", ["yes" if row["on_front"] else "no" for row in rows]))
    columns.append(("n", measured["n"].astype(str)))
    for side in ("below", "above") if has_brackets else ():
        texts = [
            MISSING
            if pd.isna(row[side])
            else f"{setting_text(row[side])} ({significant(float(row[f'{side}_mean']), 4)})"
            for row in rows
        ]
        columns.append((f"next {side}", texts))
    notes = [f"Means ± half-widths of {LEVEL:.0%} t-intervals over n seeds that no trial had."]
    if has_brackets:
        notes.append(
            "Next below and above: the neighbours in the grid, in brackets their means, infinite "
            "where a seed has no result."
        )
    return columns_grid([("study", measured["study"])], columns, notes=notes)


def _grid(
    trials: pd.DataFrame, best: pd.DataFrame, keys: Sequence[str], objectives: Sequence[str]
) -> Grid:
    counts = trials.groupby("study", sort=False)["outcome"]
    failed = {study: own.notna() & own.ne("completed") for study, own in counts}
    return columns_grid(
        [("study", best["study"])],
        [
            ("trials", [str(len(failed[study])) for study in best["study"]]),
            ("without result", [str(int(failed[study].sum())) for study in best["study"]]),
            *((key, _texts(best[key])) for key in keys),
            *((_LABELS[name], _texts(best[name])) for name in objectives),
        ],
    )


def _texts(values: pd.Series) -> list[str]:
    if pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values):
        if values.dropna().mod(1).eq(0).all():
            return [MISSING if pd.isna(value) else f"{value:.0f}" for value in values]
        return [MISSING if pd.isna(value) else significant(float(value), 3) for value in values]
    return [str(value) for value in values]


def _draw_trials(one: _SearchResults, names: Sequence[str], colours: Mapping[str, str]) -> Figure:
    """Draw the objective against each searched setting that is a number, and the grids over it."""
    trials = one.trials
    shown = [key for key in one.keys if pd.api.types.is_numeric_dtype(trials[key])] or one.keys[:1]
    width = min(PAGE_IN, 1.2 + 3.0 * len(shown))
    figure = Figure(figsize=(width, 2.6), layout="constrained")
    for axes, key in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        _scatter(axes, trials, key, one.objectives[0], colours)
        for grid in one.grids:
            if any(found["key"] == key for found in grid["brackets"]):
                means = means_along(grid, key)
                means = means[np.isfinite(means)]
                style = {"color": colours[str(grid["study"])], "linewidth": 1.0, "zorder": 1}
                axes.plot(means.index, means, marker="D", markersize=2.5, **style)
        axes.set_xlabel(setting_label(key))
    figure.axes[0].set_ylabel(names[0])
    _name_studies(figure, trials)
    return figure


def _draw_front(one: _SearchResults, names: Sequence[str], colours: Mapping[str, str]) -> Figure:
    """Draw one objective against the other."""
    figure = Figure(figsize=(4.2, 2.8), layout="constrained")
    axes = figure.subplots()
    x, y = one.objectives
    _scatter(axes, one.trials, x, y, colours)
    best = one.trials[one.trials["is_best"].astype(bool)]
    for study, own in best.groupby("study", sort=False):
        front = own.sort_values(x)
        axes.step(front[x], front[y], where="post", color=colours[str(study)], linewidth=0.8)
    axes.set_xlabel(names[0])
    axes.set_ylabel(names[1])
    _name_studies(figure, one.trials)
    return figure


def _colours(trials: pd.DataFrame, launched: Sequence[int]) -> dict[str, str]:
    """Colour studies; those of global batches as in the other figures, grey if in none of them."""
    names = list(trials["study"].unique())
    batches = {name: name.removeprefix("batch.global_batch_size=") for name in names}
    if not all(batch.isdecimal() for batch in batches.values()):
        return {name: colour_of(index, len(names)) for index, name in enumerate(names)}
    shades, names = shades_of(launched), sorted(names, key=lambda name: int(batches[name]))
    greys = {name: f"{0.8 * index / len(names):.2f}" for index, name in enumerate(names)}
    return {name: shades.get(int(batches[name]), greys[name]) for name in names}


def _name_studies(figure: Figure, trials: pd.DataFrame) -> None:
    """Put the studies beside the figure, below the key of their axis where they have one."""
    names = list(trials["study"].unique())
    if len(names) == 1:
        return
    keys = {name.partition("=")[0] for name in names}
    is_one = len(keys) == 1 and not any("," in name for name in names)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles,
        [label.partition("=")[2] for label in labels] if is_one else labels,
        title=setting_label(keys.pop()) if is_one else None,
        title_fontsize=7,
        loc="outside right upper",
    )


def _scatter(axes: Axes, trials: pd.DataFrame, x: str, y: str, colours: Mapping[str, str]) -> None:
    told = trials[np.isfinite(pd.to_numeric(trials[y]))]
    for study, colour in colours.items():
        own = told[told["study"] == study]
        for is_best, face in ((False, "none"), (True, colour)):
            part = own[own["is_best"].astype(bool) == is_best]
            axes.scatter(
                part[x],
                part[y],
                s=18,
                facecolors=face,
                edgecolors=colour,
                linewidths=0.9,
                label=study if is_best else None,
            )
    for name, scale, axis in ((x, axes.set_xscale, axes.xaxis), (y, axes.set_yscale, axes.yaxis)):
        values = told[name]
        is_number = pd.api.types.is_numeric_dtype(values) and len(values) > 0
        if is_number and values.min() > 0 and values.max() > _WIDE * values.min():
            scale("log")
            plain_ticks(axis)
