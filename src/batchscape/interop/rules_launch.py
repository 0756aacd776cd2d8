"""Where files disagree on how many processes there are."""

from __future__ import annotations

from collections.abc import Iterator

from batchscape.interop.disagreement import Disagreement
from batchscape.interop.gather import Setup
from batchscape.interop.resolve import Running, accelerate_mode
from batchscape.interop.slurm import Job
from batchscape.interop.statements import Statement, Value

__all__ = ["findings"]


def findings(setup: Setup, running: Running) -> Iterator[Disagreement]:
    """Yield what is wrong with the number of processes."""
    yield from _one_process(setup)
    yield from _per_machine(setup)
    yield from _visible(setup)
    yield from _two_counts(setup)
    yield from _unread_config(setup)
    yield from _told(setup, running)
    yield from _job(setup)
    for floor in setup.launch.floors if setup.launch is not None else ():
        yield Disagreement(
            "shell-floor",
            "error",
            f"{setup.launch.name if setup.launch else ''}: the script divides {floor}; a shell "
            "drops the remainder, and with it a part of the batch",
            "choose numbers that divide",
        )


def _wanted(setup: Setup) -> tuple[Statement, Value[int]] | None:
    """Return the number of processes that accelerate is told to start."""
    for statement in setup.of_accelerate:
        if statement.devices is not None:
            return statement, statement.devices
    return None


def _one_process(setup: Setup) -> Iterator[Disagreement]:
    if setup.launched_by != "accelerate":
        return
    mode, wanted = accelerate_mode(setup), _wanted(setup)
    if wanted is None or (wanted[1].value or 1) < 2:
        return
    if not mode.starts_many:
        yield Disagreement(
            "one-process",
            "error",
            f"{wanted[0].name(wanted[1])}, and one process runs, without a word: {mode.reason}",
            "start with torchrun --nproc_per_node, or with --multi_gpu or distributed_type "
            "MULTI_GPU on GPUs",
        )
    elif not mode.is_certain:
        yield Disagreement(
            "one-process",
            "warning",
            f"{wanted[0].name(wanted[1])}: {mode.reason}; else one process runs",
            "add --multi_gpu",
        )


def _per_machine(setup: Setup) -> Iterator[Disagreement]:
    if setup.launched_by != "accelerate":
        return
    wanted = _wanted(setup)
    nodes = next((said.nodes for said in setup.of_accelerate if said.nodes), None)
    if wanted is None or nodes is None or not wanted[1].value or not nodes.value:
        return
    remainder = wanted[1].value % nodes.value
    if remainder:
        each = wanted[1].value // nodes.value
        yield Disagreement(
            "processes-per-machine",
            "error",
            f"{wanted[0].name(wanted[1])} does not divide over {nodes}: num_processes counts all "
            f"machines, and accelerate starts {each} on each, {each * nodes.value} in all",
            f"set num_processes to a multiple of {nodes.value}",
        )


def _visible(setup: Setup) -> Iterator[Disagreement]:
    """More ranks on one machine than devices that they may see."""
    launcher = setup.launcher
    ids = launcher.others.get("gpu_ids") if launcher is not None else None
    origin = "--gpu_ids"
    if ids is None and setup.accelerate is not None and setup.launched_by == "accelerate":
        ids, origin = setup.accelerate.others.get("gpu_ids"), f"{setup.accelerate.source}: gpu_ids"
    count = None
    if isinstance(ids, (str, int)) and not isinstance(ids, bool) and str(ids) != "all":
        count = len([part for part in str(ids).split(",") if part.strip()])
    elif launcher is not None and isinstance(launcher.others.get("visible"), int):
        count, origin = int(str(launcher.others["visible"])), "CUDA_VISIBLE_DEVICES"
    elif (job := _job_of(launcher)) is not None:
        count, origin = job.gpus_on_node, "the job"
    wanted = _wanted(setup)
    if count is None or wanted is None or not wanted[1].value:
        return
    told = (said.nodes.value for said in setup.of_accelerate if said.nodes is not None)
    nodes = next((count for count in told if count), 1)
    here = wanted[1].value // nodes
    if here > count:
        yield Disagreement(
            "visible-devices",
            "error",
            f"{wanted[0].name(wanted[1])} starts {here} processes on a machine where {origin} "
            f"names {count} devices",
            "start one process per visible device, or make more visible",
        )


def _job_of(launcher: Statement | None) -> Job | None:
    job = launcher.others.get("job") if launcher is not None else None
    return job if isinstance(job, Job) else None


def _job(setup: Setup) -> Iterator[Disagreement]:
    """A launcher that starts processes itself, in a job that has nodes and tasks of its own."""
    launcher, job = setup.launcher, _job_of(setup.launcher)
    if launcher is None or job is None or launcher.others["launcher"] == "python":
        return
    under, nodes = launcher.others["under"], launcher.nodes
    if job.nodes is not None and nodes is not None and nodes.value not in {None, job.nodes}:
        # One launcher alone may be meant for one of the nodes; one on each node is not.
        alone = under is None and (nodes.value or 1) < job.nodes
        yield Disagreement(
            "job-nodes",
            "warning" if alone else "error",
            f"{launcher.name(nodes)} is not the {job.nodes} nodes of the job"
            + ("; the others stay idle" if alone else ""),
            f"set {nodes.key} to {job.nodes}, or #SBATCH --nodes to {nodes.value}",
        )
    tasks = job.tasks_on_node
    if under is not None and tasks is not None and tasks > 1:
        yield Disagreement(
            "job-tasks",
            "error",
            f"{launcher.source}: {under} starts {tasks} tasks on a node, and each of them a "
            "launcher with all of its processes",
            "start one task a node: --ntasks-per-node=1",
        )


def _two_counts(setup: Setup) -> Iterator[Disagreement]:
    """A count on the command line goes before that of the file."""
    launcher, config = setup.launcher, setup.accelerate
    if setup.launched_by != "accelerate" or launcher is None or config is None:
        return
    left, right = launcher.devices, config.devices
    if left is None or right is None or right.is_default or left.value == right.value:
        return
    yield Disagreement(
        "devices",
        "warning",
        f"{launcher.name(left)} goes before {config.name(right)}",
        "give the number in one place",
    )


def _unread_config(setup: Setup) -> Iterator[Disagreement]:
    """Only `accelerate launch` reads an accelerate config."""
    launcher, config = setup.launcher, setup.accelerate
    if config is None or launcher is None or launcher.others["launcher"] == "accelerate":
        return
    left, right = config.devices, launcher.devices
    differs = left is not None and right is not None and left.value != right.value
    yield Disagreement(
        "unread-config",
        "error" if differs else "warning",
        f"{config.source} is read by accelerate launch alone, and the command starts with "
        f"{launcher.others['launcher']}"
        + (f": {config.name(left)} is not {launcher.name(right)}" if differs else ""),
        "start with accelerate launch --config_file, or leave the file out",
    )


def _told(setup: Setup, running: Running) -> Iterator[Disagreement]:
    if setup.devices is None or running.devices is None or running.devices.origin == "--devices":
        return
    if running.devices.value != setup.devices:
        yield Disagreement(
            "devices",
            "error",
            f"--devices {setup.devices} is not {running.devices}",
            "leave --devices out: the files tell",
        )
