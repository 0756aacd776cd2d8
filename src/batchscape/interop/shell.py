"""Enough of a shell's grammar to read a launch script: quotes, variables, arithmetic, arrays.

Nothing is executed. What only running the script would tell (command substitution, variables of
the environment, loops) stays in the words as it is written, so that whoever needs the number can
say which one is not known.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from batchscape.errors import ConfigError

__all__ = ["Command", "commands_of"]

_TOKEN = re.compile(
    r"""
    (?P<joined>\\\r?\n)
  | (?P<blank>[ \t\r]+)
  | (?P<end>\n|;|&&|\|\||[|&])
  | (?P<open>\()
  | (?P<close>\))
  | (?P<redirect>\d*[<>]+&?[ \t]*[^\s;&|<>()]*)
  | '(?P<single>[^']*)'
  | "(?P<double>(?:\\.|[^"\\])*)"
  | (?P<arithmetic>\$\(\((?:[^()]|\([^()]*\))*\)\))
  | (?P<unknown>\$\([^()]*\)|`[^`]*`)
  | (?P<variable>\$\{[^{}]*\}|\$\w+)
  | \\(?P<escaped>.)
  | (?P<plain>[^\s\\'"$`;&|<>()]+|[\\$`'"])
    """,
    re.VERBOSE | re.DOTALL,
)
_EXPANDED = re.compile(r"\\.|\$\(\((?:[^()]|\([^()]*\))*\)\)|\$\{[^{}]*\}|\$\w+")
_PIECE = re.compile(r"(?:\$\([^()]*\)|`[^`]*`|\S)+|\s+")
"""Blanks, or what stands between them; those of a command that is not run belong to it."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_SUM = re.compile(r"[\d\s+\-*/%()]{1,200}")
_OPEN = frozenset({"if", "for", "while", "until", "case", "select"})
_CLOSE = frozenset({"fi", "done", "esac"})
_SHELLS = frozenset({"bash", "sh", "zsh", "dash"})
_DEEPEST = 3
"""Shells within shells; a variable that names itself would go on for ever."""
_WITHIN = frozenset({"then", "else", "elif", "do"})


@dataclass(frozen=True)
class Command:
    """One command as it would be run, with the variables put in front of it."""

    words: tuple[str, ...]
    line: int
    environment: dict[str, str] = field(default_factory=dict)
    floors: tuple[str, ...] = ()
    """Divisions of the script that leave a remainder, which a shell drops."""
    undecided: frozenset[str] = frozenset()
    """Variables with several options in them, which ones depending on a condition."""


@dataclass
class _Reader:
    """State of the walk over one script."""

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    floors: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    word: str | None = None
    array: str | None = None
    """Name of the array whose elements are being read."""
    depth: int = 0
    """Conditions and loops around the command that is being read."""
    after: str = ""
    """What ended the command before: `&&` and `||` are conditions too."""
    undecided: set[str] = field(default_factory=set)

    def assign(self, name: str, value: str) -> None:
        """Set a variable; where a condition decides between two values, it is not known."""
        before = self.variables.get(name, value)
        is_conditional = self.depth > 0 or self.after in {"&&", "||"}
        self.undecided.discard(name)
        if is_conditional and before != value:
            if any(text.startswith("-") or " " in text for text in (before, value)):
                self.undecided.add(name)
            value = f"${name}"
        self.variables[name] = value

    def add(self, text: str) -> None:
        self.word = (self.word or "") + text

    def add_split(self, text: str) -> None:
        """Add the value of a variable outside quotes: blanks in it end words."""
        for piece in _PIECE.findall(text):
            if piece.isspace():
                self.finish_word()
            else:
                self.add(piece)

    def finish_word(self) -> None:
        if self.word is not None:
            self.words.append(self.word)
        self.word = None

    def expand(self, text: str) -> str:
        """Replace variables and arithmetic; what is not known stays as written."""
        return _EXPANDED.sub(lambda found: self._value(found.group()), text)

    def _value(self, written: str) -> str:
        if written.startswith("\\"):
            return written
        if written.startswith("$(("):
            return self._sum(written)
        inner = written[2:-1] if written.startswith("${") else written[1:]
        array = re.fullmatch(r"(\w+)\[[@*]\]", inner)
        if array and array.group(1) in self.arrays:
            return " ".join(self.arrays[array.group(1)])
        name, marker, default = inner, "", ""
        found = re.fullmatch(r"(\w+)(:?[-=])(.*)", inner, re.DOTALL)
        if found:
            name, marker, default = found.groups()
        if self.variables.get(name) or (name in self.variables and marker[:1] != ":"):
            return self.variables[name]
        if marker.endswith("="):
            self.assign(name, default)
        return default if marker else written

    def _sum(self, written: str) -> str:
        inner = re.sub(r"\$\{(\w+)\}|\$(\w+)", r"\1\2", written[3:-2])
        known = re.sub(
            r"[A-Za-z_]\w*", lambda name: self.variables.get(name.group(), name.group()), inner
        )
        if not _SUM.fullmatch(known):
            return written
        try:
            result = _evaluate(ast.parse(known.strip(), mode="eval").body, self.floors)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return written
        return str(result)


def commands_of(name: str, text: str, variables: Mapping[str, str] | None = None) -> list[Command]:
    """Return the commands of a script, one after the other, whatever surrounds them.

    Those in the text that `bash -c` is given are among them, each with the words before the bash.

    Parameters
    ----------
    name : str
        Of the script, for messages.
    text : str
    variables : mapping of str to str, optional
        Those that are set when it begins.

    Raises
    ------
    ConfigError
        A quote is not closed.
    """
    # Two, so that a last line that ends in a backslash is finished too.
    return list(_all_commands(name, text, variables or {}, _DEEPEST))


def _all_commands(
    name: str, text: str, variables: Mapping[str, str], deepest: int
) -> Iterator[Command]:
    for command in _commands(_Reader(name, dict(variables)), text + "\n\n"):
        yield from _within_shells(name, command, deepest)


def _within_shells(name: str, command: Command, deepest: int) -> Iterator[Command]:
    words = command.words
    at = next((i for i, word in enumerate(words) if PurePath(word).name in _SHELLS), None)
    option = None if at is None else next((i for i in (at + 1, at + 2) if _is_text(words, i)), None)
    if at is None or option is None or not deepest:
        yield command
        return
    for inner in _all_commands(name, words[option + 1], command.environment, deepest - 1):
        yield replace(
            inner,
            words=(*words[:at], *inner.words),
            line=command.line,
            floors=(*command.floors, *inner.floors),
            undecided=command.undecided | inner.undecided,
        )


def _is_text(words: Sequence[str], index: int) -> bool:
    """Say whether an option of a shell, perhaps among others (`-lc`), announces its commands."""
    return index + 1 < len(words) and re.fullmatch(r"-[a-z]*c", words[index]) is not None


def _commands(reader: _Reader, text: str) -> Iterator[Command]:
    position, line, started = 0, 1, 1
    while position < len(text):
        if text[position] == "#" and reader.word is None:
            position = text.index("\n", position)
            continue
        found = _TOKEN.match(text, position)
        if found is None:
            msg = f"{reader.name}: line {line} cannot be read"
            raise ConfigError(msg)
        kind = found.lastgroup or "plain"
        piece = found.group(kind)
        if kind == "plain" and piece in {"'", '"', "`"}:
            msg = f"{reader.name}: the quote {piece} of line {line} is not closed"
            raise ConfigError(msg)
        if kind == "end" and reader.array is None:
            reader.finish_word()
            yield from _finish(reader, started)
            reader.after = piece if piece in {"&&", "||"} else ""
            started = line + piece.count("\n")
        else:
            _take(reader, kind, piece)
        line += found.group().count("\n")
        position = found.end()


def _take(reader: _Reader, kind: str, piece: str) -> None:
    if kind in {"joined", "blank", "end", "redirect"}:
        reader.finish_word()
    elif kind == "open" and reader.word and (found := _ASSIGNMENT.fullmatch(reader.word)):
        # NAME=( or NAME+=( begins an array; what it held so far is taken up again.
        reader.array = found[1]
        reader.words[:] = reader.arrays.get(found[1], []) if found[2] else []
        reader.word = None
    elif kind == "close" and reader.array is not None:
        reader.finish_word()
        reader.arrays[reader.array] = reader.words[:]
        reader.words.clear()
        reader.array = None
    elif kind in {"open", "close"}:
        reader.finish_word()
    elif kind in {"variable", "arithmetic"}:
        if reader.word is not None and _ASSIGNMENT.fullmatch(reader.word) and not reader.words:
            reader.add(reader.expand(piece))
        else:
            reader.add_split(reader.expand(piece))
    elif kind == "double":
        inner = reader.expand(re.sub(r"\\\n", "", piece))
        if re.fullmatch(r"\$\{\w+\[@\]\}", piece):
            # The elements of an array stay words of their own inside double quotes.
            reader.add_split(inner)
        else:
            reader.add(re.sub(r'\\(["\\$`])', r"\1", inner))
    else:
        reader.add(piece)


def _finish(reader: _Reader, line: int) -> Iterator[Command]:
    words = reader.words[:]
    environment: dict[str, str] = {}
    reader.words.clear()
    if words and words[0] in _WITHIN:
        words = words[1:]
    if words and words[0] in _OPEN:
        reader.depth += 1
        if words[0] in {"for", "select"} and len(words) > 1:
            reader.variables[words[1]] = f"${words[1]}"
    elif words and words[0] in _CLOSE:
        reader.depth = max(reader.depth - 1, 0)
    if words and words[0] in {"export", "local", "readonly", "declare", "typeset"}:
        words = words[1:]
        while words and words[0].startswith("-"):
            words = words[1:]
    while words and (found := _ASSIGNMENT.fullmatch(words[0])):
        name, adds, value = found.groups()
        before = environment.get(name, reader.variables.get(name, ""))
        environment[name] = before + value if adds else value
        words = words[1:]
    if words:
        yield Command(
            tuple(words),
            line,
            {**reader.variables, **environment},
            tuple(reader.floors),
            frozenset(reader.undecided),
        )
    else:
        for name, value in environment.items():
            reader.assign(name, value)


def _evaluate(node: ast.expr, floors: list[str]) -> int:
    """Return what a shell makes of a sum of ints."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, floors)
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATIONS:
        raise ValueError
    left, right = _evaluate(node.left, floors), _evaluate(node.right, floors)
    if max(left.bit_length(), right.bit_length()) > 64:
        raise ValueError
    result = _OPERATIONS[type(node.op)](left, right)
    if isinstance(node.op, ast.Div) and left % right:
        floors.append(f"{left} / {right} = {result}, remainder {left - result * right}")
    return result


def _divide(left: int, right: int) -> int:
    """Divide as a shell does: towards zero."""
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.Mod: lambda left, right: left - _divide(left, right) * right,
}
