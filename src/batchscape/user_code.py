"""The user's own code, named by an import path: it is found, called, and hashed."""

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from batchscape.errors import ConfigError
from batchscape.text import suggest

_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages, which are not the user's own."""
_THIS_PACKAGE = __name__.partition(".")[0]
_DYNAMIC_BINDING = re.compile(
    r"import \*|^\s*global |globals\(|__getattr__|setattr|exec\(|vars\(|__dict__", re.MULTILINE
)
"""Source text that may bind names without spelling them."""


def call_by_path(
    path: str, arguments: Mapping[str, Any], optional_arguments: Mapping[str, Any] | None = None
) -> Any:  # noqa: ANN401  (the user's own)
    """Call the callable of an import path, found where Python finds it or in the working directory.

    `optional_arguments` are passed only if its signature names them.
    """
    module_name, name = _split(path)
    _add_working_directory()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there and needs one that is not
        raise ConfigError(
            f"_target_={path}: there is no module {error.name!r} in {Path.cwd()} or among the "
            "installed packages"
        ) from None
    target: Callable[..., Any] | None = getattr(module, name, None)
    if target is None:
        raise _missing_name(path, vars(module))
    try:
        signature = inspect.signature(target)
        accepted_arguments = {
            name: value
            for name, value in (optional_arguments or {}).items()
            if name in signature.parameters
        }
        arguments = {**accepted_arguments, **arguments}
        signature.bind(**arguments)
    except TypeError as error:
        names = ", ".join(arguments) or "none"
        raise ConfigError(
            f"_target_={path} does not take these arguments ({error}); given {names}"
        ) from None
    return target(**arguments)


def source_hash(path: str) -> str:
    """Return the first digits of the SHA-256 of the source behind an import path.

    All Python files of the top-level package count, or the one top-level module; and so does every
    module that they import, directly or not, where it lies in the same folder as that package or
    module, or below the working directory. Installed packages do not count, nor do imports that
    are not written as `import` statements. Nothing is imported.
    """
    top = _split(path)[0].partition(".")[0]
    _add_working_directory()
    importlib.invalidate_caches()
    place = _place(top)
    if place is None:
        raise ConfigError(
            f"_target_={path}: there is no module {top!r} in {Path.cwd()} or among the installed "
            "packages"
        )
    files = _package_files(top, place)
    _refuse_unbound(path, files)
    if not place.is_installed:
        _add_imports(files, [*map(Path.resolve, place.homes)])
    digest = hashlib.sha256()
    for module, file in sorted(files.items()):
        name = module.replace(".", "/") + ("/" if file.stem == "__init__" else "")
        digest.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\0".encode())
    return digest.hexdigest()[:16]


def named_files(arguments: Any) -> dict[str, Path]:  # noqa: ANN401  (the user's own)
    """Return the existing files that texts at any level of arguments name, by these texts."""
    texts: set[str] = set()
    values = [arguments]
    while values:
        value = values.pop()
        if isinstance(value, str):
            texts.add(value)
        elif isinstance(value, Mapping | list | tuple):
            values += value.values() if isinstance(value, Mapping) else value
    files = {}
    for text in sorted(texts):
        with suppress(OSError, ValueError, RuntimeError):  # too long for a path, or no path
            file = Path(text).expanduser()
            if file.is_file():
                files[text] = file
    return files


@dataclass(frozen=True)
class _Place:
    """Where a module lies: a file, the folders of a package, or both."""

    file: Path | None
    folders: tuple[Path, ...]

    @property
    def homes(self) -> list[Path]:
        """The folders in which it was found."""
        return [one.parent for one in self.folders or filter(None, [self.file])]

    @property
    def is_installed(self) -> bool:
        """Whether it is not the user's own."""
        return any(_INSTALLED & set(home.parts) for home in self.homes)


