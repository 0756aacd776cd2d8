"""Plant known faults one at a time and see whether the tests that guard the place catch them.

    python tests/guards/plant_faults.py [--only WORD] [--from N] [--list FILE]

The list is `faults.yaml`. Each fault goes into a copy of the tree, where its tests run; the tree
itself is not changed. Exit code 0: all were caught; 1: some survived; 2: the list does not fit the
tree (a text that is gone guards nothing, so that is told before anything runs). Short tests are
asked first, those marked slow where they say nothing. What fails must pass without the fault.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("faults.yaml")
COPIED = ("src", "conf", "sweeps", "analysis", "tests", "docs", "examples", "benchmarks")
SLOW_IMPORTS = ("pandas", "polars", "pydantic", "scipy.stats")
SLOW_IMPORTS += ("torch", "torch.distributed")


class Fault(NamedTuple):
    """One text that takes the place of another."""

    kind: str
    file: str
    old: str
    new: str
    tests: str


def read_faults(path: Path = LIST) -> list[Fault]:
    """Read the list."""
    return [Fault(**entry) for entry in yaml.safe_load(path.read_text(encoding="utf-8"))]


def misfits(faults: list[Fault], root: Path) -> list[str]:
    """Say which faults cannot be planted, since their text does not stand once in its file."""
    problems = []
    for fault in faults:
        path = root / fault.file
        count = path.read_text(encoding="utf-8").count(fault.old) if path.is_file() else 0
        if count != 1:
            problems.append(f"{fault.file}: {count} times, and not once: {fault.old!r}")
        problems += [
            f"{fault.file}: its tests are gone: {test}"
            for test in fault.tests.split()
            if not (root / test.partition("::")[0]).exists()
        ]
    return problems


def planted(fault: Fault, root: Path) -> str:
    """Plant a fault in a tree; return the text of its file before."""
    path = root / fault.file
    before = path.read_text(encoding="utf-8")
    path.write_text(before.replace(fault.old, fault.new), encoding="utf-8")
    return before


def verdict(tests: list[str], root: Path, timeout_s: float) -> str:
    """Run short tests in a tree, then slow ones: `caught`, `survived`, or why none could tell."""
    return next(
        (
            found
            for marks in ("not slow", "slow")
            if (found := _run(tests, marks, root, timeout_s)) != "survived"
        ),
        "survived",
    )


def _run(tests: list[str], marks: str, root: Path, timeout_s: float) -> str:
    printed = root.parent / "printed.txt"
    # Forked: it has imported what takes long, and nothing of the product.
    child = get_context("fork").Process(target=_ask_pytest, args=(tests, marks, root, printed))
    child.start()
    child.join(timeout_s)
    if child.is_alive():
        os.killpg(child.pid or 0, signal.SIGKILL)
        child.join()
        return f"no answer in {timeout_s:g} s"
    code = child.exitcode
    text = printed.read_text(encoding="utf-8", errors="replace")
    if code in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}:
        return "survived"
    if code == pytest.ExitCode.TESTS_FAILED:
        failed = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return f"caught   {failed[0].split(' - ')[0].partition(' ')[2]}"
    return f"pytest ended with {code}: {text[-300:]}"


def _ask_pytest(tests: list[str], marks: str, root: Path, printed: Path) -> NoReturn:
    """Become a process group that runs tests, and end with the code of pytest."""
    os.setsid()
    output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(root)
    os.environ |= {"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(root / "src"))
    arguments = [*tests, "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    raise SystemExit(pytest.main([*arguments, "-m", f"{marks} and not gpu and not systems"]))


def main() -> int:
    """Plant all that are asked for, and count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the file or kind")
    parser.add_argument("--from", dest="first", type=int, default=1, help="number of the first")
    parser.add_argument("--list", type=Path, default=LIST)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each")
    asked = parser.parse_args()
    faults = read_faults(asked.list)
    if problems := misfits(faults, ROOT):
        sys.stderr.write("The list does not fit the tree:\n" + "\n".join(problems) + "\n")
        return 2
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in SLOW_IMPORTS:
        importlib.import_module(name)
    counts: dict[str, int] = {}
    sound: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        root = Path(folder) / "tree"
        root.mkdir()
        for name in COPIED:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, root / name, symlinks=True, ignore=ignored)
        for path in ROOT.iterdir():
            if path.is_file():
                shutil.copy(path, root / path.name)
        for number, fault in enumerate(faults, start=1):
            if number < asked.first or asked.only not in f"{fault.file} {fault.kind}":
                continue
            before = planted(fault, root)
            said = verdict(fault.tests.split(), root, asked.timeout)
            (root / fault.file).write_text(before, encoding="utf-8")
            word, _, test = said.partition("   ")
            if word == "caught" and test not in sound:
                # With all its cases: the name of one may hold what ends a name.
                again = verdict([test.partition("[")[0]], root, asked.timeout)
                if again == "survived":
                    sound.add(test)
                else:
                    said = f"fails without the fault, too: {test}"
            word = said.split()[0] if said.startswith(("caught", "survived")) else "unclear"
            counts[word] = counts.get(word, 0) + 1
            sys.stdout.write(f"{number:2} {fault.kind:24} {fault.file}: {said}\n")
            sys.stdout.flush()
    sys.stdout.write(", ".join(f"{word}: {count}" for word, count in counts.items()) + "\n")
    return 0 if set(counts) <= {"caught"} else 1


if __name__ == "__main__":
    raise SystemExit(main())
