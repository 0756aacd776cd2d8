"""The examples' sweeps as a user runs them, and how far their tables agree among themselves."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pandas as pd
import pytest

from batchscape.analysis.cells import Cells, find_cells
from batchscape.analysis.claims.declared import judge_claims
from batchscape.analysis.claims.evidence import Evidence
from batchscape.analysis.decisions.topic import decision_section
from batchscape.cli import main
from batchscape.launch import forkserver
from batchscape.record.tables import Tables, load

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Swept:
    """An ended sweep of an example."""

    code: int
    printed: str
    folder: Path
    tables: Tables

    def output(self, run_id: str, name: str) -> Path:
        """Return the one file of that name that the program of a run wrote."""
        (found,) = (self.folder / "runs" / run_id / "program").rglob(name)
        return found

    def log(self, run_id: str) -> str:
        """Return what the program of a run printed."""
        return (self.folder / "runs" / run_id / "log.txt").read_text()

    def steps(self, run_id: str) -> pd.DataFrame:
        """Return the optimizer steps of a run as we recorded them."""
        rows = self.tables.steps
        return rows[rows["run_id"] == run_id].sort_values("optimizer_step")

    def evaluation(self, run_id: str) -> pd.Series:
        """Return the only evaluation of a run."""
        rows = self.tables.evals
        return rows[rows["run_id"] == run_id].iloc[0]


_OUTPUTS = shutil.ignore_patterns("outputs", "__pycache__")


def batchscape(folder: Path, *arguments: str) -> tuple[int, str]:
    """Do what a command does, in this process; return its exit code and what it printed."""
    printed = io.StringIO()
    with (
        contextlib.chdir(folder),
        patch.dict(os.environ, OMP_NUM_THREADS="1"),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        code = main(list(arguments))
    return code, printed.getvalue()


Sweep = Callable[..., Swept]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Have a folder made by one of the processes that run the tests, and read by all."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder(name: str, make: Callable[[Path], None]) -> Path:
        wanted, made = base / f"once-{name}", base / f"once-{name}.made"
        with (base / f"once-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                shutil.rmtree(wanted, ignore_errors=True)
                make(wanted)
                made.touch()
        return wanted

    return folder


@pytest.fixture(scope="session")
def sweep(
    once: Callable[[str, Callable[[Path], None]], Path], request: pytest.FixtureRequest
) -> Sweep:
    """Copy an example, perhaps with an edited study, sweep it, and report it where that is asked.

    Unless they start cold, torchrun and its ranks are forked, see `forked_programs`.
    """

    def run(
        example: str,
        *settings: str,
        study: str | None = None,
        edit: tuple[str, str] = ("", ""),
        cold: bool = False,
        reports: bool = False,
    ) -> Swept:
        study = example if study is None else study

        def make(folder: Path) -> None:
            shutil.copytree(ROOT / "examples" / example, folder, ignore=_OUTPUTS)
            page = folder / "sweeps" / f"{study}.yaml"
            assert edit[0] in page.read_text()
            if edit[0]:
                page.write_text(page.read_text().replace(*edit))
            options = ["--config-dir", ".", f"sweeps={study}", "tracker=none"]
            with pytest.MonkeyPatch.context() as patching:
                if not cold:
                    warm = request.getfixturevalue("warm_libraries")
                    patching.setattr(forkserver, "start_interpreter", warm.start_interpreter)
                code, printed = batchscape(
                    folder, "sweep", *options, "sweep_dir=outputs/swept", *settings
                )
            if reports:
                reported, page_printed = batchscape(folder, "report", "outputs/swept")
                assert reported == 0, page_printed
                printed += page_printed
            (folder / "printed.json").write_text(json.dumps([code, printed]))

        key = hashlib.sha256(repr((example, settings, edit, cold)).encode()).hexdigest()[:8]
        folder = once(f"{study}-{key}", make)
        code, printed = json.loads((folder / "printed.json").read_text())
        outputs = folder / "outputs" / "swept"
        return Swept(code, printed, outputs, load(outputs))

    return run


def check_cuts(swept: Swept, geometries: set[tuple[int, int, int]], loss: float) -> None:
    """Check that all runs ended, that they are the cuts of 8, and that they train alike."""
    runs = swept.tables.runs
    launched = runs[runs["status"] != "rejected"]
    assert launched["status"].tolist() == ["completed"] * len(launched), swept.printed
    names = ["data_parallel_size", "micro_batch_size", "gradient_accumulation_steps"]
    assert set(launched[names].itertuples(index=False, name=None)) == geometries
    assert set(launched["global_batch_size"]) == {8}
    for _, seed in launched.groupby("seed"):
        curves = [swept.steps(run_id)["loss"].to_numpy() for run_id in seed["run_id"]]
        assert len(curves) == len(geometries)
        for curve in curves[1:]:
            # float32: what differs is the order of sums, and it grows with the steps.
            assert abs(curve - curves[0]).max() < loss


def timed(swept: Swept) -> Cells:
    """Take all times for valid: the machine may have been busy, which is not what is tested.

    Of a program that logs no times the launcher may have seen all rows at one look, and has none.
    """
    cells = find_cells(swept.tables.runs)
    completed = cells.runs["status"].eq("completed")
    cells.runs["timing_valid"] = completed
    cells.runs["step_time_s"] = cells.runs["step_time_s"].mask(
        completed & cells.runs["step_time_s"].isna(), 0.1
    )
    return cells


def check_recommendation(swept: Swept, geometries: str) -> None:
    """Check that a geometry that ran is named, with the time to a loss."""
    code, printed = batchscape(swept.folder, "recommend", str(swept.folder))
    # On a busy machine the times of too few cuts may count.
    assert code == 0 or "a valid time" in printed, printed
    decided = decision_section(timed(swept), swept.tables)
    assert decided is not None
    assert re.search(rf"({geometries}) = 8 \(devices", decided.answer[0])
    assert any("s [" in text or "to a held-out loss" in text for text in decided.answer)
    # A cut that did not run has no curve.
    ran = swept.tables.runs.query("status == 'completed'")
    assert set(decided.tables[0].frame["micro_batch_size"]) == set(ran["micro_batch_size"])


def check_cuts_are_judged(swept: Swept) -> None:
    """Check that the page and the claims say whether the cuts train alike."""
    page = (swept.folder / "report" / "report.md").read_text()
    assert "The script decides the order of samples" in page
    assert ": all equivalent." in page
    tables = swept.tables
    judged = judge_claims(Evidence(timed(swept), tables.steps, tables.evals, tables.ranks))
    verdicts = {verdict.claim.id: verdict.verdict for verdict in judged}
    assert verdicts["decompositions-are-equivalent"] == "supported"
    assert verdicts["accumulation-equals-large-batch"] == "supported"


@pytest.fixture(scope="session")
def judges() -> Callable[[Swept], None]:
    """`check_cuts_are_judged`."""
    return check_cuts_are_judged


@pytest.fixture(scope="session")
def recommends() -> Callable[..., None]:
    """`check_recommendation`."""
    return check_recommendation


@pytest.fixture(scope="session")
def cuts() -> Callable[..., None]:
    """`check_cuts`."""
    return check_cuts
