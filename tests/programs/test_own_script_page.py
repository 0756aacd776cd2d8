"""The page about one's own script says what is so, and the examples plan what they say."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from batchscape.cli import main
from batchscape.config.metrics import Metrics
from batchscape.record.placeholders import PLACEHOLDERS

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "own_script.md").read_text()
STUDIES = {
    "hf_trainer": "hf_trainer",
    "hf_trainer_deepspeed": "hf_trainer",
    "accelerate_train": "accelerate_train",
    "torchrun_train": "torchrun_train",
    "litgpt_pretrain": "litgpt_pretrain",
}


def test_every_placeholder_is_on_the_page_as_it_is():
    rows = re.findall(r"^\| `\{(\w+)\}` \| (.*) \|$", PAGE, re.MULTILINE)
    assert dict(rows) == PLACEHOLDERS


def test_every_reader_of_metrics_is_on_the_page():
    readers = get_args(get_args(Metrics)[0])
    kinds = [get_args(get_type_hints(reader)["kind"])[0] for reader in readers]
    section = PAGE.split("## The metrics")[1].split("##")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == kinds


def test_the_page_shows_the_study_as_it_is():
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert example == (EXAMPLES / "torchrun_train" / "sweeps" / "torchrun_train.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("study", "example"), STUDIES.items())
def test_examples_plan_what_they_say(study, example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(EXAMPLES / example)
    first = (EXAMPLES / example / "sweeps" / f"{study}.yaml").read_text().splitlines()[1]
    settings = [f"engine.values.litgpt={sys.executable}"] if "litgpt" in study else []
    options = ["--config-dir", ".", f"sweeps={study}", f"sweep_dir='{tmp_path}/swept'"]
    assert main(["plan", *options, *settings]) == 0
    printed = capsys.readouterr().out
    runs = re.search(r"(\d+) runs", first)
    rejected = re.search(r"(\d+) rejected runs", first)
    assert runs is not None
    assert f"Runs: {runs[1]}." in printed
    if rejected is not None:
        assert f"Rejected runs: {rejected[1]}." in printed
