"""A trajectory is named by all that determines the loss curve, and by nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchscape.config import RunConfig
from batchscape.geometry import BatchGeometry
from batchscape.plan.identity import trajectory_id
from batchscape.record.spec import DataIdentity, Stage

Parts = dict[str, Any]

DECIDES: dict[str, list[Any]] = {
    "model": [
        {"name": "gpt", "n_layers": 2, "n_heads": 4, "d_model": 128},
        {"name": "gpt", "n_layers": 4, "n_heads": 2, "d_model": 128},
        {
            "name": "llama",
            "n_layers": 2,
            "n_heads": 4,
            "n_kv_heads": 4,
            "d_model": 128,
            "d_ff": 256,
        },
    ],
    "vocabulary_size": [300, 301],
    "dropout": [0.0, 0.1],
    "source_hash": [None, "1", "2"],
    "manifest_hash": ["1", "2"],
    "train_samples": [1000, 2000],
    "held_out_samples": [500, 1000],
    "classes": [256, 257],
    "task": ["next_token", "class"],
    "features": [None, 7],
    "vocabulary": [None, 7],
    "optimizer": [
        {"name": "adamw", "beta1": 0.9, "beta2": 0.95},
        {"name": "adamw", "beta1": 0.95, "beta2": 0.9},
        {"name": "sgd"},
    ],
    "clip": [None, 1.0],
    "schedule": [
        {"name": "constant", "warmup_samples": 0},
        {"name": "constant", "warmup_samples": 320},
        {"name": "cosine", "warmup_samples": 320, "final_fraction": 0.1},
        {"name": "cosine", "warmup_samples": 320, "final_fraction": 0.2},
        {"name": "cosine", "warmup_samples": 320, "decay_samples": 640},
    ],
    # Samples, global batch, learning rate of each stage.
    "stages": [
        [(3840, 32, 0.1)],
        [(3840, 32, 0.2)],
        [(3840, 64, 0.1)],
        [(7680, 32, 0.1)],
        [(1920, 32, 0.1), (1920, 64, 0.1)],
        [(1920, 64, 0.1), (1920, 32, 0.1)],
        [(1920, 32, 0.1), (1920, 64, 0.2)],
        [(2560, 32, 0.1), (1280, 64, 0.1)],
    ],
    "every_samples": [None, 640, 1280],
    "evaluation_samples": [64, 128],
    "evaluation_batch": [32, 64],
    "ema": [None, 1e5],
    "target_loss": [None, 2.0],
    "engine": ["ddp", "fsdp", "accelerate", "fabric"],
    "compile": [False, True],
    "precision": ["float32", "bfloat16"],
    "float32_matmul": ["highest", "high"],
    "init_seed": [0, 1, 2],
    "data_seed": [0, 1, 2],
}
"""What a loss curve depends on, with values that all differ from each other."""

LEAVES: dict[str, list[Any]] = {
    "ranks": [1, 2, 4],
    "micro_batch_size": [1, 2, 4],
    "nodes": [1, 2],
    "folder": ["/here", "/there"],
    "asked_for": ["whole", "parts"],
    "seed": [0, 5],
    "timing_repeat": [0, 1],
    "launcher": [{}, {"concurrent_runs": 2, "device": "cpu"}],
    "tracker": [{"name": "none"}, {"name": "wandb", "project": "mine"}],
    "checkpoint": [{}, {"every_s": 1.0}],
    "measure": [{}, {"memory": False, "noise_scale_every": 3, "equivalence_margin": 0.1}],
    "loader": [{}, {"workers": 2}],
    "device": [{}, {"memory_limit_gib": 1.0}],
    "activation_checkpointing": [False, True],
    "sweep_name": [None, "mine"],
}
"""What leaves it as it is: the cut above all, and how the rest was asked for."""


def name_of(parts: Parts) -> str:
    total = sum(samples for samples, _, _ in parts["stages"])
    resolved = parts["asked_for"] == "whole"
    schedule = dict(parts["schedule"])
    if schedule["name"] == "cosine" and resolved:
        schedule.setdefault("decay_samples", total)
    model = {**parts["model"], "vocabulary_size": parts["vocabulary_size"]}
    if model["name"] == "gpt":
        model["dropout"] = parts["dropout"]
    # A seed for both, where they are one, or each.
    seeds = {"init_seed": parts["init_seed"], "data_seed": parts["data_seed"]}
    seeds["seed"] = parts["seed"]
    if resolved and parts["init_seed"] == parts["data_seed"]:
        seeds = {"seed": parts["init_seed"]}
    config = RunConfig.from_mapping(
        {
            "batch": {"global_batch_size": parts["stages"][-1][1]},
            "model": model,
            "data": {"name": "stdlib"},
            "optimizer": {
                **parts["optimizer"],
                "learning_rate": parts["stages"][0][2],
                "gradient_clip_norm": parts["clip"],
            },
            "schedule": schedule,
            "scaling": {},
            "budget": {
                "samples": total,
                "target_loss": parts["target_loss"],
            },
            "evaluation": {
                "every_samples": parts["every_samples"],
                "samples": parts["evaluation_samples"],
                "batch_size": parts["evaluation_batch"],
                "ema_half_life_tokens": parts["ema"],
            },
            "engine": {
                "name": parts["engine"],
                "precision": parts["precision"] if resolved else "auto",
                "compile": parts["compile"],
                "float32_matmul": parts["float32_matmul"],
                "activation_checkpointing": parts["activation_checkpointing"],
            },
            "loader": parts["loader"],
            "device": parts["device"],
            "checkpoint": parts["checkpoint"],
            "measure": parts["measure"],
            "launcher": {"name": "local", **parts["launcher"]},
            "tracker": parts["tracker"],
            "timing_repeat": parts["timing_repeat"],
            "sweep_name": parts["sweep_name"],
            **seeds,
        }
    )
    fields = ("manifest_hash", "folder", "train_samples", "held_out_samples", "classes", "task")
    data = DataIdentity(**{name: parts[name] for name in (*fields, "features", "vocabulary")})
    stages = []
    for samples, batch, rate in parts["stages"]:
        ranks, micro = parts["ranks"], parts["micro_batch_size"]
        nodes = min(parts["nodes"], ranks)
        cut = BatchGeometry(nodes, ranks // nodes, micro, batch // ranks // micro)
        assert cut.global_batch_size == batch
        stages.append(Stage(samples, cut, replace(config.optimizer, learning_rate=rate)))
    return trajectory_id(
        config,
        data,
        tuple(stages),
        precision=parts["precision"],
        source_hash=parts["source_hash"],
    )


def applies(part: str, parts: Parts) -> bool:
    """Whether a model or a rule has a setting at all."""
    return part != "dropout" or parts["model"]["name"] == "gpt"


TRAININGS = st.fixed_dictionaries(
    {name: st.sampled_from(values) for name, values in (DECIDES | LEAVES).items()}
)


@pytest.mark.parametrize("part", DECIDES)
@settings(max_examples=8)
@given(st.data())
def test_every_part_of_the_curve_is_in_the_name(part: str, data: st.DataObject) -> None:
    """Each of its values gives a name of its own, whatever the others are."""
    training = data.draw(TRAININGS.filter(lambda parts: applies(part, parts)))
    names = {name_of(training | {part: value}) for value in DECIDES[part]}
    assert len(names) == len(DECIDES[part])


@pytest.mark.parametrize("part", LEAVES)
@settings(max_examples=8)
@given(st.data())
def test_nothing_else_is_in_the_name(part: str, data: st.DataObject) -> None:
    training = data.draw(TRAININGS)
    assert len({name_of(training | {part: value}) for value in LEAVES[part]}) == 1


@given(TRAININGS, TRAININGS, st.sets(st.sampled_from(list(DECIDES)), max_size=3))
def test_names_are_equal_where_all_that_decides_is(
    training: Parts, other: Parts, changed: set[str]
) -> None:
    """Also where several parts differ, which might make up for each other."""
    decides = training | {name: other[name] for name in (*LEAVES, *changed)}
    are_equal = all(
        decides[name] == training[name] or not (applies(name, decides) or applies(name, training))
        for name in DECIDES
    )
    assert (name_of(decides) == name_of(training)) == are_equal


def test_parts_that_could_stand_for_each_other_do_not() -> None:
    training = {name: values[0] for name, values in (DECIDES | LEAVES).items()}
    pairs = [
        ("init_seed", 1, "data_seed", 2),
        ("features", 7, "vocabulary", None),
        ("train_samples", 1000, "held_out_samples", 2000),
        ("evaluation_samples", 64, "evaluation_batch", 32),
    ]
    for one, first, other, second in pairs:
        there = name_of(training | {one: first, other: second})
        assert there != name_of(training | {one: second, other: first}), (one, other)
