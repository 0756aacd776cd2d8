"""The Hugging Face Trainer, swept as it is; the oracle is its own trainer_state.json."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.systems, pytest.mark.timeout(900)]
pytest.importorskip("accelerate")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def swept(sweep):
    settings = ["seed=0", "budget.optimizer_steps=12"]
    return sweep("hf_trainer", *settings, reports=True)


def test_tables_are_what_the_trainer_logged(swept):
    """Every number that the Trainer logs is in our tables, bit by bit."""
    runs = swept.tables.runs.query("status == 'completed'")
    for run in runs.itertuples():
        state = json.loads(swept.output(run.run_id, "trainer_state.json").read_text())
        logged = [row for row in state["log_history"] if "loss" in row]
        steps = swept.steps(run.run_id)
        assert [row["step"] for row in logged] == steps["optimizer_step"].tolist()
        assert steps["optimizer_step"].tolist() == list(range(1, 13))
        assert [row["loss"] for row in logged] == steps["loss"].tolist()
        assert [row["grad_norm"] for row in logged] == steps["gradient_norm"].tolist()
        assert [row["learning_rate"] for row in logged] == steps["learning_rate"].tolist()
        assert [row["num_input_tokens_seen"] for row in logged] == steps["tokens"].tolist()
        assert steps["samples"].tolist() == [8 * step for step in range(1, 13)]
        assert state["num_input_tokens_seen"] == 12 * 8 * 64
        assert state["train_batch_size"] == run.micro_batch_size
        (evaluated,) = (row for row in state["log_history"] if "eval_loss" in row)
        assert swept.evaluation(run.run_id)["eval_loss"] == evaluated["eval_loss"]


def test_cuts_of_one_batch_train_alike(swept, cuts):
    assert swept.code == 0, swept.printed
    cuts(swept, {(1, 8, 1), (1, 2, 4), (2, 2, 2)}, loss=1e-4)
    assert len(swept.tables.steps) == 3 * 12


def test_it_ends_with_a_recommendation(swept, recommends):
    recommends(swept, "1 x 8 x 1|1 x 2 x 4|2 x 2 x 2")


def test_the_report_shows_the_runs(swept):
    page = (swept.folder / "report" / "report.md").read_text()
    assert "4 runs in 4 cells" in page
    assert ": 3 completed, 1 rejected." in page
    for cut in ("1x8x1=8", "1x2x4=8", "2x2x2=8"):
        assert f"| {cut} | completed".replace("x", "\u00d7") in page
    assert "3 used the planned batch" in page
