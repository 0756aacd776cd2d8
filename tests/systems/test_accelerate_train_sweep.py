"""An accelerate script that calls the recorder; the oracle is what it prints for itself."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytestmark = [pytest.mark.systems, pytest.mark.timeout(900)]
pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def swept(sweep):
    return sweep(
        "accelerate_train",
        "seed=0",
        "budget.optimizer_steps=12",
    )


def test_cuts_of_one_batch_train_alike_on_unequal_documents(swept, cuts):
    assert swept.code == 0, swept.printed
    cuts(swept, {(1, 8, 1), (1, 2, 4), (2, 2, 2)}, loss=1e-4)
    assert len(swept.tables.steps) == 3 * 12


def test_it_ends_with_a_recommendation(swept, recommends):
    recommends(swept, "1 x 8 x 1|1 x 2 x 4|2 x 2 x 2")


def test_tables_are_what_the_script_printed(swept):
    for run in swept.tables.runs.query("status == 'completed'").itertuples():
        log = swept.log(run.run_id)
        printed = re.findall(r"^step (\d+): loss (\S+), labels (\d+)$", log, re.MULTILINE)
        steps = swept.steps(run.run_id)
        assert [int(step) for step, _, _ in printed] == steps["optimizer_step"].tolist()
        assert [loss for _, loss, _ in printed] == [f"{loss:.6f}" for loss in steps["loss"]]
        labels = np.array([int(count) for _, _, count in printed])
        assert steps["tokens"].tolist() == labels.cumsum().tolist()
        assert len(set(labels)) > 8, "documents are of unequal length"
        assert steps["samples"].tolist() == [8 * step for step in range(1, 13)]
        evaluated = re.findall(r"^evaluation: loss (\S+)$", log, re.MULTILINE)
        assert evaluated == [f"{swept.evaluation(run.run_id)['eval_loss']:.6f}"]


def test_ranks_that_train_alone_are_found(sweep):
    """accelerate's trap: on a CPU, unless told, each rank is a world of its own."""
    settings = ["engine.environment.ACCELERATE_USE_CPU=no", "budget.optimizer_steps=6"]
    swept = sweep("accelerate_train", "seed=0", "batch.data_parallel_size=2", *settings)
    assert swept.code != 0
    (run,) = swept.tables.runs.query("status != 'rejected'").itertuples()
    assert run.status == "failed"
    assert "world_size=1" in run.reason
    assert "the plan says 2" in run.reason
