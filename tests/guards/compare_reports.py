"""Say in what two reports of the same sweeps differ: number by number, by table, cell and figure.

    python tests/guards/compare_reports.py reports OLD NEW [--renamed FILE]
    python tests/guards/compare_reports.py commits OLD NEW SWEEP... --out DIR [--renamed FILE]

`reports` compares two folders that `batchscape report` wrote; `commits` makes them first, by what
two commits say of the same sweep folders. Compared are `tables/*.csv` and the headlines of
`paper/macros.tex`. Rows are matched by the columns of `KEYS` that both tables have.

FILE maps old words to new ones (YAML), so that what is renamed is not taken for something else:

    tables: {comparison: cells}
    columns: {global_batch_size: batch}      # in every table; `comparison.n: runs` in one

Exit code: 0 where all that both show is equal, 1 where a number differs, 2 where the reports have
nothing to compare. What one alone shows is listed, and no difference.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import yaml

ROOT = Path(__file__).parents[2]
RELATIVE = 1e-9
"""What sums in another order may differ by."""
KEYS = (
    *("run_id", "claim", "law", "kind", "held", "phase", "term", "group", "cell", "context"),
    *("data_parallel_size", "micro_batch_size", "gradient_accumulation_steps"),
    *("global_batch_size", "geometry", "reference", "devices", "optimizer.learning_rate"),
    *("learning_rate", "budget.optimizer_steps", "precision", "quantity", "target_loss", "form"),
    *("seed", "name"),
)
"""Columns that name a row. A run is named by its own, and what it is asked for."""
_OF_RUN = ("run_id", "target_loss", "quantity")
_HEADLINE = re.compile(r"^\\newcommand\{\\bs(\w+?)\}\{(.*)\}$", re.MULTILINE)


class Difference(NamedTuple):
    """One figure that both show, and show unlike."""

    where: str
    old: object
    new: object


class Comparison(NamedTuple):
    """What two reports say."""

    equal: int
    different: list[Difference]
    only_old: list[str]
    only_new: list[str]

    @property
    def code(self) -> int:
        """Exit code."""
        return 1 if self.different else 0 if self.equal else 2

    def __str__(self) -> str:
        lines = [f"Equal in both: {self.equal} figures", f"Different: {len(self.different)}"]
        lines += [f"  {where}: {old} -> {new}" for where, old, new in self.different]
        for title, names in (("old", self.only_old), ("new", self.only_new)):
            lines += [f"Shown by the {title} one alone: {len(names)}"]
            lines += [f"  {name}" for name in names]
        return "\n".join(lines)


def figures_of(report: Path) -> dict[str, pd.DataFrame]:
    """Read the tables of a report, and its headlines as one more."""
    tables = {
        path.stem: pd.read_csv(path, dtype=str, keep_default_na=False)
        for path in sorted((report / "tables").glob("*.csv"))
    }
    macros = report / "paper" / "macros.tex"
    if macros.is_file():
        found = _HEADLINE.findall(macros.read_text(encoding="utf-8"))
        tables["headlines"] = pd.DataFrame(found, columns=["name", "value"])
    return tables


def compare(old: Path, new: Path, renamed: dict[str, dict[str, str]] | None = None) -> Comparison:
    """Compare two reports.

    Parameters
    ----------
    old, new : Path
        Folders of the reports.
    renamed : mapping
        New words by old ones: `tables`, and `columns`, each of which may begin with its old table.
    """
    words = renamed or {}
    before, after = figures_of(old), figures_of(new)
    before = {
        words.get("tables", {}).get(name, name): table.rename(columns=_words(name, words))
        for name, table in before.items()
    }
    found = Comparison(
        0,
        [],
        [f"table {name}" for name in sorted(before.keys() - after.keys())],
        [f"table {name}" for name in sorted(after.keys() - before.keys())],
    )
    for name in sorted(before.keys() & after.keys()):
        one = _compare_tables(name, before[name], after[name])
        found = Comparison(*(left + right for left, right in zip(found, one, strict=True)))
    return found


def _words(table: str, renamed: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return the new names of the columns of one table."""
    columns = renamed.get("columns", {})
    general = {old: new for old, new in columns.items() if not old.startswith(f"{table}.")}
    return general | {
        old.removeprefix(f"{table}."): new
        for old, new in columns.items()
        if old.startswith(f"{table}.")
    }


