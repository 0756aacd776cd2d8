"""Optimizers, schedules, rules, averages and ramps in real runs, planned as a user's are."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from batchscape.config import RunConfig
from batchscape.data.corpus import prepare
from batchscape.models.build import build_model
from batchscape.plan.machine import Machine
from batchscape.plan.resolve import resolve
from batchscape.plan.stages import solve_geometries
from batchscape.record.tables import read_table

MICRO = {"name": "gpt", "n_layers": 1, "n_heads": 2, "d_model": 16}
WSD = {"name": "wsd", "warmup_samples": 40, "decay_samples": 64}

CASES = {
    "sgd, linear rule, decay by a line": {
        "optimizer": {"name": "sgd", "learning_rate": 0.2, "weight_decay": 0.01},
        "scaling": {
            "reference_global_batch_size": 16,
            "learning_rate": "linear",
            "weight_decay": "timescale",
        },
        "schedule": WSD,
    },
    "muon, average": {
        "optimizer": {"name": "muon", "learning_rate": 0.02, "adamw_learning_rate": 0.004},
        "scaling": {"reference_global_batch_size": 16, "betas": "half_life"},
        "schedule": {"name": "constant", "warmup_samples": 40},
        "evaluation__ema_half_life_tokens": 500.0,
    },
    "ramp, all rules, cosine, average": {
        "optimizer": {"name": "adamw", "learning_rate": 0.004},
        "scaling": {
            "reference_global_batch_size": 16,
            "learning_rate": "sqrt",
            "betas": "half_life",
            "weight_decay": "timescale",
        },
        "schedule": {"name": "cosine", "warmup_samples": 40},
        "evaluation__ema_half_life_tokens": 500.0,
        "ramp": [
            {"samples": 32, "global_batch_size": 8},
            {"samples": 64, "global_batch_size": 16},
        ],
        "global_batch_size": 32,
    },
}
CUTS = [(1, 8), (2, 2)]
"""Data-parallel ranks and micro-batches: (1,8,1) and (2,2,2) where the global batch is 8."""


@pytest.fixture
def planned(config_of):
    """Settle a run as `batchscape run` does."""

    def spec_for(ranks, micro, *, ramp=(), global_batch_size=8, samples=256, **settings):
        config = config_of(
            batch={
                "data_parallel_size": ranks,
                "micro_batch_size": micro,
                "global_batch_size": global_batch_size,
                "ramp": list(ramp),
            },
            budget={"samples": samples},
            model=MICRO,
            **{"data__sequence_length": 16, "evaluation__every_samples": 32, **settings},
        )
        return resolve(
            config,
            solve_geometries(config),
            prepare(config.data),
            source_hash=None,
            machine=Machine(2, "two cores"),
            sweep_name="test",
        )

    return spec_for


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_decompositions_train_alike(trainer, planned, steps, tmp_path, case):
    specs = [planned(*cut, **CASES[case]) for cut in CUTS]
    assert len({spec.trajectory_id for spec in specs}) == 1
    assert len({spec.run_id for spec in specs}) == 2
    folders = [trainer.train(spec, tmp_path) for spec in specs]
    for columns, tables in (
        (["loss", "gradient_norm"], [steps(folder) for folder in folders]),
        (["eval_loss"], [read_table(folder, "evals") for folder in folders]),
    ):
        for column in columns:
            values = np.array([table[column] for table in tables], dtype=float)
            np.testing.assert_allclose(values[1], values[0], rtol=1e-9, atol=0)
        for column in ("samples", "tokens"):
            assert tables[0][column].tolist() == tables[1][column].tolist()
    losses = steps(folders[0])["loss"].to_numpy(dtype=float)
    assert losses[-1] < losses[0] - 0.02, "nothing was learned: the curves could not differ"


def test_rates_are_those_of_rule_and_schedule(trainer, planned, steps, tmp_path):
    """The root rule at every stage of a ramp, times half a cosine at the middle of every step."""
    case = CASES["ramp, all rules, cosine, average"]
    rows = steps(trainer.train(planned(1, 8, **case), tmp_path))
    sizes = np.array([8] * 4 + [16] * 4 + [32] * 5)
    assert rows["global_batch_size"].tolist() == sizes.tolist()
    assert rows["samples"].tolist() == np.cumsum(sizes).tolist()
    middle = np.cumsum(sizes) - sizes / 2
    t = (middle - 40) / (256 - 40)
    factor = np.where(middle < 40, middle / 40, 0.1 + 0.9 * (1 + np.cos(np.pi * t)) / 2)
    expected = 0.004 * np.sqrt(sizes / 16) * factor
    np.testing.assert_allclose(rows["learning_rate"].astype(float), expected, rtol=1e-12)


def test_rates_are_those_of_the_stages_of_a_ramp(trainer, planned, steps, tmp_path):
    ramp = [
        {"samples": 32, "global_batch_size": 8, "learning_rate_factor": 2.0},
        {"tokens": 32 * 16, "global_batch_size": 16, "learning_rate_factor": 1.5},
    ]
    constant = {"name": "constant", "warmup_samples": 0}
    spec = planned(1, 8, ramp=ramp, global_batch_size=32, samples=128, schedule=constant)
    rows = steps(trainer.train(spec, tmp_path))
    assert rows["global_batch_size"].tolist() == [8] * 4 + [16] * 2 + [32] * 2
    last = spec.config.optimizer.learning_rate
    expected = last * np.array([2.0] * 4 + [1.5] * 2 + [1.0] * 2)
    np.testing.assert_allclose(rows["learning_rate"].astype(float), expected, rtol=1e-12)


@pytest.mark.slow
def test_evaluations_are_of_the_average_and_of_the_weights(trainer, planned, tmp_path):
    """A half-life of nothing keeps the last weights alone."""
    evals = {}
    for half_life in (None, 1e-3, 500.0):
        spec = planned(1, 8, evaluation__ema_half_life_tokens=half_life)
        folder = trainer.train(spec, tmp_path / str(half_life))
        evals[half_life] = read_table(folder, "evals")
    plain = evals[None]["eval_loss"]
    assert evals[None]["raw_eval_loss"].isna().all()
    assert evals[1e-3]["eval_loss"].tolist() == plain.tolist()
    for half_life in (1e-3, 500.0):
        # Averaging leaves the training untouched.
        assert evals[half_life]["raw_eval_loss"].tolist() == plain.tolist()
    # Losses fall here, and an average lags behind.
    assert (evals[500.0]["eval_loss"] - plain).iloc[-1] > 1e-4
    assert evals[500.0]["eval_loss"].iloc[0] == plain.iloc[0]


@pytest.mark.slow
def test_the_target_is_judged_by_the_average(trainer, planned, outcome, tmp_path):
    plain = planned(1, 8, evaluation__ema_half_life_tokens=500.0)
    table = read_table(trainer.train(plain, tmp_path / "plain"), "evals")
    average, weights = table["eval_loss"].to_numpy(float), table["raw_eval_loss"].to_numpy(float)
    # Between the two curves: the weights are there already, their average is not.
    target = (average[4] + weights[4]) / 2
    reached = int(np.argmax(average <= target))
    assert reached > 4
    spec = planned(1, 8, evaluation__ema_half_life_tokens=500.0)
    mapping = spec.config.to_mapping()
    mapping["budget"]["target_loss"] = float(target)
    ended = dataclasses.replace(spec, config=RunConfig.from_mapping(mapping))
    folder = trainer.train(ended, tmp_path / "target")
    assert outcome(folder)["stop_reason"] == "target"
    assert outcome(folder)["optimizer_step"] == reached * 4


@pytest.mark.slow
def test_the_rehearsal_counts_the_average(trainer, planned, tmp_path):
    """One more copy of the parameters, from the start."""
    rows = []
    for half_life in (None, 500.0):
        spec = planned(1, 8, measure__memory=True, evaluation__ema_half_life_tokens=half_life)
        folder = trainer.train(spec, tmp_path / str(half_life))
        rows.append(read_table(folder, "ranks").iloc[0])
    model = build_model(spec.config, spec.data, "float64")
    copy_gib = 8 * sum(p.numel() for p in model.parameters()) / 2**30
    for column in ("allocated_after_model_gib", "peak_allocated_steady_gib"):
        assert rows[1][column] - rows[0][column] == pytest.approx(copy_gib, rel=0.02)
