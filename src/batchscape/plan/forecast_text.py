"""A forecast in words: a line for each distinct prediction, and the sweep as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from rich import box
from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from batchscape.plan.forecast import (
    NOT_KNOWN,
    MemoryForecast,
    PredictedRange,
    RunForecast,
    SweepForecast,
)
from batchscape.text import DURATIONS, SIZES, count_text, list_text, unit_of

T = TypeVar("T")

COUNTS = {"G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}
_FITS = {"unsure": "\nunsure", "does not fit": "\ntoo big"}
"""Second line of a predicted memory, where it is not sure that a rank has so much."""
_SHOWN = 20
"""Lines from both ends of a longer table: the cheapest and the dearest are those that matter."""


def forecast_text(sweep: SweepForecast, cuts: Mapping[str, str]) -> list[RenderableType]:
    """Show what runs and sweep will take."""
    lines = Counter((cuts[run_id], forecast) for run_id, forecast in sweep.runs.items())
    parts: list[RenderableType] = []
    for way in dict.fromkeys(forecast.way for _, forecast in lines):
        of_way = {line: count for line, count in lines.items() if line[1].way == way}
        if way.startswith(NOT_KNOWN):
            parts.append(Text(f"Time {way} ({count_text(sum(of_way.values()), 'run')})"))
        else:
            parts.append(_table(way, of_way))
    parts += [Text(line) for line in _about_memory(sweep)]
    parts.append(Text(_totals(sweep)))
    return parts


def _about_memory(sweep: SweepForecast) -> Iterator[str]:
    """Yield lines about the memory in the table, and about runs without a prediction."""
    memories = [run.memory for run in sweep.runs.values() if run.memory is not None]
    if rooms := {memory.room_gib or 0.0 for memory in memories if memory.fits is not None}:
        sizes = (
            f"{_digits(room)} GiB" if room else f"what is {NOT_KNOWN}" for room in sorted(rooms)
        )
        yield f"Memory: peak of a rank's tensors; it has {list_text(sizes)}, for more than tensors."
    for way, count in Counter(memory.way for memory in memories if memory.fits is None).items():
        yield f"Memory {way} ({count_text(count, 'run')})"


def _table(way: str, lines: Mapping[tuple[str, RunForecast], int]) -> Table:
    has_tokens = any(forecast.tokens_per_s is not None for _, forecast in lines)
    of_runs = way.removeprefix("measured, ")
    source = f"the {way}, not from runs" if of_runs == way else f"{of_runs} like these"
    titles = ("runs", "step", "tokens/s" if has_tokens else "samples/s", "run", "memory")
    table = Table(
        Column("devices x micro\nx accumulation", overflow="fold", min_width=15),
        *(Column(title, no_wrap=True, justify="right") for title in titles),
        box=box.SIMPLE_HEAD,
        title=f"Predicted from {source}",
        title_justify="left",
        title_style="",
        pad_edge=False,
        collapse_padding=True,
    )

    def row(line: tuple[tuple[str, RunForecast], int]) -> list[str]:
        (written, forecast), count = line
        rate = forecast.tokens_per_s if has_tokens else forecast.samples_per_s
        spans = [
            span(figure, units).replace(" (", "\n(") if figure is not None else ""
            for figure, units in (
                (forecast.step_time_s, DURATIONS),
                (rate, COUNTS),
                (forecast.run_time_s, DURATIONS),
            )
        ]
        fits = "" if forecast.memory is None else _FITS.get(str(forecast.memory.fits), "")
        return [written, str(count), *spans, memory_text(forecast.memory) + fits]

    add_rows(table, sorted(lines.items(), key=_dearest), row, _SHOWN, _SHOWN)
    return table


def add_rows(
    table: Table, lines: Sequence[T], row: Callable[[T], Sequence[str]], first: int, last: int
) -> int:
    """Add a row a line to a table, of many the first and the last; return how many are left out."""
    left_out = max(0, len(lines) - first - last)
    for line in lines[: first if left_out else None]:
        table.add_row(*row(line))
    if left_out:
        table.add_row(f"... {left_out} more")
        for line in lines[-last:]:
            table.add_row(*row(line))
    return left_out


def memory_text(memory: MemoryForecast | None) -> str:
    """Write the peak of a rank's tensors; nothing where it is not known."""
    if memory is None or memory.peak_allocated_gib is None:
        return ""
    taken = memory.peak_allocated_gib.value * SIZES["GiB"]
    unit = unit_of(taken, SIZES)
    return f"{_digits(taken / SIZES[unit])} {unit}"


def _dearest(line: tuple[tuple[str, RunForecast], int]) -> float:
    hours = line[0][1].device_hours
    return -hours.high if hours is not None else 0.0


def _totals(sweep: SweepForecast) -> str:
    if not sweep.runs_left:
        return "Time: nothing is left to run."
    if sweep.device_hours is None or sweep.makespan_s is None:
        return f"Time: {NOT_KNOWN} for {count_text(sweep.runs_left, 'run')}."
    unknown = sweep.runs_not_known
    missing = f"; not counted: {count_text(unknown, 'run')} of unknown time" if unknown else ""
    return (
        f"Time: {count_text(sweep.runs_left - unknown, 'run')}, "
        f"{span(sweep.device_hours, {'': 1.0})} device-hours, "
        f"{span(sweep.makespan_s, DURATIONS)} from first start to last end. "
        f"Start, compilation and checkpoints come on top{missing}."
    )


def span(figure: PredictedRange | None, units: Mapping[str, float]) -> str:
    """Write a figure with its range behind it, all in one unit; nothing where it is not known."""
    if figure is None:
        return ""
    unit = unit_of(figure.value, units)
    low, value, high = (
        _digits(number / units[unit]) for number in (figure.low, figure.value, figure.high)
    )
    return f"{f'{value} {unit}'.rstrip()} ({low}-{high})"


def _digits(number: float) -> str:
    """Write two digits, or all before the point, without an exponent."""
    if number >= 10:
        return f"{number:,.0f}"
    if number >= 1:
        return f"{number:.1f}"
    places = 2
    while number and number < 10 ** (1 - places) and places < 6:
        places += 1
    return f"{number:.{places}f}"
