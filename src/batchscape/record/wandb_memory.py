"""The memory of every rank as one small page, which W&B shows as a panel."""

from __future__ import annotations

from html import escape
from typing import Any

import pandas as pd

__all__ = ["memory_page"]

_PHASES = {
    "allocated_after_model_gib": "after model",
    "peak_allocated_first_backward_gib": "first backward",
    "peak_allocated_first_optimizer_step_gib": "first update",
    "peak_allocated_steady_gib": "steady",
    "peak_reserved_gib": "reserved",
    "device_used_gib": "device used",
    "uss_gib": "resident, own",
    "peak_rss_gib": "resident, peak",
}
_STYLE = (
    "body{font:12px sans-serif}td,th{padding:2px 6px;text-align:right;white-space:nowrap}"
    "td{background:linear-gradient(#cfe0f4,#cfe0f4) no-repeat;background-size:var(--w) 100%}"
)


def memory_page(ranks: pd.DataFrame) -> str | None:
    """Return an HTML table of the memory of each rank of the last attempt, with bars.

    Parameters
    ----------
    ranks : DataFrame
        Rows of one run, with columns of `record.columns`.

    Returns
    -------
    str or None
        One row a rank, one column a phase that any rank has a figure of, in GiB; None if there
        are no figures at all.
    """
    latest = ranks[ranks["attempt"] == ranks["attempt"].max()].sort_values("rank")
    # A rank that was started again within an attempt counts once.
    latest = latest.drop_duplicates("rank", keep="last")
    shown = [name for name in _PHASES if name in latest and latest[name].notna().any()]
    if not shown:
        return None
    largest = float(latest[shown].max().max())
    head = "".join(f"<th>{_PHASES[name]}</th>" for name in shown)
    rows = "".join(
        f"<tr><th>{int(row['rank'])}</th>"
        + "".join(_cell(row[name], largest) for name in shown)
        + "</tr>"
        for row in latest.to_dict("records")
    )
    methods = sorted({str(method) for method in latest["memory_method"].dropna()})
    source = f"<p>Allocated: {escape(', '.join(methods))}</p>" if methods else ""
    return (
        f"<style>{_STYLE}</style><table><caption>GiB by rank</caption>"
        f"<tr><th>rank</th>{head}</tr>{rows}</table>{source}"
    )


def _cell(value: Any, largest: float) -> str:  # noqa: ANN401  (a pandas scalar, perhaps NA)
    if pd.isna(value):
        return "<td></td>"
    width = 100 * float(value) / largest if largest > 0 else 0
    return f'<td style="--w:{width:.0f}%">{float(value):.3f}</td>'
