"""What a job of Slurm has, by the `#SBATCH` lines of its script and the options of srun.

Source: https://slurm.schedmd.com/sbatch.html, `OPTIONS` and `OUTPUT ENVIRONMENT VARIABLES`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise, takewhile

from batchscape.errors import ConfigError
from batchscape.geometry import is_count
from batchscape.interop.sources import as_int


@dataclass(frozen=True)
class Job:
    """What a job of Slurm has, or what srun starts in it; None where it is not stated."""

    nodes: int | None = None
    ntasks: int | None = None
    """Over all nodes."""
    ntasks_per_node: int | None = None
    gpus: int | None = None
    """Over all nodes."""
    gpus_per_node: int | None = None

    @property
    def tasks(self) -> int | None:
        """Tasks over all nodes; a job of one node unless it says otherwise."""
        if self.ntasks is not None or self.ntasks_per_node is None:
            return self.ntasks
        return self.ntasks_per_node * (self.nodes or 1)

    @property
    def tasks_on_node(self) -> int | None:
        """Tasks on each node; None where they are not stated or differ between nodes."""
        return self.ntasks_per_node or self._shared(self.ntasks)

    @property
    def gpus_on_node(self) -> int | None:
        """GPUs on each node; None where they are not stated or differ between nodes."""
        return self.gpus_per_node or self._shared(self.gpus)

    def _shared(self, count: int | None) -> int | None:
        if count is None or self.nodes is None or count % self.nodes:
            return None
        return count // self.nodes

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that Slurm sets for the script, as far as they are known."""
        values = {
            "SLURM_NNODES": self.nodes,
            "SLURM_JOB_NUM_NODES": self.nodes,
            "SLURM_NTASKS": self.tasks,
            "SLURM_NPROCS": self.tasks,
            "SLURM_NTASKS_PER_NODE": self.ntasks_per_node,
            "SLURM_GPUS_ON_NODE": self.gpus_on_node,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


def _count(text: str) -> int:
    count = as_int(text)
    if not is_count(count):
        raise argparse.ArgumentTypeError(f"must be an int from 1 to 2**63 - 1; given {text!r}")
    return count


def _gpus(text: str) -> int:
    """Read `4` or `a100:4`."""
    return _count(re.sub(r"^[A-Za-z]\w*:", "", text))


def _gpus_of_resources(text: str) -> int | None:
    """Read `gpu:4`, `gpu:a100:4`, or `gpu` for one; None where there is none among them."""
    counts = re.findall(
        r"(?:^|,)(?:gres/)?gpu(?=[:(,]|$)(?::[A-Za-z]\w*(?![^:(,]))?(?::([^,(]+))?", text
    )
    return _count(",".join(count or "1" for count in counts)) if counts else None


_RESOURCES = argparse.ArgumentParser(
    add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS
)
_RESOURCES.add_argument("-N", "--nodes", type=_count)
_RESOURCES.add_argument("-n", "--ntasks", type=_count)
_RESOURCES.add_argument("--ntasks-per-node", type=_count)
_RESOURCES.add_argument("-G", "--gpus", type=_gpus)
_RESOURCES.add_argument("--gpus-per-node", type=_gpus)
_RESOURCES.add_argument("--gres", type=_gpus_of_resources, dest="gpus_per_node")
_SWITCHES = (
    *("preserve-env", "hold", "help", "immediate", "kill-on-bad-exit", "no-kill", "label"),
    *("overcommit", "quiet", "oversubscribe", "unbuffered", "version", "verbose"),
    *("disable-status", "no-allocate", "contiguous", "exact", "exclusive", "overlap", "pty"),
    *("multi-prog", "spread-job", "use-min-nodes", "usage", "reboot", "test-only", "resv-ports"),
    *("propagate", "send-libs", "compress", "bcast", "nice", "external"),
)
_TAKES_NEXT = re.compile(
    rf"-[EHIKOQVXZhklsuv]*[A-DFGJL-NPR-UWYa-gijm-rtw-z]|--(?!(?:{'|'.join(_SWITCHES)})$)[\w-]+"
)
"""Options of srun whose value is the next word; others have none, or it stands in the same word."""


def options_of_step(words: Sequence[str]) -> list[str]:
    """Return the words of srun's own options, which end where the program that it starts begins.

    What only running the script would tell may be an option.
    """
    pairs = pairwise(["", *words])
    is_own = (word[:1] in "-$`" or _TAKES_NEXT.fullmatch(before) for before, word in pairs)
    return [*compress(words, takewhile(bool, is_own))]


def with_options(where: str, words: Sequence[str], job: Job) -> Job:
    """Return a job with what options of sbatch or srun set; others are ignored."""
    try:
        options = vars(_RESOURCES.parse_known_args(words)[0])
    except argparse.ArgumentError as error:
        raise ConfigError(f"{where} {error}") from None
    if "ntasks" in options:
        # Tasks of a step; those of its job on a node are a limit of theirs alone.
        options = {"ntasks_per_node": None, **options}
    return replace(job, **options)


def read_job(name: str, text: str) -> Job:
    """Read the `#SBATCH` lines of a script: those before its first command."""
    lines = takewhile(lambda line: re.match(r"\s*(#|$)", line), text.splitlines())
    options = [line.partition(" #")[0].split()[1:] for line in lines if line.startswith("#SBATCH ")]
    return with_options(f"{name}: #SBATCH", [word for words in options for word in words], Job())
