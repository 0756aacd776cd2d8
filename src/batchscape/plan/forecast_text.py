"""A forecast in words: a line for each distinct prediction, and the sweep as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
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
from batchscape.text import DURATIONS, SIZES, count_text, unit_of

T = TypeVar("T")

COUNTS = {"G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}
_FITS: dict[str | None, str] = {"unsure": "\nunsure", "does not fit": "\ntoo big"}
"""Second line of a predicted memory, where it is not sure that a rank has so much."""
_SHOWN = 20
"""Lines from both ends of a longer table: the cheapest and the dearest are those that matter."""


def forecast_text(
    sweep: SweepForecast, cuts: Mapping[str, str], begin: datetime
) -> list[RenderableType]:
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
    parts.append(Text(_totals(sweep, begin)))
    return parts


def _about_memory(sweep: SweepForecast) -> Iterator[str]:
    """Yield lines about the memory in the table, and about runs without a prediction."""
    memories = [run.memory for run in sweep.runs.values() if run.memory is not None]
    rooms = {memory.room_gib for memory in memories if memory.fits is not None}
    if rooms:
        known_rooms = [room for room in rooms if room is not None]
        ends = dict.fromkeys(_digits(end(known_rooms)) for end in (min, max) if known_rooms)
        sizes = f"{'-'.join(ends)} GiB" if known_rooms else f"memory that is {NOT_KNOWN}"
        counts = Counter(str(memory.fits) for memory in memories)
        troubles = ", ".join(
            f"{count_text(counts[word], 'run')} {text}"
            for word, text in (("does not fit", "too big"), ("unsure", "unsure"))
            if counts[word]
        )
        yield (
            f"Memory: peak of a rank's tensors; it has {sizes}, and takes more than tensors"
            f"{': ' if troubles else ''}{troubles}."
        )
    for way, count in Counter(memory.way for memory in memories if memory.fits is None).items():
        yield f"Memory {way} ({count_text(count, 'run')})"


def _table(way: str, lines: Mapping[tuple[str, RunForecast], int]) -> Table:
    has_tokens = any(forecast.tokens_per_s is not None for _, forecast in lines)
    has_mfu = any(forecast.mfu_pct is not None for _, forecast in lines)
    rates = ("tokens/s" if has_tokens else "samples/s", *(["MFU"] if has_mfu else []))
    titles = ("step", *rates, "run", "memory")
    of_runs = way.removeprefix("measured, ")
    by = (
        f", {way}: ranges, nothing was measured"
        if of_runs == way
        else f" from {of_runs} like these"
    )
    numbers = (Column(title, no_wrap=True, justify="right") for title in titles)
    cut = Column("devices x micro\nx accumulation", overflow="fold", min_width=15)
    table = Table(
        cut,
        Column("runs", justify="right", no_wrap=True),
        *numbers,
        box=box.SIMPLE_HEAD,
        title=f"Predicted{by}",
        title_justify="left",
        title_style="",
        pad_edge=False,
        collapse_padding=True,
    )
    ordered = sorted(lines.items(), key=_dearest)

    def row(line: tuple[tuple[str, RunForecast], int]) -> list[str]:
        (written, forecast), count = line
        rate = forecast.tokens_per_s if has_tokens else forecast.samples_per_s
        memory = forecast.memory
        return [
            written,
            str(count),
            _span(forecast.step_time_s, DURATIONS),
            _span(rate, COUNTS),
            *([_span(forecast.mfu_pct, {"%": 1.0})] if has_mfu else []),
            _span(forecast.run_time_s, DURATIONS),
            memory_text(memory) + _FITS.get(None if memory is None else memory.fits, ""),
        ]

    add_rows(table, ordered, row, _SHOWN, _SHOWN)
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
    peak = None if memory is None else memory.peak_allocated_gib
    if peak is None or peak.value is None:
        return ""
    taken = peak.value * SIZES["GiB"]
    return _in_unit(taken, unit_of(taken, SIZES), SIZES)


def _dearest(line: tuple[tuple[str, RunForecast], int]) -> float:
    hours = line[0][1].device_hours
    return -hours.high if hours is not None else 0.0


def _totals(sweep: SweepForecast, begin: datetime) -> str:
    if not sweep.runs_left:
        return "Time: nothing is left to run."
    missing = (
        f"; not counted: {count_text(sweep.runs_unknown, 'run')} of unknown time"
        if sweep.runs_unknown
        else ""
    )
    ends = sweep.ends_at(begin)
    if sweep.device_hours is None or sweep.makespan_s is None or ends is None:
        return f"Time: {NOT_KNOWN} for {count_text(sweep.runs_left, 'run')}."
    first, last = (end.strftime("%Y-%m-%d %H:%M") for end in ends)
    until = first if first == last else f"{first} to {last}"
    return (
        f"Time: {count_text(sweep.runs_left - sweep.runs_unknown, 'run')}, "
        f"{span(sweep.device_hours, {'': 1.0})} device-hours, "
        f"{span(sweep.makespan_s, DURATIONS)} from first start to last end; begun now it ends "
        f"{until}. Start, compilation and checkpoints come on top{missing}."
    )


def _span(figure: PredictedRange | None, units: Mapping[str, float]) -> str:
    """Write a figure with its range below it in one unit, or the range alone."""
    if figure is None:
        return ""
    if figure.value is not None:
        unit = unit_of(figure.value, units)
        low, high = (_digits(end / units[unit]) for end in (figure.low, figure.high))
        return f"{_in_unit(figure.value, unit, units)}\n({low}-{high})"
    below, above = unit_of(figure.low, units), unit_of(figure.high, units)
    high = _in_unit(figure.high, above, units)
    if below == above:
        return f"{_digits(figure.low / units[below])}-{high}"
    return f"{_in_unit(figure.low, below, units)}\nto {high}"


def _in_unit(number: float, unit: str, units: Mapping[str, float]) -> str:
    return f"{_digits(number / units[unit])} {unit}".rstrip()


def span(figure: PredictedRange | None, units: Mapping[str, float]) -> str:
    """Write a figure with its range behind it, or the range alone."""
    return " ".join(_span(figure, units).split())


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
