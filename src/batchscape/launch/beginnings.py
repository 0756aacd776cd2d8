"""Runs that begin alike: what they share is trained once, and the others go on from its state.

Two runs share the optimizer steps before the first one in which they differ: in the global batch
and its cut, in the optimizer's settings, or in the factor of the schedule. One of them trains these
steps and keeps its state after the last of them, the branch point; the other one begins there.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from types import MappingProxyType
from typing import Any, NamedTuple

from batchscape.config import Constant, Cosine, Schedule
from batchscape.errors import RecordError
from batchscape.plan.identity import beginning_key
from batchscape.record.files import link_or_copy, read_json, write_json
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.spec import RunSpec

_LEAST_SHARE = 0.1
"""Least share of a run's optimizer steps: to train fewer costs less than to keep their state."""
_ORIGIN = "origin.json"
"""In the copy of a branch point: the trunk and its optimizer steps."""


class Beginning(NamedTuple):
    """Where a run goes on from the state of another one, the trunk."""

    trunk: str
    """Name of the run that trains the beginning."""
    optimizer_steps: int
    """Number of optimizer steps that both share."""


_NO_BEGINNING = Beginning("", 0)
"""Beginning of a run that trains all of its steps itself."""


def find_beginnings(specs: Sequence[RunSpec], sweep: SweepFolder) -> dict[str, Beginning]:
    """Find the runs that can go on from the state of an earlier one, or of one that is over.

    Parameters
    ----------
    specs : sequence of RunSpec
        Runs that are not over, in the order of the launch.
    sweep : SweepFolder
    """
    run_ids = {spec.run_id for spec in specs}
    is_wanted = any(spec.config.launcher.share_beginnings for spec in specs)
    kept_steps_by_run, trunks = {}, []
    for folder in sweep.run_folders() if is_wanted else ():
        if folder.path.name not in run_ids and (branch_points := folder.branch_points()):
            with suppress(RecordError):
                trunks.append(RunSpec.read(folder.config))
                kept_steps_by_run[folder.path.name] = [
                    int(path.name.rpartition("-")[2]) for path in branch_points
                ]
    return shared_beginnings([*trunks, *specs], kept_steps_by_run)


def shared_beginnings(
    specs: Sequence[RunSpec],
    kept_steps_by_run: Mapping[str, Collection[int]] = MappingProxyType({}),
) -> dict[str, Beginning]:
    """Find the runs that can go on from the state of an earlier one.

    Parameters
    ----------
    specs : sequence of RunSpec
        In the order of the launch.
    kept_steps_by_run : mapping of str to collection of int
        Of runs that are over, the optimizer steps whose states they have.

    Returns
    -------
    dict of str to Beginning
        By `run_id`. Of several trunks it is the one that shares most steps, so that no step that
        runs share is trained twice.
    """
    beginnings: dict[str, Beginning] = {}
    sharing_specs = [
        spec
        for spec in specs
        if spec.config.launcher.share_beginnings
        and not spec.is_program
        and spec.timed_steps is None
    ]
    # Most runs of a large grid start like no other run, and their first steps show it sooner.
    n_by_start = Counter(map(_start, sharing_specs))
    trunks_by_key: defaultdict[tuple[Any, ...], list[RunSpec]] = defaultdict(list)
    for spec in sharing_specs:
        if n_by_start[start := _start(spec)] == 1:
            continue
        trunks = trunks_by_key[*start, beginning_key(spec)]
        trunks.append(spec)
        if spec.run_id in kept_steps_by_run:
            continue
        # A run keeps its warm-up and at least as many timed steps for itself.
        max_steps = spec.optimizer_steps - 2 * spec.config.measure.warmup_optimizer_steps - 1
        # Of equals the first: it trains these steps itself, and later ones may take them from it.
        most_steps, trunk = 0, ""
        for other in trunks[:-1]:
            n_shared_steps = min(max_steps, shared_steps(other, spec))
            if n_shared_steps <= beginnings.get(other.run_id, _NO_BEGINNING).optimizer_steps:
                continue  # it does not train these steps itself
            if (own_steps := kept_steps_by_run.get(other.run_id)) is not None:
                n_shared_steps = max((k for k in own_steps if k <= n_shared_steps), default=0)
            if n_shared_steps > most_steps:
                most_steps, trunk = n_shared_steps, other.run_id
        if most_steps >= max(1, _LEAST_SHARE * spec.optimizer_steps):
            beginnings[spec.run_id] = Beginning(trunk, most_steps)
    return beginnings


def _start(spec: RunSpec) -> tuple[Any, ...]:
    """Return what decides a run's first optimizer step, beside model, data and engine."""
    config, first = spec.config, spec.stages[0]
    seeds = config.resolved_init_seed, config.resolved_data_seed
    return (*seeds, astuple(first.geometry), repr(first.optimizer), config.schedule.warmup_samples)


def shared_steps(one: RunSpec, other: RunSpec) -> int:
    """Return the optimizer steps that two runs of equal settings train alike, from the first on."""
    schedule, other_schedule = one.config.schedule, other.config.schedule
    until = min(
        _constant_until(schedule, one.samples), _constant_until(other_schedule, other.samples)
    )
    decays_by_itself = isinstance(schedule, Cosine) and schedule.decay_samples is not None
    if schedule == other_schedule and (one.samples == other.samples or decays_by_itself):
        until = math.inf
    steps = samples = 0
    for stage, other_stage in zip(one.stages, other.stages, strict=False):
        if (stage.geometry, stage.optimizer) != (other_stage.geometry, other_stage.optimizer):
            break
        size = stage.geometry.global_batch_size
        shortest = min(stage.samples, other_stage.samples)
        equal_steps = int(min(shortest, max(until - samples, 0))) // size
        steps, samples = steps + equal_steps, samples + equal_steps * size
        if equal_steps * size < max(stage.samples, other_stage.samples):
            break
    return steps


