import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.config import RunConfig
from batchscape.errors import ConfigError
from batchscape.geometry import BatchGeometry
from batchscape.plan.identity import content_hash, name_sweep, rejected_id, run_id, trajectory_id
from batchscape.record.spec import DataIdentity, Stage

DATA = DataIdentity("0123456789abcdef", "/a/folder", 1000, 100, 256, task="next_token")
GEOMETRY = BatchGeometry(1, 2, 8, 2)
SETTINGS = {
    "batch": {"global_batch_size": 32, "data_parallel_size": 2, "micro_batch_size": 8},
    "model": {"name": "gpt", "n_layers": 2, "n_heads": 4, "d_model": 128},
    "data": {"name": "stdlib"},
    "optimizer": {"name": "adamw", "learning_rate": 0.001},
    "schedule": {"name": "cosine", "warmup_samples": 320},
    "scaling": {},
    "budget": {"samples": 3840},
    "evaluation": {"every_samples": 640},
    "engine": {"name": "ddp"},
    "loader": {},
    "checkpoint": {},
    "measure": {},
    "launcher": {"name": "local"},
    "tracker": {"name": "none"},
}


def changed(path, value):
    mapping = json.loads(json.dumps(SETTINGS))
    *groups, last = path.split(".")
    node = mapping
    for group in groups:
        node = node[group]
    node[last] = value
    return RunConfig.from_mapping(mapping)


def ids(
    config,
    *,
    data=DATA,
    geometry=GEOMETRY,
    samples=3840,
    precision="float32",
    source_hash=None,
    device_type="cpu",
):
    stages = (Stage(samples, geometry, config.optimizer),)
    trajectory = trajectory_id(config, data, stages, precision=precision, source_hash=source_hash)
    return trajectory, run_id(config, trajectory, stages, device_type)


BASE = RunConfig.from_mapping(SETTINGS)


def test_the_hash_is_that_of_canonical_json():
    text = b'{"a":0.5,"b":[1,null,true]}'
    expected = hashlib.sha256(text).hexdigest()[:8]
    assert content_hash({"b": [1, None, True], "a": 0.5}, 8) == expected


@given(st.randoms(use_true_random=False))
def test_order_of_keys_does_not_matter(shuffler):
    def shuffled(value):
        if not isinstance(value, dict):
            return value
        keys = list(value)
        shuffler.shuffle(keys)
        return {key: shuffled(value[key]) for key in keys}

    assert ids(RunConfig.from_mapping(shuffled(SETTINGS))) == ids(BASE)


def test_resolved_values_count_and_how_they_were_given_does_not():
    others = [
        ids(BASE, geometry=BatchGeometry(1, 2, 8, 4)),
        ids(BASE, samples=7680),
        ids(BASE, precision="bfloat16"),
        ids(BASE, source_hash="0123"),
        *(
            ids(RunConfig.from_mapping({**SETTINGS, "init_seed": init, "data_seed": data}))
            for init, data in ((1, 2), (2, 1))
        ),
    ]
    assert len({trajectory for trajectory, _ in [ids(BASE), *others]}) == 7
    assert ids(changed("schedule.decay_samples", 3840)) == ids(BASE)
    assert ids(changed("budget", {"optimizer_steps": 120})) == ids(BASE)
    assert ids(changed("budget", {"tokens": 3840 * 64})) == ids(BASE)
    assert ids(changed("model.vocabulary_size", 256)) == ids(BASE)
    assert ids(changed("model.vocabulary_size", 257)) != ids(BASE)
    assert ids(changed("model.loss_chunk", 1024)) != ids(BASE)
    seeds = changed("init_seed", 0), changed("data_seed", 0), changed("engine.precision", "float32")
    assert all(ids(config) == ids(BASE) for config in seeds)


def test_geometry_layout_device_and_content():
    variants = [
        ids(BASE),
        ids(BASE, geometry=BatchGeometry(1, 1, 8, 4)),
        ids(BASE, geometry=BatchGeometry(2, 1, 8, 2)),
        ids(BASE, device_type="cuda"),
    ]
    assert len({trajectory for trajectory, _ in variants}) == 1
    assert len({run for _, run in variants}) == 4
    assert ids(BASE, data=replace(DATA, folder="/another/folder")) == ids(BASE)
    names = ("manifest_hash", "train_samples", "held_out_samples", "classes", "task")
    contents = [{name: 7} for name in (*names, "features", "vocabulary")]
    contents += [dict(zip(names[1:3], sizes, strict=True)) for sizes in ((8, 9), (9, 8))]
    others = [ids(BASE, data=replace(DATA, **content)) for content in contents]
    assert len({trajectory for trajectory, _ in (ids(BASE), *others)}) == 1 + len(others)
    assert len({run for _, run in (*variants, *others)}) == 4 + len(others)
    few, many = BatchGeometry(1, 2, 4, 2), BatchGeometry(1, 2, 8, 2)
    ramps = [
        [(1920, few, 0.1), (1920, many, 0.1)],
        [(1920, many, 0.1), (1920, few, 0.1)],
        [(1920, few, 0.1), (1920, many, 0.2)],
        [(640, few, 0.1), (3200, many, 0.1)],
        [(640, BatchGeometry(1, 1, 8, 2), 0.1), (3200, many, 0.1)],  # the same, cut otherwise
    ]
    trajectories = {
        trajectory_id(
            BASE,
            DATA,
            tuple(
                Stage(samples, cut, replace(BASE.optimizer, learning_rate=rate))
                for samples, cut, rate in ramp
            ),
            precision="float32",
            source_hash=None,
        )
        for ramp in ramps
    }
    assert len(trajectories) == len(ramps) - 1


