"""The commands of a launch script without control flow, and the values of its variables.

Nothing is executed. The reader knows assignments, `export`, arrays, `${NAME:-default}`, `$((...))`
of whole numbers, quotes and continued lines. Values that only running the script would tell (the
output of a command, variables of the environment) stay in the words as they are written. Control
flow, and any other command that may set a variable, is refused with its line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from pathlib import PurePath

from batchscape.errors import ConfigError


def listed_words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


_REFUSED = listed_words(
    """
    if then elif else fi for while until do done case esac select function { } [[ ! coproc
    source . eval read mapfile readarray getopts let declare typeset local
    """
)
"""Control flow, and commands that may set any variable."""
_SETUP_FILES = re.compile(r"activate|conda|mamba|profile|bashrc|modules?\.sh|setvars\.sh")
"""Files that are sourced to set up programs; they do not concern the batch."""
_SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh"})
_ADVICE = "give the command with its values: batchscape check-config -- COMMAND"
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: int.__add__,
    ast.Sub: int.__sub__,
    ast.Mult: int.__mul__,
}

_ROUND, _CURLY = r"\((?!)\)", r"\{(?!)\}"
for _ in range(5):
    _ROUND = (
        rf"""\((?>[^()'"`\\\#]|(?<!\s)\#|\#[^\n]*|\\.|'[^']*'|"(?:[^"\\]|\\.)*+"|{_ROUND})*+\)"""
    )
    _CURLY = rf"\{{(?>[^{{}}]|{_CURLY})*+\}}"
_VALUE = rf"(?>\${_ROUND}|\${_CURLY}|\$[A-Za-z_]\w*+|\$[\d@*\#?$!-]|`[^`]*+`)"
_TOKEN = re.compile(
    rf"""
    (?P<continued>\\\n) | \\(?P<escaped>.) | '(?P<quoted>[^']*+)'
    | "(?P<text>(?>\\.|[^"\\`$]|{_VALUE}|\$(?![({{]))*+)"
    | (?P<value>{_VALUE}) | (?<=[A-Za-z0-9_+]=)(?P<array>{_ROUND})
    | (?P<redirection>(?:(?<!\S)\d)?&?[<>]++&?[ \t]*+) | (?P<joint>\n|;|&&|\|\||\|&?|&)
    | (?P<blank>[ \t]++|(?<![^\s;&|(])\#[^\n]*+) | (?P<bracket>[()])
    | (?P<plain>(?>[^\s'"`\\$;&|<>()]|\$(?![({{])|[^\S \t\n])(?>[^\s'"`\\$;&|<>()\#]|(?<!\s)\#)*+)
    """,
    re.VERBOSE | re.DOTALL,
)
_IN_TEXT = re.compile(rf'\\\n|\\([$`"\\])|(?P<value>{_VALUE})', re.DOTALL)
_VARIABLE = re.compile(r"(\w+)(\[[@*]\])?(?:(:?-)(.*))?", re.DOTALL)
_BLANKS = re.compile(r"[ \t\n]+")
_NO_BREAK = "\N{NO-BREAK SPACE}"
"""Replaces the blanks of a command that is not run, so that they end no word."""
_EMPTY = "\ue003"
"""Stands beside each quotation, so that an empty one is a word too."""
_HIDDEN = str.maketrans(" \t\n", "\ue000\ue001\ue002")
_UNHIDDEN = {0xE000: " ", 0xE001: "\t", 0xE002: "\n", 0xE003: None}

Word = list[re.Match[str]]
"""Tokens with no blank between them."""


@dataclass(frozen=True)
class ShellCommand:
    """One command as it would be run."""

    words: tuple[str, ...]
    line: int
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that are known when it starts, with those in front of the command."""
    floors: tuple[str, ...] = ()
    """Divisions of the script that leave a remainder, which a shell drops."""


def commands_of(
    name: str, text: str, variables: Mapping[str, str] | None = None
) -> list[ShellCommand]:
    """Return the commands of a script; `variables` are set when it begins."""
    return list(_Script(name, dict(variables or {})).read(text + "\n\n"))


def is_unknown(word: str) -> bool:
    """Whether a word has a value that only running its script would tell."""
    return bool(re.search(r"\$[\w({]|`", word))


def _words_of(tokens: Iterable[re.Match[str]]) -> list[Word]:
    """Return the words between blanks, without comments and redirections."""
    words: list[Word] = [[]]
    for token in tokens:
        if token.lastgroup in {"blank", "joint", "redirection"}:
            words.append([token] if token.lastgroup == "redirection" else [])
        elif token.lastgroup != "continued":
            words[-1].append(token)
    return [word for word in words if word and word[0].lastgroup != "redirection"]


def _assigns(word: Word) -> bool:
    return bool(_ASSIGNMENT.match(word[0][0]))


@dataclass
class _Script:
    """The variables, arrays and remainders while one script is read."""

    name: str
    variables: dict[str, str]
    arrays: dict[str, list[str]] = field(default_factory=dict)
    floors: list[str] = field(default_factory=list)
    line: int = 1

    def read(self, text: str) -> Iterator[ShellCommand]:
        """Carry out assignments, and yield commands."""
        statement: Word = []
        joint_before = "\n"
        for token in self._tokens(text):
            if token.lastgroup != "joint":
                statement.append(token)
                continue
            words, joint = _words_of(statement), token[0]
            self.line = 1 + text.count("\n", 0, (words[0][0] if words else token).start())
            for part in statement:
                is_here_document = part.lastgroup == "redirection" and "<<" in part[0]
                if part.lastgroup == "bracket" or is_here_document:
                    raise self._refusal(part[0])
            if words:
                # `&&`, `||` and `|` on either side, or `&` behind it, make it uncertain.
                is_joined = joint_before not in {"\n", ";", "&"}
                uncertain = joint_before if is_joined else joint
                yield from self._statement(words, "" if uncertain in {"\n", ";"} else uncertain)
            statement, joint_before = [], joint

    def _tokens(self, text: str) -> Iterator[re.Match[str]]:
        at = 0
        while at < len(text):
            token = _TOKEN.match(text, at)
            if token is None:
                line = 1 + text.count("\n", 0, at)
                what = "$" + text[at + 1] if text[at] == "$" else text[at]
                msg = (
                    f"{self.name}: what {what} begins in line {line} is not closed, or nested too "
                    f"deeply; {_ADVICE}"
                )
                raise ConfigError(msg)
            at = token.end()
            yield token

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self.name}: line {self.line} has {what}, and a script is read that has assignments, "
            f"#SBATCH lines and one launch command; {_ADVICE}"
        )

    def _statement(self, statement: list[Word], joint: str) -> Iterator[ShellCommand]:
        """Carry out assignments, and yield the command; a joint makes it uncertain."""
        heads = list(takewhile(_assigns, statement))
        rest = statement[len(heads) :]
        is_export = bool(rest) and rest[0][0][0] in {"export", "readonly"}
        words: list[str] = []
        for word in rest:
            text = self._text(word)
            split = [text] if is_export and _assigns(word) else _BLANKS.split(text)
            words += [part.translate(_UNHIDDEN) for part in split if part]
        before = dict(self.variables)
        for word in heads:
            self._assign(word)
        if not words:
            if heads and joint:
                raise self._refusal(f"an assignment beside {joint}")
            return
        variables, self.variables = self.variables, before
        yield from self._command(words, variables, joint)

    def _command(
        self, words: list[str], variables: dict[str, str], joint: str
    ) -> Iterator[ShellCommand]:
        sets_up = words[0] in {"source", ".", "eval"} and _SETUP_FILES.search(" ".join(words[1:]))
        is_element = re.match(r"\w+\[.*\]\+?=", words[0]) or words[:2] == ["printf", "-v"]
        if is_element or (words[0] in _REFUSED and not sets_up):
            raise self._refusal(words[0])
        shell = dropwhile(lambda word: PurePath(word).name not in _SHELLS, words)
        if any(re.fullmatch(r"-[a-z]*c", word) for word in shell):
            raise self._refusal("a shell with -c")
        if words[0] not in {"export", "readonly", "unset"}:
            yield ShellCommand(tuple(words), self.line, variables, tuple(self.floors))
            return
        for argument in words[1:]:
            key, equals, value = argument.partition("=")
            if joint or "$" in key:
                raise self._refusal(" ".join(words)[:40])
            if words[0] == "unset":
                self.variables.pop(key, None)
            elif equals:
                self.variables[key] = value

    def _assign(self, word: Word) -> None:
        key, operator, _ = re.split(r"(\+?=)", word[0][0], maxsplit=1)
        is_appended = operator == "+="
        if len(word) > 1 and word[1].lastgroup == "array":
            inner = _words_of(self._tokens(word[1][0][1:-1]))
            texts = [one for each in inner for one in _BLANKS.split(self._text(each)) if one]
            before = self.arrays.get(key, []) if is_appended else []
            self.arrays[key] = [*before, *(text.translate(_UNHIDDEN) for text in texts)]
            return
        text = self._text(word).translate(_UNHIDDEN)[len(key + operator) :]
        self.variables[key] = self.variables.get(key, "") + text if is_appended else text

    def _text(self, word: Iterable[re.Match[str]]) -> str:
        """Expand a word; its quoted blanks are hidden, and blanks of variables end words."""
        text = ""
        for token in word:
            kind, content = token.lastgroup, token[token.lastgroup or 0]
            if kind == "value":
                text += self._value(content)
            elif kind == "text" and (array := re.fullmatch(r"\$\{(\w+)\[@\]\}", content)):
                # `"${NAME[@]}"`: each element is a word.
                elements = self.arrays.get(array[1], [content])
                text += " ".join(_EMPTY + one.translate(_HIDDEN) for one in elements)
            elif kind == "text":
                quoted = _IN_TEXT.sub(
                    lambda part: self._value(part[0]) if part["value"] else part[1] or "",
                    content,
                )
                text += _EMPTY + quoted.translate(_HIDDEN)
            elif kind in {"quoted", "escaped"}:
                text += _EMPTY + content.translate(_HIDDEN)
            elif kind in {"array", "bracket"}:
                raise self._refusal("(")
            elif kind != "continued":
                text += content
        return text

    def _value(self, piece: str) -> str:
        """Expand a substitution; an unknown one stays as it is written."""
        unknown = _BLANKS.sub(_NO_BREAK, piece)
        if piece.startswith("$((") and piece.endswith("))"):
            return self._sum(piece[3:-2]) or unknown
        if assignment := re.match(r"\$\{\w+:?=", piece):
            raise self._refusal(assignment[0])
        variable = _VARIABLE.fullmatch(piece[2:-1] if piece[1] == "{" else piece[1:])
        if not variable:
            return unknown
        key, is_array, how, default = variable.groups()
        if is_array:
            return " ".join(self.arrays[key]) if key in self.arrays else unknown
        value = self.variables.get(key)
        if how and (value is None or (not value and how == ":-")):
            return self._text(self._tokens(default))
        # With braces, so that the next letters are no part of the name.
        return f"${{{key}}}" if value is None else value

    def _sum(self, text: str) -> str | None:
        """Evaluate arithmetic of whole numbers; None where its value is not known."""
        if re.search(r"\+\+|--|[^=!<>]=(?!=)", text):
            raise self._refusal(f"$(({text}))")
        names = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
        plain = names.sub(lambda name: self.variables.get(name[1], name[1]), text)
        try:
            return str(self._number(ast.parse(plain.strip().replace("/", "//"), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, MemoryError, RecursionError):
            return None

    def _number(self, node: ast.expr) -> int:
        """Evaluate whole numbers, and note divisions with a remainder; ValueError for others."""
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if not isinstance(node, ast.BinOp):
            raise ValueError
        first, second = self._number(node.left), self._number(node.right)
        if isinstance(node.op, ast.FloorDiv) and first >= 0 and second >= 0:
            quotient, remainder = divmod(first, second)
            if remainder:
                self.floors.append(f"{first} / {second} = {quotient}, remainder {remainder}")
            return quotient
        if type(node.op) not in _OPERATIONS:
            raise ValueError
        return _OPERATIONS[type(node.op)](first, second)
