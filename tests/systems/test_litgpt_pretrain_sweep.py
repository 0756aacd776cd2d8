"""`litgpt pretrain` as it is: what it prints is read, and its own metrics.csv is the oracle."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

pytestmark = [pytest.mark.systems, pytest.mark.timeout(900)]

LITGPT = Path(__file__).parents[2] / ".venv-litgpt" / "bin" / "litgpt"
SETTING = f"engine.values.litgpt={LITGPT}"

if not LITGPT.exists() and os.environ.get("BATCHSCAPE_REQUIRE_SYSTEMS") != "1":
    pytest.skip("make .venv-litgpt/.installed", allow_module_level=True)


@pytest.fixture(scope="module")
def swept(sweep):
    return sweep("litgpt_pretrain", SETTING, "seed=0", "batch.micro_batch_size=2,8", cold=True)


def test_cuts_of_one_batch_train_alike(swept, cuts):
    assert swept.code == 0, swept.printed
    # The losses are printed with three digits.
    cuts(swept, {(1, 8, 1), (1, 2, 4)}, loss=1.1e-3)
    assert len(swept.tables.steps) == 2 * 30


def test_it_ends_with_a_recommendation(swept, recommends):
    recommends(swept, "1 x 8 x 1|1 x 2 x 4")


def test_wider_cells_are_rejected_with_the_reason(swept):
    rejected = swept.tables.runs.query("status == 'rejected'")
    assert set(rejected["data_parallel_size"]) == {2}
    wide = rejected[rejected["micro_batch_size"] < 8]
    assert wide["reason"].str.contains("at most engine.max_devices=1").all()
    assert len(wide) == 1


def test_tables_are_what_litgpt_logged(swept):
    for run in swept.tables.runs.query("status == 'completed'").itertuples():
        with swept.output(run.run_id, "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        # It prints three digits of a loss, four of a held-out one.
        logged = [row for row in rows if row["loss"]]
        steps = swept.steps(run.run_id)
        # LitGPT's `step` is its iteration, less one.
        accumulation = run.gradient_accumulation_steps
        assert [int(row["iter"]) for row in logged] == [accumulation * k for k in range(1, 31)]
        assert [int(row["step"]) for row in logged] == [int(row["iter"]) - 1 for row in logged]
        assert steps["optimizer_step"].tolist() == list(range(1, 31))
        losses = [float(row["loss"]) for row in logged]
        assert steps["loss"].tolist() == pytest.approx(losses, abs=5.1e-4)
        assert steps["tokens"].tolist() == [int(row["total_tokens"]) for row in logged]
        assert steps["samples"].tolist() == [int(row["samples"]) for row in logged]
        (evaluated,) = (float(row["val_loss"]) for row in rows if row["val_loss"])
        assert swept.evaluation(run.run_id)["eval_loss"] == pytest.approx(evaluated, abs=5.1e-5)
        assert int(logged[-1]["total_tokens"]) == 30 * 8 * 64


def test_a_batch_that_litgpt_floors_is_found(sweep):
    """18 samples in micro-batches of 4 are asked of LitGPT: it trains on 16."""
    floored = ("batch_size={global_batch_size}", "batch_size=18")
    cell = ["seed=0", "batch.micro_batch_size=4", "batch.data_parallel_size=1"]
    swept = sweep("litgpt_pretrain", SETTING, *cell, edit=floored, cold=True)
    assert swept.code != 0
    (run,) = swept.tables.runs.itertuples()
    assert run.status == "failed"
    assert "gradient_accumulation_steps=4" in run.reason
    assert "the plan says 2" in run.reason
