"""Pictures of the trade-off: what a target takes by batch size, critical batch sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from batchscape.analysis.figures.chart import Axis, Chart, Choice, Look, Marks
from batchscape.analysis.figures.style import ACCENT, CROSS, GREY, INK, MARK, palette

_BATCH = "global batch size (samples)"
_QUANTITIES = {
    "steps_to_target": "optimizer steps to target",
    "samples_to_target": "samples to target",
    "tokens_to_target": "tokens to target",
    "time_to_target_s": "time to target (s)",
}
_LOOKS = {
    "runs": INK,
    "not reached: more than this": Look(MARK.colour, symbol="triangle-up", hollow=True),
    "diverged": Look(MARK.colour, symbol=CROSS),
    "fit": Look(ACCENT.colour, ACCENT.dark, "stroke"),
    "interval of the fit": Look(ACCENT.colour, ACCENT.dark, "square"),
    "perfect scaling": Look(GREY.colour, GREY.dark, "stroke", (4, 3)),
    "critical batch size": Look(MARK.colour, symbol="stroke"),
    "interval of the critical batch size": Look(MARK.colour, symbol="square"),
}


def steps_chart(
    reaches: pd.DataFrame,
    curves: pd.DataFrame,
    labels: Mapping[int, str],
    headline_target: tuple[int, float] | None,
) -> Chart | None:
    """Draw what reaching a target took, run by run, with the fit; None for one batch size."""
    several = reaches["group"].nunique() > 1
    options: dict[str, str] = {}
    for keys, rows in reaches.groupby(["group", "target_loss"], sort=False):
        group, target = int(str(keys[0])), float(str(keys[1]))
        if rows["global_batch_size"].nunique() > 1:
            name = "the target" if math.isinf(target) else f"loss {target:.7g}"
            label = labels.get(group, f"group {group}")
            options[_key(group, target)] = f"{label}: {name}" if several else name
    if not options:
        return None
    first = "" if headline_target is None else _key(*headline_target)
    options = {key: options[key] for key in dict.fromkeys([first, *options]) if key in options}
    reaches = _keyed(reaches).reindex(
        columns=[
            *("target", "outcome", "global_batch_size", "steps_low", "run_id", "sweep_dir"),
            *_QUANTITIES,
            "n_learning_rates",
        ]
    )
    quantities = {
        name: text
        for name, text in _QUANTITIES.items()
        if name == "steps_to_target" or reaches[name].notna().any()
    }
    of_runs = reaches[[*quantities, "global_batch_size", "target", "run_id", "sweep_dir"]]
    short = reaches[reaches["outcome"].isin(["censored", "pruned"])]
    diverged = of_runs[reaches["outcome"].eq("diverged")]
    lowest = of_runs["steps_to_target"].min()
    marks = [
        Marks("point", of_runs[reaches["outcome"].eq("reached")], "runs"),
        Marks("point", _counted(short, "steps_low"), "not reached: more than this", size=36),
        Marks("point", diverged.assign(steps_to_target=lowest)
              .drop(columns=[*quantities][1:]), "diverged", size=36, placed="y"),
    ]  # fmt: skip
    if len(curves):
        keyed = _keyed(curves)
        fit, sizes = _counted(keyed, "steps"), keyed["global_batch_size"]
        ends = {
            f"{name}_to_target_{end}": keyed[end] * factor
            for end in ("low", "high")
            for name, factor in (("steps", 1), ("samples", sizes))
        }
        critical = keyed.drop_duplicates("target")[["target", *_CRITICAL]].rename(columns=_CRITICAL)
        is_closed = critical[list(_CRITICAL.values())].abs().lt(np.inf).all(axis=1)
        is_closed &= critical["global_batch_size_low"].gt(0)
        band = fit.assign(**ends).dropna(subset=list(ends))
        marks = [
            Marks("span", critical[is_closed], "interval of the critical batch size"),
            Marks("band", band, "interval of the fit"),
            Marks("line", _counted(keyed, "perfect_steps"), "perfect scaling"),
            Marks("line", fit, "fit"),
            Marks("rule", critical.dropna(subset="global_batch_size"), "critical batch size"),
            *marks,
        ]
    marks = [mark for mark in marks if len(mark.table)]
    names = {mark.name for mark in marks}
    at_best = " at the best learning rate of their global batch"
    return Chart(
        "steps_to_target",
        "What a target takes, by global batch",
        f"Points are runs{at_best if reaches['n_learning_rates'].gt(1).any() else ''}, one a "
        "trajectory: in tables/reaches.csv those of which is_best is true."
        + "".join(text for name, text in _CAPTIONS.items() if name in names),
        Axis(
            {"global_batch_size": _BATCH}, kind="log", ticks=reaches["global_batch_size"].tolist()
        ),
        Axis(quantities, "Count", "log"),
        marks,
        {name: look for name, look in _LOOKS.items() if name in names},
        choices=[Choice("target", "Target", options)],
        panels="y",
        page_only=["tokens_to_target"],
        tables=["tables/reaches.csv"] + ["tables/tradeoff_curve.csv"] * (len(curves) > 0),
    )


_CAPTIONS = {
    "not reached: more than this": " Triangles point up from what a run had seen when it ended "
    "without reaching the target.",
    "diverged": " A cross, at the height of the fewest steps, is a run that diverged.",
    "fit": " The line is the fit, with its pointwise 95 % interval.",
    "perfect scaling": " Dashed: perfect scaling, half the steps at twice the batch, from the "
    "smallest batch on.",
    "critical batch size": " Vertical: the critical batch size, with its interval.",
}
_CRITICAL = {
    f"critical_batch_size{end}": f"global_batch_size{end}" for end in ("", "_low", "_high")
}


def _key(group: int, target: float) -> str:
    return f"{group}|{target!r}"


def _keyed(table: pd.DataFrame) -> pd.DataFrame:
    pairs = zip(table["group"], table["target_loss"], strict=True)
    return table.assign(target=[_key(int(group), float(target)) for group, target in pairs])


def _counted(table: pd.DataFrame, steps: str) -> pd.DataFrame:
    """Count optimizer steps in samples too; tokens and time do not follow from them."""
    sizes, names = table["global_batch_size"], ["target", "run_id", "sweep_dir"]
    return table[[name for name in names if name in table]].assign(
        global_batch_size=sizes,
        steps_to_target=table[steps],
        samples_to_target=table[steps] * sizes,
    )


def critical_batch_chart(table: pd.DataFrame, scales: Mapping[str, float]) -> Chart | None:
    """Draw critical batch sizes over targets, with noise scales by the labels of groups."""
    points = table.dropna(subset="critical_batch_size").rename(columns={"runs": "run_ids"})
    if not points["group"].duplicated().any():
        return None
    points["series"] = points["group"].mask(points["group"].eq(""), "critical batch size")
    points = points[["target_loss", "series", *_CRITICAL, "run_ids"]]
    noise = pd.DataFrame({"series": [*scales], "critical_batch_size": [*scales.values()]})
    noise = noise[np.isfinite(noise["critical_batch_size"])]
    noise["series"] = [
        f"noise scale, {label}" if label else "noise scale" for label in noise["series"]
    ]
    looks = palette(points["series"])
    dashed = zip(noise["series"], palette(scales).values(), strict=False)
    looks |= {name: Look(look.colour, look.dark, "stroke", (5, 2)) for name, look in dashed}
    return Chart(
        "critical_batch_curve",
        "Critical batch size by target",
        "Critical batch size (mccandlish) over target losses, with its 95 % interval.",
        Axis({"target_loss": "target loss"}, falls=True),
        Axis({"critical_batch_size": "critical batch size (samples)"}, kind="log"),
        [
            Marks("rule", noise),
            Marks("line", points),
            Marks("interval", points),
            Marks("point", points, size=20),
        ],
        looks,
        tables=["tables/critical_batch.csv"],
    )
