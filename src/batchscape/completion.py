"""Completion of command lines: what may follow, and the scripts by which shells ask for it.

Read from help texts and from the names in `conf/` and `sweeps/`, so that nothing heavy is imported.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import batchscape

__all__ = ["SCRIPTS", "candidates", "options_of"]

_BASH = """\
_batchscape() {
    local found
    COMPREPLY=()
    while IFS= read -r found; do
        COMPREPLY+=("$found")
    done < <("$1" completion bash --breaks "$COMP_WORDBREAKS" \\
        --line "${COMP_LINE:0:COMP_POINT}" 2>/dev/null)
}
complete -o default -o nospace -F _batchscape batchscape
"""

_ZSH = """\
_batchscape() {
    local -a found
    found=("${(@f)$("$words[1]" completion zsh \\
        --line "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}")
    if [[ -z "$found" ]]; then
        _files
        return
    fi
    compadd -Q -S '' -- "${(@)found:#* }"
    compadd -Q -- "${(@)${(@M)found:#* }% }"
}
compdef _batchscape batchscape
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH}
"""What a shell evaluates, by its name. Candidates that are whole end in a space."""

_OPTION = re.compile(r"^  (?:-\w, )?(--[\w-]+)(?: \{([\w,]+)\})?", re.MULTILINE)
_SETTING = re.compile(r"^(\w+):", re.MULTILINE)
_OF_HYDRA = {"--cfg": ("job",), "--config-dir": (), "--retry": ("failed", "oom", "timeout", "all")}


def options_of(help_text: str) -> dict[str, tuple[str, ...]]:
    """Return the options that a help text lists, and the values that it names for each.

    Parameters
    ----------
    help_text : str
        One option begins a line, after two spaces.
    """
    return {
        option: tuple(values.split(",")) if values else ()
        for option, values in _OPTION.findall(help_text)
    }


def candidates(
    line: str, verbs: Sequence[str], composed: Sequence[str], help_of: Callable[[str], str]
) -> list[str]:
    """Return what the last word of a command line may become.

    Parameters
    ----------
    line : str
        From the program's name up to the cursor.
    verbs : sequence of str
    composed : sequence of str
        The verbs that take settings.
    help_of : callable
        Returns the help text of a verb.

    Returns
    -------
    list of str
        Whole words, with a space behind those that are complete; none where files are meant.
    """
    try:
        words = shlex.split(line)[1:]
    except ValueError:  # an open quotation
        words = line.split()[1:]
    if not words or line[-1].isspace():
        words.append("")
    *before, word = words
    if not before:
        found = [f"{verb} " for verb in (*verbs, "--help", "--version")]
    else:
        verb = before[0]
        options = options_of(help_of(verb)) if verb in verbs else {}
        if verb in composed:
            options |= _OF_HYDRA
        if options.get(before[-1]):
            found = [f"{value} " for value in options[before[-1]]]
        elif before[-1] == "--config-dir":
            found = []
        elif word.startswith("-"):
            found = [f"{option} " for option in options]
        else:
            found = list(_settings(before, word)) if verb in composed else []
    return sorted(candidate for candidate in found if candidate.startswith(word))


def _settings(before: Sequence[str], word: str) -> Iterator[str]:
    """Yield settings, and the options of the group that a word has chosen."""
    groups = _groups(before)
    key, equals, value = word.partition("=")
    if equals:
        # Of several values the last one.
        given = word[: len(word) - len(value.rpartition(",")[2])]
        yield from (f"{given}{option} " for option in groups.get(key, {}))
        return
    group, dot, _ = key.partition(".")
    if not dot:
        root = Path(batchscape.__file__).parent / "conf" / "config.yaml"
        single = set(_SETTING.findall(root.read_text())) - {"defaults", "hydra"}
        yield from (f"{name}=" for name in {*groups, *single})
        yield from (f"{name}." for name in groups.keys() - {"sweeps"})
        return
    # Those of all options where none is chosen: the default is no other than the rest.
    files = groups.get(group, {})
    chosen = dict(w.partition("=")[::2] for w in before).get(group, "")
    read = [files[chosen]] if chosen in files else files.values()
    keys = {name for path in read for name in _SETTING.findall(path.read_text())}
    yield from (f"{group}.{name}=" for name in keys - {"defaults", "name"})


def _groups(before: Sequence[str]) -> Mapping[str, Mapping[str, Path]]:
    """Return the files of each group of settings, and of studies, by the names of the options."""
    ours = Path(batchscape.__file__).parent
    own = [Path(given) for option, given in pairwise(before) if option in {"--config-dir", "-cd"}]
    own += [Path(word.partition("=")[2]) for word in before if word.startswith("--config-dir=")]
    found: dict[str, dict[str, Path]] = {}
    for pattern, root in (("*/*.yaml", ours / "conf"), ("sweeps/*.yaml", ours)):
        for folder in (root, *own):
            for path in folder.expanduser().glob(pattern):
                found.setdefault(path.parent.name, {})[path.stem] = path
    return found
