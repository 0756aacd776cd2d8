"""The commands of a launch script without control flow, and the values of its variables.

Nothing is executed. The reader knows assignments, `export`, arrays, `${NAME:-default}`, `$((...))`
of whole numbers, quotes and continued lines: it puts values in, and shlex cuts the words. Values
that only running the script would tell (the output of a command, variables of the environment)
stay as they are written. Control flow, and any other command that may set a variable, is refused
with its line.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile

from batchscape.errors import ConfigError

_REFUSED = re.compile(
    r"^(?:if|then|elif|else|fi|for|while|until|do|done|case|esac|select|function|coproc"
    r"|[{}!]|\[\[|source|\.|eval|read|mapfile|readarray|getopts|let|readonly|declare|typeset|local"
    r"|printf -v)(?= )|^set(?= [^-+ ]|(?: -\S+)*? -- \S)"
    r"|^\w+\[.*?\]\+?=|(?<![^ /])(?:ba|z|da|k)?sh(?: \S+)*? -[a-z]*c(?= )"
)
"""Control flow, commands that may set any variable, and shells that are given their commands."""
_SETS_UP = re.compile(
    r"(?:source|\.) (?:[^ ]*/)?(?:activate|(?:conda|mamba|modules?|setvars)\.sh|(?:bash)?\.?bashrc"
    r"|\.(?:bash_)?profile|(?<= /etc/)profile(?:\.d/[^ /]+)?) "
    r"|eval \$\(\S*(?:conda|mamba)\b['\"]?\s"
)
"""Setting up programs does not concern the batch."""
_ADVICE = "give the command with its values: batchscape check-config -- COMMAND"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)

_ROUND, _CURLY = r"\((?!)\)", r"\{(?!)\}"
for _ in range(5):
    _ROUND = rf"""\((?>[^()'"`\\#]|(?<!\s)#|#[^\n]*|\\.|'[^']*'|"(?:[^"\\]|\\.)*+"|{_ROUND})*+\)"""
    _CURLY = rf"\{{(?>[^{{}}]|{_CURLY})*+\}}"
_VALUE = rf"(?>\${_ROUND}|\${_CURLY}|\$[A-Za-z_]\w*+|\$[\d@*#?$!-]|`[^`]*+`)"
_TEXT = rf'(?>\\.|[^"\\`$]|{_VALUE}|\$(?![({{]))*+'
_ARRAY = rf"(?<=[A-Za-z0-9_+]=){_ROUND}"
_ATOM = (
    rf"""(?:\\[^\n]|'[^']*+'|"{_TEXT}"|{_VALUE}|{_ARRAY}|[^\s\\'"`$;&|<>()]|[^\S \t\n]"""
    r"|\$(?![({]))"
)
_BESIDE = r"[ \t]|\\\n|(?<![^\s;&|(])#[^\n]*+|(?:(?<!\S)\d)?&?(?:>>?|<(?!<))&?[ \t]*+" rf"{_ATOM}*+"
"""Blanks, comments, redirections."""
_STATEMENT = re.compile(rf"(?:{_BESIDE}|{_ATOM})*+", re.DOTALL)
_JOINT = re.compile(r"\n|;|&&|\|\||\|&?|&")
_WORD = re.compile(rf"{_BESIDE}|({_ATOM}++)", re.DOTALL)
_PIECE = re.compile(
    rf"""\\.|'[^']*+'|"\$\{{(?P<elements>\w+)\[@\]\}}"|"(?P<text>{_TEXT})"|(?P<value>{_VALUE})"""
    rf"|(?P<array>{_ARRAY})",
    re.DOTALL,
)
_IN_TEXT = re.compile(rf'\\\n|\\(?P<escaped>[$`"\\])|(?P<value>{_VALUE})', re.DOTALL)
_VARIABLE = re.compile(r"(\w+)(\[[@*]\])?(?:(:?-)(.*))?", re.DOTALL)
_BLANKS = re.compile(r"[ \t\n]+")
_NO_BREAK = "\N{NO-BREAK SPACE}"
"""Replaces the blanks of a command that is not run, so that they end no word."""
_ELEMENT_MARK = "\ue0ff"
"""Stands before each element of an array."""
_QUOTES = {ord(one): 0xE000 + ord(one) for one in "'\"\\"}
"""Replaces what is part of a value by what shlex takes for letters."""
_HIDDEN = _QUOTES | {ord(one): 0xE000 + ord(one) for one in " \t\n\r"}
_SHOWN = {hidden: one for one, hidden in _HIDDEN.items()}


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
    name: str, text: str, variables: Mapping[str, str] | None = None, *, unknown: str = "(?!)"
) -> list[ShellCommand]:
    """Return the commands of a script; `variables` are set when it begins.

    Names that match `unknown` are set too, and what to is not known: their defaults do not count.
    """
    return list(_Script(name, dict(variables or {}), unknown).read(text + "\n\n"))


def is_unknown(word: str) -> bool:
    """Whether a word has a value that only running its script would tell."""
    return bool(re.search(r"\$[\w({]|`", word))


def _without_prefix(words: list[str]) -> list[str]:
    """Return a command without `builtin` and `command`, where these run it."""
    if words[:1] not in (["builtin"], ["command"]) or words[1:2] in (["-v"], ["-V"]):
        return words
    return _without_prefix([*dropwhile(lambda word: word.startswith("-"), words[1:])])


@dataclass
class _Script:
    """Variables and remainders while one script is read; arrays are variables too."""

    name: str
    variables: dict[str, str]
    unknown: str
    """Pattern of names whose defaults do not count."""
    floors: list[str] = field(default_factory=list)
    line: int = 1

    def read(self, text: str) -> Iterator[ShellCommand]:
        """Carry out assignments, and yield commands."""
        at, before = 0, ""
        while at < len(text):
            statement = _STATEMENT.match(text, at)
            end = at if statement is None else statement.end()
            words = [word for word in _WORD.finditer(text, at, end) if word[1]]
            joint = _JOINT.match(text, end)
            self.line = 1 + text.count("\n", 0, words[0].start() if words and joint else end)
            if joint is None:
                brackets = {"(": "(", ")": ")", "<": "<<"}
                raise self._refusal(brackets.get(text[end], f"{text[end]} without its end"))
            if words:
                # `&&`, `||` and `|` on either side, or `&` behind it, make it uncertain.
                beside = (before + joint[0]).strip("\n;")
                yield from self._statement([word[1] for word in words], beside)
            at, before = joint.end(), "" if joint[0] == "&" else joint[0]

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self.name}: line {self.line} has {what}, and a script is read that has assignments, "
            f"#SBATCH lines and one launch command; {_ADVICE}"
        )

    def _statement(self, texts: Sequence[str], beside: str) -> Iterator[ShellCommand]:
        """Carry out assignments, or yield the command; what it is joined by makes it uncertain."""
        heads = list(takewhile(_ASSIGNMENT.match, texts))
        rest = texts[len(heads) :]
        words = [word for text in rest for word in self._words(text, is_whole=rest[0] == "export")]
        words = _without_prefix(words)
        before = dict(self.variables)
        for head in heads:
            self._assign(*self._words(head, is_whole=True))
        if not words:
            if heads and beside:
                raise self._refusal(f"an assignment beside {beside}")
            return
        variables, self.variables = self.variables, before
        command = " ".join([*words, ""])
        refused = _REFUSED.search(command)
        if refused and not _SETS_UP.match(command):
            raise self._refusal(refused[0])
        if words[0] not in {"export", "unset"}:
            yield ShellCommand(tuple(words), self.line, variables, tuple(self.floors))
            return
        if beside or any(is_unknown(word.partition("=")[0]) for word in words):
            raise self._refusal(command[:40].strip())
        for word in words[1:]:
            if words[0] == "unset":
                self.variables.pop(word, None)
            elif "=" in word:
                self._assign(word)

    def _assign(self, text: str) -> None:
        name, value = re.split(r"\+?=", text, maxsplit=1)
        is_appended = text.startswith(f"{name}+=")
        self.variables[name] = self.variables.get(name, "") * is_appended + value

    def _words(self, text: str, *, is_whole: bool = False) -> list[str]:
        """Return the words that one word of the script becomes.

        Where it is whole, a blank in an unquoted value does not split it.
        """
        hiding_table = _HIDDEN if is_whole else _QUOTES

        def expand_piece(piece: re.Match[str]) -> str:
            if piece["value"]:
                return self._value(piece["value"]).translate(hiding_table)
            if piece["text"]:
                return f'"{_IN_TEXT.sub(expand_quoted, piece["text"])}"'
            if piece["array"]:
                element_words = filter(None, _WORD.findall(piece["array"][1:-1]))
                elements = [element for each in element_words for element in self._words(each)]
                return "".join(_ELEMENT_MARK + element.translate(_HIDDEN) for element in elements)
            if piece["elements"] in self.variables:
                # `"${NAME[@]}"`: each element is a word.
                _, *elements = self.variables[piece["elements"]].split(_ELEMENT_MARK)
                return " ".join(f'"{element.translate(_HIDDEN)}"' for element in elements)
            return piece[0]

        def expand_quoted(piece: re.Match[str]) -> str:
            value = self._value(piece["value"]) if piece["value"] else piece["escaped"] or ""
            return value.translate(_HIDDEN)

        # A carriage return is a blank for shlex, and a letter for a shell.
        hidden_text = _PIECE.sub(expand_piece, text).replace("\r", "\r".translate(_HIDDEN))
        return [word.translate(_SHOWN) for word in shlex.split(hidden_text)]

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
        name, elements, how, default = variable.groups()
        value = self.variables.get(name)
        if how and value is None and re.match(self.unknown, name):
            return unknown
        if how and (value is None or (not value and how == ":-")):
            return " ".join(word for text in _WORD.findall(default) for word in self._words(text))
        if value is None or bool(elements) != value.startswith(_ELEMENT_MARK):
            # With braces, so that the next letters are no part of the name.
            return unknown if elements else f"${{{name}}}"
        return value[1:].replace(_ELEMENT_MARK, " ") if elements else value

    def _sum(self, text: str) -> str | None:
        """Evaluate products and quotients of whole numbers; None where the value is not known."""
        if re.search(r"\+\+|--|[^=!<>]=(?!=)", text):
            raise self._refusal(f"$(({text}))")
        # `$NAME` is replaced by its text, and NAME by what its text comes to.

        def operand(name: re.Match[str]) -> str:
            value = self.variables.get(name[2], name[2])
            return value if name[1] else f"({value})"

        # A comment of Python is a base of a shell: 8#20.
        plain = re.sub(r"(\$?)\{?([A-Za-z_]\w*)\}?", operand, text).replace("#", "?")
        try:
            return str(self._number(ast.parse(plain.strip().replace("/", "//"), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, MemoryError, RecursionError):
            return None

    def _number(self, node: ast.expr) -> int:
        """Evaluate a tree, and note divisions with a remainder; ValueError for other operations."""
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult | ast.FloorDiv):
            raise ValueError
        first, second = self._number(node.left), self._number(node.right)
        if isinstance(node.op, ast.Mult):
            return first * second
        quotient, remainder = divmod(first, second)
        if remainder:
            self.floors.append(f"{first} / {second} = {quotient}, remainder {remainder}")
        return quotient
