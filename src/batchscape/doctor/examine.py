"""All probes at once, and their findings as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from batchscape.doctor import cluster, machine, tools, torch_probes
from batchscape.doctor.finding import Finding, Probe, findings_of
from batchscape.outgoing import outgoing_json
from batchscape.terminal import OutgoingConsole

__all__ = ["Examination", "examine", "examine_with"]

_STYLES = {
    "ok": "green",
    "missing": "yellow",
    "broken": "red",
    "not needed": "dim",
    "not probed": "cyan",
}


@dataclass(frozen=True)
class Examination:
    """Everything that was found."""

    findings: tuple[Finding, ...]

    @property
    def is_fit(self) -> bool:
        """Whether nothing is missing that the default sweep needs."""
        return not any(finding.is_obstacle for finding in self.findings)

    def as_json(self) -> str:
        """Return the same as JSON: `fit`, and `findings` with the fields of `Finding`."""
        content = {"fit": self.is_fit, "findings": [asdict(found) for found in self.findings]}
        return json.dumps(outgoing_json(content), indent=2)

    def as_table(self) -> Group:
        """Return what a console shows."""
        table = Table("what", "status", "detail", "repair", box=box.SIMPLE_HEAD)
        for found in self.findings:
            style = "bold red" if found.is_obstacle else _STYLES[found.status]
            repair = "" if found.status in {"ok", "not needed"} else found.repair or ""
            table.add_row(found.what, Text(found.status, style), found.detail, repair)
        return Group(table, self._verdict())

    def _verdict(self) -> str:
        obstacles = [found.what for found in self.findings if found.is_obstacle]
        if obstacles:
            return f"The default sweep cannot run here because of: {', '.join(obstacles)}"
        return "Nothing is missing that the default sweep needs."


def examine(outputs: Path, *, compiles: bool) -> Examination:
    """Examine this machine.

    Parameters
    ----------
    outputs : Path
        Where sweeps go; need not exist.
    compiles : bool
        Whether to compile a function with torch, which takes most of the time.
    """
    compilation = torch_probes.compilation if compiles else torch_probes.no_compilation
    return examine_with(
        [
            ("Python", machine.python),
            ("packages", machine.packages),
            ("CPU", machine.cpu),
            ("shared memory", machine.shared_memory),
            ("disk", partial(machine.disk, outputs)),
            ("torch", torch_probes.torch),
            ("gloo", torch_probes.gloo),
            ("fork server", torch_probes.fork_server),
            ("torch.compile", compilation),
            ("NVML", machine.driver),
            ("MIG", machine.mig),
            ("W&B", tools.tracker),
            ("Slurm", cluster.slurm),
            ("shared folder", partial(cluster.shared_folder, outputs)),
            ("LaTeX", tools.latex),
            ("transformers", tools.transformers),
        ]
    )


def examine_with(
    probes: Sequence[tuple[str, Probe]], console: Console | None = None
) -> Examination:
    """Run probes at the same time; their findings keep the order of the probes.

    Parameters
    ----------
    probes : sequence of (str, callable)
        What each one is about, and the probe.
    console : Console, optional
        A terminal sees there what is still being probed; by default the standard error.
    """
    shown = console or OutgoingConsole(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}"),
    )
    # NVML is opened and closed by several of them, which its counter allows.
    with (
        Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as bar,
        ThreadPoolExecutor(len(probes)) as pool,
    ):
        asked = {pool.submit(findings_of, what, probe): what for what, probe in probes}
        task = bar.add_task("", total=len(asked), what="")
        waited = dict(asked)
        for one in as_completed(asked):
            del waited[one]
            bar.update(task, advance=1, what=", ".join(waited.values()), refresh=True)
    return Examination(tuple(found for one in asked for found in one.result()))
