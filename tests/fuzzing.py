"""Random configurations and command lines: valid ones, and ones that break every rule there is."""

from __future__ import annotations

import copy
import json
import os
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from batchscape.compose import compose
from batchscape.plan.expand import Cell, SweepCells

__all__ = ["Bases", "mutated", "random_line"]

NUMBERS: list[Any] = [
    *(0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 64, 100, 1437, 3840, 65536, -1, -8),
    *(2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**61 - 1, 2**63 - 1, 2**63, 2**64, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1.0, 1.5, 8.0, 99.9, 100.0, -0.5, 1e-9, 1e-320, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf")),
]
TEXTS: list[Any] = [
    *("", " ", "auto", "cpu", "cuda", "none", "null", "true", "8", "1e-3", "a/b", "..", ".", "/"),
    *(
        "é",
        "数据",
        "\u202e",
        "\U0001f600",
        "a\nb",
        "a\tb",
        "\x1b[31m",
        "[red]",
        "\\",
        "'",
        '"',
        "%s",
    ),
    *("${seed}", "${x}", "${", "{}", "{x}", "???", "\ud800", "x" * 300, "x" * 70000, "nowhere"),
    *("ddp", "gpt", "mlp", "adamw", "digits", "text", "stdlib", "float32", "bfloat16", "os.getcwd"),
    *("/dev/null", "/dev/zero", "/proc/self/mem", "\0", "a\0b", "-", "--help", "~", "$HOME"),
]
OTHERS: list[Any] = [None, True, False, [], {}, [1], [[]], [None], ["a", 1], {"a": 1}, {"": None}]
DEEP: list[Any] = [0]
for _ in range(1500):
    DEEP = [DEEP]
OF_FILES = ("path", "held_out_path", "tokenizer", "cwd", "sweep_dir", "files", "argv")


class Bases:
    """Valid configurations of every kind, each composed once by the command line's own way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        text = folder / "text.txt"
        text.write_text("to be or not to be, that is the question. " * 60)
        lines = folder / "lines.jsonl"
        lines.write_text(
            "".join(json.dumps({"text": f"line {n} of all"}) + "\n" for n in range(200))
        )
        tokens = folder / "tokens.bin"
        (np.arange(9000) % 50).astype(np.uint16).tofile(tokens)
        os.mkfifo(folder / "pipe")
        self.files = [str(path) for path in (text, lines, tokens, folder, folder / "pipe")]
        small = ("data.sequence_length=16", "evaluation.samples=4", "budget.samples=320")
        even = ("evaluation.every_samples=null", "tracker=none")
        self.lines: list[tuple[str, ...]] = [
            ("data=digits", "model=mlp"),
            ("data=text", f"data.path='{text}'", *small, *even),
            ("data=text", f"data.path='{text}'", "data.layout=padded", "model=llama_nano", *even,
             "evaluation.samples=1", "data.sequence_length=64"),
            ("data=documents", f"data.path='{lines}'", *small, *even),
            ("data=tokens", f"data.path='{tokens}'", *small, *even, "data.held_out_pct=20.0"),
            ("data=custom", "data._target_=own_data.Blobs", "model=mlp", *even,
             "evaluation.samples=64"),
            ("data=digits", "model=mlp", "schedule=cosine", "scaling=sqrt", "optimizer=muon",
             "batch.ramp=[{samples: 320, global_batch_size: 16}]", "evaluation.every_samples=null"),
            ("data=digits", "model=mlp", "engine=fsdp", "batch.data_parallel_size=2", *even),
            ("engine=command", "engine.argv=[echo,'{micro_batch_size}','{global_batch_size}',"
             "'{optimizer_steps}']", "tracker=none"),
        ]  # fmt: skip
        self._composed: list[SweepCells] = []

    @property
    def grids(self) -> list[SweepCells]:
        """One grid of one cell for each base."""
        if not self._composed:
            for lines in self.lines:
                grid = compose(lines, "batchscape plan")
                assert grid is not None
                self._composed.append(grid)
        return self._composed


def mutated(bases: Bases, rng: random.Random) -> tuple[SweepCells, list[str]]:
    """Return a grid of up to three cells, each changed at random, and what was changed."""
    base = rng.choice(bases.grids)
    told: list[str] = []
    cells = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        settings = copy.deepcopy(base.cells[0].settings)
        changes = range(rng.choice([1, 1, 1, 2, 3, 4]))
        told.extend(_mutate(settings, bases, rng) for _ in changes)
        cells.append(Cell(settings, {}))
    return SweepCells(cells, base.axis_keys, base.fixed, base.sweep_file), told


def _mutate(settings: dict[str, Any], bases: Bases, rng: random.Random) -> str:
    places = list(_places(settings))
    if rng.random() < 0.8:
        places = [place for place in places if not isinstance(place[0][place[1]], dict)]
    holder, key, path = rng.choice(places)
    name = key if isinstance(key, str) else path.split(".")[-2]
    kind = rng.random()
    if kind < 0.05:
        del holder[key]
        return f"~{path}"
    if kind < 0.10:
        added = rng.choice([_misspelt(str(key), rng), "new", "name", "_target_", ""])
        value = _value(bases, rng, name, holder[key])
        if isinstance(holder, list):
            holder.append(value)
        else:
            holder[added] = value
        return f"+{path} -> {added}={_shown(value)}"
    if kind < 0.16:
        other = rng.choice(bases.grids).cells[0].settings
        group = rng.choice(list(other))
        settings[group] = copy.deepcopy(other[group])
        return f"{group} of another option"
    holder[key] = _value(bases, rng, name, holder[key])
    return f"{path}={_shown(holder[key])}"


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except RecursionError:
        return "a very deep list"


def _places(node: Any, path: str = "") -> Iterator[tuple[Any, Any, str]]:
    entries = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in entries:
        yield node, key, f"{path}{key}"
        if isinstance(value, dict | list) and value is not DEEP:
            yield from _places(value, f"{path}{key}.")


def _value(bases: Bases, rng: random.Random, key: str, before: Any) -> Any:
    if key in OF_FILES and rng.random() < 0.5:
        return rng.choice(bases.files)
    kind = rng.random()
    if isinstance(before, int) and not isinstance(before, bool) and kind < 0.5:
        return max(before + rng.choice([-1, 1, 2]), rng.choice([0, -1])) * rng.choice([1, 2, 3])
    if isinstance(before, float) and kind < 0.4:
        return before * rng.choice([0.5, 2.0, 1e6, -1.0])
    if kind < 0.7:
        return rng.choice(NUMBERS)
    if kind < 0.9:
        return rng.choice(TEXTS)
    found = rng.choice([*OTHERS, DEEP])
    return found if found is DEEP else copy.copy(found)


def _misspelt(word: str, rng: random.Random) -> str:
    at = rng.randrange(len(word) + 1)
    return word[:at] + rng.choice([*string.ascii_lowercase, ""]) + word[at + 1 :]


def random_line(bases: Bases, rng: random.Random) -> list[str]:
    """Return the arguments of a random command line, of which the first ones are a valid base."""
    lines = list(rng.choice(bases.lines))
    keys = [path for _, _, path in _places(rng.choice(bases.grids).cells[0].settings)]
    for _ in range(rng.choice([1, 1, 2, 3])):
        key = rng.choice(keys)
        prefix = rng.choice(["", "", "", "", "", "+", "++", "~"])
        key = _misspelt(key, rng) if rng.random() < 0.15 else key
        value = ",".join(_word(bases, rng, key) for _ in range(rng.choice([1, 1, 1, 2, 3])))
        line = f"{prefix}{key}={value}"
        lines.append(line if rng.random() < 0.95 else _misspelt(line, rng))
    rng.shuffle(lines)
    # The system takes no such arguments, so that no command line has them.
    return [line.replace("\0", "").encode(errors="replace").decode() for line in lines]


def _word(bases: Bases, rng: random.Random, key: str) -> str:
    kind = rng.random()
    if kind < 0.15:
        return rng.choice(
            [
                *("range(1,4)", "range(0,1000000000)", "range(1,2,1e-9)", "range(3)", "glob(*)"),
                *("choice(1,2)", "interval(0,1)", "shuffle(1,2)", "sort(3,1,2)", "range(1,0)"),
                *("{a:1}", "{a:{b:[1,{c:2}]}}", "{", "[[", "[]", "'", '"', "'a b'", '"x"', "\\,"),
                *(
                    "${seed}",
                    "${nothing.here}",
                    "${oc.env:NO_SUCH}",
                    "${batch}",
                    "${hydra:job.name}",
                ),
                *("str(1)", "int(x)", "extend_list(1)", "null", "???", "a b", "1_000", "0x10", "é"),
            ]
        )
    value = _value(bases, rng, key.rpartition(".")[2], None)
    text = "null" if value is None else _shown(value) if value is DEEP else str(value)[:2000]
    return text if rng.random() < 0.7 else f"'{text}'"
