"""The examples are planned, run and reported as their pages say."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from batchscape.cli import main
from batchscape.models.build import build_model
from batchscape.record.tables import load

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_study"


def test_own_study_is_found_and_planned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--config-dir", str(EXAMPLE), "sweeps=wide_or_deep"]) == 0
    printed = capsys.readouterr().out
    assert "Runs: 8." in printed
    assert "Folder: outputs/wide_or_deep" in printed


@pytest.mark.slow
def test_own_study_ends_with_a_recommendation(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    study = ["--config-dir", str(EXAMPLE), "sweeps=wide_or_deep", "tracker=none"]
    # Four optimizer steps beyond those that warm up, of short samples; the study has twenty.
    short = ["budget.samples=288", "evaluation.every_samples=96"]
    short += ["data.sequence_length=16", "evaluation.samples=64", "sweep_dir=outputs/wide_or_deep"]
    assert main(["sweep", *study, *short]) == 0
    assert load(Path("outputs/wide_or_deep")).runs["status"].tolist() == ["completed"] * 8
    capsys.readouterr()
    assert main(["recommend", "outputs/wide_or_deep"]) == 0
    printed = capsys.readouterr().out
    assert "For n layers 1, d model 180:" in printed
    assert "For n layers 2, d model 128:" in printed


def test_the_wide_model_is_about_as_large(spec_of):
    def size(**model):
        spec = spec_of(model={"name": "gpt", "n_heads": 4, **model}, data__sequence_length=64)
        return sum(p.numel() for p in build_model(spec.config, spec.data, "float32").parameters())

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
    assert main(["recommend", "outputs/short"]) == 0
    runs = load(Path("outputs/short")).runs
    assert runs["status"].tolist() == ["completed"] * 2
    assert runs["not_invariant"].isna().all()
    assert runs["final_eval_accuracy"].isna().all(), "there is nothing to classify"
    # More updates on the same samples learn more, here; and something is learned at all.
    by_batch = runs.set_index("global_batch_size")["final_eval_loss"]
    assert by_batch[8] < by_batch[128] < 1.0


def test_the_page_shows_the_example():
    page = (Path(__file__).parents[1] / "docs" / "own_model.md").read_text()
    code = (OWN_MODEL / "my_work.py").read_text()
    for line in re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0].splitlines():
        assert line.strip() in code or line.startswith("#") or "def " in line, line
