"""What benchmarks compute; `make check` tells whether what they call is there."""

import importlib.util
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from packaging.requirements import Requirement

from forked_programs import run_script

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def module_of(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_extra_brings_what_the_trainer_needs():
    """By the word of transformers itself, which installs it on request only."""
    project = tomllib.loads((BENCHMARKS.parent / "pyproject.toml").read_text())["project"]
    requirements, extras = [*map(Requirement, project["dependencies"])], ["bench"]
    for extra in extras:  # which grow by those that they name
        lines = [Requirement(line) for line in project["optional-dependencies"][extra]]
        extras += [name for line in lines if line.name == "batchscape" for name in line.extras]
        requirements += lines
    needed = {
        line.name
        for line in map(Requirement, metadata.requires("transformers"))
        if line.marker is not None and line.marker.evaluate({"extra": "torch"})
    }
    assert {"accelerate", "torch"} <= needed
    assert needed | {"transformers"} <= {line.name for line in requirements}


@pytest.mark.slow
def test_hf_trainer(warm_libraries, tmp_path):
    script, options = BENCHMARKS / "hf_trainer.py", ["--rounds", "2", "--sizes", "tiny"]
    printed = run_script(warm_libraries, script, *options, folder=tmp_path)
    (apart,) = re.findall(r"tiny: losses of 20 .* largest difference (\S+)", printed)
    assert float(apart) < 1e-5
    assert re.search(r"tiny: \d+ tokens/s, the Trainer \d+; ratio \d\.\d\d", printed)


@pytest.mark.parametrize(
    ("scatter", "identified"),
    [((1, 1.01, 0.99, 1, 1.01), 6), ((1, 1.01, 60, 1, 1.01), 4), ((60, 0.01, 0.01, 0.01, 60), 0)],
)
def test_times_that_are_not_identified_are_counted_apart(scatter, identified, monkeypatch, capsys):
    """Each of three cuts between the ends predicts the two others; a wild one tells nothing."""
    module = module_of("step_time_prediction")
    sizes = [1, 2, 4, 8, 16]
    times = [64 // micro * (0.001 + 0.0005 * micro) + 0.002 for micro in sizes]
    table = pd.DataFrame(
        {
            "run_id": [f"run-{micro}" for micro in sizes],
            "data_parallel_size": 1,
            "micro_batch_size": sizes,
            "gradient_accumulation_steps": [64 // micro for micro in sizes],
            "step_time_s": np.array(times) * scatter,
            "exchange_s": np.nan,
            "optimizer_s": np.nan,
            "timing_valid": True,
        }
    )
    monkeypatch.setattr(module, "trained", lambda *_: table)
    monkeypatch.setattr(sys, "argv", ["step_time_prediction.py", "--models", "mlp"])
    module.main()
    printed = capsys.readouterr().out
    assert "nan" not in printed
    if identified:
        assert f"{identified} predictions of held-out cuts" in printed
        assert f"; {6 - identified} further times are not identified" in printed
    else:
        assert "none of 6 times of held-out cuts is identified by three trainings" in printed


def test_regret_is_of_the_seeds_that_a_search_did_not_see():
    """Seed 0 was lucky at the middle rate, which is 0.5 worse than the first for the others."""
    module = module_of("search_regret")
    rows = [[1.0, 0.1, 2.0], [0.9, 1.3, 2.0], [1.1, 1.7, 2.0]]
    losses = module.Losses(
        pd.DataFrame(
            {"seed": seed, "learning_rate": rate, "loss": loss}
            for seed, losses_of_seed in enumerate(rows)
            for rate, loss in zip((0.01, 0.1, 1.0), losses_of_seed, strict=True)
        )
    )
    assert losses.regret(0.1, 0) == pytest.approx((1.3 + 1.7) / 2 - (0.9 + 1.1) / 2)
    # Seeds 1 and 2 choose the first rate, where their others lose to the middle one.
    others = [(1.0 + 1.1) / 2 - (0.1 + 1.7) / 2, (1.0 + 0.9) / 2 - (0.1 + 1.3) / 2]
    expected = np.mean([0.5, *others])
    assert module.listed(losses, [0.01, 0.1, 1.0]) == pytest.approx(expected)
