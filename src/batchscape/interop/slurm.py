"""The resources that `#SBATCH` lines of a script and options of srun ask for.

Source: https://slurm.schedmd.com/sbatch.html, `OPTIONS` and `OUTPUT ENVIRONMENT VARIABLES`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from batchscape.errors import ConfigError
from batchscape.geometry import is_count
from batchscape.interop.readers import as_int

_DIRECTIVE = "#SBATCH"
_NAMES = {
    **dict.fromkeys(("--nodes", "-N"), "nodes"),
    **dict.fromkeys(("--ntasks", "-n"), "tasks"),
    "--ntasks-per-node": "tasks_per_node",
    **dict.fromkeys(("--gpus", "-G"), "gpus"),
    "--gpus-per-node": "gpus_per_node",
    "--gres": "gpus_per_node",
    "--gpus-per-task": "gpus_per_task",
}


@dataclass(frozen=True)
class JobResources:
    """Nodes, tasks and GPUs of a job or of one of its steps; None where they are not stated."""

    nodes: int | None = None
    tasks: int | None = None
    """Over all nodes."""
    tasks_per_node: int | None = None
    gpus: int | None = None
    """Over all nodes."""
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None

    @property
    def all_tasks(self) -> int | None:
        """Tasks over all nodes; a job of one node unless it says otherwise."""
        if self.tasks is not None or self.tasks_per_node is None:
            return self.tasks
        return self.tasks_per_node * (self.nodes or 1)

    @property
    def tasks_on_node(self) -> int | None:
        """Tasks on each node; None where they are not stated or differ between nodes."""
        if self.tasks_per_node is not None:
            return self.tasks_per_node
        return _shared(self.tasks, self.nodes)

    @property
    def gpus_on_node(self) -> int | None:
        """GPUs on each node; None where they are not stated or differ between nodes."""
        if self.gpus_per_node is not None:
            return self.gpus_per_node
        if self.gpus is not None:
            return _shared(self.gpus, self.nodes)
        tasks = self.tasks_on_node
        if self.gpus_per_task is None or tasks is None:
            return None
        return self.gpus_per_task * tasks

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that Slurm sets for the script, as far as they are known."""
        values = {
            "SLURM_NNODES": self.nodes,
            "SLURM_JOB_NUM_NODES": self.nodes,
            "SLURM_NTASKS": self.all_tasks,
            "SLURM_NPROCS": self.all_tasks,
            "SLURM_NTASKS_PER_NODE": self.tasks_per_node,
            "SLURM_GPUS_ON_NODE": self.gpus_on_node,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


def read_directives(name: str, text: str) -> JobResources:
    """Read the `#SBATCH` lines of a script: those before its first command."""
    job = JobResources()
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith(_DIRECTIVE):
            where = f"{name}:{number}: {_DIRECTIVE}"
            try:
                words = shlex.split(line[len(_DIRECTIVE) :], comments=True)
            except ValueError as error:
                msg = f"{where} cannot be read: {error}"
                raise ConfigError(msg) from None
            job = read_options(where, words, job)
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return job


def read_options(where: str, words: Sequence[str], job: JobResources) -> JobResources:
    """Return a job with the values that options of sbatch or srun set; others are ignored."""
    for option, value in _options(words):
        count = _gpus(option, value) if _NAMES[option].startswith("gpus") else value
        if count is None:
            continue
        number = as_int(count)
        if not is_count(number):
            msg = f"{where} {option} must be an int from 1 to 2**63 - 1; given {value[:60]!r}"
            raise ConfigError(msg)
        job = replace(job, **{_NAMES[option]: number})
    return job


def read_step(where: str, words: Sequence[str], job: JobResources) -> JobResources:
    """Return the resources of a step that srun starts in a job; as `read_options`."""
    fields = {_NAMES[option] for option, _ in _options(words)}
    if "tasks" in fields and "tasks_per_node" not in fields:
        # Tasks of the step; those of the job on a node are a limit of theirs alone.
        job = replace(job, tasks_per_node=None)
    return read_options(where, words, job)


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not word.startswith("--") and len(word) > 2:
            name, equals, value = word[:2], "=", word[2:]
        if name in _NAMES and (equals or index + 1 < len(words)):
            yield name, value if equals else words[index + 1]


def _gpus(option: str, value: str) -> str | None:
    """Count the GPUs of `4`, `a100:4,v100:2` or, as a resource, `gpu:a100:4`; None: no GPUs."""
    counts = []
    for part in value.split(","):
        words = part.removeprefix("gres/").partition("(")[0].split(":")
        if option == "--gres" and words.pop(0) != "gpu":
            continue
        # A resource without a number is one of it.
        is_one = option == "--gres" and (not words or (len(words) == 1 and words[0][:1].isalpha()))
        counts.append("1" if is_one else words[-1])
    numbers = [number for number in map(as_int, counts) if is_count(number)]
    if len(numbers) == len(counts) > 1:
        return str(sum(numbers))
    # Of several, one is no number, and is refused with the rest.
    return ",".join(counts) if counts else None


def _shared(count: int | None, nodes: int | None) -> int | None:
    if count is None or nodes is None or count % nodes:
        return None
    return count // nodes
