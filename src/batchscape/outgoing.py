r"""Texts that leave for a terminal, a page, a table, a figure or a tracker are made harmless.

Names, reasons and settings are texts of others. Secrets are replaced, also in records. A sequence
that a terminal obeys is removed, and other control characters are shown as `\x1b`.

A secret is the value of a variable whose name has `KEY`, `TOKEN`, `SECRET`, `PASS` or `CREDENTIAL`
in it, if it has 8 characters or more and is no number; a token of one of six published shapes; or
user and password in a URL.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from batchscape.errors import ConfigError

Place = tuple[str | int, ...]
"""Names and positions that lead to a text in a JSON value; to the mapping of one that is a key."""
Change = Callable[[str, Place, bool], str]
"""Returns what stands for a text at a place, and is told whether it is a key."""
_SHORTEST = 8
_PART = r"\w*(?:KEY|TOKEN|SECRET|PASS|CREDENTIAL)"
# The pattern looks once at each word, so that its time grows linearly with the text.
_NAMED = re.compile(rf"\b(?={_PART})(\w++)(=[\"']?)(?!\d+\b)[^\s\"']{{{_SHORTEST},}}")
"""A variable in a command: `WANDB_API_KEY=... python train.py`."""
_SHAPES = {
    # https://github.blog/changelog/2021-03-31-authentication-token-format-updates-are-generally-available/
    "a token of GitHub": r"gh[pousr]_\w{20,}|github_pat_\w{20,}",
    # https://huggingface.co/docs/hub/security-tokens
    "a token of Hugging Face": r"hf_[A-Za-z0-9]{20,}",
    # https://docs.wandb.ai/support/models/articles/why-does-my-api-key-fail-with-must-be-40-characters
    "a key of Weights & Biases": r"wandb_v\d_\w{20,}",
    # Of OpenAI, Anthropic and others:
    # https://openrouter.ai/docs/guides/features/guardrails/secret-formats
    "a key of the shape sk-...": (
        r"(?<![\w-])sk-(?:(?:proj|svcacct|admin|ant|or)-[\w-]{20,}|[A-Za-z0-9]{20,})"
    ),
    # https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_identifiers.html
    "an access key of AWS": r"(?<![A-Za-z0-9])(?:AKIA|ASIA)[0-9A-Z]{16}",
    # https://cloud.google.com/docs/authentication/api-keys
    "a key of Google": r"AIza[\w-]{35}",
    # RFC 3986, section 3.2.1
    "a password in a URL": r"(?<=://)[^\s/:@]*:[^\s/@]+(?=@)",
}
"""Kinds of secrets and how they look, from what their services publish."""
_SHAPE_PATTERNS = {kind: re.compile(shape) for kind, shape in _SHAPES.items()}
_MOST_SHOWN = 5

# ECMA-48, and xterm's control sequences: https://invisible-island.net/xterm/ctlseqs/ctlseqs.html
_SEQUENCE = re.compile(
    # Titles, links, strings. Another escape ends the search, so that each begin is looked at once.
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\n\x07\x1b\x90\x98\x9c-\x9f]*+(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, the cursor
    r"|\x1b[ -/]*[0-~]"
)
_CONTROL = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"
    # These change the direction of text, break lines, or cannot be encoded.
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
    "]"
)
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # noqa: RUF001
"""Characters that begin a formula of a spreadsheet.

Source: OWASP, CSV injection, https://owasp.org/www-community/attacks/CSV_Injection."""


def redact(text: str) -> str:
    """Return a text with every secret replaced by its name: `[WANDB_API_KEY]`."""
    return text if len(text) < _SHORTEST else _redact_text(text, _secrets())


def redact_json(content: Any) -> Any:  # noqa: ANN401  (of JSON)
    """Return a JSON value in which no text carries a secret; the content is not changed."""
    return _mapped(content, _redaction())


