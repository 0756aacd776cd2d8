"""The chart of engines: the differences of their losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchscape.analysis.cells import Cells, setting_label, setting_texts
from batchscape.analysis.engines.losses import EngineLosses
from batchscape.analysis.engines.matching import counterparts, shared_settings
from batchscape.analysis.figures.chart import Axis, Chart, Choice, Look, Marks
from batchscape.analysis.figures.style import GREY, palette

_SEEDS = "sd between seeds"


def engine_loss_charts(
    cells: Cells, losses: EngineLosses, engines: Sequence[str]
) -> Iterator[Chart]:
    """Draw the differences between the curves of engines."""
    apart = losses.by_step[losses.by_step["largest"].gt(0)]
    if apart.empty:
        return
    groups_of_cells = counterparts(cells)
    titles = {
        str(g): _title(cells, int(groups_of_cells.index[groups_of_cells["group"] == g][0]))
        for g in dict.fromkeys(losses.pairs["group"])
    }
    apart = apart.assign(series=apart["engine"], group=apart["group"].astype(str))
    spread = losses.spread.assign(group=losses.spread["group"].astype(str))
    spread = spread.rename(columns={"sd": "largest"})
    by_seeds = {_SEEDS: Look(GREY.colour, GREY.dark, "stroke", (2, 2))} if len(spread) else {}
    yield Chart(
        "engines_difference",
        "Differences between engines",
        "The largest difference over seeds and decompositions from the first decomposition of "
        f"{engines[0]}, or of the next engine where that did not complete; differences of exactly "
        "0 are left out.",
        Axis({"optimizer_step": "optimizer steps"}),
        Axis({"largest": f"largest |Δ loss| to {engines[0]}"}, kind="log"),
        [*([Marks("line", spread, _SEEDS)] if len(spread) else []), Marks("line", apart)],
        {**palette(engines), **by_seeds},
        choices=[Choice("group", "Trained", titles)] if len(titles) > 1 else [],
        panels="group",
    )


def _title(cells: Cells, cell: int) -> str:
    row = cells.table.loc[[cell]]
    parts = [f"global batch {row['global_batch_size'].iloc[0]}"]
    settings = [name for name in shared_settings(cells) if name in cells.contexts]
    parts += [f"{setting_label(name)} {setting_texts(row, name).iloc[0]}" for name in settings]
    return ", ".join(parts)
