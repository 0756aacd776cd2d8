"""All that `batchscape.analysis` offers; it is imported once something of it is asked for."""

from __future__ import annotations

from batchscape.analysis.cells import find_cells
from batchscape.analysis.claims.declared import judge_claims
from batchscape.analysis.claims.evidence import Evidence
from batchscape.analysis.comparison import compare
from batchscape.analysis.cost.step_time import fit_step_time
from batchscape.analysis.decisions.evidence import gather
from batchscape.analysis.decisions.recommend import Needs, recommend
from batchscape.analysis.estimates import Estimate
from batchscape.analysis.learning_rate.choice import at_best_learning_rate
from batchscape.analysis.learning_rate.optimum import best_learning_rates
from batchscape.analysis.noise_scale.estimate import run_noise_scales
from batchscape.analysis.report.analyze import analyze
from batchscape.analysis.report.write import write_report
from batchscape.analysis.targets.crossings import steps_to_target
from batchscape.analysis.targets.curves import curves_of
from batchscape.analysis.targets.foreign import ReadOptions, as_table, read_table
from batchscape.analysis.targets.summary import reaches_table
from batchscape.analysis.tradeoff.fit import fit_tradeoff
from batchscape.record.tables import load

__all__ = [
    "Estimate",
    "Evidence",
    "Needs",
    "ReadOptions",
    "analyze",
    "as_table",
    "at_best_learning_rate",
    "best_learning_rates",
    "compare",
    "curves_of",
    "find_cells",
    "fit_step_time",
    "fit_tradeoff",
    "gather",
    "judge_claims",
    "load",
    "reaches_table",
    "read_table",
    "recommend",
    "run_noise_scales",
    "steps_to_target",
    "write_report",
]
