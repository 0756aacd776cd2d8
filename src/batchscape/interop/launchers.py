"""The launchers that start one process per device: their options, and how many processes follow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePath
from typing import Literal

from batchscape.errors import ConfigError
from batchscape.interop.readers import count_ids
from batchscape.interop.slurm import JobResources, read_options, read_step
from batchscape.interop.statements import Source, Statement, Value

__all__ = ["FLAGS", "Launcher", "job_of", "launcher_of", "read_launcher", "starter_of"]

Launcher = Literal["torchrun", "paddle", "accelerate", "deepspeed", "litgpt", "python"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Options without a value: they tell where the launcher's options end and the script begins.
FLAGS: dict[Launcher, frozenset[str]] = {
    "torchrun": _words("h help m module no_python run_path standalone use_env virtual_local_rank"),
    "paddle": _words("h help"),
    "accelerate": _words(
        "cpu debug downcast_bf16 dynamo_use_dynamic dynamo_use_fullgraph "
        "dynamo_use_regional_compilation enable_cpu_affinity fp8_use_autocast_during_eval h help "
        "m module multi_gpu no_python no_tpu_cluster q quiet same_network tpu tpu_cluster "
        "tpu_use_sudo use_deepspeed use_fsdp use_megatron_lm use_parallelism_config"
    ),
    "deepspeed": _words(
        "bind_cores_to_rank elastic_training force_multi h help module no_local_rank no_python "
        "no_ssh no_ssh_check q quiet save_pid"
    ),
    "litgpt": frozenset(),
    "python": frozenset(),
}

_MODULES: dict[str, Launcher] = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "paddle.distributed.launch": "paddle",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "litgpt": "litgpt",
}
_PROGRAMS: dict[str, Launcher] = {
    "torchrun": "torchrun",
    "accelerate-launch": "accelerate",
    "deepspeed": "deepspeed",
    "litgpt": "litgpt",
}
_MPI_COUNTS = ("-np", "--np", "-n", "--n", "-c")
_NOT_LAUNCHING = frozenset({"echo", "printf", "pip", "which", "type", "command", "cd", "export"})


def launcher_of(words: Sequence[str]) -> tuple[Launcher, int] | None:
    """Return the launcher of a command, and where its options begin; None where it has none.

    Parameters
    ----------
    words : sequence of str
        A command; programs in front of the launcher (srun, nohup, a Python program that starts
        what stands behind its arguments) are passed over.
    """
    if not words or words[0] in _NOT_LAUNCHING:
        return None
    python: tuple[Launcher, int] | None = None
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        is_value = before.startswith("-") and before != "--"
        if python and (is_value or not _has_script(words[index:])):
            # The value of an option of the script, and no launcher that it starts.
            continue
        launcher = _launcher_at(words, index, PurePath(word).name)
        if launcher is not None and launcher[0] != "python":
            return launcher
        python = python or launcher
    return python


def _has_script(words: Sequence[str]) -> bool:
    return "-m" in words or any(word.endswith(".py") for word in words[1:])


def _launcher_at(words: Sequence[str], index: int, program: str) -> tuple[Launcher, int] | None:
    if program == "ds" and _has_script(words[index:]):
        # Short for deepspeed, and as short for a folder.
        return "deepspeed", index + 1
    if program in _PROGRAMS:
        return _PROGRAMS[program], index + 1
    if program == "accelerate" and words[index + 1 : index + 2] == ("launch",):
        return "accelerate", index + 2
    if not program.startswith("python") or program.endswith(".py"):
        return None
    at = index + 1
    while at < len(words) and words[at].startswith("-") and words[at] not in {"-m", "-c", "-"}:
        at += 1
    following = list(words[at : at + 2])
    if following[:1] == ["-m"] and len(following) == 2:
        module = _MODULES.get(following[1])
        return ("python", at + 1) if module is None else (module, at + 2)
    return ("python", at) if following and following[0].endswith(".py") else None


def starter_of(words: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    """Return what starts a command once for each task (`srun`, `mpirun`), and its options.

    Parameters
    ----------
    words : sequence of str
        What stands before the launcher.
    """
    for index, word in enumerate(words):
        if PurePath(word).name in {"srun", "mpirun", "mpiexec"}:
            return PurePath(word).name, words[index + 1 :]
    return None


def job_of(name: str, starter: tuple[str, Sequence[str]], job: JobResources) -> JobResources:
    """Return a job as the options of what starts the tasks leave it.

    Parameters
    ----------
    name : str
        Begins a message.
    starter : tuple
        As `starter_of` returns it.
    job : JobResources
        Of the `#SBATCH` lines.

    Raises
    ------
    ConfigError
        A number of nodes, tasks or GPUs is none.
    """
    program, options = starter
    if program == "srun":
        return read_step(f"{name} (srun)", options, job)
    given = [after for before, after in pairwise(options) if before in _MPI_COUNTS]
    tasks = [f"--ntasks={count}" for count in given]
    return read_options(f"{name} ({program})", tasks, JobResources(nodes=job.nodes))


def read_launcher(
    launcher: Launcher, source: Source, visible: str | None, under: str | None, job: JobResources
) -> Statement:
    """Read the options of a launcher.

    Parameters
    ----------
    source : Source
        Its options, dashes as underscores.
    visible : str or None
        CUDA_VISIBLE_DEVICES in front of the command.
    under : str or None
        What starts it once for each task.
    job : JobResources
        Nodes, tasks and GPUs that it has.

    Returns
    -------
    Statement
        Its `devices` are None where only the machine would tell.

    Raises
    ------
    ConfigError
        A value breaks a rule.
    """
    others: dict[str, object] = {
        "launcher": launcher,
        "visible": count_ids(visible),
        "under": under,
        "job": job,
    }
    devices = nodes = accumulation = clipping = precision = None
    if launcher in {"torchrun", "paddle"}:
        nodes, per_node = _fixed_nodes(source), _per_node(source, job)
        devices = None if per_node is None else _over_nodes(per_node, nodes)
    elif launcher == "deepspeed":
        nodes, devices = _deepspeed_devices(source)
    elif launcher == "accelerate":
        devices, nodes = source.count("num_processes"), source.count("num_machines")
        accumulation = source.count("gradient_accumulation_steps")
        clipping = source.number("gradient_clipping")
        precision = source.precision("mixed_precision")
        others["config_file"] = source.content.get("config_file")
        others["deepspeed_config_file"] = source.content.get("deepspeed_config_file")
        others["gpu_ids"] = count_ids(source.content.get("gpu_ids"))
        others["mpirun"] = bool(source.content.get("mpirun_hostfile"))
        for name in ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm"):
            others[name] = name in source.content
        if others["use_megatron_lm"]:
            msg = (
                f"{source.name}: --use_megatron_lm cuts the model; only data parallelism is covered"
            )
            raise ConfigError(msg)
    elif launcher == "python" and under is not None:
        nodes = None if job.nodes is None else Value(job.nodes, "nodes")
        devices = None if job.all_tasks is None else Value(job.all_tasks, f"tasks of {under}")
    elif launcher == "python" and others["visible"] == 1:
        # Else the script may start others, or spread its batches over all devices that it sees.
        devices = Value(1, "CUDA_VISIBLE_DEVICES names")
    return Statement(
        "launcher",
        f"{source.name} ({_TITLES[launcher]})",
        devices=devices,
        nodes=nodes,
        accumulation=accumulation,
        precision=precision,
        clipping=clipping,
        others=others,
    )


_TITLES: dict[Launcher, str] = {
    "torchrun": "torchrun",
    "paddle": "paddle.distributed.launch",
    "accelerate": "accelerate launch",
    "deepspeed": "deepspeed",
    "litgpt": "litgpt",
    "python": "python",
}


def _fixed_nodes(source: Source) -> Value[int]:
    hosts = count_ids(source.content.get("ips"))
    if hosts is not None:
        return Value(hosts, "ips")
    least, _, most = str(source.content.get("nnodes", 1)).partition(":")
    if most and most != least:
        # An elastic job has no one global batch.
        msg = (
            f"{source.name}: nnodes {least}:{most} lets the number of nodes change, and the global "
            "batch with it; give one number"
        )
        raise ConfigError(msg)
    nodes = Source(source.name, {"nnodes": least}, is_text=True).count("nnodes")
    return nodes or Value(1, "nnodes")


def _per_node(source: Source, job: JobResources) -> Value[int] | None:
    given = source.content.get("nproc_per_node")
    if given in {"auto", "cpu", "gpu", "xpu"}:
        # Counted on the machine when it starts.
        count = None if given in {"cpu", "xpu"} else job.gpus_on_node
        return None if count is None else Value(count, f"nproc_per_node {given}: GPUs of the job")
    # Of paddle: the devices themselves. Where nothing is given, variables may say it.
    lists = ((name, count_ids(source.content.get(name))) for name in ("gpus", "devices"))
    ids = next((Value(count, name) for name, count in lists if count is not None), None)
    return source.count("nproc_per_node") or ids


def _deepspeed_devices(source: Source) -> tuple[Value[int] | None, Value[int] | None]:
    nodes, per_node = source.count("num_nodes"), source.count("num_gpus")
    per_node = per_node or source.count("num_accelerators")
    include = source.content.get("include") or source.content.get("i")
    if isinstance(include, str) and ":" in include:
        counts = [count_ids(host.partition(":")[2]) for host in include.split("@")]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts):
            return None, None
        return Value(len(known), "include"), Value(sum(known), "include")
    if per_node is None:
        return nodes, None
    if nodes is None and ("hostfile" in source.content or "H" in source.content):
        return None, None
    return nodes, _over_nodes(per_node, nodes)


def _over_nodes(per_node: Value[int], nodes: Value[int] | None) -> Value[int]:
    """Return how many there are on all nodes; one node where nobody says how many."""
    if nodes is None or nodes.value == 1:
        return per_node
    count = None if per_node.value is None or nodes.value is None else per_node.value * nodes.value
    return Value(count, f"{per_node.key} x {nodes.key}")
