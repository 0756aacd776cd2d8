"""All that `batchscape.analysis` offers; it is imported once something of it is asked for."""

from __future__ import annotations

from batchscape.analysis.cells import Cells, find_cells, valid_figures
from batchscape.analysis.claims.declared import judge_claims
from batchscape.analysis.claims.evidence import Evidence
from batchscape.analysis.comparing.sides import compare_sweeps
from batchscape.analysis.comparison import compare, throughput_ratios
from batchscape.analysis.cost.memory_model import MemoryModel, fit_memory
from batchscape.analysis.cost.scaling import scaling_efficiency
from batchscape.analysis.cost.step_time import StepTimeModel, fit_step_time
from batchscape.analysis.cost.table import cost_table
from batchscape.analysis.decisions.evidence import gather
from batchscape.analysis.decisions.recommend import Needs, Recommendation, recommend
from batchscape.analysis.decisions.to_target import pareto_front, time_to_target
from batchscape.analysis.equivalence.decompositions import (
    compare_decompositions,
    loss_differences,
    seed_spread,
)
from batchscape.analysis.equivalence.gradients import gradient_errors
from batchscape.analysis.equivalence.paired import judge_equivalence, paired_differences
from batchscape.analysis.equivalence.tost import Tost, tost
from batchscape.analysis.estimates import Estimate
from batchscape.analysis.learning_rate.choice import at_best_learning_rate, tuning_warning
from batchscape.analysis.learning_rate.exponent import exponent_of
from batchscape.analysis.learning_rate.optimum import best_learning_rates
from batchscape.analysis.noise_scale.estimate import (
    cell_noise_scales,
    noise_scale_curves,
    run_noise_scales,
)
from batchscape.analysis.numbers import significant, with_spread
from batchscape.analysis.report.analyze import Analysis, analyze
from batchscape.analysis.report.write import Report, write_report
from batchscape.analysis.targets.censoring import median_with_infinity
from batchscape.analysis.targets.choice import choose_targets
from batchscape.analysis.targets.crossings import steps_to_target
from batchscape.analysis.targets.curves import curve_groups, curves_of
from batchscape.analysis.targets.foreign import as_table, read_table
from batchscape.analysis.targets.summary import reaches_table
from batchscape.analysis.tradeoff.fit import TradeoffFit, fit_tradeoff
from batchscape.analysis.tradeoff.targets import critical_batch_curve
from batchscape.record.tables import Tables, load

__all__ = [
    "Analysis",
    "Cells",
    "Estimate",
    "Evidence",
    "MemoryModel",
    "Needs",
    "Recommendation",
    "Report",
    "StepTimeModel",
    "Tables",
    "Tost",
    "TradeoffFit",
    "analyze",
    "as_table",
    "at_best_learning_rate",
    "best_learning_rates",
    "cell_noise_scales",
    "choose_targets",
    "compare",
    "compare_decompositions",
    "compare_sweeps",
    "cost_table",
    "critical_batch_curve",
    "curve_groups",
    "curves_of",
    "exponent_of",
    "find_cells",
    "fit_memory",
    "fit_step_time",
    "fit_tradeoff",
    "gather",
    "gradient_errors",
    "judge_claims",
    "judge_equivalence",
    "load",
    "loss_differences",
    "median_with_infinity",
    "noise_scale_curves",
    "paired_differences",
    "pareto_front",
    "reaches_table",
    "read_table",
    "recommend",
    "run_noise_scales",
    "scaling_efficiency",
    "seed_spread",
    "significant",
    "steps_to_target",
    "throughput_ratios",
    "time_to_target",
    "tost",
    "tuning_warning",
    "valid_figures",
    "with_spread",
    "write_report",
]