def _compare_tables(name: str, old: pd.DataFrame, new: pd.DataFrame) -> Comparison:
    named = _OF_RUN if "run_id" in old and "run_id" in new else KEYS
    keys = [key for key in named if key in old and key in new]
    left, right = _by_row(old, keys), _by_row(new, keys)
    both = [column for column in old if column in new and column not in keys]
    equal, different = 0, []
    for row in left.index.intersection(right.index, sort=False):
        for column in both:
            values = left.at[row, column], right.at[row, column]
            if _are_equal(*values):
                equal += 1
            else:
                different.append(Difference(f"{name} [{row}] {column}", *values))

    def alone(one: pd.DataFrame, other: pd.DataFrame) -> list[str]:
        columns = [f"{name}: column {c}" for c in one.columns.difference(other.columns)]
        return columns + [f"{name}: row [{row}]" for row in one.index.difference(other.index)]

    return Comparison(equal, different, alone(left, right), alone(right, left))


def _by_row(table: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Name each row by its keys; rows of one name by their number as well."""
    cells = table.reindex(columns=keys).to_dict("records")
    names = pd.Series([", ".join(f"{k}={_short(v)}" for k, v in c.items() if v) for c in cells])
    again = names.groupby(names).cumcount()
    names = names.where(again == 0, names + " #" + (again + 1).astype(str))
    return table.set_axis(pd.Index(names, dtype=object), axis="index")


def _short(value: str) -> str:
    """Write a number in one way, so that 32 and 32.0 name one row."""
    try:
        return f"{float(value):.12g}"
    except ValueError:
        return value


def _are_equal(old: str, new: str) -> bool:
    """Compare two cells: numbers by value, words by letter; nothing equals nothing alone."""
    try:
        left, right = float(old), float(new)
    except ValueError:
        return old == new
    return left == right or abs(left - right) <= RELATIVE * max(abs(left), abs(right))


def report_of(commit: str, sweeps: list[Path], out: Path) -> Path:
    """Make the report of sweeps by a commit, in a work tree of its own."""
    tree, report = out / f"tree-{commit[:12]}", out / f"report-{commit[:12]}"
    shutil.rmtree(report, ignore_errors=True)
    _git("worktree", "add", "--detach", "--force", str(tree), commit)
    try:
        environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "batchscape", "report", *map(str, sweeps)]
        subprocess.run([*command, "--out", str(report)], cwd=tree, env=environment, check=True)
    finally:
        _git("worktree", "remove", "--force", str(tree))
    return report


def _git(*arguments: str) -> None:
    subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True)  # noqa: S607


def main(argv: list[str] | None = None) -> int:
    """Compare as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("reports", "commits"))
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("sweeps", nargs="*", type=lambda text: Path(text).resolve())
    parser.add_argument("--out", type=Path, help="where the reports of commits go")
    parser.add_argument("--renamed", type=Path, help="YAML: new words by old ones")
    asked = parser.parse_args(argv)
    renamed = yaml.safe_load(asked.renamed.read_text()) if asked.renamed else None
    old, new = Path(asked.old), Path(asked.new)
    if asked.what == "commits":
        if not asked.sweeps or asked.out is None:
            parser.error("commits are compared on sweep folders: give them, and --out DIR")
        out = asked.out.resolve()
        old, new = (report_of(commit, asked.sweeps, out) for commit in (asked.old, asked.new))
    found = compare(old, new, renamed)
    sys.stdout.write(f"{found}\n")
    return found.code


if __name__ == "__main__":
    raise SystemExit(main())
