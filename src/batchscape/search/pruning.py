"""Which trials are cut before their end: those that are worse than most at equal samples."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress

from batchscape.config import Constant, RunConfig, Sampler
from batchscape.errors import ConfigError, RecordError
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.tables import read_table

__all__ = ["MedianRule", "check_fair", "curve_of", "is_cut"]

_LEAST_TRIALS = 4
"""Trials with an evaluation at equal samples before any is cut."""
_FIRST_SHARE = 0.25
"""Share of the samples of a run before which none is cut: early losses say little of late ones."""

Curve = Mapping[int, float]
"""Held-out losses by samples."""


def check_fair(sampler: Sampler, configs: Sequence[RunConfig]) -> None:
    """Refuse to cut trials where a loss on the way says nothing fair of the end.

    Parameters
    ----------
    sampler : Sampler
    configs : sequence of RunConfig

    Raises
    ------
    ConfigError
        If there are two objectives, several runs a trial, a schedule that changes ranks on the
        way, or no evaluation on the way.
    """
    if sampler.pruner == "none":
        return
    said = f"search.pruner={sampler.pruner}"
    if len(sampler.objective) > 1 or sampler.objective[0] == "peak_allocated_gib":
        msg = (
            f"{said} cuts by held-out losses, and search.objective={sampler.objective} is judged "
            "by more; use search.pruner=none"
        )
        raise ConfigError(msg)
    if sampler.seeds > 1:
        msg = f"{said} cuts single runs, and a trial has {sampler.seeds}; use search.seeds=1"
        raise ConfigError(msg)
    for config in configs:
        if not isinstance(config.schedule, Constant) or config.batch.ramp:
            msg = (
                f"{said} compares trials on their way, and with schedule={config.schedule.name} "
                "or a ramp ranks change later; use search.pruner=none"
            )
            raise ConfigError(msg)
        samples = config.budget.samples
        if samples and config.schedule.warmup_samples > _FIRST_SHARE * samples:
            msg = (
                f"{said} compares trials from {_FIRST_SHARE:g} of budget.samples={samples} on, and "
                f"schedule.warmup_samples={config.schedule.warmup_samples} lasts longer"
            )
            raise ConfigError(msg)
        if config.evaluation.every_samples is None:
            msg = f"{said} needs evaluations on the way: give evaluation.every_samples"
            raise ConfigError(msg)


def is_cut(curve: Curve, others: Sequence[Curve], budget: int) -> tuple[int, float] | None:
    """Say whether the median rule cuts a run.

    Parameters
    ----------
    curve : mapping of int to float
        Held-out losses so far, by samples.
    others : sequence of mapping
        Those of the earlier trials of its study, each as long as it was trained.
    budget : int
        Samples of a full run.

    Returns
    -------
    samples : int
        Where it is above the median of the others.
    median : float
        None instead of both where it goes on.
    """
    for samples, loss in sorted(curve.items()):
        there = [other[samples] for other in others if samples in other]
        if samples < _FIRST_SHARE * budget or len(there) < _LEAST_TRIALS:
            continue
        median = statistics.median(there)
        if loss > median:
            return samples, median
    return None


def curve_of(folder: RunFolder) -> dict[int, float]:
    """Read the evaluations of a run, also while it trains; empty where there are none yet."""
    with suppress(RecordError, OSError):
        evals = read_table(folder, "evals").dropna(subset=["samples", "eval_loss"])
        return dict(
            zip(evals["samples"].astype(int), evals["eval_loss"].astype(float), strict=True)
        )
    return {}


class MedianRule:
    """Asked of each run at work whether it goes on.

    Parameters
    ----------
    sweep : SweepFolder
        Of the trials.
    """

    def __init__(self, sweep: SweepFolder) -> None:
        self._sweep = sweep
        self._curves: dict[str, Curve] = {}
        """Of runs that are over."""

    def asked(self, spec: RunSpec, earlier: Sequence[str]) -> str | None:
        """Return why a run is cut; None: it goes on.

        Parameters
        ----------
        spec : RunSpec
        earlier : sequence of str
            Runs of the trials of its study that are over.
        """
        self._curves |= {
            run: curve_of(self._sweep.run(run)) for run in earlier if run not in self._curves
        }
        curve = curve_of(self._sweep.run(spec.run_id))
        found = is_cut(curve, [self._curves[run] for run in earlier], spec.samples)
        if found is None:
            return None
        samples, median = found
        return (
            f"cut by search.pruner=median: its held-out loss of {curve[samples]:.4g} at "
            f"{samples:,} samples is above {median:.4g}, the median of the trials before it"
        )
