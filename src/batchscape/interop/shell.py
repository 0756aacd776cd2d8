"""The commands of a launch script, by tree-sitter's grammar of bash, with what variables hold.

Nothing is executed. What only running the script would tell (what a command prints, variables of
the environment) stays in the words as it is written, and so does what control flow decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from batchscape.errors import ConfigError

if TYPE_CHECKING:
    from tree_sitter import Node

__all__ = ["ShellCommand", "commands_of"]

_FLOW = frozenset(
    {
        *("if_statement", "case_statement", "while_statement"),
        *("for_statement", "c_style_for_statement", "function_definition", "subshell"),
    }
)
"""What decides whether, how often or where its commands run."""
_BLOCKS = frozenset(
    {
        *_FLOW,
        *("program", "redirected_statement", "pipeline", "negated_command", "compound_statement"),
        *("do_group", "elif_clause", "else_clause", "case_item"),
        *("variable_assignments", "declaration_command"),
    }
)
"""What holds commands or assignments."""
_ASSIGNMENTS = frozenset({"variable_assignment", "variable_assignments", "declaration_command"})
_VARIABLES = frozenset({"simple_expansion", "expansion"})
_DEFAULTS = frozenset({":-", "-", ":=", "="})
_BARE = re.compile(r"(?<!\\)\$([A-Za-z_]\w*|\d)")
_BLANKS = re.compile(r"[ \t\n]+")
_NO_BREAK = "\N{NO-BREAK SPACE}"
"""A blank of a command that is not run: it ends no word."""
_ALL = re.compile(r'"\$\{(\w+)\[@\]\}"')
"""All elements of an array, each of them a word."""
_HELD = re.compile(r"\$\{?(\w+)(?:\[[@*]\])?\}?")
"""A word that is a variable of unknown value and nothing else."""


@dataclass(frozen=True)
class ShellCommand:
    """One command as it would be run."""

    words: tuple[str, ...]
    line: int
    variables: Mapping[str, str] = field(default_factory=dict)
    """Known when it starts, with those put in front of it."""
    floors: tuple[str, ...] = ()
    """Divisions of the script that leave a remainder, which a shell drops."""
    decided: Mapping[str, str] = field(default_factory=dict)
    """By variable, the control flow that decides what it holds: `the if of line 3`."""
    several: frozenset[str] = frozenset()
    """Of these, the ones that may be several words."""

    @property
    def undecided(self) -> str | None:
        """A word of which control flow decides even how many words it is."""
        found = ((word, _HELD.fullmatch(word)) for word in self.words)
        return next((word for word, held in found if held and held[1] in self.several), None)


def commands_of(
    name: str, text: str, variables: Mapping[str, str] | None = None
) -> list[ShellCommand]:
    """Return the commands of a script, one after the other, whatever surrounds them.

    In place of `bash -c TEXT` stand the commands of the text, with the words before the bash.

    Parameters
    ----------
    name : str
        Of the script, for messages.
    variables : mapping of str to str, optional
        Those that are set when it begins.

    Raises
    ------
    ConfigError
        A line is none of bash.
    """
    script = _Script(dict(variables or {}))
    script.read(name, text)
    return [inner for command in script.commands for inner in _within_shell(name, command)]


def _within_shell(name: str, command: ShellCommand) -> list[ShellCommand]:
    words = command.words
    at = next((i for i, word in enumerate(words) if PurePath(word).name in {"bash", "sh"}), None)
    if at is None or len(words) < at + 3 or not re.fullmatch(r"-[a-z]*c", words[at + 1]):
        return [command]
    script = _Script(
        dict(command.variables), [*command.floors], dict(command.decided), set(command.several)
    )
    text = words[at + 2].replace(_NO_BREAK, " ")
    script.read(f"{name}: {words[at]} -c in line {command.line}", text)
    return [
        replace(inner, words=(*words[:at], *inner.words), line=command.line)
        for inner in script.commands
    ]


@dataclass
class _Script:
    """The walk over one script."""

    variables: dict[str, str]
    floors: list[str] = field(default_factory=list)
    decided: dict[str, str] = field(default_factory=dict)
    several: set[str] = field(default_factory=set)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    flow: str = ""
    """Control flow around what is being read."""
    commands: list[ShellCommand] = field(default_factory=list)

    def read(self, name: str, text: str) -> None:
        import tree_sitter
        import tree_sitter_bash

        language = tree_sitter.Language(tree_sitter_bash.language())
        # The grammar takes the last of `$A/$B.c` for a dollar and a word; with braces it does not.
        braced = _BARE.sub(r"${\1}", text)
        root = tree_sitter.Parser(language).parse(f"{braced}\n\n".encode()).root_node
        if root.has_error:
            msg = f"{name}: {_error(root)}; give the command with its values after --"
            raise ConfigError(msg)
        self._walk(root)

    def _walk(self, node: Node) -> None:
        around = self.flow
        if node.type == "command":
            self._command(node)
        elif node.type == "variable_assignment":
            self._assignment(node)
        elif node.type == "list":
            first, operator, last = node.children[0], node.children[1], node.children[-1]
            self._walk(first)
            if operator.type != "&&" or not _only_assigns(first):
                self.flow = around or _named(operator)
            self._walk(last)
        elif node.type in _BLOCKS:
            if node.type in _FLOW:
                self.flow = around or _named(node)
            if node.type == "for_statement" and (variable := node.child_by_field_name("variable")):
                values = (_raw(value) for value in node.children_by_field_name("value"))
                self._assign(_raw(variable), *(value.strip("\"'") for value in values))
            for child in node.named_children:
                self._walk(child)
        self.flow = around

    def _command(self, node: Node) -> None:
        parts = [*node.children_by_field_name("name"), *node.children_by_field_name("argument")]
        if node.parent is not None and node.parent.type == "redirected_statement":
            # The grammar counts words behind `> FILE` to the redirect.
            for redirect in node.parent.children_by_field_name("redirect"):
                parts += redirect.children_by_field_name("destination")[1:]
        own: dict[str, str] = {}
        for child in node.named_children:
            if child.type == "variable_assignment":
                between = slice(
                    child.end_byte - node.start_byte, parts[0].start_byte - node.start_byte
                )
                if re.search(rb"(?<!\\)\n", (node.text or b"")[between]):
                    # The grammar counts `A=1 B=2` on a line of their own to the next command.
                    self._assignment(child)
                elif value := child.child_by_field_name("value"):
                    own[_raw(child.children[0])] = self._text(value)
        words = [word for part in parts for word in self._words(part)]
        self.commands.append(
            ShellCommand(
                tuple(words),
                parts[0].start_point.row + 1,
                self.variables | own,
                tuple(self.floors),
                dict(self.decided),
                frozenset(self.several),
            )
        )

    def _assignment(self, node: Node) -> None:
        name, value = _raw(node.children[0]), node.child_by_field_name("value")
        adds = node.children[1].type == "+="
        if value is None:
            self._assign(name, "")
        elif value.type != "array":
            text = self._text(value)
            self._assign(name, self.variables.get(name, "") + text if adds else text)
        elif self.flow:
            self._assign(name, _raw(value))
        else:
            unknown = [f"${{{name}[@]}}"] if name in self.decided else []
            before = self.arrays.get(name, unknown) if adds else []
            self.arrays[name] = before + [
                word
                for child in value.named_children
                if child.type != "comment"
                for word in self._words(child)
            ]

    def _assign(self, name: str, *values: str) -> None:
        """Set a variable; where control flow decides, it is not known."""
        if not self.flow:
            (self.variables[name],) = values
            return
        self.decided[name] = self.flow
        before = " ".join(self.arrays.pop(name, [])) or self.variables.get(name, "")
        if any(_BLANKS.search(text) or text.startswith(("-", "(")) for text in (before, *values)):
            self.several.add(name)
        self.variables[name] = f"${{{name}}}"

    def _words(self, node: Node) -> list[str]:
        """Return the words that one of the script becomes: a variable may hold several, or none."""
        if node.type == "command_name":
            node = node.children[0]
        words = [""]
        is_quoted = False
        for part in node.children if node.type == "concatenation" else [node]:
            array = _ALL.fullmatch(_raw(part))
            if array and array[1] in self.arrays:
                pieces = self.arrays[array[1]] or [""]
            elif part.type in _VARIABLES:
                pieces = _BLANKS.split(self._text(part))
            else:
                pieces = [self._text(part)]
                is_quoted |= part.type in {"string", "raw_string"}
            words[-1] += pieces[0]
            words += pieces[1:]
        return [word for word in words if word] or ([""] if is_quoted else [])

    def _text(self, node: Node) -> str:
        """Return what a piece of a word becomes; what is not known stays as it is written."""
        readers: dict[str, Callable[[Node], str]] = {
            "concatenation": lambda node: "".join(map(self._text, node.children)),
            "raw_string": lambda node: _raw(node)[1:-1],
            "string": self._string,
            "simple_expansion": self._value,
            "expansion": self._value,
            "arithmetic_expansion": self._sum,
            "command_substitution": _unknown,
        }
        reader = readers.get(node.type)
        return re.sub(r"\\(.)", r"\1", _raw(node)) if reader is None else reader(node)

    def _string(self, node: Node) -> str:
        """Return what stands between double quotes."""
        raw = node.text or b""
        pieces, at = [], 1
        for child in node.named_children:
            if child.type != "string_content":
                # Blanks in front of a variable are part of its node.
                begin = child.end_byte - node.start_byte - len((child.text or b"").lstrip())
                pieces += [_unescaped(raw[at:begin]), self._text(child)]
                at = child.end_byte - node.start_byte
        return "".join([*pieces, _unescaped(raw[at:-1])])

    def _value(self, node: Node) -> str:
        raw = _raw(node).lstrip()
        array = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", raw)
        if array and array[1] in self.arrays:
            return " ".join(self.arrays[array[1]])
        name = _raw(node.children[1])
        operator = node.child_by_field_name("operator")
        how = "" if operator is None else operator.type
        if not re.fullmatch(r"\w+", name) or how not in {"", *_DEFAULTS}:
            return _unknown(node)
        known = self.variables.get(name)
        if known or (known is not None and not how.startswith(":")):
            return known
        if not how:
            return _unknown(node)
        default = "".join(map(self._text, node.children[3:-1]))
        if how.endswith("="):
            self._assign(name, default)
        return default

    def _sum(self, node: Node) -> str:
        try:
            return str(self._number(node.named_children[0]))
        except (ValueError, ZeroDivisionError, IndexError):
            return _unknown(node)

    def _number(self, node: Node) -> int:
        """Return what an expression comes to; ValueError: this is not known."""
        if node.type == "parenthesized_expression":
            return self._number(node.named_children[0])
        if node.type != "binary_expression":
            raw = _raw(node)
            text = self.variables.get(raw, raw) if raw.isidentifier() else self._text(node)
            if not re.fullmatch(r"0|-?[1-9]\d{0,17}", text):
                raise ValueError
            return int(text)
        left, right = self._number(node.children[0]), self._number(node.children[-1])
        operator = node.children[1].type
        if operator == "+":
            return left + right
        if operator == "-":
            return left - right
        if operator == "*":
            return left * right
        if operator != "/" or left < 0 or right < 0:
            raise ValueError
        quotient, remainder = divmod(left, right)
        if remainder:
            self.floors.append(f"{left} / {right} = {quotient}, remainder {remainder}")
        return quotient


def _raw(node: Node) -> str:
    return (node.text or b"").decode()


def _unknown(node: Node) -> str:
    """Return what only running it would tell, as it is written."""
    return _BLANKS.sub(_NO_BREAK, _raw(node).strip())


def _unescaped(inside: bytes) -> str:
    """Return text of double quotes as the shell takes it."""
    return re.sub(r'\\(["\\$`])', r"\1", inside.decode().replace("\\\n", ""))


def _named(node: Node) -> str:
    """Return how a message names control flow: by its first word, and its line."""
    word = {"function_definition": "function", "subshell": "( )"}.get(node.type)
    first = node.children[0] if node.children else node
    return f"the {word or first.type} of line {node.start_point.row + 1}"


def _only_assigns(node: Node) -> bool:
    if node.type == "list":
        return node.children[1].type == "&&" and all(map(_only_assigns, node.named_children))
    return node.type in _ASSIGNMENTS


def _error(node: Node) -> str:
    """Say where the first thing is that the grammar has no rule for."""
    while wrong := [child for child in node.children if child.has_error]:
        node = wrong[0]
    if node.is_missing and node.parent is not None:
        return f"what begins in line {node.parent.start_point.row + 1} has no closing {node.type}"
    first, last = node.start_point.row + 1, node.end_point.row + 1
    lines = f"line {first}" if last <= first else f"something in lines {first} to {last}"
    near = _raw(node).strip().partition("\n")[0][:40]
    return f"{lines} cannot be read as bash, at {near}"
