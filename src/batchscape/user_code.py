"""The user's own code, named by an import path: found, called, and told apart by its content."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import re
import symtable
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import Any

from batchscape.errors import ConfigError
from batchscape.text import suggest

__all__ = ["call_by_path", "named_files", "source_hash"]

_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of packages that others have written."""
_THIS_PACKAGE = __name__.partition(".")[0]
_BINDS_UNSEEN = re.compile(
    r"import \*|^\s*global |globals\(|__getattr__|setattr|exec\(|vars\(|__dict__", re.MULTILINE
)
"""What in the source of a module may bind names that it does not spell."""


def call_by_path(
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
        raise _lacks(path, vars(module))
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

    All Python files of the top-level package count, or the one top-level module; and so does every
    module that they import, directly or not, where it lies in the same folder as that package or
    module, or below the working directory. Installed packages do not count, nor do imports that
    are not written as `import` statements. Nothing is imported.

    Raises
    ------
    ConfigError
        If there is no such package or module, or nothing in its source binds the name.
    """
    top = _split(path)[0].partition(".")[0]
    _see_working_directory()
    importlib.invalidate_caches()
    place = _place(top)
    if place is None:
        msg = (
            f"_target_={path}: there is no module {top!r} in {Path.cwd()} or among the installed "
            "packages"
        )
        raise ConfigError(msg)
    found = _whole(top, place)
    _refuse_unbound(path, found)
    if not place.is_installed():
        homes = [home.resolve() for home in place.homes()]
        _follow(found, lambda other: other.is_beside(homes))
    digest = hashlib.sha256()
    for module, file in sorted(found.items()):
        name = module.replace(".", "/") + ("/" if file.stem == "__init__" else "")
        digest.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\0".encode())
    return digest.hexdigest()[:16]


def named_files(arguments: Any) -> dict[str, Path]:  # noqa: ANN401  (the user's own)
    """Return the files that texts in arguments name, by these texts, in their order.

    Folders, and texts that name no file that is there, do not count.

    Parameters
    ----------
    arguments : mapping, sequence or value
        Searched through all levels.
    """
    found = {}
    for text in sorted(set(_texts(arguments))):
        with suppress(OSError, ValueError, RuntimeError):  # too long for a path, or no path
            file = Path(text).expanduser()
            if file.is_file():
                found[text] = file
    return found


def _texts(value: Any) -> Iterator[str]:  # noqa: ANN401  (the user's own)
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


@dataclass(frozen=True)
class _Place:
    """Where a module lies: a file, the folders of a package, or both."""

    file: Path | None
    folders: tuple[Path, ...]

    def homes(self) -> list[Path]:
        """Return the folders in which it was found."""
        return [folder.parent for folder in self.folders] or (
            [] if self.file is None else [self.file.parent]
        )

    def is_installed(self) -> bool:
        """Return whether it is not the user's own."""
        return any(_INSTALLED & set(home.parts) for home in self.homes())

    def is_beside(self, homes: list[Path]) -> bool:
        """Return whether it lies in one of these folders, or below the working directory."""
        here = Path.cwd().resolve()
        own = [home.resolve() for home in self.homes()]
        return not self.is_installed() and any(
            home in homes or home.is_relative_to(here) for home in own
        )

    def inner(self, name: str) -> _Place | None:
        """Find a module in a package."""
        for folder in self.folders:
            if (folder / name / "__init__.py").is_file():
                return _Place(folder / name / "__init__.py", (folder / name,))
            for suffix in all_suffixes():
                if (folder / f"{name}{suffix}").is_file():
                    return _Place(folder / f"{name}{suffix}", ())
        spaces = tuple(folder / name for folder in self.folders if (folder / name).is_dir())
        return _Place(None, spaces) if spaces else None


def _place(top: str) -> _Place | None:
    """Find a top-level module as Python does; its code does not run."""
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module that was made, not found
        return None
    if spec is None:
        return None
    folders = tuple(Path(folder) for folder in spec.submodule_search_locations or ())
    file = Path(spec.origin) if spec.has_location and spec.origin else None
    return _Place(file if file is not None and file.is_file() else None, folders)


def _whole(top: str, place: _Place) -> dict[str, Path]:
    """Return all files of a top-level module, by the names of their modules."""
    found = {} if place.file is None else {top: place.file}
    for folder in place.folders:
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            if not _INSTALLED & set(parts):
                parts = parts[:-1] if parts[-1] == "__init__" else parts
                found.setdefault(".".join((top, *parts)), file)
    return found


def _follow(found: dict[str, Path], counts: Callable[[_Place], bool]) -> None:
    """Add the modules that those found import, and what these import."""
    tops: dict[str, _Place | None] = {}
    waiting = list(found.items())
    while waiting:
        for name in _imported(*waiting.pop()):
            top, *inner = name.split(".")
            if top not in tops:
                known = top in sys.stdlib_module_names or top == _THIS_PACKAGE
                place = None if known else _place(top)
                tops[top] = place if place is not None and counts(place) else None
            at, module = tops[top], top
            while at is not None:
                if at.file is not None and module not in found:
                    found[module] = at.file
                    waiting.append((module, at.file))
                if not inner:
                    break
                at, module = at.inner(inner[0]), f"{module}.{inner.pop(0)}"


def _imported(module: str, file: Path) -> Iterator[str]:
    """Return what a module may import: names of modules, and of what is in them."""
    if file.suffix != ".py":
        return
    tree = ast.Module([], [])
    with warnings.catch_warnings(), suppress(SyntaxError, ValueError):
        warnings.simplefilter("ignore")
        tree = ast.parse(file.read_bytes())
    package = module.split(".") if file.stem == "__init__" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            if origin:
                yield origin
                yield from (f"{origin}.{a.name}" for a in node.names if a.name != "*")


def _refuse_unbound(path: str, files: Mapping[str, Path]) -> None:
    """Refuse a name that its module does not bind: else every run would be launched to find out."""
    module, name = _split(path)
    file = files.get(module)
    if file is None or file.suffix != ".py":
        return
    try:
        source = file.read_text(encoding="utf-8")
        symbols = symtable.symtable(source, str(file), "exec").get_symbols()
    except (SyntaxError, ValueError):
        return  # the training says it better
    bound = [s.get_name() for s in symbols if s.is_assigned() or s.is_imported()]
    if name not in bound and not _BINDS_UNSEEN.search(source):
        raise _lacks(path, bound)


def _lacks(path: str, names: Iterable[str]) -> ConfigError:
    module, name = _split(path)
    known = [own for own in names if not own.startswith("_")]
    return ConfigError(f"_target_={path}: module {module} has no {name!r}{suggest(name, known)}")


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
