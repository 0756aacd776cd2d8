"""Names and units of columns in foreign tables.

A column is renamed only if the list here has its name and no other column has a name for the same.
If several do, the user has to say which.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain

import pandas as pd

from batchscape.errors import AnalysisError

ALIASES: dict[str, tuple[str, ...]] = {
    "global_batch_size": ("batch_size", "global_batch", "batch", "bs", "batchsize"),
    "seed": ("random_seed", "trial", "replicate"),
    "learning_rate": ("lr", "peak_learning_rate", "peak_lr"),
    "target_loss": ("target", "loss_target"),
    "steps_to_target": ("steps_to_result", "steps_to_goal", "iterations_to_target"),
    "samples_to_target": ("examples_to_target", "sequences_to_target"),
    "tokens_to_target": (),
    "time_to_target_s": ("seconds_to_target",),
    "optimizer_step": (
        *("step", "global_step", "iteration", "iter", "update"),
        *("train_global_step", "trainer_global_step"),
    ),
    "samples": ("examples", "sequences", "samples_seen", "examples_seen"),
    "tokens": ("tokens_seen",),
    "train_time_s": ("time_s", "seconds"),
    "loss": (
        *("eval_loss", "val_loss", "valid_loss", "validation_loss", "test_loss", "train_loss"),
        *("final_loss", "final_eval_loss", "final_val_loss", "final_test_loss", "final_train_loss"),
    ),
    "status": ("state",),
    "outcome": (),
    "run": ("run_id", "run_name"),
    "group": (),
    "trajectory_id": (),
}
"""Names of `docs/analysis_tables.md`, and the foreign names that mean the same."""

_NOT_NEEDED = {"samples_to_target", "time_to_target_s", "tokens", "train_time_s"}
"""Columns that an analysis can do without if several columns could be one of them."""

_STEPS = ("steps", "iterations", "updates")
"""Without a loss, a column of steps can only be what it took."""
_IN_TOKENS = re.compile(r"(batch(_size)?|bs)_(in_)?(m?tokens|mtok|tok)|(m?tokens|tok)_(per_)?batch")


def recognise(table: pd.DataFrame, columns: Mapping[str, str]) -> tuple[pd.DataFrame, list[str]]:
    """Rename foreign columns to ours (`columns`: our names to theirs), with a note for each."""
    headers = [str(column) for column in table.columns]
    _refuse_twice(headers, columns)
    _refuse_given(headers, columns)
    table = table.set_axis(headers, axis=1)
    # W&B writes its own count of calls as `Step`.
    names = {plain(column): column for column in headers if column != "Step"}
    column_of_name = dict(columns)
    has_loss = "loss" in column_of_name or not names.keys().isdisjoint(("loss", *ALIASES["loss"]))
    step_name = "optimizer_step" if has_loss else "steps_to_target"
    unused = []
    for name, aliases in ALIASES.items():
        if name in column_of_name:
            continue
        possible = [*aliases, *_STEPS] if name == step_name else aliases
        matches = [names[alias] for alias in possible if alias in names]
        matches = [column for column in matches if column not in column_of_name.values()]
        if name in names:
            matches = [names[name]]
        if name == "run" and len(matches) > 1:
            codes = {pd.factorize(table[column])[0].tobytes() for column in matches}
            if len(codes) == 1:
                del matches[1:]  # Each tells the same runs apart.
        is_optional = name in _NOT_NEEDED or (
            name == "samples" and "optimizer_step" in column_of_name
        )
        if len(matches) == 1:
            column_of_name[name] = matches[0]
        elif matches and is_optional:
            unused.append(f"not used, for several could be {name}: {', '.join(matches)}")
        elif matches:
            raise AnalysisError(
                f"several columns could be {name}: {', '.join(matches)}; say which with "
                f"--column {name}={matches[0]}, or rename it"
            )
    suspects = [column for name, column in names.items() if _IN_TOKENS.fullmatch(name)]
    if suspects and "global_batch_size" not in column_of_name:
        raise AnalysisError(
            f"global_batch_size counts samples, and {suspects[0]} counts tokens; divide it by the "
            "tokens of a sample and name the column global_batch_size"
        )
    notes = [
        f"{column} is taken for {name}" for name, column in column_of_name.items() if column != name
    ]
    # A column with our name, where the user gave another column for that name.
    shadowed = {name: f"{name} (not used)" for name in column_of_name if name in table}
    renamed = table.rename(
        columns={**shadowed, **{old: new for new, old in column_of_name.items()}}
    )
    return renamed, notes + unused


def plain(name: str) -> str:
    """Return a name in small letters and underscores; W&B's own begin with one, as `_step`."""
    of_wandb = "_" if name.startswith("_") else ""
    return of_wandb + re.sub(r"[^a-z0-9]+", "_", name.strip().lower()).strip("_")


def _refuse_given(headers: Sequence[str], columns: Mapping[str, str]) -> None:
    """Refuse a name that is not ours, or a column that is not there or given for two names."""
    for name, column in columns.items():
        if name not in ALIASES:
            raise AnalysisError(f"{name!r} is no column of ours; those are: {', '.join(ALIASES)}")
        if column not in headers:
            have = ", ".join(headers)
            raise AnalysisError(f"the table has no column {column!r}; it has: {have}")
    column_names = [*columns.values()]
    if twice := [column for column in column_names if column_names.count(column) > 1]:
        raise AnalysisError(
            f"one column cannot be two things: {twice[0]!r} is given more than once"
        )


def _refuse_twice(headers: Sequence[str], columns: Mapping[str, str]) -> None:
    """Refuse a name that two columns have, where it is one of ours and not given."""
    # pandas reads a second `loss` as `loss.1`.
    bases = [re.sub(r"\.\d+$", "", column) for column in headers]
    names = [plain(b if b in headers else c) for b, c in zip(bases, headers, strict=True)]
    recognised = {*ALIASES, *chain(_STEPS, *ALIASES.values())}
    recognised -= {*map(plain, columns.values())}
    recognised -= {*columns, *chain(*(ALIASES.get(name, ()) for name in columns))}
    twice = {name for name in recognised if names.count(name) > 1}
    if twice := twice or {column for column in headers if headers.count(column) > 1}:
        raise AnalysisError(
            f"every column needs another name; more than one is called {', '.join(sorted(twice))}: "
            "rename all but one of each"
        )
