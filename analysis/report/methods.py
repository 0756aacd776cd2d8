"""Methods of a report, in sentences for a paper, from the records of its runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from batchscape.analysis.cells import GEOMETRY_WORDS, Cells, plain_texts, status_counts
from batchscape.analysis.estimates import FEWEST, LEVEL
from batchscape.analysis.hardware import is_timed_alone, was_started
from batchscape.analysis.joins import column_of
from batchscape.analysis.report.macros import words_of
from batchscape.analysis.report.topic import Section
from batchscape.text import count_text, list_text

_MOST_VALUES = 8
"""Values of a setting that a sentence lists; of more it says how many, and the ends."""
_MOST_NAMED = 3
_CLAIMS = "claim_"
_REVISION = "environment.git.revision"
_GROUPS = ("model", "data", "optimizer", "schedule", "scaling", "budget", "evaluation", "engine")
"""Groups of settings that say what was trained."""
_REFERENCE = "scaling.reference_global_batch_size"
_WHERE = ("hardware", "device_type", "precision", "launch.threads_per_rank")
_SOFTWARE = {
    "environment.batchscape": "batchscape",
    "environment.python": "Python",
    "environment.packages.torch": "PyTorch",
    "environment.cuda.driver": "CUDA driver",
}


def methods(cells: Cells, sections: Sequence[Section]) -> dict[str, list[str]]:
    """Return sentences by title, on the runs and on the intervals of the sections' headlines."""
    runs = cells.runs
    launched = runs[was_started(runs)].dropna(axis="columns", how="all")
    counts = (
        f"{count_text(len(runs), 'run')} in {count_text(len(cells.table), 'cell')} "
        f"({status_counts(runs['status'])}); the runs of a cell differ in no setting that decides "
        "loss, memory or time but seed and timing repeat."
    )
    paragraphs = {"Runs": [counts, *_of_sweeps(runs, launched)]}
    if not launched.empty:
        paragraphs |= {
            "Held fixed": list(_fixed(launched)),
            "Seeds and intervals": list(_intervals(cells, launched, sections)),
            "Times": list(_times(launched)),
            "Machines and software": list(_machines(launched)),
        }
    return {title: sentences for title, sentences in paragraphs.items() if sentences}


def _of_sweeps(runs: pd.DataFrame, launched: pd.DataFrame) -> Iterator[str]:
    """List for each sweep the values of what varies anywhere."""
    varying = [f"{group}.{leaf}" for group, _, vary in _trained(launched) for leaf in vary]
    labels = {**GEOMETRY_WORDS, **{name: _words(name) for name in varying}, "seed": "seed"}
    for sweep, sweep_runs in runs.groupby("sweep_name", sort=False):
        started = sweep_runs[sweep_runs.index.isin(launched.index)]
        if started.empty:
            yield f"{sweep}: none of its {count_text(len(sweep_runs), 'run')} was launched."
            continue
        recorded = started.columns[started.notna().any()]
        values = [f"{labels[name]} {_values(started[name])}" for name in labels if name in recorded]
        yield f"{sweep} ({status_counts(sweep_runs['status'])}): {'; '.join(values)}."


def _fixed(launched: pd.DataFrame) -> Iterator[str]:
    for group, constants, _ in _trained(launched):
        is_unscaled = group == "scaling" and "reference_global_batch_size" not in constants
        if not constants or is_unscaled:
            continue
        values = [f"{_words(leaf)} {value}" for leaf, value in constants.items() if leaf != "name"]
        parts = [constants["name"]] if "name" in constants else []
        parts += [f"({', '.join(values)})" if parts else ", ".join(values)] if values else []
        yield f"{group.capitalize()}: {' '.join(parts)}."
    if column_of(launched, _REFERENCE).notna().any():
        yield "What a rule of scaling changes is given as written, before the rule."
    if "learning_rate" in launched:
        rates = _values(launched["learning_rate"])
        yield f"Learning rates trained with, after the rules of scaling: {rates}."
    if "train_samples" in launched:
        yield f"Samples to train on: {_values(launched['train_samples'])}."
    planned = launched[~is_timed_alone(launched)].reindex(
        columns=["planned_samples", "planned_optimizer_steps"]
    )
    if planned.notna().all(axis=None):
        samples, steps = (_values(planned[name]) for name in planned)
        yield f"A run was to see {samples} samples, in {steps} optimizer steps."


def _trained(runs: pd.DataFrame) -> Iterator[tuple[str, dict[str, str], list[str]]]:
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


