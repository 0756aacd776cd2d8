"""What a plan of a command refuses, rejects and is named by."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchscape.compose import compose
from batchscape.config import RunConfig
from batchscape.errors import ConfigError
from batchscape.plan.expand import SweepCells
from batchscape.record.placeholders import PLACEHOLDERS, placeholder_values, unpassed_settings
from batchscape.record.spec import RunSpec


def only(planned) -> RunSpec:
    (spec,) = planned.specs
    return spec


def argv(*arguments: str) -> dict[str, list[str]]:
    return {"engine__argv": ["{python}", *arguments]}


def test_choosing_the_engine_chooses_model_and_data():
    grid = compose(["engine=command", "engine.argv=[python]"], "batchscape run")
    assert isinstance(grid, SweepCells)
    config = RunConfig.from_mapping(grid.cells[0].settings)
    assert (config.model.name, config.data.name) == ("external", "external")
    grid = compose(["engine=command", "engine.argv=[python]", "model=gpt_nano"], "batchscape run")
    assert isinstance(grid, SweepCells)
    with pytest.raises(ConfigError, match="add model=external, or choose none"):
        RunConfig.from_mapping(grid.cells[0].settings)


def test_values_of_placeholders(settings, plan):
    """Arithmetic by hand: 2 ranks x 3 samples x 4 micro-steps = 24, five steps, 16 tokens each."""
    cell = settings(
        batch={"data_parallel_size": 2, "micro_batch_size": 3, "global_batch_size": 24},
        budget__optimizer_steps=5,
        data__sequence_length=16,
        optimizer__weight_decay=0.25,
        scaling={"reference_global_batch_size": 12, "learning_rate": "linear"},
        schedule__warmup_samples=48,
        evaluation__every_samples=72,
        seed=7,
        data_seed=8,
        **argv(
            "{learning_rate}",
            "{warmup_optimizer_steps}",
            "{evaluation_every_optimizer_steps}",
            "{optimizer.weight_decay}",
        ),
    )
    spec = only(plan(cell))
    values = placeholder_values(spec.config, spec.stages)
    expected = {
        "micro_batch_size": 3,
        "gradient_accumulation_steps": 4,
        "accumulation_over_ranks": 8,
        "data_parallel_size": 2,
        "nodes": 1,
        "devices": 2,
        "global_batch_size": 24,
        "global_batch_tokens": 384,
        "samples": 120,
        "tokens": 1920,
        "optimizer_steps": 5,
        "micro_steps": 20,
        "sequence_length": 16,
        "learning_rate": 0.2,
        "warmup_optimizer_steps": 2,
        "evaluation_every_optimizer_steps": 3,
        "seed": 7,
        "init_seed": 7,
        "data_seed": 8,
        "precision": "program",
        "optimizer.weight_decay": 0.25,
    }
    assert {name: values[name] for name in expected} == expected
    assert set(PLACEHOLDERS) - set(values) == {"run_dir", "run_id", "python", "port"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (argv("{micro}"), r"no placeholder \{micro\}; did you mean \{micro_steps\}"),
        (argv("{"), "is doubled"),
        (argv("{tokens}"), "data.sequence_length is null"),
        (argv("{optimizer.gradient_clip_norm}"), "gradient_clip_norm is null"),
        (argv("{warmup_optimizer_steps}"), "multiple of the global batch 8; given 12; use 8 or 16"),
        ({"engine__values": {"zero_stage": 1}}, r"\{zero_stage\} is nowhere in engine.argv"),
        ({"engine__values": {"seed": 1}, **argv("{seed}")}, "is a placeholder already"),
        ({"engine__values": {"a-b": 1}}, "cannot be a placeholder"),
        (
            {"engine__argv": ["no-such-program"]},
            "no-such-program is no program that may be executed",
        ),
        ({"engine__argv": ["./train.sh"]}, "./train.sh is no program that may be executed"),
        ({"engine__cwd": "/nowhere"}, "no such folder"),
        ({"engine__files": ["nothing.py"]}, "no file or folder nothing.py"),
        ({"data__files": ["nothing.bin"]}, "no file or folder nothing.bin"),
        ({"budget__target_loss": 1.0}, "cannot be stopped at a target"),
        (
            {"batch__ramp": [{"samples": 8, "global_batch_size": 4}]},
            "one global batch from begin to end",
        ),
        (
            {"scaling": {"reference_global_batch_size": 4, "learning_rate": "sqrt"}},
            "does not reach the program",
        ),
        ({"model": {"name": "mlp", "hidden_sizes": [2]}}, "add model=external"),
        ({"engine": {"name": "ddp"}}, "add engine=command"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings, plan, overrides, message):
    optimizer = {"name": "adamw", "learning_rate": 0.1, "gradient_clip_norm": None}
    cell = settings(
        **{
            "optimizer": optimizer,
            "schedule": {"name": "constant", "warmup_samples": 12},
            **overrides,
        }
    )
    with pytest.raises(ConfigError, match=message):
        plan(cell)


@pytest.mark.parametrize(
    ("key", "placeholder", "reaches"),
    [
        ("seed", "seed", True),
        ("seed", "data_seed", True),
        ("seed", "learning_rate", False),
        ("optimizer.learning_rate", "learning_rate", True),
        ("optimizer.learning_rate", "optimizer.learning_rate", True),
        ("optimizer.learning_rate", "optimizer.beta1", False),
        ("optimizer.beta1", "optimizer.beta1", True),
        ("optimizer", "optimizer.name", True),
        ("optimizer", "seed", False),
        ("schedule", "schedule.warmup_samples", True),
        ("schedule", "seed", False),
        ("evaluation.samples", "seed", False),
        ("loader.workers", "seed", False),
        ("checkpoint.every_s", "seed", False),
        ("measure.noise_scale_every", "seed", False),
        ("measure.warmup_optimizer_steps", "seed", True),
        ("batch.global_batch_size", "seed", True),
        ("+engine.values.x", "seed", True),
        ("timing_repeat", "seed", True),
    ],
)
def test_what_is_chosen_must_reach_the_program(settings, plan, key, placeholder, reaches):
    cell = settings(**argv(f"{{{placeholder}}}"))
    for keys in ({"swept": (key,)}, {"fixed": (key,)}):
        if reaches:
            plan(cell, **keys)
        else:
            with pytest.raises(ConfigError, match="the program is not told"):
                plan(cell, **keys)


def test_a_sequence_length_counts_tokens_but_cannot_be_swept_unseen(settings, plan):
    cell = settings(data__sequence_length=16)
    plan(cell, fixed=("data.sequence_length",))
    with pytest.raises(ConfigError, match=r"data\.sequence_length is swept"):
        plan(cell, swept=("data.sequence_length",))


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ((), "micro_batch_size"),
        (("{micro_batch_size}",), "gradient_accumulation_steps"),
        (("{gradient_accumulation_steps}",), "micro_batch_size"),
        (("{micro_batch_size}", "{gradient_accumulation_steps}"), None),
        (("{micro_batch_size}", "{global_batch_size}"), None),
        (("{micro_batch_size}", "{accumulation_over_ranks}"), None),
        (("{accumulation_over_ranks}", "{global_batch_size}"), None),
    ],
)
def test_factors_that_differ_must_be_told(settings, plan, arguments, missing):
    """Micro-batches of 2 and 4 of a global batch of 8: accumulation differs as well."""
    cells = [
        settings(batch__micro_batch_size=micro, batch__data_parallel_size=1, **argv(*arguments))
        for micro in (2, 4)
    ]
    if missing is None:
        assert len(plan(*cells).specs) == 2
    else:
        with pytest.raises(ConfigError, match=f"^{missing} differs between the runs"):
            plan(*cells)
    assert len(plan(cells[0]).specs) == 1, "what does not differ may stand in argv itself"


def test_wide_cells_are_rejected_with_the_reason(settings, plan):
    engine = argv("{devices}", "{gradient_accumulation_steps}")
    cells = [
        settings(batch__data_parallel_size=ranks, engine__max_devices=1, **engine)
        for ranks in (1, 2)
    ]
    planned = plan(*cells)
    assert [spec.geometry.data_parallel_size for spec in planned.specs] == [1]
    (rejection,) = planned.rejections
    assert "at most engine.max_devices=1 data-parallel ranks" in rejection.reason


def test_rules_of_settings_that_are_not_passed_refuse_nothing(settings, plan):
    """An evaluation every 100 samples is within a step of 8; the program hears of neither."""
    cell = settings(evaluation__every_samples=100)
    assert only(plan(cell)).evaluation_every_samples is None
    with pytest.raises(ConfigError, match="multiple of the global batch"):
        plan(
            cell | {"engine": cell["engine"] | {"argv": ["{python}", "{evaluation.every_samples}"]}}
        )


def test_what_is_not_passed_is_known(config):
    names = unpassed_settings(config(**argv("{learning_rate}", "{seed}", "{optimizer.beta1}")))
    assert {"optimizer.weight_decay", "schedule.warmup_samples", "loader.workers"} <= set(names)
    assert not {"optimizer.learning_rate", "optimizer.beta1", "seed", "init_seed"} & set(names)


def test_names_hold_what_decides_the_training(settings, plan, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("pass")
    (tmp_path / "module.py").write_text("a = 1")
    base = {
        "engine__cwd": str(tmp_path),
        "engine__files": ["module.py"],
        **argv("train.py", "{seed}", "{micro_batch_size}"),
    }

    def spec(**overrides) -> RunSpec:
        return only(plan(settings(**{**base, **overrides})))

    first = spec()
    same = [
        spec(),
        spec(optimizer__learning_rate=0.2),  # not told
        spec(engine__resumable=True),
        spec(engine__max_devices=4),
        spec(loader={"workers": 1}),
    ]
    assert {s.run_id for s in same} == {first.run_id}
    other_trajectory = [
        spec(seed=1),
        spec(batch__global_batch_size=16),
        spec(budget__optimizer_steps=5),
        spec(engine__environment={"A": "1"}),
        spec(engine__precision="bfloat16"),
        spec(data__sequence_length=16),
        spec(**argv("train.py", "{seed}", "{micro_batch_size}", "--more")),
        spec(engine__values={"x": 1}, **argv("train.py", "{seed}", "{micro_batch_size}", "{x}")),
        spec(engine__values={"x": 2}, **argv("train.py", "{seed}", "{micro_batch_size}", "{x}")),
    ]
    script.write_text("pass # edited")
    other_trajectory.append(spec())
    (tmp_path / "module.py").write_text("a = 2")
    other_trajectory.append(spec())
    names = [s.trajectory_id for s in (first, *other_trajectory)]
    assert len(set(names)) == len(names)
    script.write_text("pass")
    (tmp_path / "module.py").write_text("a = 1")
    read_otherwise = spec(engine__metrics={"kind": "trainer_state"})
    assert read_otherwise.trajectory_id == first.trajectory_id
    assert read_otherwise.run_id != first.run_id
    assert spec(timing_repeat=1).run_id != first.run_id


def test_cuts_of_a_program_share_a_trajectory_and_are_other_runs(settings, plan):
    """Whatever of the cut it is told, and where it is told none of it."""
    variants = [
        ["{micro_batch_size}", "{gradient_accumulation_steps}", "{devices}", "{nodes}"],
        ["{micro_batch_size}", "{accumulation_over_ranks}", "{data_parallel_size}"],
        ["{micro_batch_size}", "{global_batch_size}", "{micro_steps}", "{seed}"],
        ["{global_batch_tokens}", "{tokens}", "{samples}", "{optimizer_steps}"],
    ]
    for names in variants:
        specs = [
            only(plan(settings(batch__micro_batch_size=m, data__sequence_length=8, **argv(*names))))
            for m in (2, 4, 8)
        ]
        assert len({spec.trajectory_id for spec in specs}) == 1
        assert len({spec.run_id for spec in specs}) == 3
        other = only(
            plan(settings(batch__global_batch_size=16, data__sequence_length=8, **argv(*names)))
        )
        assert other.trajectory_id != specs[0].trajectory_id


def test_a_run_is_read_as_it_was_written(settings, plan, tmp_path: Path):
    spec = only(plan(settings(engine__values={"x": 1.5}, **argv("{x}"))))
    spec.write(tmp_path / "config.json")
    assert RunSpec.read(tmp_path / "config.json") == spec


@pytest.mark.parametrize(
    ("key", "values", "placeholder"),
    [
        ("engine.precision", ("float32", "bfloat16"), "{precision}"),
        ("budget.optimizer_steps", (4, 8), "{optimizer_steps}"),
    ],
)
def test_what_the_script_may_have_itself_must_be_told_once_it_is_swept(
    settings, plan, key, values, placeholder
):
    override = key.replace(".", "__")
    passing = [settings(**argv(placeholder)) for _ in values]
    untold = [settings() for _ in values]
    for cells in (passing, untold):
        for cell, value in zip(cells, values, strict=True):
            group, _, name = override.partition("__")
            cell[group][name] = value
    assert len(plan(*passing, swept=(key,)).specs) == 2
    assert len(plan(untold[0], fixed=(key,)).specs) == 1
    with pytest.raises(ConfigError, match=rf"{key} is swept, but the program is not told"):
        plan(*untold, swept=(key,))


@pytest.mark.parametrize("name", ["BATCHSCAPE_RUN_DIR", "BATCHSCAPE_ATTEMPT"])
def test_variables_of_batchscape_are_its_own(settings, plan, name):
    with pytest.raises(ConfigError, match="batchscape's own"):
        plan(settings(engine__environment={name: "1"}))


def test_devices_are_those_of_the_lease(settings, plan):
    with pytest.raises(ConfigError, match="devices of its own"):
        plan(settings(engine__environment={"CUDA_VISIBLE_DEVICES": "0,1"}))
    assert plan(settings(engine__environment={"CUDA_VISIBLE_DEVICES": ""})).specs, "hides them all"


@pytest.mark.parametrize(
    "engine",
    [
        {"engine__environment": {"HF_TOKEN": "of the YAML file"}},
        {"engine__environment": {"LOGIN": "tea-and-biscuits"}},
        {"engine__argv": ["{python}", "--login=tea-and-biscuits"]},
        {"engine__argv": ["{python}", "{login}"], "engine__values": {"login": "tea-and-biscuits"}},
    ],
)
def test_secrets_are_refused_and_not_told(settings, plan, monkeypatch, engine):
    monkeypatch.setenv("SOME_API_KEY", "tea-and-biscuits")
    with pytest.raises(ConfigError, match=r"holds .*\[(HF_TOKEN|SOME_API_KEY)\]") as error:
        plan(settings(**engine))
    assert "biscuits" not in str(error.value)
    assert plan(settings(engine__environment={"TOKENIZERS_PARALLELISM": "false"})).specs


@pytest.mark.parametrize(
    "argv",
    [
        ["{python}", "tran.py"],
        ["torchrun", "--nproc_per_node", "{devices}", "tran.py", "--micro={micro_batch_size}"],
        ["python3", "-u", "tran.py"],
    ],
)
def test_a_script_that_is_not_there_is_refused(settings, plan, tmp_path, monkeypatch, argv):
    (tmp_path / "train.py").touch()
    monkeypatch.setattr("shutil.which", lambda *_, **__: "/bin/true")
    factors = ["{micro_batch_size}"]
    cell = settings(engine__argv=[*argv, *factors], engine__cwd=str(tmp_path))
    with pytest.raises(ConfigError, match=r"no script tran\.py in "):
        plan(cell)


@pytest.mark.parametrize(
    "argv",
    [
        ["docker", "run", "image", "python", "/in/it/train.py"],
        ["{python}", "-c", "print('no script.py')"],
        ["{python}", "train.py", "--export", "made.py"],
    ],
)
def test_no_script_is_looked_for_where_none_need_be(settings, plan, tmp_path, monkeypatch, argv):
    (tmp_path / "train.py").touch()
    monkeypatch.setattr("shutil.which", lambda *_, **__: "/bin/true")
    assert only(plan(settings(engine__argv=argv, engine__cwd=str(tmp_path))))
