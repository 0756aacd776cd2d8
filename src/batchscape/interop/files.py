"""Read a file of another training system, and tell which system's it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from batchscape.errors import ConfigError
from batchscape.interop.readers import kind_of, marks_of_kinds, read_content
from batchscape.interop.statements import Kind, Source, Statement

__all__ = ["is_configuration", "read_file", "read_text"]

_LARGEST_BYTES = 2**20
"""No configuration is larger; a checkpoint given by mistake is not read whole."""


def is_configuration(path: Path | str) -> bool:
    """Return whether a file is a mapping of settings; any other is read as commands of a shell."""
    return Path(path).suffix.lower() in {".json", ".yaml", ".yml"}


def read_file(path: Path, kind: Kind | None = None) -> Statement:
    """Read one configuration file.

    Parameters
    ----------
    path : Path
        A .json, .yaml or .yml file.
    kind : str, optional
        What it is, where a command says so; else it is told by its keys.

    Returns
    -------
    Statement
        Keys that have nothing to do with the batch are left alone.

    Raises
    ------
    ConfigError
        It cannot be read, is none of the known kinds, or has a value that breaks a rule.
    """
    content = _parse(path, read_text(path))
    kind = kind or kind_of(content, is_json=path.suffix.lower() == ".json")
    if kind is None:
        msg = f"{path}: cannot tell what file this is; keys that would tell: {marks_of_kinds()}"
        raise ConfigError(msg)
    return read_content(Source(str(path), content), kind)


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises
    ------
    ConfigError
        It is not there, not readable, too large or not UTF-8.
    """
    try:
        size = path.stat().st_size
        if size > _LARGEST_BYTES:
            msg = f"{path}: a configuration has at most {_LARGEST_BYTES} bytes; this has {size}"
            raise ConfigError(msg)
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        msg = f"{path}: a configuration is text in UTF-8, and this is not"
        raise ConfigError(msg) from None
    except OSError as error:
        msg = f"{path}: cannot be read ({error.strerror or error})"
        raise ConfigError(msg) from None
    except ValueError as error:
        # A path with a null character.
        msg = f"{str(path)!r}: cannot be read ({error})"
        raise ConfigError(msg) from None


def _parse(path: Path, text: str) -> Mapping[str, object]:
    is_json = path.suffix.lower() == ".json"
    try:
        content = json.loads(text, object_pairs_hook=_once) if is_json else yaml.safe_load(text)
    except json.JSONDecodeError as error:
        msg = f"{path}: no valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        raise ConfigError(msg) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        msg = f"{path}: no valid YAML: {error.problem or error.context}{where}"
        raise ConfigError(msg) from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        # Impossible dates, ints of thousands of digits, keys that are given twice.
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        msg = f"{path}: no valid {'JSON' if is_json else 'YAML'}: {said}"
        raise ConfigError(msg) from None
    except RecursionError:
        msg = f"{path}: nested too deeply for a configuration"
        raise ConfigError(msg) from None
    if not isinstance(content, dict):
        msg = f"{path}: a configuration is a mapping of keys to values, and this is not"
        raise ConfigError(msg)
    return content


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Refuse keys that are given twice, as DeepSpeed does; else the last one would win."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        msg = f"key {twice!r} is given twice"
        raise ValueError(msg)
    return content
