"""The commands of a launch script, by tree-sitter's grammar of bash, with what variables hold.

Nothing is executed. What only running the script would tell (what a command prints, variables of
the environment) stays in the words as it is written, and so does what control flow decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        *("for_statement", "c_style_for_statement", "subshell", "pipeline"),
    }
)
"""What decides whether, how often or where its commands run."""
_LOOPS = frozenset({"for_statement", "c_style_for_statement", "while_statement"})
_BRANCHES = frozenset({"elif_clause", "else_clause", "case_item"})
_BLOCKS = frozenset(
    {
        *_FLOW,
        *(
            "program",
            "redirected_statement",
            "heredoc_redirect",
            "negated_command",
            "compound_statement",
        ),
        *("do_group", "elif_clause", "else_clause", "case_item"),
        *("variable_assignments", "declaration_command"),
    }
)
"""What holds commands or assignments."""
_ASSIGNMENTS = frozenset({"variable_assignment", "variable_assignments", "declaration_command"})
_DECLARED = frozenset(
    [
        "string",
        "raw_string",
        "concatenation",
        "simple_expansion",
        "expansion",
        "command_substitution",
    ]
)
"""Words behind `export` that may hold an assignment."""
_VARIABLES = frozenset({"simple_expansion", "expansion"})
_DEFAULTS = frozenset({":-", "-", ":=", "="})
_CHANGED = re.compile(
    r"([A-Za-z_]\w*)\s*(?:\[[^]]*\]\s*)?(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)"
    r"|(?:\+\+|--)([A-Za-z_]\w*)"
)
"""A variable that arithmetic sets."""
_READERS = frozenset({"read", "mapfile", "readarray", "getopts", "unset"})
"""Builtins whose arguments are names of variables that they set."""
_PARAMETERS = frozenset("123456789")
_SURROUNDINGS = frozenset(
    [
        "activate",
        "conda.sh",
        "mamba.sh",
        "bash",
        "modules.sh",
        "setvars.sh",
        "profile",
        ".profile",
        ".bashrc",
        ".bash_profile",
        "bashrc",
    ]
)
"""Sourced to set up programs; they say nothing of the batch."""
_EVERY = ""
"""In place of a name: each variable that is not assigned afterwards."""
_SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh"})
_DEEPEST = 5
_GIVE = "give the command with its values after --"
_BARE = re.compile(r"(?<!\\)\$([A-Za-z_]\w*|\d)")
_BLANKS = re.compile(r"[ \t\n]+")
_WIDE = re.compile("[\u00ff-\U0010ffff]")
_WRITTEN = re.compile("\u00ff([0-9a-f]+)\u00ff")
"""A wide character by its number: the grammar looks them up in a table that ends before them, and
may crash."""
_NO_BREAK = "\N{NO-BREAK SPACE}"
"""A blank of a command that is not run: it ends no word."""
_ALL = re.compile(r'"\$\{(\w+)\[@\]\}"')
"""All elements of an array, each of them a word."""
_HELD = re.compile(r"\$\{?(\w+)(?:\[[@*]\])?\}?")
"""A word that is a variable of unknown value and nothing else."""
_PERHAPS = re.compile(r"\$\{\w+:?\+[\"']?[-$].*\}", re.DOTALL)
"""Options that are there if a variable of unknown value is set."""


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
        """A word of which nothing here tells even how many words it is."""
        for word in self.words:
            held = _HELD.fullmatch(word)
            if (held and held[1] in self.several & self.decided.keys()) or _PERHAPS.fullmatch(word):
                return word
        return None


def commands_of(
    name: str, text: str, variables: Mapping[str, str] | None = None
) -> list[ShellCommand]:
    """Return the commands of a script, one after the other, whatever surrounds them.

    In place of `bash -c TEXT` and `eval TEXT` stand the commands of the text, behind
    the words before it.

    Parameters
    ----------
    name : str
        Of the script, for messages.
    variables : mapping of str to str, optional
        Those that are set when it begins.

    Raises
    ------
    ConfigError
        A line is none of bash, or a shell is told to run what is not known.
    """
    script = _Script(dict(variables or {}))
    try:
        script.read(name, text)
        return [inner for command in script.commands for inner in _within_shell(name, command)]
    except RecursionError:
        msg = f"{name}: nested too deeply for a script; {_GIVE}"
        raise ConfigError(msg) from None


def _within_shell(name: str, command: ShellCommand, depth: int = 0) -> list[ShellCommand]:
    words = command.words
    at = next((i for i, word in enumerate(words) if PurePath(word).name in _SHELLS), None)
    if words[:1] == ("eval",):
        at, text = 0, " ".join(words[1:])
    elif at is None or words[0] == "echo" or (found := _text_of_shell(words[at + 1 :])) is None:
        return [command]
    else:
        text = found
    where = f"{name}: {words[at]}{'' if words[at] == 'eval' else ' -c'} in line {command.line}"
    if depth > _DEEPEST:
        msg = f"{where}: shells within each other, deeper than is read; {_GIVE}"
        raise ConfigError(msg)
    script = _Script(
        dict(command.variables), [*command.floors], dict(command.decided), set(command.several)
    )
    script.read(where, text.replace(_NO_BREAK, " "))
    inside = []
    for inner in script.commands:
        if words[at] != "eval" and inner.words and inner.words[0].startswith(("$", "`")):
            msg = (
                f"{where} runs {inner.words[0]}, which only running the script would tell; {_GIVE}"
            )
            raise ConfigError(msg)
        outer = replace(inner, words=(*words[:at], *inner.words), line=command.line)
        inside += _within_shell(name, outer, depth + 1)
    return inside


def _text_of_shell(words: Sequence[str]) -> str | None:
    """Return what a shell with these words is to run; None where it is a file, or nothing."""
    is_text, index = False, 0
    while index < len(words) and words[index][:1] in {"-", "+"}:
        word = words[index]
        is_text |= bool(re.fullmatch(r"-[A-Za-z]*c[A-Za-z]*", word))
        takes_word = re.fullmatch(r"[-+][A-Za-z]*[oO]|--(rcfile|init-file)", word)
        index += 2 if takes_word else 1
    return words[index] if is_text and index < len(words) else None


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
    functions: dict[str, set[str]] = field(default_factory=dict)
    """By function, the variables that a call may set."""
    commands: list[ShellCommand] = field(default_factory=list)

    def read(self, name: str, text: str) -> None:
        import tree_sitter
        import tree_sitter_bash

        language = tree_sitter.Language(tree_sitter_bash.language())
        # The grammar takes the last of `$A/$B.c` for a dollar and a word; with braces it does not.
        braced = _BARE.sub(r"${\1}", text)
        narrow = _WIDE.sub(lambda found: f"\u00ff{ord(found[0]):x}\u00ff", braced)
        root = tree_sitter.Parser(language).parse(f"{narrow}\n\n".encode()).root_node
        if root.has_error:
            msg = f"{name}: {_error(root)}; {_GIVE}"
            raise ConfigError(msg)
        self._walk(root)

    def _walk(self, node: Node) -> None:
        walkers: dict[str, Callable[[Node], None]] = {
            "command": self._command,
            "variable_assignment": self._assignment,
            "list": self._list,
            "function_definition": self._function,
            **dict.fromkeys(_FLOW, self._flow),
        }
        if node.type in walkers:
            walkers[node.type](node)
        elif node.type == "unset_command" or _is_arithmetic(node):
            self._decide(self._assigned(node), self.flow or _named(node))
        elif node.type in _BLOCKS:
            walk = self._declaration if node.type == "declaration_command" else self._walk
            for child in node.named_children:
                walk(child)

    def _flow(self, node: Node) -> None:
        """Walk what control flow holds: what is set in there is certain up to its end."""
        around = self.flow
        self.flow = around or _named(node)
        assigned = set(self._assigned(node))
        if node.type in _LOOPS:
            # A turn may begin with what the one before it has left.
            self._decide(assigned, self.flow)
        for child in node.named_children:
            if child.type in _BRANCHES or node.type == "pipeline":
                self._decide(assigned, self.flow)
            self._walk(child)
        self._decide(assigned, self.flow)
        self.flow = around

    def _declaration(self, node: Node) -> None:
        """Set what a word behind `export` or `declare` says, whether it is quoted or not."""
        if node.type not in _DECLARED:
            self._walk(node)
            return
        text = self._text(node)
        name, equals, value = text.partition("=")
        if name.isidentifier() and equals and not value.startswith("("):
            self._assign(name, value)
        elif "=" in text or "$" in text or "`" in text:
            who = f"the {_raw(node)[:20]} of line {node.start_point.row + 1}"
            self._decide(self._assigned(node), self.flow or who)

    def _list(self, node: Node) -> None:
        """Walk what `&&` or `||` joins: after the first, nothing is sure to run."""
        operator = node.children[1]
        parts = [node.children[-1]]
        node = node.children[0]
        # What stands behind several && runs after all of them.
        while operator.type == "&&" and node.type == "list" and node.children[1].type == "&&":
            operator = node.children[1]
            parts.insert(0, node.children[-1])
            node = node.children[0]
        self._walk(node)
        is_certain = operator.type == "&&" and _only_assigns(node)
        around, assigned = self.flow, set[str]()
        for part in parts:
            if not is_certain:
                self.flow = around or _named(operator)
                assigned |= set(self._assigned(part))
            self._walk(part)
            is_certain = is_certain and _only_assigns(part)
        self._decide(assigned, around or _named(operator))
        self.flow = around

    def _function(self, node: Node) -> None:
        """Walk the body of a function, which runs nobody knows when behind its definition."""
        around = self.flow
        self.flow = around or _named(node)
        name = _raw(node.child_by_field_name("name") or node)
        own = set(self._assigned(node))
        at, later = node, set[str]()
        while at.parent is not None:
            for sibling in at.parent.named_children:
                if sibling.start_byte >= at.end_byte:
                    later |= set(self._assigned(sibling))
            at = at.parent
        for others in self.functions.values():
            later |= others
        before = (dict(self.variables), dict(self.arrays), dict(self.decided))
        self._decide(_PARAMETERS | later | own, self.flow)
        for child in node.named_children:
            self._walk(child)
        self.variables, self.arrays, self.decided = before
        self.functions[name] = own
        self._decide(own, self.flow)
        self.flow = around

    def _assigned(self, node: Node) -> Iterator[str]:
        """Yield the variables that a piece of a script may set, and note those of several words."""
        raw = _raw(node)
        if node.type == "variable_assignment" or (
            node.type in _DECLARED
            and node.parent is not None
            and node.parent.type == "declaration_command"
        ):
            name, _, value = re.sub("[\"']", "", raw).partition("=")
            found = re.match(r"[A-Za-z_]\w*", name)
            yield self._noted(found[0] if found else _EVERY, value)
        elif node.type == "for_statement" and (variable := node.child_by_field_name("variable")):
            for one in node.children_by_field_name("value") or [variable]:
                yield self._noted(_raw(variable), _raw(one))
        elif node.type == "expansion" and (given := re.match(r"\s*\$\{(\w+):?=(.*)\}", raw)):
            yield self._noted(given[1], given[2])
        elif node.type == "arithmetic_expansion" or _is_arithmetic(node):
            yield from (one[1] or one[2] for one in _CHANGED.finditer(raw))
        elif node.type in {"command", "unset_command"}:
            yield from self._set_by(node)
        for child in node.named_children:
            yield from self._assigned(child)

    def _noted(self, name: str, value: str) -> str:
        if _is_several(value.strip("\"'")):
            self.several.add(name)
        return name

    def _set_by(self, node: Node) -> Iterable[str]:
        """Return the variables that one command may set."""
        parts = [*node.children_by_field_name("name"), *node.children_by_field_name("argument")]
        words = [_raw(part).strip("\"'") for part in parts or node.children]
        while words[1:] and words[0] in {"builtin", "command"}:
            del words[0]
        name, given = words[0], words[1:]
        text = " ".join(given)
        found: Iterable[str] = self.functions.get(name, ())
        if name in _READERS:
            names = (re.match(r"[A-Za-z_]\w*", word) for word in given)
            found = [match[0] for match in names if match] or ["REPLY", "MAPFILE"]
        elif name == "printf" and given[:1] == ["-v"]:
            found = [word.partition("[")[0] for word in given[1:2]]
        elif name == "let":
            found = [one[1] or one[2] for one in _CHANGED.finditer(text)]
        elif name == "set" and "--" in given:
            found = _PARAMETERS
        elif name in {"source", "."} and given:
            found = [] if PurePath(given[0]).name in _SURROUNDINGS else [_EVERY]
        elif name == "eval" and not re.match(r"\$\(|`", text):
            found = [_EVERY]
        return found

    def _decide(self, assigned: Iterable[str], who: str) -> None:
        """Forget what variables hold, for somebody else decides it."""
        names = set(assigned)
        if _EVERY in names:
            self.decided[_EVERY] = who
            known = {*self.variables, *self.arrays}
            names |= {name for name in known if not name.startswith("SLURM_")}
        for name in names - {_EVERY}:
            self.arrays.pop(name, None)
            self._noted(name, self.variables.get(name, ""))
            self.decided[name] = who
            self.variables[name] = f"${{{name}}}"

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
        if found := set(self._set_by(node)):
            line = parts[0].start_point.row + 1
            self._decide(found, self.flow or f"the {_raw(parts[0])} of line {line}")
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
        if node.children[0].type == "subscript":
            line = node.start_point.row + 1
            self._decide(set(self._assigned(node)), self.flow or f"the {name}= of line {line}")
        elif value is None:
            self._assign(name, "")
        elif value.type != "array":
            text = self._text(value)
            self._assign(name, self.variables.get(name, "") + text if adds else text)
        else:
            unknown = [f"${{{name}[@]}}"] if name in self.decided else []
            before = self.arrays.get(name, unknown) if adds else []
            self.several.add(name)
            self.arrays[name] = before + [
                word
                for child in value.named_children
                if child.type != "comment"
                for word in self._words(child)
            ]

    def _assign(self, name: str, value: str) -> None:
        self.variables[self._noted(name, value)] = value

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
        if not re.fullmatch(r"\w+", name) or how not in {"", "+", ":+", *_DEFAULTS}:
            return _unknown(node)
        if _EVERY in self.decided and name not in self.variables:
            self._decide([name], self.decided[_EVERY])
        known = self.variables.get(name)
        rest = node.children[3:-1]
        if how in {"+", ":+"} and known is not None and not re.search(r"[$`]", known):
            return "".join(map(self._text, rest)) if known or how == "+" else ""
        if (known is None and not how) or how in {"+", ":+"}:
            return _unknown(node)
        if known or (known is not None and not how.startswith(":")):
            return known
        default = "".join(map(self._text, rest))
        if how.endswith("="):
            self._assign(name, default)
        return default

    def _sum(self, node: Node) -> str:
        if changed := set(self._assigned(node)):
            self._decide(changed, self.flow or _named(node))
            return _unknown(node)
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
    return _decoded(node.text or b"")


def _decoded(raw: bytes) -> str:
    """Return text as it was given, with its wide characters."""
    return _WRITTEN.sub(lambda found: chr(int(found[1], 16)), raw.decode())


def _unknown(node: Node) -> str:
    """Return what only running it would tell, as it is written."""
    return _BLANKS.sub(_NO_BREAK, _raw(node).strip())


def _unescaped(inside: bytes) -> str:
    """Return text of double quotes as the shell takes it."""
    return re.sub(r'\\(["\\$`])', r"\1", _decoded(inside).replace("\\\n", ""))


def _named(node: Node) -> str:
    """Return how a message names control flow: by its first word, and its line."""
    words = {"function_definition": "function", "subshell": "( )", "pipeline": "|"}
    word = words.get(node.type)
    first = node.children[0] if node.children else node
    return f"the {word or first.type} of line {node.start_point.row + 1}"


def _is_several(value: str) -> bool:
    """Return whether a value may be several words, or an option."""
    if value.startswith(("$(", "`")):
        return False
    return bool(_BLANKS.search(value)) or value.startswith(("-", "("))


def _is_arithmetic(node: Node) -> bool:
    return node.type == "compound_statement" and _raw(node).startswith("((")


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
