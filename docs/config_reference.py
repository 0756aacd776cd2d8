"""Writes `docs/configuration.md` from the dataclasses of the configuration, `conf/` and `sweeps/`.

Run it after a change of a setting, an option or a study: `python docs/config_reference.py`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types
import yaml
from pydantic.fields import FieldInfo

from batchscape.config import OUR_GROUPS, Affects, RunConfig

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"
HEAD = """\
# Configuration

`python docs/config_reference.py` writes this page from `src/batchscape/config/`, `conf/` and
`sweeps/`; change it there.

A setting is `group.name=value`, an option of a group is `group=option`, and several values are an
axis of the sweep:

```
batchscape sweep optimizer=adamw,sgd batch.micro_batch_size=4,8
batchscape run --cfg job        # every setting with its value; runs nothing
```

*Decides* is what a setting changes: the *loss* of every cut, *memory*, *time*, *all* three, or the
*record* that is kept. With another value there it is another run; *nothing* repeats no run.

## Settings of Hydra

`python -m batchscape --multirun sweeps=NAME` is the same as `batchscape sweep sweeps=NAME`. Hydra
composes settings; sweeps are expanded and launched here. `hydra.searchpath`, `hydra.sweeper.params`
and `hydra.callbacks` have their effect. Any other setting of Hydra is refused on the command line,
and those below in a study too.

| of Hydra | here |
| --- | --- |
| `hydra.sweep.dir=DIR` | is taken as `sweep_dir=DIR` |
| `hydra.run.dir`, `hydra.sweep.subdir` | `sweep_dir=DIR`; runs in it are named by their content |
| `hydra.job.name=NAME` | `sweep_name=NAME` |
| `hydra.job.env_set`, `hydra.job.env_copy` | runs have the environment of the command |
| `hydra.job.chdir=true` | runs stay in its folder; `engine.cwd=DIR` moves a program |
| `hydra.verbose`, `hydra/job_logging` | what a run prints is in `log.txt` of its folder |
| `hydra.output_subdir` | `config.json` of each run has its settings |
| `hydra/launcher=...` | `launcher.concurrent_runs=N` takes several runs at a time |
| `hydra/sweeper=...`, `hydra.mode` | axes are `key=a,b,c`, or a study |
"""
NEEDED = "???"
"""How Hydra writes a value that the user has to give."""
WORDS = {
    int: "integer",
    float: "number",
    bool: "`true`, `false`",
    str: "text",
    NoneType: "`null`",
}
COLUMNS = "| setting | values | default | decides | meaning |\n| --- | --- | --- | --- | --- |"


def page() -> str:
    """Return the page."""
    hints = get_type_hints(RunConfig, include_extras=True)
    groups = {name: members(hint) for name, hint in hints.items() if members(hint)}
    of_the_run = [field for field in fields(RunConfig) if field.name not in groups]
    top = yaml.safe_load((ROOT / "conf" / "config.yaml").read_text())
    default = {key: option for entry in top["defaults"] for key, option in entry_of(entry)}
    parts = [HEAD, *studies()]
    for group, owners in groups.items():
        parts += [f"## {group}\n", f"Without a choice: `{group}={default[group]}`."]
        if group in OUR_GROUPS:
            parts[-1] += (
                " Read by batchscape's own loop; a program of `engine=command` is told what its "
                "placeholders name."
            )
        found = options_of(group)
        for owner in owners:
            mine = {name: option for name, option in found.items() if chooses(option, owner)}
            parts += ["", *part(owner, group, mine, several=len(owners) > 1)]
    parts += ["## Of the run itself\n", table(RunConfig, of_the_run, "", {"": top})]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts) + "\n")


def studies() -> Iterator[str]:
    """Yield the studies, with the question and the runs that their first lines promise."""
    yield "## Studies\n\nEach is `sweeps=NAME`; any setting beside it changes the study.\n"
    yield "| `sweeps=` | question | runs |\n| --- | --- | --- |"
    for path in sorted((ROOT / "sweeps").glob("*.yaml")):
        question, _, runs = path.read_text().splitlines()[1].removeprefix("# ").partition("? ")
        yield f"| [`{path.stem}`](../sweeps/{path.name}) | {question}? | {runs.rstrip('.')} |"
    yield ""


def part(owner: type, group: str, options: Mapping[str, Any], *, several: bool) -> Iterator[str]:
    """Yield what a dataclass holds, and the options that choose it."""
    names = ", ".join(f"`{group}={name}`" for name in options)
    if several:
        yield f"### {names}\n"
        yield f"{inspect.cleandoc(owner.__doc__ or '')}\n"
    shown = [field for field in fields(owner) if field.name != "name"]
    yield from chosen_by(group, options)
    if shown:
        yield table(owner, shown, f"{group}.", options) + "\n"
    hints = get_type_hints(owner, include_extras=True)
    for field in shown:
        for member in [] if decides(hints[field.name]) else members(hints[field.name]):
            key = f"{group}.{field.name}"
            kind = get_args(get_type_hints(member)["kind"])[0]
            yield f"#### `{key}.kind={kind}`\n\n{inspect.cleandoc(member.__doc__ or '')}\n"
            inner = [field for field in fields(member) if field.name != "kind"]
            if inner:
                yield table(member, inner, f"{key}.", {}) + "\n"


def chosen_by(group: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of one dataclass where there are several, with what tells them apart."""
    if len(options) < 2:
        return
    keys = [key for key in next(iter(options.values())) if key != "name"]
    differ = [key for key in keys if len({repr(option[key]) for option in options.values()}) > 1]
    yield "| option | what | its values |\n| --- | --- | --- |"
    for name, option in options.items():
        first = (ROOT / "conf" / group / f"{name}.yaml").read_text().splitlines()[0]
        values = ", ".join(
            f"`{key}={plain(option[key])}`" for key in differ if option[key] != NEEDED
        )
        yield f"| `{group}={name}` | {first.removeprefix('# ').rstrip('.')} | {values} |"
    yield ""