def _constant_until(schedule: Schedule, budget_samples: int) -> float:
    """Return up to which sample a schedule has its warm-up and its peak, and nothing else."""
    if isinstance(schedule, Constant):
        return math.inf
    if isinstance(schedule, Cosine):
        return schedule.warmup_samples
    return budget_samples - schedule.decay_samples


def kept_steps(spec: RunSpec) -> set[int]:
    """Return the optimizer steps after which a run keeps its state for later commands."""
    steps = map(spec.steps_of, spec.config.checkpoint.keep_at_samples)
    return {step for step in steps if step is not None}


class Branches:
    """The branch points of one launch: who waits for which, who keeps which, which can go.

    Parameters
    ----------
    specs : sequence of RunSpec
        Runs of the launch, in their order.
    sweep : SweepFolder
    may_train : callable
        Whether a run, by name, may still train.
    """

    def __init__(
        self, specs: Sequence[RunSpec], sweep: SweepFolder, may_train: Callable[[str], bool]
    ) -> None:
        self._sweep = sweep
        self._kept_steps = {spec.run_id: kept_steps(spec) for spec in specs}
        self._may_train_in_launch = may_train
        self._beginnings = find_beginnings([s for s in specs if may_train(s.run_id)], sweep)

    def _may_train(self, run_id: str) -> bool:
        """Whether a run of this launch may still train; nobody waits for runs of other launches."""
        return run_id in self._kept_steps and self._may_train_in_launch(run_id)

    def _needed(self) -> set[Beginning]:
        """Return the branch points from which a run may still begin."""
        return {one for run_id, one in self._beginnings.items() if self._may_train(run_id)}

    def can_begin(self, spec: RunSpec) -> bool:
        """Whether a run can begin now: the state that it begins from is there, or will never be."""
        beginning = self._beginnings.get(spec.run_id)
        if beginning is None or not self._may_train(beginning.trunk):
            return True
        folder, trunk = self._sweep.run(spec.run_id), self._sweep.run(beginning.trunk)
        return (
            folder.beginning.is_dir()
            or trunk.branch_point(beginning.optimizer_steps).is_dir()
            # The trunk may have been further when this run was added.
            or (trunk.checkpoint_step or 0) >= beginning.optimizer_steps
            or folder.checkpoint_step is not None
        )

    def launch_record(self, spec: RunSpec) -> dict[str, Any]:
        """Return what `launch.json` says of it: `begins` of a branch, `keeps` of a trunk.

        A branch has its own copy of the state from now on, which nobody else removes.
        """
        record: dict[str, Any] = {}
        folder = self._sweep.run(spec.run_id)
        beginning = self._beginnings.get(spec.run_id)
        if beginning is not None and folder.checkpoint_step is None:
            self._copy(beginning, folder)
        if folder.beginning.is_dir():
            record["begins"] = read_json(folder.beginning / _ORIGIN)
        needed_steps = {one.optimizer_steps for one in self._needed() if one.trunk == spec.run_id}
        keeps = needed_steps | kept_steps(spec)
        return record | ({"keeps": sorted(keeps)} if keeps else {})

    def _copy(self, beginning: Beginning, folder: RunFolder) -> None:
        """Copy a branch point to a run, unless it has one, or there is none."""
        trunk = self._sweep.run(beginning.trunk)
        point_folder = trunk.branch_point(beginning.optimizer_steps)
        if folder.beginning.is_dir() or not point_folder.is_dir():
            return
        hidden = folder.beginning.with_name(f".{folder.beginning.name}")
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
        with suppress(FileNotFoundError):
            for path in point_folder.iterdir():
                link_or_copy(path, hidden / path.name)
        needed = (folder.lines("steps"), folder.lines("evals"), folder.launch)
        if not all((hidden / path.name).exists() for path in needed):
            # Another launcher removes it just now: this run trains all of its steps.
            shutil.rmtree(hidden, ignore_errors=True)
            return
        write_json(hidden / _ORIGIN, beginning._asdict())
        hidden.rename(folder.beginning)

    def own_share(self, spec: RunSpec) -> float:
        """Return the share of its optimizer steps that a run trains itself."""
        beginning = self._beginnings.get(spec.run_id, _NO_BEGINNING)
        return 1 - beginning.optimizer_steps / spec.optimizer_steps

    def remove_unneeded(self) -> None:
        """Remove the branch points from which no run will begin, unless a run keeps them."""
        needed = {
            self._sweep.run(one.trunk).branch_point(one.optimizer_steps) for one in self._needed()
        }
        for run_id, own_kept_steps in self._kept_steps.items():
            folder, kept_steps_of_run = self._sweep.run(run_id), set(own_kept_steps)
            point_folders = set(folder.branches.iterdir()) if folder.branches.is_dir() else set()
            if point_folders and not self._may_train(run_id):
                # An earlier command may have asked for more.
                with suppress(RecordError):
                    kept_steps_of_run |= kept_steps(RunSpec.read(folder.config))
            for point_folder in (
                point_folders - needed - set(map(folder.branch_point, kept_steps_of_run))
            ):
                shutil.rmtree(point_folder, ignore_errors=True)
            with suppress(OSError):
                folder.branches.rmdir()
