"""How runs end: budget, target, divergence; and what they leave behind."""

from __future__ import annotations

import math
import time

import pytest

from batchscape.measure.memory_report import PHASES
from batchscape.record.tables import read_table


def test_budget_evaluations_and_rank_rows(trainer, steps, outcome, tmp_path):
    spec = trainer.make_spec(
        (2, 8, 1),
        evaluation__every_samples=160,
        measure__memory=True,
        measure__warmup_optimizer_steps=3,
    )
    folder = trainer.train(spec, tmp_path)
    assert outcome(folder)["status"] == "completed"
    assert outcome(folder)["stop_reason"] == "budget"
    rows = steps(folder)
    assert rows["optimizer_step"].tolist() == list(range(1, 21))
    assert rows["warmup"].tolist() == [True] * 3 + [False] * 17
    parts = rows[["data_s", "forward_backward_s", "exchange_s", "optimizer_s"]]
    assert (parts.sum(axis=1) - rows["step_time_s"]).abs().max() < 1e-9
    assert (parts.drop(columns="exchange_s") > 0).all(axis=None)
    assert (rows[["exchange_s", "exchange_span_s"]] > 0).all(axis=None)
    assert (rows["exchange_span_s"] >= rows["exchange_s"]).all()
    # Before the first step there is none, and warm-up and evaluations end the count.
    assert rows["optimizer_step"][rows["gap_s"].isna()].tolist() == [1, 4, 11]
    assert (rows["gap_s"].dropna() > 0).all()
    assert rows["train_time_s"].iloc[-1] == pytest.approx(rows["step_time_s"].sum())
    evals = read_table(folder, "evals")
    assert evals["optimizer_step"].tolist() == [0, 10, 20]
    assert evals["samples"].tolist() == [0, 160, 320]
    assert evals["eval_labels"].tolist() == [16 * 32] * 3
    assert evals["eval_loss"].iloc[0] == pytest.approx(math.log(256), abs=0.2)
    ranks = read_table(folder, "ranks").sort_values("rank")
    assert ranks["rank"].tolist() == [0, 1]
    assert ranks["node"].tolist() == [0, 0]
    assert ranks["attention_kernel"].dropna().tolist() == ["flash"], "rank 0 looks"
    of_cuda = ["workspace_gib", "allocator_retries", "reduction_precision", "libraries"]
    assert ranks[of_cuda].isna().all(axis=None)
    assert ranks["memory_method"].unique().tolist() == ["cpu allocator events"]
    peaks = ranks[[f"peak_allocated_{phase}_gib" for phase in PHASES[1:]]]
    assert (peaks.max(axis=1) == ranks["peak_allocated_gib"]).all()
    assert (ranks["memory_probe_s"] < ranks["startup_s"]).all()
    assert (ranks["uss_gib"] <= ranks["rss_gib"]).all()


def test_failure_names_the_exception(trainer, outcome, tmp_path):
    spec = trainer.make_spec((1, 32, 1))
    folder = trainer.start(spec, tmp_path, entry="faulty_workers:broken")
    assert trainer.wait(spec) == [1]
    assert outcome(folder)["status"] == "failed"
    assert outcome(folder)["reason"] == "ZeroDivisionError: planted"
    assert outcome(folder)["cause"] == "exception"
    assert outcome(folder)["phase"] == "forward"
    assert "Traceback" in folder.log.read_text()


def test_out_of_memory_is_told_from_other_failures(trainer, outcome, tmp_path):
    spec = trainer.make_spec((1, 32, 1))
    folder = trainer.start(spec, tmp_path, entry="faulty_workers:greedy")
    assert trainer.wait(spec) == [1]
    assert outcome(folder)["status"] == "oom"
    assert outcome(folder)["cause"] == "out_of_memory"
    assert outcome(folder)["phase"] == "optimizer"
    peak = outcome(folder)["peak_memory_gib"]
    assert outcome(folder)["peak_memory_method"] == "resident"
    assert 0.05 < peak < 2
    reason = outcome(folder)["reason"]
    assert reason.startswith("out of memory in optimizer of optimizer step 1: RuntimeError: ")
    assert reason.endswith(f"; peak until then: {peak:.3g} GiB resident")


def test_a_last_step_that_ruins_the_model_is_divergence(trainer, outcome, tmp_path):
    """The loss of the only step is finite; the parameters after it are not."""
    spec = trainer.make_spec(
        (1, 32, 1),
        optimizer={"name": "sgd", "learning_rate": 1e200},
        schedule={"name": "constant"},
        budget__optimizer_steps=1,
    )
    folder = trainer.train(spec, tmp_path)
    assert outcome(folder)["status"] == "diverged"
    assert outcome(folder)["reason"] == "the held-out loss after optimizer step 1 is not finite"


@pytest.mark.slow
def test_startup_excludes_the_first_evaluation(trainer, tmp_path):
    """A long evaluation is in `evaluation_s` alone: counted twice, the parts exceed the whole."""
    spec = trainer.make_spec(
        (1, 32, 1),
        data={"name": "custom", "_target_": "own_data.Blobs", "arguments": {"slow_s": 0.5}},
        model={"name": "mlp", "hidden_sizes": [8]},
        evaluation__samples=64,
        budget__optimizer_steps=1,
    )
    began = time.perf_counter()
    rank = read_table(trainer.train(spec, tmp_path), "ranks").iloc[0]
    whole_s = time.perf_counter() - began
    assert rank["evaluation_s"] >= 8 * 0.5  # of 8 samples each, asleep
    assert rank["startup_s"] > 0
    assert rank["startup_s"] + rank["evaluation_s"] < whole_s


def test_evaluation_samples_come_from_all_held_out_files(spec_of):
    """Neighbours in the corpus are not neighbours in the evaluation."""
    import numpy as np
    import torch

    from batchscape.train.evaluation import Evaluator

    spec = spec_of()
    ranks = range(spec.geometry.data_parallel_size)
    evaluators = [Evaluator(spec, torch.device("cpu"), rank) for rank in ranks]
    chosen = np.concatenate([batch for each in evaluators for batch in each._batches])
    assert len(set(chosen)) == 16
    assert np.ptp(chosen) > spec.data.held_out_samples / 2