def test_a_run_is_named_by_the_seeds_it_uses():
    mapping = {**SETTINGS, "init_seed": 3, "data_seed": 3}
    same = [RunConfig.from_mapping({**mapping, "seed": seed}) for seed in (0, 1, 3)]
    assert len({ids(config) for config in same}) == 1
    assert len({rejected_id(config) for config in same}) == 1
    assert ids(same[0])[1].startswith("b32-d2-m8-a2-s3-")
    assert ids(same[0]) == ids(changed("seed", 3))
    apart = RunConfig.from_mapping({**mapping, "data_seed": 4})
    assert ids(apart)[1].startswith("b32-d2-m8-a2-s3.4-")
    assert rejected_id(apart).startswith("b32-d2-m8-s3.4-")
    assert rejected_id(same[0]).startswith("b32-d2-m8-s3-")
    assert rejected_id(changed("launcher.concurrent_runs", 5)) == rejected_id(BASE)
    assert rejected_id(changed("optimizer.learning_rate", 5)) != rejected_id(BASE)


def test_only_equal_content_has_equal_hashes():
    distinct = [None, 0, 1, True, "1", 1.5, [], [1], {}, {"1": 1}, {"1": [1]}, "null"]
    assert len({content_hash(content, 16) for content in distinct}) == len(distinct)
    with pytest.raises(ValueError, match="JSON compliant"):
        content_hash(float("nan"), 8)


def folder(plan):
    assert plan.sweep_dir == Path("outputs") / plan.sweep_name
    return plan.sweep_name


def test_sweep_names(plan):
    study = "sweeps=fixed_global_batch"
    assert folder(plan()) == "run"
    assert folder(plan(study)) == "fixed_global_batch"
    swept = "batch.micro_batch_size=4,8"
    assert folder(plan(swept, "seed=0,1")) == "micro_batch_size-seed"
    assert folder(plan("seed=0,1", swept)) == "micro_batch_size-seed"
    assert folder(plan("model=gpt_nano,gpt_micro")) == "model"
    assert folder(plan("seed=1")).startswith("run-")


@pytest.mark.slow
def test_what_extends_a_folder_and_what_opens_another(plan):
    study = "sweeps=fixed_global_batch"
    same = [
        ["seed=7,8"],
        ["seed=3"],
        ["batch.micro_batch_size=16"],
        ["optimizer.learning_rate=0.1,0.2"],
        ["tracker=none", "launcher.concurrent_runs=2", "launcher.device=cpu"],
        ["checkpoint.every_s=1"],
        ["measure.equivalence_margin=0.01", "tracker.project=mine"],
        ["cluster=h200"],
    ]
    assert {folder(plan(study, *more)) for more in same} == {"fixed_global_batch"}
    other = [
        ["model=gpt_micro"],
        ["optimizer.learning_rate=0.1"],
        ["budget.samples=1920"],
        ["measure.memory=false"],
        ["measure.noise_scale_every=null"],
        ["measure.warmup_optimizer_steps=2"],
    ]
    names = {folder(plan(study, *more)) for more in other}
    assert len(names) == 6
    assert all(name.startswith("fixed_global_batch-") for name in names)
    both = ["model=gpt_micro", "budget.samples=1920"]
    assert folder(plan(study, *both)) == folder(plan(study, *reversed(both), "tracker=none"))
    assert folder(plan("optimizer.learning_rate=1e-2")) == folder(
        plan("optimizer.learning_rate=0.01")
    )


def test_given_names(plan):
    sweep_plan = plan("sweep_name=mine", "model=gpt_micro")
    assert (sweep_plan.sweep_name, sweep_plan.sweep_dir) == ("mine", Path("outputs/mine"))
    placed = plan("sweep_dir=/some/where", "sweeps=fixed_global_batch")
    assert (placed.sweep_name, placed.sweep_dir) == ("fixed_global_batch", Path("/some/where"))
    assert all(spec.sweep_name == "mine" for spec in sweep_plan.specs)


@pytest.mark.parametrize("name", ["", "a/b", "..", "../out", "/var/x", ".hidden", " ", "a b", "-"])
def test_names_that_are_no_folder(name):
    config = changed("sweep_name", name)
    with pytest.raises(ConfigError, match="sweep_name"):
        name_sweep(config, sweep_file=None, swept_keys=(), fixed={})


def test_axes_do_not_enter_the_hash(grid):
    learning_rates = grid("sweeps=learning_rate", "seed=5", "budget.samples=1280")
    assert "seed" in learning_rates.axis_keys
    assert learning_rates.fixed == {"sweeps": "learning_rate", "budget.samples": 1280}


def test_what_is_measured_again_goes_to_the_folder_of_what_it_repeats():
    for swept, fixed in (((), {"seed": 3}), (("seed",), {}), (("seed", "batch.ramp"), {"a": 1})):
        name_and_folder = name_sweep(BASE, sweep_file=None, swept_keys=swept, fixed=fixed)
        again = name_sweep(
            BASE, sweep_file=None, swept_keys=swept, fixed={**fixed, "timing_repeat": 1}
        )
        swept_again = name_sweep(
            BASE, sweep_file=None, swept_keys=(*swept, "timing_repeat"), fixed=fixed
        )
        assert name_and_folder == again == swept_again
