"""The Trainer with DeepSpeed; oracles are its trainer_state.json, and the Trainer without it."""

from __future__ import annotations

import json

import pytest

from batchscape.cli import main

pytestmark = [pytest.mark.systems, pytest.mark.timeout(900)]
pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("deepspeed")

STUDY, STEPS = "hf_trainer_deepspeed", "budget.optimizer_steps=12"


@pytest.fixture(scope="module")
def swept(sweep):
    return sweep("hf_trainer", STEPS, study=STUDY)


def curve(swept, run_id):
    state = json.loads(swept.output(run_id, "trainer_state.json").read_text())
    return [row["loss"] for row in state["log_history"] if "loss" in row]


def test_stages_and_cuts_train_alike(swept):
    runs = swept.tables.runs
    assert swept.code == 0, swept.printed
    assert runs["status"].tolist() == ["completed"] * 4
    geometry = ["data_parallel_size", "micro_batch_size", "gradient_accumulation_steps"]
    found = set(runs[[*geometry, "engine.values.zero_stage"]].itertuples(index=False, name=None))
    assert found == {(1, 2, 4, 1), (1, 2, 4, 2), (2, 2, 2, 1), (2, 2, 2, 2)}
    first, *others = (curve(swept, run_id) for run_id in runs["run_id"])
    for other in others:
        assert other == pytest.approx(first, abs=1e-4)


def test_each_stage_ends_with_a_recommendation(swept, recommends):
    recommends(swept, "1 x 2 x 4|2 x 2 x 2")


def test_tables_are_what_the_trainer_logged(swept):
    for run_id in swept.tables.runs["run_id"]:
        steps = swept.steps(run_id)
        assert steps["loss"].tolist() == curve(swept, run_id)
        assert steps["samples"].tolist() == [8 * step for step in range(1, 13)]
        assert steps["tokens"].tolist() == [512 * step for step in range(1, 13)]


def test_the_configs_agree_and_a_wrong_one_does_not(swept, tmp_path, monkeypatch, capsys):
    """What was started is what `check-config` finds consistent."""
    run = swept.tables.runs.query("data_parallel_size == 2").iloc[0]
    command = json.loads((swept.folder / "runs" / run["run_id"] / "command.json").read_text())
    monkeypatch.chdir(command["cwd"])
    assert main(["check-config", "--", *command["argv"]]) == 0, capsys.readouterr().out
    wrong = tmp_path / "wrong.json"
    wrong.write_text(
        json.dumps(
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
            | {"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1}}
        )
    )
    argv = [f"--deepspeed={wrong}" if "deepspeed=" in text else text for text in command["argv"]]
    assert main(["check-config", "--", *argv]) == 1
