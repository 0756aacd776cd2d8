"""The files and the command that are used together, each read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchscape.errors import ConfigError
from batchscape.interop.command import Launch, read_command, read_script
from batchscape.interop.files import is_script, read_file, read_text
from batchscape.interop.readers import read_deepspeed
from batchscape.interop.statements import KINDS, Kind, Source, Statement

__all__ = ["Setup", "gather"]


@dataclass(frozen=True)
class Setup:
    """Everything that is said; None where nobody says it."""

    launch: Launch | None = None
    launcher: Statement | None = None
    script: Statement | None = None
    """Arguments of a script that is not the Trainer's."""
    trainer: Statement | None = None
    """`TrainingArguments` in force."""
    unread_trainer: Statement | None = None
    """A file of them that the command does not name."""
    deepspeed: Statement | None = None
    accelerate: Statement | None = None
    litgpt: Statement | None = None
    litgpt_arguments: Statement | None = None
    """What the command line sets over the LitGPT file."""
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
    def statements(self) -> tuple[Statement, ...]:
        """All of them, in the order in which a table shows them."""
        found = (
            self.launcher,
            self.accelerate,
            self.trainer,
            self.unread_trainer,
            self.script,
            self.deepspeed,
            self.litgpt,
            self.litgpt_arguments,
        )
        return tuple(statement for statement in found if statement is not None)


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
    scripts = [path for path in files if is_script(path)]
    if len(scripts) + bool(command) > 1:
        msg = "one launch command at a time: one script, or the command after --"
        raise ConfigError(msg)
    launch = None
    if scripts:
        launch = read_script(str(scripts[0]), read_text(scripts[0]), flags)
    elif command:
        launch = read_command(command, flags)
    elif flags:
        msg = "--flag names arguments of a script: give its launch command, or the file with it"
        raise ConfigError(msg)
    shelf = _Shelf([path for path in files if not is_script(path)])
    base = scripts[0].parent if scripts else Path()
    for name, kind in launch.files if launch is not None else ():
        shelf.take(name, kind, base)
    shelf.take_rest()
    found = shelf.found

    script = launch.script if launch is not None else None
    from_arguments = script if script is not None and script.kind == "trainer" else None
    trainer = from_arguments or found.get("trainer")
    shelf.follow(trainer)
    shelf.follow(found.get("accelerate"))
    return Setup(
        launch=launch,
        launcher=launch.statement if launch is not None else None,
        script=script if script is not None and script.kind == "script" else None,
        trainer=trainer,
        unread_trainer=found.get("trainer") if from_arguments is not None else None,
        deepspeed=found.get("deepspeed"),
        accelerate=found.get("accelerate"),
        litgpt=found.get("litgpt"),
        litgpt_arguments=script if script is not None and script.kind == "litgpt" else None,
        devices=devices,
    )


class _Shelf:
    """Files by kind; each is read once, whether it was given or named by another."""

    def __init__(self, given: Sequence[Path]) -> None:
        self.given = list(given)
        self.found: dict[Kind, Statement] = {}
        self.paths: dict[Kind, Path] = {}

    def take(self, name: str, kind: Kind, base: Path) -> None:
        """Read a file that a command or another file names."""
        path = self._locate(name, base)
        if path in self.given:
            self.given.remove(path)
        if kind in self.paths and self.paths[kind].resolve() == path.resolve():
            return
        self._keep(read_file(path, kind), path)

    def take_rest(self) -> None:
        """Read what was given and not named."""
        for path in self.given:
            if not any(path.resolve() == other.resolve() for other in self.paths.values()):
                self._keep(read_file(path), path)
        self.given.clear()

    def follow(self, statement: Statement | None) -> None:
        """Read the DeepSpeed JSON that a configuration names or holds."""
        if statement is None:
            return
        inline = statement.others.get("deepspeed_inline")
        if isinstance(inline, dict):
            source = Source(f"{statement.source}: deepspeed", inline)
            self._keep(read_deepspeed(source), Path(statement.source))
        named = statement.others.get("deepspeed") or statement.others.get("deepspeed_config_file")
        if isinstance(named, str) and named.endswith(".json"):
            path = self.paths.get("deepspeed")
            if path is None or path.name != Path(named).name:
                base = self.paths.get(statement.kind, Path())
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

    def _keep(self, statement: Statement, path: Path) -> None:
        earlier = self.found.get(statement.kind)
        if earlier is not None:
            msg = (
                f"{earlier.source} and {statement.source} are both {_one(statement.kind)}; "
                "check one set of files at a time"
            )
            raise ConfigError(msg)
        self.found[statement.kind] = statement
        self.paths[statement.kind] = path


def _one(kind: Kind) -> str:
    name = KINDS[kind]
    # What is called by a plural has no article.
    return name if name.endswith("s") else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
