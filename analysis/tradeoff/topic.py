"""The report's section on the trade-off: the critical batch size, its fit and its curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from batchscape.analysis.comparing.pairs import logarithm
from batchscape.analysis.estimates import LEVEL, NOT_IDENTIFIED, Estimate
from batchscape.analysis.joins import column_of
from batchscape.analysis.labels import group_name
from batchscape.analysis.numbers import significant
from batchscape.analysis.report.topic import Section
from batchscape.analysis.targets.choice import early_crossings, why_unsettled
from batchscape.analysis.targets.readings import (
    CROSSING_RULES,
    Reading,
    at_first_crossing,
    halves_of_seeds,
    under_readings,
)
from batchscape.analysis.tradeoff.figures import critical_batch_chart, steps_chart
from batchscape.analysis.tradeoff.fit import TradeoffFit, fit_tradeoff
from batchscape.analysis.tradeoff.forms import FORMULAS, Form
from batchscape.analysis.tradeoff.measurements import ends_of_range
from batchscape.analysis.tradeoff.quantities import few_seeds
from batchscape.analysis.tradeoff.tables import GroupFits, fitted_curves, tradeoff_tables
from batchscape.errors import AnalysisError
from batchscape.text import count_text

_TITLE = "Update frequency against convergence"
_HEADLINES = ("critical_batch_size", "overhead_batch_size", "s_min", "exponent")
_OF_A_TARGET = ("s_min", "e_min")
"""Counts that belong to one target: another target is no other reading of them."""
_CRITICAL = (
    "{prefix}The critical batch size{at} is {critical_batch_size} samples{misfit}"
    "{critical_batch_size_readings} (mccandlish, {formula}; {behind}; {rule}): there the target "
    "takes twice the fewest optimizer steps.{falls}"
)
_NO_CRITICAL = "{prefix}The critical batch size{at} is {why_not}.{span}"
_SPAN = " Batch sizes of {first:g} to {last:g} were fitted."
_FALLS = (
    " By the fit, a batch of {:g} samples takes {} times fewer optimizer steps than one of {:g}, "
    "and one of {:g} takes {} times fewer than one of {:g}."
)
_RATES = (
    "Each batch size stands at the best of up to {:g} learning rates: the lowest of several "
    "noisy means is a little too low, and intervals take the chosen rates as known."
)
_BUYS = (
    "{prefix}From a global batch of {first:g} to {last:g} samples{rates}, {target} takes "
    "{steps_ratio} times fewer optimizer steps{few_times}{steps_ratio_readings} and "
    "{samples_ratio} times the samples{samples_ratio_readings} (n = {n} seeds; {rule})."
)
_SHORT_CRITICAL = (
    "{prefix}The critical batch size, where {target} takes twice the fewest optimizer steps, is "
    "{critical_batch_size} samples{critical_batch_size_readings} ({batches} batch sizes, n = "
    "{seeds} seeds; {rule}){doubt}."
)
_SHORT_NO_CRITICAL = "{prefix}The critical batch size is {why_not}."
_UNSETTLED = (
    "{prefix}What fewer optimizer steps cost is not identified: no target is settled. At {target} "
    "{unsettled}."
)


def tradeoff_section(
    reaches: pd.DataFrame,
    *,
    groups: Mapping[int, str] | None = None,
    form: Form | None = None,
    overhead: float = 0.2,
    reference_batch_size: float | None = None,
    noise_scales: pd.DataFrame | None = None,
    warnings: Sequence[str] = (),
    tuning: Callable[[int, float], str | None] | None = None,
) -> Section | None:
    """Say how update frequency trades against convergence, by the lowest settled target."""
    if reaches.empty:
        return None
    # A foreign table may have one group, and one target that it does not name.
    targets = column_of(reaches, "target_loss").fillna(math.inf)
    table = reaches.assign(group=reaches.get("group", 0), target_loss=targets)
    parts = [part for part in table.groupby("group") if part[1]["global_batch_size"].nunique() > 1]
    if not parts:
        return None
    group_fits: list[GroupFits] = []
    all_warnings = list(warnings)
    fit = partial(
        fit_tradeoff, form=form, overhead=overhead, reference_batch_size=reference_batch_size
    )
    for number, group_reaches in parts:
        group = int(str(number))
        label = group_name(groups, group) if len(parts) > 1 else ""
        by_target = group_reaches.groupby("target_loss")
        rows = {float(str(target)): target_rows for target, target_rows in [*by_target][::-1]}
        try:
            fits = {target: fit(target_rows) for target, target_rows in rows.items()}
        except AnalysisError as error:
            all_warnings.append(f"{label}: {error}" if label else str(error))
            continue
        group_fits.append(_choose_target(group, label, rows, fits))
    curves = fitted_curves(group_fits)
    headline_target = next(((g.number, g.target) for g in group_fits if g.unsettled is None), None)
    steps = steps_chart(table, curves, groups or {}, headline_target)
    pictures = [steps] if steps else []
    if not group_fits:
        answer = ["Not identified: nothing can be fitted."]
        return Section(_TITLE, answer, pictures=pictures, warnings=all_warnings)
    tables = tradeoff_tables(group_fits)
    scales = {group.label: _typical_scale(noise_scales, group) for group in group_fits}
    critical = critical_batch_chart(tables[0].frame, {name: s for name, (s, _) in scales.items()})
    return Section(
        _TITLE,
        [text for group in group_fits for text in _answer(group, *scales[group.label])],
        tables,
        [*pictures, critical] if critical else pictures,
        [*all_warnings, *(text for group in group_fits for text in _warnings(group, tuning))],
        {
            f"{name}_group_{group.number}" if len(group_fits) > 1 else name: estimate
            for group in group_fits
            for name, estimate in group.headlines.items()
        },
        first_screen=_short(group_fits),
        chart_data={} if curves.empty else {"tradeoff_curve": curves},
    )


def _warnings(group: GroupFits, tuning: Callable[[int, float], str | None] | None) -> list[str]:
    """Say what weakens the fit of a group."""
    texts = [
        None if tuning is None else tuning(group.number, group.target),
        *group.fit.warnings,
        *(
            f"{name.replace('_', ' ')}: {estimate.note}"
            for name, estimate in group.headlines.items()
            if estimate.readings
        ),
    ]
    return [f"{group.prefix}{text}" for text in texts if text]


def noise_scale_sentence(critical: Estimate, scale: float, n: int, batches: int) -> str | None:
    """Compare a critical batch size with the typical gradient noise scale; None without either."""
    if not (critical.is_identified and math.isfinite(scale)):
        return None
    ratio = significant(scale / critical.value, 2)
    return (
        f"The gradient noise scale, {significant(scale, 3)} samples (geometric mean over {n} "
        f"of {batches} batch sizes), is {ratio} times that. It tells the order of magnitude only: "
        "over the eight tasks of McCandlish et al. 2018 (table 1) the ratio went from 0.05 to 8."
    )


def _facts(group: GroupFits) -> dict[str, Any]:
    """Return what the sentences on a group name: every headline, and what it rests on."""
    fit, critical = group.fit, group.headlines["critical_batch_size"]
    where = "" if math.isinf(group.target) else f"a loss of {group.target:g}"
    sizes = fit.batches["global_batch_size"]
    rules = column_of(fit.runs, "crossing").dropna().unique()
    facts: dict[str, Any] = {
        "prefix": group.prefix,
        "at": where and f" at {where}",
        "target": where or "the target",
        "first": sizes.min(),
        "last": sizes.max(),
        "batches": len(sizes),
        "seeds": fit.n_seeds,
        "rates": _rates(fit),
        "rule": ", ".join(CROSSING_RULES[rule] for rule in rules)
        or "steps as the table gives them",
        "formula": FORMULAS[fit.form],
        "misfit": f", but {fit.misfit}" if fit.misfit else "",
        "behind": _behind(fit, critical),
        "falls": _falls(fit),
        "unsettled": group.unsettled,
        "doubt": f": {critical.note}" if critical.note and not critical.readings else "",
        # With the bound that is left of a value.
        "why_not": str(critical.note).replace(NOT_IDENTIFIED, critical.text(), 1),
    }
    for name, estimate in group.headlines.items():
        facts |= {name: estimate.text(), f"{name}_readings": _over_readings(estimate)}
    return facts | {"span": _SPAN.format(**facts) if fit.is_fitted else ""}


def _falls(fit: TradeoffFit) -> str:
    """Say what larger batches save at both ends of what was measured; empty without a good fit."""
    if not fit.is_fitted or fit.misfit:
        return ""
    sizes, steps = (fit.batches[name].tolist() for name in ("global_batch_size", "fitted_steps"))
    first, last = (significant(steps[place] / steps[place + 1], 3) for place in (0, -2))
    return _FALLS.format(sizes[1], first, sizes[0], sizes[-1], last, sizes[-2])


def _answer(group: GroupFits, scale: float, n_scales: int) -> list[str]:
    fit, headlines, facts = group.fit, group.headlines, _facts(group)
    critical, largest = headlines["critical_batch_size"], headlines["overhead_batch_size"]
    answer = [(_CRITICAL if critical.is_identified else _NO_CRITICAL).format(**facts)]
    answer += [] if group.unsettled else _by_form(fit)
    if largest.is_identified:
        what = largest.definition.partition(": ")[2].partition(", by")[0].capitalize()
        answer.append(f"{what}: {largest.text()} samples{facts['overhead_batch_size_readings']}.")
    if headlines["s_min"].is_identified:
        also = f"; fewest samples: {fit.fewest_samples.text()}" if fit.form == "two_term" else ""
        answer.append(
            "Fewest optimizer steps: {s_min}{s_min_readings}".format(**facts) + f"{also}."
        )
    if _most_rates(fit) > 1:
        answer.append(_RATES.format(_most_rates(fit)))
    sentence = noise_scale_sentence(critical, scale, n_scales, facts["batches"])
    return answer if sentence is None else [*answer, sentence]


def _short(group_fits: Sequence[GroupFits]) -> list[str]:
    """Say of the first group what its samples buy, and its critical batch size."""
    group, *other_groups = group_fits
    headlines, facts = group.headlines, _facts(group)
    if group.unsettled is not None:
        sentences = [_UNSETTLED.format(**facts)]
    else:
        is_identified = headlines["critical_batch_size"].is_identified
        sentences = [(_SHORT_CRITICAL if is_identified else _SHORT_NO_CRITICAL).format(**facts)]
        if "steps_ratio" in headlines:
            ratio = headlines["steps_ratio"]
            few_times = " (below 1: more steps)" if ratio.low < 1 or ratio.value < 1 else ""
            sentences.insert(0, _BUYS.format(**facts, n=ratio.n, few_times=few_times))
        sentences[0] += _left_out(group.fit)
    if other_groups:
        rest = count_text(len(other_groups), "more group of runs is", "more groups of runs are")
        sentences[-1] += f" {rest} in the tables."
    return sentences


def _most_rates(fit: TradeoffFit) -> float:
    """Return the most learning rates that a batch size was tried at; NaN where none is known."""
    return float(column_of(fit.runs, "n_learning_rates").max())


def _rates(fit: TradeoffFit) -> str:
    """Name the learning rates at both ends of the range, where they are known."""
    sizes = fit.batches["global_batch_size"]
    at_ends = fit.runs["global_batch_size"].isin([sizes.min(), sizes.max()])
    rates = column_of(fit.runs, "learning_rate")[at_ends]
    if rates.isna().any():
        return ""
    texts = [*dict.fromkeys(significant(rate, 3) for rate in rates.unique())]
    most = _most_rates(fit)
    best = f", the best of {most:g}" if most > 1 else ""
    if len(texts) == 1:
        return f" (learning rate {texts[0]}{best})"
    return f" (learning rates {' and '.join(texts)}{best and f'{best} each'})"


def _over_readings(estimate: Estimate) -> str:
    """Say that a range is one over readings, and what each gives; nothing for an interval."""
    if not estimate.readings:
        return ""
    # A reading that gives what the one before gave adds nothing.
    names: dict[str, str] = {}
    for name, value in estimate.readings:
        names.setdefault(significant(value, 3), name)
    listed = ", ".join(f"{value} {name}" for value, name in names.items())
    return f" (a range over readings: {listed})"


def _choose_target(
    number: int, label: str, rows: dict[float, pd.DataFrame], fits: dict[float, TradeoffFit]
) -> GroupFits:
    """Choose the headline target, and check its estimates against their other readings."""
    whys = {target: why_unsettled(target_rows) for target, target_rows in rows.items()}
    early = {target: early_crossings(target_rows) for target, target_rows in rows.items()}
    # Chosen without looking at the estimates, which would favour some of them.
    settled = [target for target in fits if whys[target] is None]
    main = max(
        settled or fits,
        key=lambda target: (len(fits[target].batches), -target if settled else target),
    )
    fit, unsettled = fits[main], whys[main]
    sizes = fit.batches["global_batch_size"]
    ends = sizes.min(), sizes.max()
    headlines = _estimates(fit, ends)
    if unsettled is not None:
        where = "" if math.isinf(main) else f" at {main:g}"
        headlines = {
            name: Estimate.unknown(f"{unsettled}{where}", e.n, e.definition, unit=e.unit)
            for name, e in headlines.items()
        }
        return GroupFits(number, label, fits, main, early, unsettled, headlines)
    # The batch sizes of the fit at their first crossings, and by each half of the seeds.
    fitted_rows = rows[main][rows[main]["global_batch_size"].isin(sizes)]
    first = at_first_crossing(fitted_rows)
    tables = dict(halves_of_seeds(fitted_rows))
    if first is not None and not first["steps_to_target"].equals(fitted_rows["steps_to_target"]):
        tables["at the first crossing"] = first
    readings = {
        name: _estimates(fit_tradeoff(table, form=fit.form), ends) for name, table in tables.items()
    }
    easier = min((target for target in settled if target > main), default=None)
    if easier is not None:
        estimates = _estimates(fits[easier], ends).items()
        readings[f"at a loss of {easier:g}"] = {n: e for n, e in estimates if n not in _OF_A_TARGET}
    headlines = {
        name: under_readings(
            estimate,
            [
                Reading(reading, estimates[name], of_half=reading.startswith("by seeds"))
                for reading, estimates in readings.items()
                if name in estimates
            ],
        )
        for name, estimate in headlines.items()
    }
    return GroupFits(number, label, fits, main, early, None, headlines)


def _left_out(fit: TradeoffFit) -> str:
    """Name the batch sizes that the fit leaves out, and why."""
    sizes, missed = (
        fit.excluded["global_batch_size"],
        fit.excluded["reached"] < fit.excluded["runs"],
    )
    kinds = {
        "not all runs reached the target": sizes[missed],
        "it needs more samples than a larger one": sizes[~missed],
    }
    texts = [
        f"B = {', '.join(map('{:g}'.format, left_out))} left out: {why}"
        for why, left_out in kinds.items()
        if len(left_out)
    ]
    return f" ({'; '.join(texts)}.)" if texts else ""


def _by_form(fit: TradeoffFit) -> list[str]:
    """Set both forms side by side, and say which is trusted."""
    free, two = fit.by_form["free_exponent"], fit.by_form["two_term"]
    if not free.is_fitted:
        return []
    sizes = [
        f"{size.text()} samples" if size.is_identified else size.text()
        for size in (free.critical_batch_size, two.critical_batch_size)
    ]
    return [
        f"With the exponent free, {FORMULAS['free_exponent']}, the critical batch size is "
        f"{sizes[0]}, and the exponent is {free.exponent.text()}; with the exponent taken for 1, "
        f"{FORMULAS['two_term']}, it is {sizes[1]}. The first is trusted, as it holds whether or "
        "not the exponent is 1; the second holds only if the exponent is 1."
    ]


def _behind(fit: TradeoffFit, critical: Estimate) -> str:
    sizes, few = f"{len(fit.batches)} batch sizes", few_seeds(fit)
    if critical.readings:
        return f"{critical.method}, over {fit.n_seeds} seeds at {sizes}"
    return (
        f"{sizes}; {few}"
        if few
        else f"{LEVEL * 100:g} % interval over {fit.n_seeds} seeds at {sizes}"
    )


def _estimates(fit: TradeoffFit, ends: tuple[float, float]) -> dict[str, Estimate]:
    """Return the trusted estimates, the ratios over the range, and those at exponent 1."""
    estimates = {name: getattr(fit, name) for name in _HEADLINES}
    ratios = ends_of_range(fit.measurements, ends) if fit.is_fitted else None
    if ratios is not None:
        estimates |= {"steps_ratio": ratios[0], "samples_ratio": ratios[1]}
    two = fit.of_form("two_term")
    if two is not None:
        if two.contradiction is None:
            estimates["critical_batch_size_two_term"] = two.critical_batch_size
        estimates["e_min"] = two.fewest_samples
    return estimates


def _typical_scale(noise_scales: pd.DataFrame | None, group: GroupFits) -> tuple[float, int]:
    """Return the geometric mean over the batch sizes of a fit, and the number of those known."""
    if noise_scales is None or noise_scales.empty:
        return math.nan, 0
    is_of_fit = noise_scales["cell"].isin(group.fit.runs["cell"])
    scales = noise_scales[is_of_fit & noise_scales["group"].eq(group.number)]
    means = logarithm(scales["estimate"]).groupby(scales["global_batch_size"]).mean()
    return math.exp(means.mean()), len(means)