def refuse_secrets(settings: Iterable[Mapping[str, Any]]) -> None:
    """Refuse settings of cells that contain a secret, by their keys, before anything is written."""
    redacted_texts: dict[str, str] = {}
    checked_values: dict[tuple[str, int], Any] = {}
    redacted = _redaction()

    def note(text: str, place: Place, is_key: bool) -> str:
        change = redacted(text, place, is_key)
        if change != text:
            key = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place)[1:]
            redacted_texts[f"a key of {key or 'the settings'}" if is_key else key] = change
        return change

    for cell in settings:
        for name, value in cell.items():
            # Cells share the objects that they do not vary.
            if (name, id(value)) in checked_values:
                continue
            checked_values[name, id(value)] = value
            try:
                _mapped({name: value}, note)
            except RecursionError:
                raise ConfigError(f"{name} is nested too deeply for a setting") from None
    if not redacted_texts:
        return
    lines = [f"  {key} holds {text}" for key, text in redacted_texts.items()]
    if len(lines) > _MOST_SHOWN:
        lines[_MOST_SHOWN:] = [f"  and {len(lines) - _MOST_SHOWN} further"]
    listed = "\n".join(lines)
    raise ConfigError(
        "Settings are written to the run folders, to reports and to Weights & Biases, so none may "
        f"hold a secret:\n{listed}\nLeave it out of the settings and pass it by an environment "
        "variable: runs, and the programs of engine=command, inherit those of batchscape."
    )


def make_printable(text: str) -> str:
    """Remove terminal sequences, and write other control characters as escapes.

    Line ends and tabs stay.
    """
    if text.isprintable():
        return text
    text = _SEQUENCE.sub("", text.replace("\r\n", "\n"))
    return _CONTROL.sub(
        lambda m: f"\\x{ord(m[0]):02x}" if ord(m[0]) < 0x100 else f"\\u{ord(m[0]):04x}", text
    )


def outgoing(text: str) -> str:
    """Return a text as it may leave: as by `make_printable`, and without secrets."""
    # Sequences go first, as one within a secret would hide it.
    return redact(make_printable(text))


def outgoing_json(content: Any) -> Any:  # noqa: ANN401  (of JSON)
    """Return a JSON value whose texts, and keys, are as they may leave; it is not changed."""
    return redact_json(_mapped(content, lambda text, *_: make_printable(text)))


def outgoing_cell(text: str) -> str:
    """Return a text as it may stand in a CSV file: `outgoing`, and no formula of a spreadsheet.

    An apostrophe goes before what begins as a formula and is no number; a spreadsheet shows it as
    text, and so does pandas, with the apostrophe.
    """
    text = outgoing(text)
    with suppress(ValueError):
        float(text)
        if text == text.strip():
            return text
    return f"'{text}" if text.startswith(_FORMULA) else text


def _secrets() -> tuple[tuple[str, str], ...]:
    """Return the variables that hold secrets, longest value first."""
    # As bytes: to decode every variable for every text takes a twentieth of a report's time.
    names = [os.fsdecode(name) for name in os.environb if _is_secret_name(name)]
    secrets = [(name, value) for name in names if _is_long(value := os.environ[name])]
    return tuple(sorted(secrets, key=lambda item: -len(item[1])))


@lru_cache(maxsize=4096)
def _is_secret_name(name: str | bytes) -> bool:
    name = os.fsdecode(name)
    return re.fullmatch(rf"(?={_PART})\w+", name) is not None


def _is_long(value: str) -> bool:
    return len(value) >= _SHORTEST and not value.isdigit()


@lru_cache(maxsize=4096)
def _redact_text(text: str, secrets: tuple[tuple[str, str], ...]) -> str:
    # Cached, as reports repeat their texts; the secrets are part of the key.
    for name, value in secrets:
        text = text.replace(value, f"[{name}]")
    return _without_tokens(_NAMED.sub(r"\1\2[\1]", text))


def _without_tokens(text: str) -> str:
    """Return a text without tokens of a published shape."""
    for kind, shape in _SHAPE_PATTERNS.items():
        text = shape.sub(f"[{kind}]", text)
    return text


def _mapped(content: Any, change: Change, place: Place = ()) -> Any:  # noqa: ANN401  (of JSON)
    """Return a JSON value with its texts and keys changed."""
    if isinstance(content, str):
        return change(content, place, False)
    if isinstance(content, Mapping):
        return {
            change(key, place, True) if isinstance(key, str) else key: _mapped(
                value, change, (*place, str(key))
            )
            for key, value in content.items()
        }
    if isinstance(content, list | tuple):
        return [_mapped(value, change, (*place, number)) for number, value in enumerate(content)]
    return content


def _redaction() -> Change:
    """Return what replaces secrets, by the variables of now."""
    secrets = _secrets()

    def redacted(text: str, place: Place, is_key: bool) -> str:
        if is_key:  # a key may be the name of a variable, and is replaced only by its shape
            return _without_tokens(text)
        if place and _is_secret_name(str(place[-1])) and _is_long(text):
            return f"[{place[-1]}]"
        return text if len(text) < _SHORTEST else _redact_text(text, secrets)

    return redacted
