"""The commands of a launch script that has no control flow, with what its variables hold.

Nothing is executed. Read are assignments, `export`, arrays, `${NAME:-default}`, `$((...))` of whole
numbers, quotes and continued lines. What only running the script would tell (what a command prints,
variables of the environment) stays in the words as it is written. Control flow, and whatever else
may set a variable, is refused with its line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from batchscape.errors import ConfigError

__all__ = ["ShellCommand", "commands_of", "is_unknown"]

_FLOW = frozenset(
    {
        *("if", "then", "elif", "else", "fi", "for", "while", "until", "do", "done", "case"),
        *("esac", "select", "function", "{", "}", "[[", "!", "coproc"),
    }
)
_SETTERS = frozenset(
    {
        *("source", ".", "eval", "read", "mapfile", "readarray", "getopts", "let"),
        *("declare", "typeset", "local"),
    }
)
"""Commands that may set any variable."""
_SURROUNDINGS = re.compile(r"activate|conda|mamba|profile|bashrc|modules?\.sh|setvars\.sh")
"""What is sourced to set up programs; it says nothing of the batch."""
_JOINTS = frozenset({"&&", "||"})
_SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh"})
_GIVE = "give the command with its values: batchscape check-config -- COMMAND"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)")
_NAMED = re.compile(r"\$(?:[A-Za-z_]\w*|[\d@*#?$!-])")
_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_ALL = re.compile(r'"\$\{(\w+)\[@\]\}"')
"""All elements of an array, each of them a word."""
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)(?:(:?-)(.*))?\}", re.DOTALL)
_SETTING_EXPANSION = re.compile(r"\$\{\w+:?=")
_BLANKS = re.compile(r"[ \t\n]+")
_NO_BREAK = "\N{NO-BREAK SPACE}"
"""A blank of a command that is not run: it ends no word."""
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: int.__add__,
    ast.Sub: int.__sub__,
    ast.Mult: int.__mul__,
}


@dataclass(frozen=True)
class ShellCommand:
    """One command as it would be run."""

    words: tuple[str, ...]
    line: int
    variables: Mapping[str, str] = field(default_factory=dict)
    """Known when it starts, with those put in front of it."""
    floors: tuple[str, ...] = ()
    """Divisions of the script that leave a remainder, which a shell drops."""


def commands_of(
    name: str, text: str, variables: Mapping[str, str] | None = None
) -> list[ShellCommand]:
    """Return the commands of a script, one after the other.

    Parameters
    ----------
    name : str
        Of the script, for messages.
    variables : mapping of str to str, optional
        Those that are set when it begins.

    Raises
    ------
    ConfigError
        A line is more than an assignment or a command.
    """
    script = _Script(name, dict(variables or {}))
    try:
        return [command for one in _statements(name, text) for command in script.read(one)]
    except RecursionError:
        msg = f"{name}: nested too deeply for a script; {_GIVE}"
        raise ConfigError(msg) from None


def is_unknown(word: str) -> bool:
    """Whether a word holds what only running its script would tell."""
    return bool(re.search(r"\$[\w({]|`", word))


@dataclass(frozen=True)
class _ShellStatement:
    """A piece of a script that ends at `;`, `&`, `|`, `&&`, `||` or with its line."""

    text: str
    line: int
    before: str
    """What separates it from the one before."""
    after: str


def _statements(name: str, text: str) -> Iterator[_ShellStatement]:
    """Yield the statements of a script, without comments and redirections."""
    piece, at, line, before = "", 0, 1, ""
    started = line
    while at <= len(text):
        here = text[at : at + 1]
        separator = re.match(r"\n|;|&&|\|\||\|&?|&(?!>)|\Z", text[at:])
        if separator:
            if piece.strip():
                yield _ShellStatement(piece.strip(), started, before, separator[0])
            piece, before = "", separator[0]
            at += max(len(separator[0]), 1)
        elif here == "#" and (not piece or piece[-1].isspace()):
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
            continue
        elif here == "(" and not _ASSIGNMENT.fullmatch(re.split(r"\s", piece)[-1]):
            raise _refusal(name, line, "(")
        elif found := re.match(r"&?[<>]", text[at:]):
            if re.match(r"<<|[<>]\(", text[at:]):
                raise _refusal(name, line, text[at : at + 2])
            piece = re.sub(r"(?<!\S)\d$", "", piece)
            word = re.match(r"[<>&|]+[ \t]*", text[at:])
            at += len(word[0]) if word else len(found[0])
            while at < len(text) and not re.match(r"[\s;|&<>]", text[at]):
                at = _end(name, line, text, at)
        else:
            end = _end(name, line, text, at)
            if not piece.strip():
                started = line
            piece += text[at:end].replace("\\\n", "") if here == "\\" else text[at:end]
            at = end
        line = 1 + text.count("\n", 0, at)


def _end(name: str, line: int, text: str, at: int) -> int:
    """Return where a quotation, a substitution or a character ends that begins somewhere."""
    here, two = text[at], text[at : at + 2]
    closing = {"'": "'", '"': '"', "`": "`", "(": ")"}.get(here)
    closing = {"$(": ")", "${": "}"}.get(two, closing)
    if here == "\\":
        return min(at + 2, len(text))
    if closing is None:
        named = _NAMED.match(text, at)
        return named.end() if named else at + 1
    end = at + (1 if here in "'\"`(" else 2)
    special = {"'": "", "`": "\\", '"': "\\$`"}.get(closing, "\\$`'\"(")
    while end < len(text) and text[end] != closing:
        if here == "(" and text[end] == "#" and text[end - 1].isspace():
            end = (text.find("\n", end) + 1) or len(text)
            continue
        end = _end(name, line, text, end) if text[end] in special else end + 1
    if end >= len(text):
        msg = f"{name}: what {here} begins in line {line} is not closed; {_GIVE}"
        raise ConfigError(msg)
    return end + 1


def _refusal(name: str, line: int, what: str) -> ConfigError:
    return ConfigError(
        f"{name}: line {line} has {what}, and a script is read that has assignments, #SBATCH lines "
        f"and one launch command; {_GIVE}"
    )


@dataclass
class _Script:
    """What is known while one script is read."""

    name: str
    variables: dict[str, str]
    arrays: dict[str, list[str]] = field(default_factory=dict)
    floors: list[str] = field(default_factory=list)

    def read(self, statement: _ShellStatement) -> Iterator[ShellCommand]:
        """Take what a statement assigns; yield the command that it is."""
        line, rest = statement.line, statement.text
        if found := _SETTING_EXPANSION.search(rest):
            raise _refusal(self.name, line, found[0])
        assigned = []
        while found := _ASSIGNMENT.match(rest):
            end = found.end()
            while end < len(rest) and not rest[end].isspace():
                end = _end(self.name, line, rest, end)
            assigned.append((found[1], found[2], rest[found.end() : end]))
            rest = rest[end:].lstrip()
        joined = {statement.before, statement.after} & {"|", "|&"} or {statement.before} & _JOINTS
        is_certain = not joined and statement.after != "&"
        words = self._words(line, rest)
        if words:
            own = {key: self._text(line, value) for key, _, value in assigned}
            yield from self._command(line, words, own, is_certain=is_certain)
        elif assigned and not is_certain:
            beside = "".join(joined) or "&"
            raise _refusal(self.name, line, f"an assignment beside {beside}")
        else:
            for key, operator, value in assigned:
                self._assign(line, key, value, adds=operator == "+=")

    def _assign(self, line: int, key: str, value: str, *, adds: bool) -> None:
        if value.startswith("("):
            before = self.arrays.get(key, []) if adds else []
            self.arrays[key] = [*before, *self._words(line, value[1:-1])]
            return
        text = self._text(line, value)
        self.variables[key] = self.variables.get(key, "") + text if adds else text

    def _command(
        self, line: int, words: list[str], own: dict[str, str], *, is_certain: bool
    ) -> Iterator[ShellCommand]:
        first = words[0]
        named = _SURROUNDINGS.search(" ".join(words[1:]))
        is_element = re.match(r"\w+\[.*\]\+?=", first)
        is_printf = words[:2] == ["printf", "-v"]
        if first in _FLOW or (first in _SETTERS and not named) or is_element or is_printf:
            raise _refusal(self.name, line, first)
        is_shell = any(PurePath(word).name in _SHELLS for word in words)
        if is_shell and any(re.fullmatch(r"-[a-z]*c", word) for word in words):
            raise _refusal(self.name, line, "a shell with -c")
        if first not in {"export", "readonly", "unset"}:
            yield ShellCommand(tuple(words), line, self.variables | own, tuple(self.floors))
            return
        for word in words[1:]:
            key, equals, value = word.partition("=")
            if not is_certain or "$" in key or value.startswith("("):
                raise _refusal(self.name, line, " ".join(words)[:40])
            if first == "unset":
                self.variables.pop(key, None)
            elif equals:
                self.variables[key] = value

    def _words(self, line: int, text: str) -> list[str]:
        """Return the words that a text becomes: a variable may hold several, or none."""
        words: list[str] = []
        word: str | None = None
        at = 0
        while at < len(text):
            end = _end(self.name, line, text, at)
            piece = text[at:end]
            at = end
            if piece.isspace():
                words += [] if word is None else [word]
                word = None
            elif piece[0] == "#" and word is None:
                at = (text.find("\n", at) + 1) or len(text)
            elif (array := _ALL.fullmatch(piece)) and array[1] in self.arrays:
                first, *others = self.arrays[array[1]] or [""]
                *whole, word = [(word or "") + first, *others]
                words += whole
            elif piece[0] in "$`":
                first, *others = _BLANKS.split(self._value(line, piece))
                if first or others or word is not None:
                    *whole, word = [(word or "") + first, *others]
                    words += [one for one in whole if one]
                    word = word or None
            else:
                word = (word or "") + self._text(line, piece)
        return words if word is None else [*words, word]

    def _text(self, line: int, text: str, *, is_quoted: bool = False) -> str:
        """Return what a piece of a word becomes; what is not known stays as it is written."""
        found, at = "", 0
        while at < len(text):
            if is_quoted and text[at] not in "\\$`":
                found, at = found + text[at], at + 1
                continue
            end = _end(self.name, line, text, at)
            piece, at = text[at:end], end
            if piece == "\\\n":
                continue
            if piece[0] == "\\":
                found += piece[1:] if not is_quoted or piece[1] in '"\\$`' else piece
            elif piece[0] == "'":
                found += piece[1:-1]
            elif piece[0] == '"':
                found += self._text(line, piece[1:-1], is_quoted=True)
            elif piece[0] in "$`":
                found += self._value(line, piece)
            else:
                found += piece
        return found

    def _value(self, line: int, piece: str) -> str:
        """Return what a substitution becomes."""
        unknown = _BLANKS.sub(_NO_BREAK, piece)
        if piece.startswith("$((") and piece.endswith("))"):
            total = self._sum(line, piece[3:-2])
            return unknown if total is None else str(total)
        if (array := _ARRAY.fullmatch(piece)) and array[1] in self.arrays:
            return " ".join(self.arrays[array[1]])
        found = _VARIABLE.fullmatch(piece)
        if not found:
            return unknown
        name, how = found[1] or found[2], found[3]
        held = self.variables.get(name)
        if how and (held is None or (not held and how == ":-")):
            return self._text(line, found[4], is_quoted=True)
        # With braces, so that what follows is no part of the name.
        return f"${{{name}}}" if held is None else held

    def _sum(self, line: int, text: str) -> int | None:
        """Return what arithmetic of whole numbers comes to; None: this is not known."""
        if re.search(r"\+\+|--|[^=!<>]=(?!=)", text):
            raise _refusal(self.name, line, f"$(({text}))")
        plain = self._text(line, text, is_quoted=True)
        plain = re.sub(r"[A-Za-z_]\w*", lambda name: self.variables.get(name[0], name[0]), plain)
        try:
            return self._number(ast.parse(plain.strip().replace("/", "//"), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, MemoryError):
            return None

    def _number(self, node: ast.expr) -> int:
        """Evaluate whole numbers, and note divisions with a remainder; ValueError for others."""
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if not isinstance(node, ast.BinOp):
            raise ValueError
        left, right = self._number(node.left), self._number(node.right)
        if isinstance(node.op, ast.FloorDiv) and left >= 0 and right >= 0:
            quotient, remainder = divmod(left, right)
            if remainder:
                self.floors.append(f"{left} / {right} = {quotient}, remainder {remainder}")
            return quotient
        if type(node.op) not in _OPERATIONS:
            raise ValueError
        return _OPERATIONS[type(node.op)](left, right)
