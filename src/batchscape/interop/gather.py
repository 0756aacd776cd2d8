"""The files and the command that are used together, each read once."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchscape.errors import ConfigError
from batchscape.interop.command import COMMAND_LINE, Launch, read_script
from batchscape.interop.files import is_configuration, read_file, read_text
from batchscape.interop.readers import read_deepspeed
from batchscape.interop.statements import KINDS, Kind, Source, Statement
from batchscape.text import list_text

__all__ = ["Setup", "gather"]


@dataclass(frozen=True)
class Setup:
    """Everything that is said; None where nobody says it."""

    launch: Launch | None = None
    launcher: Statement | None = None
    programs: tuple[Statement, ...] = ()
    """Arguments of the script and its file, in the order of precedence."""
    unread: Statement | None = None
    """A file of the script that the command does not name."""
    deepspeed: Statement | None = None
    accelerate: Statement | None = None
    devices: int | None = None
    """Told by the user, for what only the machine knows."""

    @property
    def launched_by(self) -> str | None:
        """Name of the launcher; an accelerate config alone is for `accelerate launch`."""
        if self.launcher is None:
            return "accelerate" if self.accelerate is not None else None
        return str(self.launcher.others["launcher"])

    @property
    def of_accelerate(self) -> tuple[Statement, ...]:
        """Where `accelerate launch` finds its settings, in the order of precedence."""
        return tuple(s for s in (self.launcher, self.accelerate) if s is not None)

    @property
    def program(self) -> Statement | None:
        """What cuts the batch: arguments or file of the script; None where nothing tells."""
        return self.programs[0] if self.programs else None

    @property
    def trainer(self) -> Statement | None:
        """The program, where it is transformers' Trainer."""
        program = self.program
        is_trainer = program is not None and program.kind in {"trainer", "axolotl"}
        return program if is_trainer else None

    @property
    def statements(self) -> tuple[Statement, ...]:
        """All of them, in the order in which a table shows them."""
        all_of_them = (
            self.launcher,
            self.accelerate,
            *self.programs,
            self.unread,
            self.deepspeed,
        )
        return tuple(statement for statement in all_of_them if statement is not None)


def gather(
    files: Sequence[Path],
    command: Sequence[str],
    devices: int | None,
    flags: Mapping[str, str],
) -> Setup:
    """Read files and a command, and the files that they name.

    Parameters
    ----------
    files : sequence of Path
        Configurations, and at most one script with a launch command.
    command : sequence of str
        A launch command; empty where there is none.
    devices : int or None
        Processes in all, where the files leave it to the machine.
    flags : mapping of str to str
        Arguments of a script of the user's own, by the word that they stand for.

    Raises
    ------
    ConfigError
        One cannot be read, is of no known kind, or two of them are of the same kind.
    """
    scripts = [path for path in files if not is_configuration(path)]
    if len(scripts) + bool(command) > 1:
        msg = "one launch command at a time: one script, or the command after --"
        raise ConfigError(msg)
    launch = None
    if scripts:
        text = read_text(scripts[0])
        launch = read_script(str(scripts[0]), text, flags, counts_told=devices is not None)
    elif command:
        # The shell has split and expanded it.
        text = shlex.join(command)
        launch = read_script(COMMAND_LINE, text, flags, counts_told=devices is not None)
    elif flags:
        msg = "--flag names arguments of a script: give its launch command, or the file with it"
        raise ConfigError(msg)
    shelf = _Shelf([path for path in files if is_configuration(path)])
    base = scripts[0].parent if scripts else Path()
    for name, kind in launch.files if launch is not None else ():
        shelf.take(name, kind, base)
    shelf.take_rest()

    arguments, file = None if launch is None else launch.script, shelf.statements.get("program")
    is_over = arguments is not None and arguments.kind == "litgpt"
    is_stated = arguments is not None and arguments.states_batch
    unread = file if is_stated and not is_over else None
    order = (arguments, file) if is_over or is_stated else (file, arguments)
    programs = tuple(one for one in order if one is not None and one is not unread)
    for statement in (*programs, shelf.statements.get("accelerate")):
        shelf.follow(statement)
    return Setup(
        launch=launch,
        launcher=launch.statement if launch is not None else None,
        programs=programs,
        unread=unread,
        deepspeed=shelf.statements.get("deepspeed"),
        accelerate=shelf.statements.get("accelerate"),
        devices=devices,
    )


class _Shelf:
    """Files by kind; each is read once, whether it was given or named by another."""

    def __init__(self, given: Sequence[Path]) -> None:
        self.given = list(given)
        self.statements: dict[str, Statement] = {}
        self.paths: dict[str, Path] = {}

    def take(self, name: str, kind: Kind | None, base: Path) -> None:
        """Read a file that a command or another file names."""
        path = self._locate(name, base)
        if path in self.given:
            self.given.remove(path)
        if not self._has(path):
            self._keep(read_file(path, kind), path)

    def take_rest(self) -> None:
        """Read what was given and not named."""
        for path in self.given:
            if not self._has(path):
                self._keep(read_file(path), path)
        self.given.clear()

    def follow(self, statement: Statement | None) -> None:
        """Read the DeepSpeed JSON that a configuration names or holds."""
        if statement is None:
            return
        named = statement.others.get("deepspeed") or statement.others.get("deepspeed_config_file")
        if isinstance(named, dict):
            source = Source(f"{statement.source}: deepspeed", named)
            self._keep(read_deepspeed(source), Path(statement.source))
        elif isinstance(named, str) and named.endswith(".json"):
            path = self.paths.get("deepspeed")
            if path is None or path.name != Path(named).name:
                base = self.paths.get(_role(statement), Path())
                self.take(named, "deepspeed", base.parent)

    def _locate(self, name: str, base: Path) -> Path:
        same_name = [path for path in self.given if path.name == Path(name).name]
        for path in (*same_name, Path(name), base / name):
            if path.is_file():
                return path
        msg = (
            f"{name} is named as a configuration, and is neither here nor beside the file that "
            "names it; give it too: batchscape check-config FILE FILE"
        )
        raise ConfigError(msg)

    def _has(self, path: Path) -> bool:
        return any(path.resolve() == other.resolve() for other in self.paths.values())

    def _keep(self, statement: Statement, path: Path) -> None:
        earlier = self.statements.get(_role(statement))
        if earlier is not None:
            both = list_text(
                (f"{one.source} ({KINDS[one.kind]})" for one in (earlier, statement)), "and"
            )
            msg = (
                f"{both} both set the batch, and a program reads one of them; check them in two "
                "commands"
            )
            raise ConfigError(msg)
        self.statements[_role(statement)] = statement
        self.paths[_role(statement)] = path


def _role(statement: Statement) -> str:
    """Return what a file is for; of each there is one."""
    return statement.kind if statement.kind in {"deepspeed", "accelerate"} else "program"
