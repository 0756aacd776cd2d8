"""The example study is planned as its first line says."""

from __future__ import annotations

from pathlib import Path

from batchscape.cli import main
from batchscape.models import build_model, parameter_count

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
