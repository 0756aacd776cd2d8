"""From run folders to numbers, tables, figures and a report.

Everything here takes and returns DataFrames: `load` reads sweep folders, `find_cells` sorts runs
into cells, `compare` and `compare_decompositions` compute the tables, and `write_report` writes
all of it. No runtime of the training is needed.
"""

from __future__ import annotations

from batchscape.analysis.cells import Cells, find_cells
from batchscape.analysis.comparison import QUANTITIES, compare, throughput_ratios, valid_figures
from batchscape.analysis.equivalence.decompositions import (
    compare_decompositions,
    loss_differences,
    seed_spread,
)
from batchscape.analysis.figures.curves import mean_curves
from batchscape.analysis.numbers import significant, with_spread
from batchscape.analysis.report.write import Report, write_report
from batchscape.record.tables import Tables, load

__all__ = [
    "QUANTITIES",
    "Cells",
    "Report",
    "Tables",
    "compare",
    "compare_decompositions",
    "find_cells",
    "load",
    "loss_differences",
    "mean_curves",
    "seed_spread",
    "significant",
    "throughput_ratios",
    "valid_figures",
    "with_spread",
    "write_report",
]
