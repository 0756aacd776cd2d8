"""`batchscape check-config`: whether files that are used together agree on the batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from batchscape.errors import ConfigError
from batchscape.geometry import is_count
from batchscape.interop.command import read_flags
from batchscape.interop.readers import BATCH_KEYS, KINDS, Value
from batchscape.interop.resolve import Running, Setup, gather, resolve
from batchscape.interop.rules import Disagreement, findings_of
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
        geometry = self.running.geometry
        facts = {name: getattr(self.running, name) for name in _NUMBERS}
        says: list[dict[str, object]] = []
        for statement in self.setup.statements:
            entry: dict[str, object] = {"source": statement.source, "kind": statement.kind}
            for name in (*_NUMBERS, "nodes", "precision", "clipping"):
                value = getattr(statement, name)
                if value is not None:
                    entry[name] = {"key": value.key, "value": _plain(value)}
            says.append(entry)
        content = {
            "verdict": self.verdict,
            "says": says,
            "runs": {
                "rules_of": self.running.system,
                **{name: None if fact is None else asdict(fact) for name, fact in facts.items()},
            },
            "geometry": None
            if geometry is None
            else {name: getattr(geometry, name) for name in ("nodes", *_GEOMETRY)},
            "findings": [asdict(finding) for finding in self.findings],
        }
        return json.dumps(outgoing_json(content), indent=2)

    def as_table(self) -> Group:
        """Return the tables and sentences for a console."""
        titles = ("devices", "micro-batch", "accumulation", "global batch", "precision")
        table = Table("file", "kind", *titles, box=box.SIMPLE_HEAD)
        for statement in self.setup.statements:
            values = (getattr(statement, name) for name in (*_NUMBERS, "precision"))
            cells = ("" if value is None else str(_plain(value)) for value in values)
            table.add_row(statement.source, KINDS[statement.kind], *cells)
        geometry = self.running.geometry
        if geometry is not None:
            table.add_section()
            cells = (str(getattr(geometry, name)) for name in _GEOMETRY)
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
        kind = running.system if program is None else program.kind
        keys = BATCH_KEYS.get(kind, BATCH_KEYS["script"])
        devices = ["devices (add --devices N)"] if running.devices is None else []
        batch_numbers = [
            f"{name} ({(keys.get(part) or keys['total'])[0]})"
            for part, name in (("micro", "micro-batch"), ("accumulation", "accumulation"))
            if getattr(running, part) is None
        ]
        problem = f"nothing here states {', '.join([*devices, *batch_numbers])}"
        if not batch_numbers or self.setup.launch is None:
            return problem
        return f"{problem}; where another argument of the script does: --flag NAME=micro_batch_size"


_NUMBERS = ("devices", "micro", "accumulation", "total")
_GEOMETRY = (
    *("data_parallel_size", "micro_batch_size"),
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
        msg = "nothing to check: give a file, or a launch command after --"
        raise ConfigError(msg)
    if devices is not None and not is_count(devices):
        msg = f"devices must be an int from 1 to 2**63 - 1; given {devices}"
        raise ConfigError(msg)
    setup = gather(files, command, devices, read_flags(flags))
    running = resolve(setup)
    return Consistency(setup, running, tuple(findings_of(setup, running)))


def _plain(value: Value[Any]) -> object:
    return "auto" if value.is_auto else value.value
