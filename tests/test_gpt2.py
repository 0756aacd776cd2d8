"""GPT-2 124M on a few tokens of its vocabulary, as a user would train it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from batchscape.analysis import write_report
from batchscape.cli import main
from batchscape.record.tables import load


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_gpt2_124m_trains_for_a_few_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name, count in (("train.bin", 10_000), ("val.bin", 1_000)):
        rng.integers(0, 100, count).astype("<u2").tofile(tmp_path / name)
    settings = [
        *("model=gpt2_124m", "data=tokens", "data.path=train.bin"),
        *("data.held_out_path=val.bin", "data.vocabulary_size=50257"),
        *("data.sequence_length=16", "batch.global_batch_size=4", "batch.micro_batch_size=2"),
        *("budget=optimizer_steps", "budget.optimizer_steps=3", "schedule.warmup_samples=0"),
        *("evaluation.samples=2", "evaluation.batch_size=2", "evaluation.every_samples=null"),
        *(
            "measure.warmup_optimizer_steps=1",
            "measure.noise_scale_every=2",
            "measure.memory=false",
        ),
        *("optimizer.learning_rate=3e-4", "sweep_name=gpt2", "tracker=none", "launcher.device=cpu"),
    ]
    assert main(["run", *settings]) == 0
    write_report([Path("outputs/gpt2")], with_charts=False)
    tables = load(Path("outputs/gpt2"))
    (run,) = tables.runs.to_dict("records")
    # Of 124.5 M parameters positions multiply nothing; attention adds 12 L H Q T.
    multiplied = 124_439_808 + (50304 - 50257) * 768 - 1024 * 768
    per_token = 6 * multiplied + 12 * 12 * 768 * 16
    flops = tables.ranks["model_flops_per_sample"].iloc[0]
    assert flops == pytest.approx(16 * per_token, rel=0.002)
    # As published, with the rows that pad the vocabulary, and of 1024 positions the 16 of these.
    assert run["parameters"] == 124_439_808 + (50304 - 50257) * 768 - (1024 - 16) * 768
    assert run["model_tflops_per_s_per_device"] > 0
    mfu = tables.runs.reindex(columns=["mfu_pct"])
    assert mfu.isna().all(axis=None), "no datasheet of a processor is known"
    assert tables.steps["loss"].iloc[0] == pytest.approx(10.82, abs=0.3), "ln 50304"
    assert tables.steps["loss"].iloc[-1] < tables.steps["loss"].iloc[0]
    page = Path("outputs/gpt2/report/report.md").read_text()
    assert "MFU" not in page
