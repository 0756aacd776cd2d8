"""No setting holds a secret: settings go to files, to reports and to trackers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from batchscape.credentials import find_secret, secret_variables
from batchscape.errors import ConfigError

__all__ = ["refuse_secrets"]

_MOST_SHOWN = 5
_DEEPEST = 64
"""Levels of nested settings; JSON, hashes and every reader of the settings go down them."""


def refuse_secrets(
    settings: Iterable[Mapping[str, Any]], environment: Mapping[str, str] | None = None
) -> None:
    """Refuse settings that contain a secret, before anything is written.

    Parameters
    ----------
    settings : iterable of mapping
        Plain nested settings of cells; those that share their values cost little.
    environment : mapping, optional
        Where secrets are known from; this process's own by default.

    Raises
    ------
    ConfigError
        With the keys of the settings and what kind of secret each holds, never the secret. If
        settings are nested too deeply to be looked through.
    """
    variables = secret_variables(environment)
    known: dict[tuple[str, str], str | None] = {}
    found: dict[str, str] = {}
    for cell in settings:
        for key, of, text in _texts(cell, "", ""):
            if (of, text) not in known:
                known[of, text] = find_secret(text, variables, of=of)
            if (secret := known[of, text]) is not None:
                found[key] = secret
    if not found:
        return
    shown = list(found.items())[:_MOST_SHOWN]
    lines = [f"  {key} holds {secret}" for key, secret in shown]
    if len(found) > len(shown):
        lines.append(f"  and {len(found) - len(shown)} further settings")
    msg = "\n".join(
        (
            "Settings are written to the run folders, to reports and to Weights & Biases, so none "
            "may hold a secret:",
            *lines,
            "Leave it out of the settings and pass it by an environment variable: runs, and the "
            "programs of engine=command, inherit those of batchscape.",
        )
    )
    raise ConfigError(msg)


def _texts(value: Any, key: str, of: str, depth: int = 0) -> Iterator[tuple[str, str, str]]:  # noqa: ANN401  (JSON)
    """Yield every text with its dotted key and what it is the value of; names of keys as well."""
    if depth > _DEEPEST:
        group = key.partition(".")[0].partition("[")[0]
        msg = f"{group} is nested more than {_DEEPEST} levels deep"
        raise ConfigError(msg)
    if isinstance(value, str):
        yield key, of, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield f"a key of {key or 'the settings'}", "", str(name)
            yield from _texts(inner, f"{key}.{name}" if key else str(name), str(name), depth + 1)
    elif isinstance(value, list | tuple):
        before = ""
        for number, inner in enumerate(value):
            # Of an option `--api-key VALUE` the value stands in the next argument.
            option = before if before.startswith("-") and "=" not in before else of
            yield from _texts(inner, f"{key}[{number}]", option, depth + 1)
            before = inner if isinstance(inner, str) else ""
