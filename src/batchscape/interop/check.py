"""`batchscape check-config`: whether files that are used together agree on the batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from batchscape.errors import ConfigError
from batchscape.geometry import is_count
from batchscape.interop.launch import read_flags
from batchscape.interop.resolve import Running, Setup, gather, resolve
from batchscape.interop.rules import Disagreement, findings_of
from batchscape.interop.sources import KINDS, Fact
from batchscape.outgoing import outgoing_json
from batchscape.text import count_text

_STYLES = {"error": "bold red", "warning": "yellow"}


@dataclass(frozen=True)
class Consistency:
    """The statements of a set of files, what would run, and where they disagree."""

    setup: Setup
    running: Running
    findings: tuple[Disagreement, ...]

    @property
    def verdict(self) -> Literal["agree", "disagree", "cannot tell"]:
        """Whether all statements describe one batch."""
        if not self.is_consistent:
            return "disagree"
        is_used = all(finding.rule != "unused-number" for finding in self.findings)
        return "agree" if is_used and self.running.geometry is not None else "cannot tell"

    @property
    def is_consistent(self) -> bool:
        """Whether there is no error; there may be warnings."""
        return all(finding.severity != "error" for finding in self.findings)

    def as_json(self) -> str:
        """Return a JSON object with `verdict`, `says`, `runs`, `geometry` and `findings`."""
        running, geometry = self.running, self.running.geometry
        facts = {name: getattr(running, name) for name in _NUMBERS}
        content = {
            "verdict": self.verdict,
            "says": [
                {"source": statement.source, "kind": statement.kind}
                | {
                    name: {"key": fact.key, "value": _shown(fact)}
                    for name, fact in statement.facts.items()
                }
                for statement in self.setup.statements
            ],
            "runs": {
                "rules_of": running.system,
                **{
                    name: fact and {"value": fact.value, "origin": fact.origin}
                    for name, fact in facts.items()
                },
            },
            "geometry": geometry and {name: getattr(geometry, name) for name in _GEOMETRY},
            "findings": [asdict(finding) for finding in self.findings],
        }
        return json.dumps(outgoing_json(content), indent=2)

    def as_table(self) -> Group:
        """Return the tables and sentences for a console."""
        titles = ("devices", "micro-batch", "accumulation", "global batch")
        table = Table("file", "kind", *titles, box=box.SIMPLE_HEAD)
        for statement in self.setup.statements:
            facts = (statement.facts.get(name) for name in _NUMBERS)
            cells = (str(_shown(fact)) if fact else "" for fact in facts)
            table.add_row(statement.source, KINDS[statement.kind].title, *cells)
        geometry = self.running.geometry
        if geometry is not None:
            table.add_section()
            cells = (str(getattr(geometry, name)) for name in _GEOMETRY[1:])
            table.add_row(Text("what would run", "bold"), "", *cells)
        findings = [
            Text.assemble(
                (f"{finding.severity} [{finding.rule}] ", _STYLES[finding.severity]),
                f"{finding.message}\n  fix: {finding.fix}",
            )
            for finding in self.findings
        ]
        return Group(table, *findings, self._verdict())

    def _verdict(self) -> str:
        count = sum(finding.severity == "error" for finding in self.findings)
        if count:
            return f"{count_text(count, 'disagreement')} found."
        geometry = self.running.geometry
        if geometry is None:
            return f"Cannot tell what would run: {self._open_numbers()}."
        product = f"devices x micro-batch x accumulation = {geometry}"
        if self.verdict == "agree":
            return f"They agree: {product}."
        return f"Cannot tell whether they agree: a number is not used. Without it, {product}."

    def _open_numbers(self) -> str:
        running, program = self.running, self.setup.program
        kind = KINDS[program.kind or "script"]
        devices = ["devices (add --devices N)"] if running.devices is None else []
        batch_numbers = [
            f"{name} ({[*kind.names(part), *kind.names('total')][0]})"
            for part, name in (("micro", "micro-batch"), ("accumulation", "accumulation"))
            if getattr(running, part) is None
        ]
        problem = f"nothing here states {', '.join([*devices, *batch_numbers])}"
        if not batch_numbers or not self.setup.launch:
            return problem
        return f"{problem}; where another argument of the script does: --flag NAME=micro_batch_size"


_NUMBERS = ("devices", "micro", "accumulation", "total")
_GEOMETRY = (
    *("nodes", "data_parallel_size", "micro_batch_size"),
    *("gradient_accumulation_steps", "global_batch_size"),
)


def check_configs(
    files: Sequence[Path],
    command: Sequence[str] = (),
    *,
    devices: int | None = None,
    flags: Sequence[str] = (),
) -> Consistency:
    """Check configurations and a launch command that are used together.

    `devices` counts processes in all, where the files leave that to the machine. Each of `flags` is
    `NAME=WORD`: an argument of the user's own script and what it stands for.
    """
    if not files and not command:
        raise ConfigError("nothing to check: give a file, or a launch command after --")
    if devices is not None and not is_count(devices):
        raise ConfigError(f"devices must be an int from 1 to 2**63 - 1; given {devices}")
    setup = gather(files, command, devices, read_flags(flags))
    running = resolve(setup)
    return Consistency(setup, running, tuple(findings_of(setup, running)))


def _shown(fact: Fact) -> object:
    return "auto" if fact.value is None else fact.value
