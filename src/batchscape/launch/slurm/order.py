"""What the jobs of a sweep are to do: written where the command is called, read in every job."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from batchscape.config import Slurm
from batchscape.errors import BatchscapeError, DamageError, RecordError
from batchscape.record.disk import read_each
from batchscape.record.files import read_json, write_json
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec

__all__ = ["POOL", "QUEUE_AGAIN", "JobOrder", "Shape", "shapes"]

QUEUE_AGAIN = os.EX_TEMPFAIL
"""Exit code of a job's launcher that ends while runs are left, as it was asked to stop or as it
cannot take those that were added."""

_LAUNCHER = TypeAdapter(Slurm)


class Shape(NamedTuple):
    """Which runs a job takes: all of one node (`POOL`), or those of one shape over several."""

    nodes: int
    devices_per_node: int
    """Ranks of a run on each node; 0: any number, on the devices of the pool."""

    @classmethod
    def of(cls, spec: RunSpec) -> Shape:
        """Return the shape of the jobs that take a run."""
        geometry = spec.geometry
        return POOL if geometry.nodes == 1 else cls(geometry.nodes, geometry.devices_per_node)

    @classmethod
    def named(cls, name: str) -> Shape:
        """Return the shape that a text names, as `str` writes it."""
        return POOL if name == str(POOL) else cls(*map(int, name.split("x")))

    def __str__(self) -> str:
        """Write it as in names of jobs."""
        return f"{self.nodes}x{self.devices_per_node}" if self.devices_per_node else "pool"


POOL = Shape(1, 0)


@dataclass(frozen=True)
class JobOrder:
    """Runs, and how they are launched."""

    runs: tuple[str, ...]
    launcher: Slurm
    command: str | None

    def write(self, sweep: SweepFolder) -> None:
        """Replace what the jobs of a sweep are to do; those at work look again before they end."""
        launcher: dict[str, Any] = _LAUNCHER.dump_python(self.launcher, mode="json")
        content = {"runs": list(self.runs), "launcher": launcher, "command": self.command}
        write_json(sweep.slurm / "order.json", content)

    @classmethod
    def read(cls, sweep: SweepFolder) -> JobOrder:
        """Read what `write` left.

        Raises
        ------
        RecordError
            If there is none, or it is damaged.
        """
        path = sweep.slurm / "order.json"
        content = read_json(path)
        try:
            launcher = _LAUNCHER.validate_json(json.dumps(content["launcher"]))
            return cls(tuple(content["runs"]), launcher, content["command"])
        except (KeyError, TypeError, ValueError) as error:
            msg = f"{path} is damaged: {error}"
            raise DamageError(msg) from None

    def extended(self, sweep: SweepFolder) -> JobOrder:
        """Return it with the runs of the one before, which jobs at work still do."""
        try:
            before = JobOrder.read(sweep).runs
        except RecordError:
            before = ()
        return replace(self, runs=tuple(dict.fromkeys((*before, *self.runs))))

    def specs(
        self,
        sweep: SweepFolder,
        shape: Shape,
        note: Callable[[str], object],
        but: Collection[str] = (),
    ) -> list[RunSpec]:
        """Return the runs that jobs of a shape take, but some, launched as the order says.

        Those that cannot be read are left out; `note` is told of each.
        """

        def read(name: str) -> RunSpec | None:
            try:
                return RunSpec.read(sweep.run(name).config)
            except BatchscapeError as error:
                note(f"{name} is left out: {error}")
                return None

        found = read_each(read, [name for name in self.runs if name not in but], sweep.path)
        return [
            replace(spec, config=replace(spec.config, launcher=self.launcher))
            for spec in found
            if spec is not None and Shape.of(spec) == shape
        ]


def shapes(specs: Iterable[RunSpec]) -> dict[Shape, list[RunSpec]]:
    """Return runs by the shape of the jobs that take them."""
    found: dict[Shape, list[RunSpec]] = {}
    for spec in specs:
        found.setdefault(Shape.of(spec), []).append(spec)
    return found
