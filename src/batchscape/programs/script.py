"""The program that a command names: whether it is there, and what its files contain."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from batchscape.config import Command
from batchscape.config.template import fill, placeholders, to_text
from batchscape.errors import ConfigError
from batchscape.record.content import hash_of_files

_RUNS_SCRIPTS = re.compile(r"\{python\}|python[\d.]*|torchrun|accelerate|deepspeed")
"""Programs whose arguments name a script of this machine."""


def check_program(command: Command) -> None:
    """Check that the program of a command is there, and the script that it is to run."""
    folder, argument = _folder(command), command.argv[0]
    program = _fill_values(argument, command)
    file = str(folder / program) if "/" in program else program
    is_open = placeholders(argument) and program == argument
    if not is_open and shutil.which(file, path=command.environment.get("PATH")) is None:
        raise ConfigError(
            f"engine.argv: {program} is no program that may be executed, in {folder.absolute()} "
            "or on the PATH; give its path, make it executable (chmod +x), or start a Python "
            "script with {python}"
        )
    script = _script(command)
    if script is not None and not _is_file(folder / script):
        raise ConfigError(
            f"engine.argv: there is no script {script} in {folder.absolute()}; a path there is "
            "below engine.cwd, by default the folder that batchscape is called in"
        )


def _script(command: Command) -> str | None:
    """Return the first argument that names a Python script; None where none need be here."""
    program = Path(command.argv[0]).name
    if "-c" in command.argv or not _RUNS_SCRIPTS.fullmatch(program):
        return None
    words = (_fill_values(text, command) for text in command.argv[1:])
    return next((word for word in words if re.fullmatch(r"[^-{][^{]*\.py", word)), None)


def command_source_hash(command: Command) -> str | None:
    """Name the content of the files that argv and `engine.files` name.

    Of argv, an argument counts that is a file, and what follows the `=` of one that is; the program
    itself (`torchrun`) only where it is a script with a suffix, such as `./train.sh`.
    """
    folder = _folder(command)
    words = [_fill_values(text, command) for text in command.argv]
    if not Path(words[0]).suffix:
        del words[0]
    words += [text.partition("=")[2] for text in words if "=" in text]
    argv = [text for text in words if text and _is_file(folder / text)]
    return hash_of_files([*argv, *command.files], folder, "engine.files")


def _folder(command: Command) -> Path:
    folder = Path(command.cwd or ".").expanduser()
    if not folder.is_dir():
        raise ConfigError(f"engine.cwd={command.cwd}: there is no such folder")
    return folder


def _fill_values(text: str, command: Command) -> str:
    """Fill in `engine.values`; a text with other placeholders stays as it is."""
    texts = {name: to_text(value) for name, value in command.values.items()}
    names = placeholders(text)
    return fill(text, texts) if texts.keys() >= set(names) else text


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long for a path, or no path
        return False
