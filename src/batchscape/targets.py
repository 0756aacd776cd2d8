"""The user's own code, named by an import path: found, called, and told apart by its content."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from batchscape.errors import ConfigError

__all__ = ["call_target", "source_hash"]


def call_target(
    path: str, arguments: Mapping[str, Any], offered: Mapping[str, Any] | None = None
) -> Any:  # noqa: ANN401  (the user's own)
    """Call what an import path names.

    Modules are found where Python finds them, and in the working directory.

    Parameters
    ----------
    path : str
        `package.module.name` of a callable.
    arguments : mapping
        Its keyword arguments.
    offered : mapping or None
        Further ones, given where its signature names them and `arguments` do not.

    Raises
    ------
    ConfigError
        If there is no such module or name, or it does not take these arguments.
    """
    module_name, name = _split(path)
    _see_working_directory()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there and needs one that is not
        msg = (
            f"_target_={path}: there is no module {error.name!r} in {Path.cwd()} or among the "
            "installed packages"
        )
        raise ConfigError(msg) from None
    called: Callable[..., Any] | None = getattr(module, name, None)
    if called is None:
        known = ", ".join(n for n in vars(module) if not n.startswith("_")) or "nothing"
        msg = f"_target_={path}: module {module_name} has no {name!r}; it has {known}"
        raise ConfigError(msg)
    try:
        signature = inspect.signature(called)
        named = {
            name: value for name, value in (offered or {}).items() if name in signature.parameters
        }
        arguments = {**named, **arguments}
        signature.bind(**arguments)
    except TypeError as error:
        given = ", ".join(arguments) or "none"
        msg = f"_target_={path} does not take these arguments ({error}); given {given}"
        raise ConfigError(msg) from None
    return called(**arguments)


def source_hash(path: str) -> str:
    """Return the first digits of the SHA-256 of the source behind an import path.

    All Python files of the top-level package count, or the one top-level module. Nothing is
    imported.

    Raises
    ------
    ConfigError
        If there is no such package or module.
    """
    top = _split(path)[0].partition(".")[0]
    _see_working_directory()
    spec = PathFinder.find_spec(top)
    if spec is None:
        msg = (
            f"_target_={path}: there is no module {top!r} in {Path.cwd()} or among the installed "
            "packages"
        )
        raise ConfigError(msg)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if folders:
        files = sorted(
            (file.relative_to(folder).as_posix(), file)
            for folder in folders
            for file in folder.rglob("*.py")
        )
    else:
        files = [(f"{top}.py", Path(spec.origin or ""))]
    digest = hashlib.sha256()
    for name, file in files:
        digest.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\0".encode())
    return digest.hexdigest()[:16]


def _split(path: str) -> tuple[str, str]:
    module, _, name = path.rpartition(".")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        msg = f"_target_={path!r}: an import path is package.module.name"
        raise ConfigError(msg)
    return module, name


def _see_working_directory() -> None:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
