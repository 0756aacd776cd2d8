"""Names and units of columns in foreign tables.

A column is renamed only if the list here has its name and no other column has a name for the same.
If several do, the user has to say which.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

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

# Without a loss, a column of steps can only be what it took.
_WITHOUT_LOSS = {"steps_to_target": ("steps", "iterations", "updates")}
_WITH_LOSS = {"optimizer_step": ("steps", "iterations", "updates")}
_IN_TOKENS = re.compile(r"(batch(_size)?|bs)_(in_)?(m?tokens|mtok|tok)|(m?tokens|tok)_(per_)?batch")


def recognise(
    table: pd.DataFrame, columns: Mapping[str, str] | None = None
) -> tuple[pd.DataFrame, list[str]]:
    """Rename foreign columns to ours (`columns`: our names to theirs), with a note for each."""
    _refuse_twice(table, columns or {})
    # W&B writes its own count of calls as `Step`.
    names = {plain(str(column)): str(column) for column in table.columns if column != "Step"}
    table = table.set_axis([str(column) for column in table.columns], axis=1)
    theirs_of = _given(table, columns or {})
    has_loss = "loss" in theirs_of or any(n in names for n in ("loss", *ALIASES["loss"]))
    extra = _WITH_LOSS if has_loss else _WITHOUT_LOSS
    unused = []
    for name, aliases in ALIASES.items():
        if name in theirs_of:
            continue
        if name in names:
            theirs_of[name] = names[name]
            continue
        possible = [*aliases, *extra.get(name, ())]
        matches = [names[alias] for alias in possible if alias in names]
        matches = [column for column in matches if column not in theirs_of.values()]
        if name == "run" and len({pd.factorize(table[n])[0].tobytes() for n in matches}) == 1:
            del matches[1:]  # Each tells the same runs apart.
        if len(matches) > 1:
            if name in _NOT_NEEDED or (name == "samples" and "optimizer_step" in theirs_of):
                unused.append(f"not used, for several could be {name}: {', '.join(matches)}")
                continue
            msg = (
                f"several columns could be {name}: {', '.join(matches)}; say which with "
                f"--column {name}={matches[0]}, or rename it"
            )
            raise AnalysisError(msg)
        if matches:
            theirs_of[name] = matches[0]
    _refuse_tokens(theirs_of, names)
    notes = [
        f"{theirs} is taken for {name}" for name, theirs in theirs_of.items() if theirs != name
    ]
    notes += unused
    # A column with our name, where the user gave another column for that name.
    shadowed = {name: f"{name} (not used)" for name in theirs_of if name in table}
    renamed = table.rename(columns={**shadowed, **{old: new for new, old in theirs_of.items()}})
    return renamed, notes


def plain(name: str) -> str:
    """Return a name in small letters and underscores; W&B's own begin with one, as `_step`."""
    of_wandb = "_" if name.startswith("_") else ""
    return of_wandb + re.sub(r"[^a-z0-9]+", "_", name.strip().lower()).strip("_")


def _given(table: pd.DataFrame, columns: Mapping[str, str]) -> dict[str, str]:
    for name, column in columns.items():
        if name not in ALIASES:
            msg = f"{name!r} is no column of ours; those are: {', '.join(ALIASES)}"
            raise AnalysisError(msg)
        if column not in table:
            msg = (
                f"the table has no column {column!r}; it has: {', '.join(map(str, table.columns))}"
            )
            raise AnalysisError(msg)
    twice = [column for column in columns.values() if list(columns.values()).count(column) > 1]
    if twice:
        msg = f"one column cannot be two things: {twice[0]!r} is given more than once"
        raise AnalysisError(msg)
    return dict(columns)


def _refuse_twice(table: pd.DataFrame, columns: Mapping[str, str]) -> None:
    """Refuse a name that two columns have, where it is one of ours and not given."""
    headers = [str(column) for column in table.columns]
    # pandas reads a second `loss` as `loss.1`.
    bases = [re.sub(r"\.\d+$", "", column) for column in headers]
    names = [plain(b if b in headers else c) for b, c in zip(bases, headers, strict=True)]
    extra = (*_WITH_LOSS.values(), *_WITHOUT_LOSS.values())
    recognised = set(ALIASES).union(*ALIASES.values(), *extra)
    recognised -= {plain(column) for column in columns.values()}
    for name in columns:
        recognised -= {name, *ALIASES.get(name, ())}
    repeated = {name for name in names if names.count(name) > 1}
    if twice := sorted(repeated & recognised) or sorted(
        {c for c in headers if headers.count(c) > 1}
    ):
        msg = (
            f"every column needs another name; more than one is called {', '.join(twice)}: rename "
            "all but one of each"
        )
        raise AnalysisError(msg)


def _refuse_tokens(theirs_of: Mapping[str, str], names: Mapping[str, str]) -> None:
    """Refuse a batch in tokens."""
    batch = theirs_of.get("global_batch_size")
    suspects = [name for plain_name, name in names.items() if _IN_TOKENS.fullmatch(plain_name)]
    if batch is None and suspects:
        msg = (
            f"global_batch_size counts samples, and {suspects[0]} counts tokens; divide it by the "
            "tokens of a sample and name the column global_batch_size"
        )
        raise AnalysisError(msg)