def _place(name: str, within: Sequence[Path] | None = None) -> _Place | None:
    """Find a top-level module, or one within folders, as Python does; its code does not run."""
    try:
        if within is None:
            spec = importlib.util.find_spec(name)
        else:
            spec = PathFinder.find_spec(name, [*map(str, within)])
    except ValueError:  # a module that was made, not found
        return None
    if spec is None:
        return None
    folders = tuple(Path(folder) for folder in spec.submodule_search_locations or ())
    file = Path(spec.origin) if spec.has_location and spec.origin else None
    return _Place(file if file is not None and file.is_file() else None, folders)


def _package_files(top: str, place: _Place) -> dict[str, Path]:
    """Return all files of a top-level module, by the names of their modules."""
    files = {} if place.file is None else {top: place.file}
    for folder in place.folders:
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            if not _INSTALLED & set(parts):
                parts = parts[:-1] if parts[-1] == "__init__" else parts
                files.setdefault(".".join((top, *parts)), file)
    return files


def _add_imports(files: dict[str, Path], homes: list[Path]) -> None:
    """Add the modules of the user's own that the files import, directly or not."""
    working_directory = Path.cwd().resolve()
    places: dict[str, _Place | None] = dict.fromkeys([*sys.stdlib_module_names, _THIS_PACKAGE])
    queue = list(files.items())
    while queue:
        for name in _imported_names(*queue.pop()):
            top, *inner_names = name.split(".")
            if top not in places:
                place = _place(top)
                is_counted = (
                    place is not None
                    and not place.is_installed
                    and any(
                        home in homes or home.is_relative_to(working_directory)
                        for home in map(Path.resolve, place.homes)
                    )
                )
                places[top] = place if is_counted else None
            # Every package on the way to the module counts too.
            place, module = places[top], top
            while place is not None:
                if place.file is not None and module not in files:
                    files[module] = place.file
                    queue.append((module, place.file))
                if not inner_names:
                    break
                inner_name = inner_names.pop(0)
                place, module = _place(inner_name, place.folders), f"{module}.{inner_name}"


def _imported_names(module: str, file: Path) -> Iterator[str]:
    """Yield the modules that a module may import, and names that may be modules."""
    if file.suffix != ".py":
        return
    tree = ast.Module([], [])
    with warnings.catch_warnings(), suppress(SyntaxError, ValueError):
        warnings.simplefilter("ignore")
        tree = ast.parse(file.read_bytes())
    package = module if file.stem == "__init__" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # beyond the top, where Python finds nothing either
                dotted = "." * node.level + (node.module or "")
                origin = importlib.util.resolve_name(dotted, package)
                yield origin
                yield from (f"{origin}.{alias.name}" for alias in node.names if alias.name != "*")


def _refuse_unbound(path: str, files: Mapping[str, Path]) -> None:
    """Refuse a name that its module does not bind, before any run is launched."""
    module, name = _split(path)
    file = files.get(module)
    if file is None or file.suffix != ".py":
        return
    try:
        source = file.read_text(encoding="utf-8")
        symbols = symtable.symtable(source, str(file), "exec").get_symbols()
    except (SyntaxError, ValueError):
        return  # the import in the training raises the better error
    bound_names = [s.get_name() for s in symbols if s.is_assigned() or s.is_imported()]
    if name not in bound_names and not _DYNAMIC_BINDING.search(source):
        raise _missing_name(path, bound_names)


def _missing_name(path: str, names: Iterable[str]) -> ConfigError:
    module, name = _split(path)
    public_names = [candidate for candidate in names if not candidate.startswith("_")]
    return ConfigError(
        f"_target_={path}: module {module} has no {name!r}{suggest(name, public_names)}"
    )


def _split(path: str) -> tuple[str, str]:
    module, _, name = path.rpartition(".")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise ConfigError(f"_target_={path!r}: an import path is package.module.name")
    return module, name


def _add_working_directory() -> None:
    working_directory = str(Path.cwd())
    if working_directory not in sys.path:
        sys.path.insert(0, working_directory)