def table(
    owner: type, shown: list[Field[Any]], prefix: str, options: Mapping[str, Mapping[str, Any]]
) -> str:
    """Return the settings of a dataclass as a table."""
    # A name of pydantic's dataclasses, of which there is no type.
    infos: Mapping[str, FieldInfo] = owner.__pydantic_fields__  # type: ignore[attr-defined]
    hints = get_type_hints(owner, include_extras=True)
    rows = [COLUMNS]
    for field in shown:
        info, hint = infos[field.name], hints[field.name]
        key = info.alias or field.name
        given = {plain(option[key]) for option in options.values()} or {default_of(field)}
        default = f"`{given.pop()}`" if len(given) == 1 else "by option"
        own = decides(hint)
        cells = (
            f"`{prefix}{key}`",
            values_of(hint) if own is not None else "one of those below",
            "needed" if default == f"`{NEEDED}`" else default,
            str(own) if own is not None else "",
            " ".join(described(owner, field.name).split()),
        )
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(rows)


def described(owner: type, name: str) -> str:
    """Return the text below a field, in the dataclass itself or the one that it stands on."""
    found = (getattr(base, "__pydantic_fields__", {}).get(name) for base in owner.__mro__)
    return next((info.description for info in found if info and info.description), "")


def default_of(field: Field[Any]) -> str:
    """Return the default of a dataclass, as a user writes it."""
    default = field.default
    if isinstance(default, FieldInfo):
        default = default.get_default(call_default_factory=True)
    return NEEDED if default is MISSING else plain(default)


def plain(value: object) -> str:
    """Write a value as on the command line."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {plain(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(plain, value)) + "]"
    return json.dumps(value)


def decides(hint: object) -> Affects | None:
    """Return what a setting decides; None of a group of settings."""
    return next((m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Affects)), None)


def members(hint: object) -> list[type]:
    """Return the dataclasses that a type consists of."""
    if isinstance(hint, type):
        return [hint] if is_dataclass(hint) else []
    if get_origin(hint) is Annotated:
        return [] if decides(hint) is not None else members(get_args(hint)[0])
    is_union = get_origin(hint) in {Union, UnionType}
    return [member for inner in get_args(hint) for member in members(inner)] if is_union else []


def values_of(hint: Any) -> str:  # noqa: ANN401  (a type)
    """Say in words which values a type takes."""
    inner = get_args(hint)
    match get_origin(hint):
        case origin if origin is Annotated:
            bounds = [bound for mark in inner[1:] for bound in bounds_of(mark)]
            said = " ".join([values_of(inner[0]), " and ".join(bounds)]).rstrip()
        case origin if origin in {Union, UnionType}:
            said = " or ".join(values_of(member) for member in inner)
        case origin if origin is Literal:
            said = ", ".join(f"`{plain(value)}`" for value in inner)
        case origin if origin in {list, tuple}:
            said = f"list of {values_of(inner[0])}"
        case origin if origin is dict:
            said = "mapping"
        case _ if is_dataclass(hint):
            said = "{" + ", ".join(field.name for field in fields(hint)) + "}"
        case _:
            said = WORDS.get(hint, "any value")
    return said


def bounds_of(mark: object) -> Iterator[str]:
    """Yield the bounds that a mark of a type sets."""
    for inner in mark.metadata if isinstance(mark, FieldInfo) else ():
        match inner:
            case annotated_types.Ge(ge=bound):
                yield f"≥ {bound}"
            case annotated_types.Gt(gt=bound):
                yield f"> {bound}"
            case annotated_types.Le(le=bound):
                yield f"≤ {bound}"
            case annotated_types.Lt(lt=bound):
                yield f"< {bound}"


def options_of(group: str) -> dict[str, dict[str, Any]]:
    """Return the options of a group, by name."""
    found = {}
    for path in sorted((ROOT / "conf" / group).glob("*.yaml")):
        option = yaml.safe_load(path.read_text())
        found[path.stem] = {key: value for key, value in option.items() if key != "defaults"}
    return found


def chooses(option: Mapping[str, Any], owner: type) -> bool:
    """Return whether an option is of a dataclass."""
    hints = get_type_hints(owner)
    return "name" not in hints or option["name"] in get_args(hints["name"])


def entry_of(entry: object) -> Iterator[tuple[str, str]]:
    """Yield group and option of an entry of a defaults list."""
    if isinstance(entry, dict):
        yield from entry.items()


if __name__ == "__main__":
    PAGE.write_text(page())
