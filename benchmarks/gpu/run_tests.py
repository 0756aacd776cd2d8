"""The tests that need a CUDA device: outcomes and seconds of each file.

They are collected and skipped where there is none, so that what cannot be imported is a failure
there too. Arguments are those of pytest.

    python benchmarks/gpu/run_tests.py tests    # of parts
    python benchmarks/gpu/run_tests.py runs     # of whole runs
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
from results import ROOT, save

RUNS = ROOT / "tests" / "gpu" / "test_cuda_runs.py"
LIMIT_S, TEST_LIMIT_S = 400, 130
"""After the first no further test is begun; what has been seen by then is written."""


class Outcomes:
    """What became of the tests, by file."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the outcome of a test, and of what went wrong before or after it."""
        file = report.location[0]
        counts = self.counts.setdefault(file, Counter())
        self.seconds[file] += report.duration
        if report.when == "call" or not report.passed:
            counts[report.outcome] += 1

    def rows(self) -> list[dict[str, object]]:
        """Return a row a file."""
        outcomes = ("passed", "failed", "skipped")
        return [
            {"file": file, **{name: counts[name] for name in outcomes}, "s": self.seconds[file]}
            for file, counts in self.counts.items()
        ]


def main() -> None:
    part, *arguments = sys.argv[1:]
    # Of modules without such tests some need packages that a machine without a network lacks.
    files = [
        file
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in file.read_text() and (file == RUNS) == (part == "runs")
    ]
    outcomes = Outcomes()
    limits = [f"--session-timeout={LIMIT_S}", f"--timeout={TEST_LIMIT_S}"]
    settings = ["-m", "gpu", "--durations=10", *limits, *arguments]
    code = pytest.main([*settings, *map(str, files)], plugins=[outcomes])
    if torch.cuda.is_available():
        save(part, outcomes.rows())
    else:
        print(f"{part}: no CUDA device here; the tests were collected and skipped")
    sys.exit(code)


if __name__ == "__main__":
    main()
