"""How a run is fed, measured, launched and mirrored."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from batchscape.config.types import OUR_LOOP, Affects, Count, NonNegative, Positive, settings

Repeated = Literal["failed", "oom", "timeout", "all"]
"""Statuses of runs that can be launched again, or all of them."""


@settings
class Loader:
    """The processes that fetch the samples of a rank."""

    workers: Annotated[NonNegative, Affects.COST] = 0
    """Processes beside each rank that fetch samples, each two micro-batches ahead; 0: the rank
    itself does."""


@settings
class Device:
    """What a run may take of each device: a smaller device, emulated by a larger one."""

    memory_limit_gib: Annotated[Positive | None, Affects.COST] = None
    """Memory that the ranks on one device may take; beyond it they run out of memory. Null: all
    there is. What counts, on CUDA and on a CPU: `measure.memory_limit`."""


@settings
class Checkpoint:
    """When the state of a run is written, so that it can go on after an interruption."""

    every_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = 120.0
    """Least time between checkpoints, in seconds; 0: at every drain of the recorder; null: only
    when interrupted."""
    keep_at_samples: Annotated[tuple[Count, ...], OUR_LOOP] = ()
    """Samples after which a run keeps its state for good, so that runs of a later command can begin
    with it."""


@settings
class Measure:
    """Measurements beside the loss."""

    warmup_optimizer_steps: Annotated[NonNegative, Affects.TIME] = 5
    """First optimizer steps that stay out of step-time figures."""
    steps_of_further_cuts: Annotated[Count | None, Affects.NOTHING, OUR_LOOP] = None
    """Optimizer steps of a cut whose training another cut of the plan does whole, the one with the
    smallest micro-batch: those after the first ones are timed, and no loss of it counts. Null:
    every cut trains its whole budget."""
    memory: Annotated[bool, Affects.RECORD] = True
    """Measure peak memory; on CPU this is a short probe before training."""
    noise_scale_every: Annotated[Count | None, Affects.COST | Affects.RECORD, OUR_LOOP] = 20
    """Optimizer steps between two samples of the gradient noise scale; null: none."""
    equivalence_margin: Annotated[Positive, Affects.NOTHING] = 0.005
    """Largest difference of the final loss, in nats, within which decompositions count as
    equivalent, and a batch that grows as losing nothing. Finished runs keep theirs."""
    equivalence_margin_steps: Annotated[Positive, Affects.NOTHING] = 0.02
    """The same for the logarithm of the steps to a target, where 0.02 is 2 %. Finished runs keep
    theirs."""

    def __post_init__(self) -> None:
        """Check that a cut has steps to time."""
        steps, first = self.steps_of_further_cuts, self.warmup_optimizer_steps
        if steps is not None and steps <= first:
            raise ValueError(
                f"steps_of_further_cuts must be above warmup_optimizer_steps={first}, which are "
                f"not timed; given {steps}; with 40 or more their median is stable"
            )


@settings
class AnyLauncher:
    """Settings of every launcher."""

    name: str
    device: Annotated[Literal["auto", "cpu", "cuda"], Affects.COST] = "auto"
    """`auto` takes CUDA devices where there are any, and refuses accelerators that are none (ROCm,
    XPU, MPS): nothing is measured on those. Its outcome is part of a run."""
    share_beginnings: bool = True
    """Train the optimizer steps that several runs begin with once, and let the others go on from
    there. Step times of a run are then those of its own steps, times to a target those of all."""
    concurrent_runs: Count = 1
    """Runs at the same time; above 1 their times stay out of comparisons."""
    oversubscribe: Count | None = None
    """Ranks of a run that may share a core or, through gloo, a CUDA device, and runs, where
    `concurrent_runs` allows several; times of those that share stay out of comparisons. Wider runs
    are rejected. Null: two ranks of a run a core, one a CUDA device, and no two runs."""
    timeout_s: Positive | None = None
    """Longest time a run may take; null: no limit."""
    hang_s: Positive | None = 300.0
    """A run hangs, and is ended, once no rank has made progress for 20 of its optimizer steps, and
    at least for so many seconds; for six times as many outside of steps (start, compilation,
    evaluation, checkpoint, all of a program of `engine=command`). Null: it never does. The rule is
    in `launch.hangs`."""
    retries: NonNegative = 1
    """Times that one launch tries a run again that the machine may have ended: a hang, a rank that
    was killed or lost, a fork server that died. What would happen again is never tried again: an
    exception, memory that is out, divergence, a time limit."""
    retry: list[Repeated] = Field(default_factory=list)
    """Statuses of runs that ended by a fault in an earlier launch and are launched again; such a
    run goes on from its checkpoint where it has one. The option `--retry` sets it."""
    max_failures: Count | None = None
    """Once this many runs of one launch have ended by a fault, no more are started; those that
    run are finished. null: once all have failed alike, three at least, and none has trained in
    the folder; a large number never stops for that."""
    skip_unfit: bool = True
    """Reject a run that is predicted to need more memory than there is, or whose micro-batch is
    larger than that of a run that ran out of memory with all else that decides memory alike; false:
    try each."""

    def ranks_per_device(self, device_type: str) -> int:
        """Return how many ranks of a run may share a core or CUDA device."""
        return self.oversubscribe or (2 if device_type == "cpu" else 1)

    @property
    def hang_outside_s(self) -> float | None:
        """Silence that is a hang outside of optimizer steps, in seconds; None: none is."""
        return None if self.hang_s is None else 6 * self.hang_s

    @property
    def runs_per_device(self) -> int:
        """How many runs may share a core or CUDA device, where several go at a time."""
        return self.oversubscribe or 1


@settings
class Local(AnyLauncher):
    """Runs on this machine."""

    name: Literal["local"]


SbatchValue = str | int | float | bool | None
"""A value of an option of `sbatch`; true is a bare option, false or null leaves it out."""

_INSTEAD = {
    "array": "launcher.jobs",
    "clusters": "the command on a login node of that cluster",
    "error": "the job's log in the folder slurm of the sweep",
    "job-name": "sweep_name, or sweep_dir",
    "nodes": "batch.nodes",
    "ntasks": "batch.data_parallel_size",
    "ntasks-per-node": "batch.data_parallel_size",
    "open-mode": "the job's log in the folder slurm of the sweep",
    "output": "the job's log in the folder slurm of the sweep",
    "signal": "launcher.signal_delay_s",
    "time": "launcher.timeout_min",
}
"""Options of `sbatch` that the launcher sets, and the settings in their place."""


@settings
class Slurm(AnyLauncher):
    """Runs in jobs of a Slurm cluster, each a launcher inside its allocation."""

    name: Literal["slurm"]
    jobs: Count = 1
    """Pool jobs: each takes one node, or a part of it, and shares the runs of one node with the
    others. Runs over several nodes have a job for each shape beside them."""
    timeout_min: Count = 60
    """Time limit of a job, in minutes."""
    signal_delay_s: Count = 120
    """Seconds before that limit at which runs are asked for a checkpoint and their end."""
    max_num_timeout: NonNegative = 10
    """Times that a job is queued again at its time limit while runs are left."""
    sbatch: dict[str, SbatchValue] = Field(default_factory=dict)
    """Options of `sbatch` by their long names, such as `{partition: gpu, mem: 400G}`. They replace
    what a job asks for otherwise, and null takes that out: `gpus-per-node`, of a pool job
    `cluster.devices_per_node`, of a job over nodes one a rank; `cpus-per-task`, where runs are on
    CPUs, `cluster.devices_per_node`; `requeue`."""
    setup: list[str] = Field(default_factory=list)
    """Lines of shell before a job starts Python, such as `module load cuda`."""
    python: str | None = None
    """Command that starts Python in a job, such as `apptainer exec --nv image.sif python`; null:
    the interpreter of this command."""

    def __post_init__(self) -> None:
        """Refuse options that the launcher sets, and texts that are no options."""
        for name, value in self.sbatch.items():
            entry = f"sbatch: {{{name}: {value}}}"
            if name in _INSTEAD:
                raise ValueError(
                    f"the launcher sets --{name} of sbatch; got {entry}, use {_INSTEAD[name]}"
                )
            if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
                long_name = name.lstrip("-").replace("_", "-")
                meant = long_name if len(long_name) > 1 else "partition or mem"
                raise ValueError(
                    f"sbatch takes long names of its options; got {entry}, use {meant}"
                )
            if isinstance(value, str) and not value.isprintable():
                raise ValueError(f"an option of sbatch is one line of text; got {name}: {value!r}")


LauncherSettings = Annotated[Local | Slurm, Field(discriminator="name")]


def _is_accepted(name: str) -> str:
    # W&B would refuse it when the runs are done.
    if not re.fullmatch(r"[^/\\#?%:\x00-\x1f]{1,128}", name):
        raise ValueError(f"it has 1 to 128 characters and none of / \\ # ? % :, got {name!r}")
    return name


_WandbName = Annotated[str, AfterValidator(_is_accepted)]


@settings
class WandbTracker:
    """Weights & Biases, mirrored from the run folders by a process of its own."""

    name: Literal["wandb"]
    mode: Literal["auto", "online", "offline"] = "auto"
    """`auto` is online with an API key and offline without."""
    project: _WandbName = "batchscape"
    """Project that the runs go to."""
    entity: _WandbName | None = None
    """User or team; null: the key's default."""
    tags: list[Annotated[str, Field(min_length=1, max_length=64)]] = Field(default_factory=list)
    """Tags of every run, 1 to 64 characters each."""


@settings
class NoTracker:
    """The run folders alone."""

    name: Literal["none"]


Tracker = Annotated[WandbTracker | NoTracker, Field(discriminator="name")]
