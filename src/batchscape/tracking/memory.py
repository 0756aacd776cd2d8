"""The memory of every rank as one small page, which W&B shows as a panel.

A table of W&B's own would be an artifact, which its library stages outside the sweep folder.
"""

from __future__ import annotations

from html import escape

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
    latest = latest.drop_duplicates("rank", keep="last").set_index("rank")
    figures = latest.reindex(columns=list(_PHASES)).astype(float)
    figures = figures.dropna(axis="columns", how="all").rename(columns=_PHASES)
    if figures.empty:
        return None
    page = figures.style.set_uuid("ranks").format("{:.3f}", na_rep="")
    page = page.set_caption("GiB by rank").bar(axis=None, vmin=0, color="#cfe0f4")
    page = page.set_table_styles(
        [{"selector": "td, th", "props": "font: 12px sans-serif; padding: 2px 6px"}]
    )
    methods = sorted({str(method) for method in latest["memory_method"].dropna()})
    source = f"<p>Allocated: {escape(', '.join(methods))}</p>" if methods else ""
    return f"{page.to_html()}{source}"