def _intervals(cells: Cells, launched: pd.DataFrame, sections: Sequence[Section]) -> Iterator[str]:
    completed = launched[launched["status"].eq("completed")]
    if completed.empty:
        yield "No run completed: there is no mean and no interval."
        return
    counts = completed.groupby("cell").size()
    yield f"Completed runs of a cell: {_values(counts)}."
    if not cells.of_programs().any():
        yield (
            "Optimizer step k of a run with global batch B takes samples kB to (k + 1)B of one "
            "stream, which depends on the seed and not on the cut: runs of equal seed are paired."
        )
    yield (
        f"Figures are means with {LEVEL:.0%} t-intervals over completed runs, of losses over "
        f"seeds; below {FEWEST} values there is no interval. Cells are told apart by "
        "t-intervals of differences paired by seed, corrected for the number of comparisons."
    )
    if n_lost := int(launched["status"].isin(["diverged", "pruned"]).sum()):
        yield (
            f"{count_text(n_lost, 'run')} diverged or {'was' if n_lost == 1 else 'were'} pruned: "
            "counted as reaching no target."
        )
    yield from interval_methods(sections)


def interval_methods(sections: Sequence[Section]) -> Iterator[str]:
    """Say for each method of an interval which headlines it is of."""
    by_method: dict[str, dict[str, None]] = {}
    for section in sections:
        for name, estimate in section.headlines.items():
            # Those of claims are in the table of claims.
            if estimate.is_identified and not name.startswith(_CLAIMS):
                by_method.setdefault(estimate.method, {})[words_of(name, estimate)] = None
    for method, names in by_method.items():
        yield f"Interval of {list_text(list(names), 'and', _MOST_NAMED)}: {method}."


def _times(launched: pd.DataFrame) -> Iterator[str]:
    completed = launched[launched["status"].eq("completed")]
    if completed.empty:
        return
    warmup = "measure.warmup_optimizer_steps"
    if warmup in launched:
        yield (
            "The step time of a run is the median over its optimizer steps, without the first "
            f"{_values(launched[warmup])}; evaluation, checkpoints, compilation and start-up are "
            "no part of it."
        )
    if "launch.concurrent_runs" in launched:
        most = int(pd.to_numeric(launched["launch.concurrent_runs"]).max())
        yield f"Each launcher ran {'up to ' * (most > 1)}{count_text(most, 'run')} at a time."
    valid = int(completed["timing_valid"].sum())
    yield f"The times of {valid} of {count_text(len(completed), 'completed run')} count."
    notes = completed.reindex(columns=["timing_note"])[~completed["timing_valid"]]
    for note, count in notes["timing_note"].value_counts().items():
        yield f"Those of {count} do not: {note}."


def _machines(launched: pd.DataFrame) -> Iterator[str]:
    where = [name for name in _WHERE if name in launched]
    groups = pd.DataFrame({n: plain_texts(launched[n]) for n in where}).value_counts(sort=False)
    for values, count in groups.items():
        facts = dict(zip(where, values if isinstance(values, tuple) else (values,), strict=True))
        threads = facts.pop("launch.threads_per_rank", "null")
        threads_text = "" if threads == "null" else f", threads per rank: {threads}"
        machine = ", ".join(text for text in facts.values() if text != "null")
        yield f"{count_text(count, 'run')} on {machine}{threads_text}."
    software = [
        f"{name} {_values(launched[column])}"
        for column, name in _SOFTWARE.items()
        if column in launched
    ]
    if _REVISION in launched:
        short = launched[_REVISION].dropna().astype(str).str[:12]
        software.append(f"revision of the code {_values(short)}")
    if software:
        yield f"Software: {', '.join(software)}."
    dirty = launched.get("environment.git.dirty", pd.Series(dtype=object)).eq(True).sum()
    if dirty:
        yield f"{count_text(int(dirty), 'run')} came from a working tree with uncommitted changes."


def _values(column: pd.Series[Any]) -> str:
    """List the values of a column, numbers in their order; of many, how many and the ends."""
    texts = plain_texts(column.dropna()).unique().tolist()
    numbers = pd.to_numeric(pd.Series(texts, dtype=object), errors="coerce")
    if numbers.notna().all():
        texts = [texts[place] for place in numbers.astype(float).argsort()]
        if len(texts) > _MOST_VALUES:
            return f"{len(texts)} values from {texts[0]} to {texts[-1]}"
    return list_text(texts, "", _MOST_VALUES) or "unknown"


def _words(name: str) -> str:
    return name.replace(".name", "").replace("_", " ").replace(".", " ")
