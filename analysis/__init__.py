"""From run folders to numbers, tables, figures and a report.

Everything here takes and returns DataFrames: `load` reads sweep folders, `find_cells` sorts runs
into cells, `compare` and `compare_decompositions` compute the tables, and `write_report` writes
all of it. No runtime of the training is needed.
"""

from __future__ import annotations

from batchscape.record.tables import Tables, load

from .cells import Cells, find_cells
from .comparison import QUANTITIES, compare, throughput_ratios, valid_figures
from .curves import mean_curves
from .decompositions import compare_decompositions, loss_differences, seed_spread
from .numbers import significant, with_spread
from .report import Report, write_report

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
