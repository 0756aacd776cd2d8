"""The examples are planned, run and reported as their pages say."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from batchscape.analysis.cells import find_cells
from batchscape.analysis.claims.declared import judge_claims
from batchscape.analysis.claims.evidence import Evidence
from batchscape.analysis.decisions.view import decision_section
from batchscape.analysis.report.section import Section
from batchscape.cli import main
from batchscape.models import build_model, parameter_count
from batchscape.record.tables import load

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_study"


def test_own_study_is_found_and_planned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--config-dir", str(EXAMPLE), "sweeps=wide_or_deep"]) == 0
    printed = capsys.readouterr().out
    assert "Runs: 8." in printed
    assert "Folder: outputs/wide_or_deep" in printed


def test_the_wide_model_is_about_as_large(spec_of):
    def size(**model):
        spec = spec_of(model={"name": "gpt", "n_heads": 4, **model}, data__sequence_length=64)
        return parameter_count(build_model(spec.config, spec.data, "float32"))

    assert 0.9 < size(n_layers=1, d_model=180) / size(n_layers=2, d_model=128) < 1.1


OWN_MODEL = Path(__file__).parents[1] / "examples" / "own_model"


@pytest.mark.slow
def test_own_model_and_data_are_planned_and_trained(tmp_path, monkeypatch, capsys):
    """As the page says, from the example's folder; two of its runs, a tenth as long."""
    folder = tmp_path / "own_model"
    shutil.copytree(OWN_MODEL, folder)
    monkeypatch.chdir(folder)
    study = ["--config-dir", ".", "sweeps=own_model", "tracker=none"]
    assert main(["plan", *study]) == 0
    assert "Runs: 12." in capsys.readouterr().out
    short = ["budget.samples=1280", "seed=0", "batch.gradient_accumulation_steps=1,16"]
    assert main(["sweep", *study, *short, "model.arguments.width=16", "sweep_name=short"]) == 0
    assert main(["report", "outputs/short"]) == 0
    runs = load(Path("outputs/short")).runs
    assert runs["status"].tolist() == ["completed"] * 2
    assert runs["not_invariant"].isna().all()
    assert runs["final_eval_accuracy"].isna().all(), "there is nothing to classify"
    # More updates on the same samples learn more, here; and something is learned at all.
    by_batch = runs.set_index("global_batch_size")["final_eval_loss"]
    assert by_batch[8] < by_batch[128] < 1.0


def report_of(example: str, folder: Path, monkeypatch) -> tuple[dict, Section]:
    """Sweep and report a program's example as its page says; return its sections by title.

    Its times are those of a machine that may have been busy, so that the last look takes them for
    valid: what is recommended must not fail for any other reason.
    """
    shutil.copytree(EXAMPLE.parent / example, folder, ignore=shutil.ignore_patterns("outputs"))
    monkeypatch.chdir(folder)
    outputs = Path("outputs") / example
    assert main(["sweep", "--config-dir", ".", f"sweeps={example}", "tracker=none"]) == 0
    assert main(["report", str(outputs)]) == 0
    assert main(["recommend", str(outputs)]) == 0
    tables = load(outputs)
    page = (outputs / "report" / "report.md").read_text()
    cells = find_cells(tables.runs)
    cells.runs["timing_valid"] = cells.runs["status"].eq("completed")
    verdicts = judge_claims(Evidence(cells, tables.steps, tables.evals, tables.ranks))
    section = decision_section(cells, tables)
    assert section is not None
    return {"page": page, "verdicts": {v.claim.id: v.verdict for v in verdicts}}, section


def check_answers(found: dict, decided: Section) -> None:
    """Check that cuts are judged, and a geometry that ran is named."""
    assert "## Do decompositions train alike?" in found["page"]
    assert "The order of samples is the script's" in found["page"]
    assert ": all equivalent." in found["page"]
    assert "## Which geometry to use\n\nNot identified" not in found["page"]
    assert found["verdicts"]["decompositions-are-equivalent"] == "supported"
    assert found["verdicts"]["accumulation-equals-large-batch"] == "supported"
    assert re.match(r"Use (1 x 8 x 1|1 x 2 x 4|2 x 2 x 2) = 8 ", decided.answer[0])
    assert any("s [" in text or "to a held-out loss" in text for text in decided.answer)
    cuts = decided.tables[0].table
    assert set(cuts["micro_batch_size"]) == {2, 8}, "a cut that did not run has no curve"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_torchrun_example_ends_with_a_recommendation(tmp_path, monkeypatch):
    check_answers(*report_of("torchrun_train", tmp_path / "here", monkeypatch))


@pytest.mark.systems
@pytest.mark.timeout(900)
@pytest.mark.parametrize("example", ["accelerate_train", "hf_trainer"])
def test_examples_of_libraries_end_with_a_recommendation(example, tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    check_answers(*report_of(example, tmp_path / "here", monkeypatch))


def test_the_page_shows_the_example():
    page = (Path(__file__).parents[1] / "docs" / "own_model.md").read_text()
    code = (OWN_MODEL / "my_work.py").read_text()
    for line in re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0].splitlines():
        assert line.strip() in code or line.startswith("#") or "def " in line, line
