from dataclasses import fields, is_dataclass
from itertools import starmap
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from omegaconf import OmegaConf

import batchscape.conf
from batchscape.compose import compose
from batchscape.config import RunConfig
from batchscape.config.types import key_of
from batchscape.errors import ConfigError

CONF = Path(batchscape.conf.__file__).parent
OPTIONS = sorted(
    path.relative_to(CONF).with_suffix("").as_posix() for path in CONF.glob("*/*.yaml")
)
COMPANIONS = {
    "data/digits": ["model=mlp"],
    "model/mlp": ["data=digits"],
    "data/external": ["engine=command", "engine.argv=[python]"],
    "model/external": ["engine=command", "engine.argv=[python]"],
}
GIVEN = {
    # What an option leaves to its user (`???`).
    "data/text": {"path": "some/text.txt"},
    "data/tokens": {"path": "some/train.bin"},
    "data/documents": {"path": "some/documents.jsonl"},
    "data/custom": {"_target_": "my_data.Data"},
    "model/hf": {"path": "some/folder"},
    "model/custom": {"_target_": "my_models.Model"},
    "engine/command": {"argv": ["python", "train.py"]},
}


def content_of(option):
    plain = OmegaConf.to_container(OmegaConf.load(CONF / f"{option}.yaml"))
    # An option may choose those of other groups that belong to it.
    return {
        str(key): value for key, value in plain.items() if option == "config" or key != "defaults"
    }


def composed(*arguments):
    grid = compose(arguments, "batchscape run")
    (cell,) = grid.cells
    return RunConfig.from_mapping(cell.settings)


def dataclass_of(group, content):
    """Find the dataclass that an option configures, by its name where there are several."""
    hint = get_type_hints(RunConfig)[group]
    for member in (hint, *get_args(hint)):
        if is_dataclass(member):
            hints = get_type_hints(member)
            if "name" not in hints or content["name"] in get_args(hints["name"]):
                return member
    pytest.fail(f"{group}: no dataclass for {content}")


def rounds():
    """Every option once or more: those of model, data and engine alone, all others beside them.

    Budgets stand beside engines: not every model and not all data take each of them.
    """
    by_group = {}
    for option in OPTIONS:
        by_group.setdefault(option.partition("/")[0], []).append(option)
    tied = [option for group in ("model", "data", "engine") for option in by_group.pop(group)]
    return [
        [
            option,
            *(
                options[number % len(options)]
                for group, options in by_group.items()
                if group != "budget" or option.startswith("engine/")
            ),
        ]
        for number, option in enumerate(tied)
    ]


@pytest.mark.parametrize("options", rounds(), ids=lambda options: str(options[0]))
def test_options_compose_and_validate(options):
    lines = list(COMPANIONS.get(options[0], []))
    for option in options:
        group, _, name = option.partition("/")
        lines.append(f"{group}={name}")
        lines += [f"{group}.{key}={value}" for key, value in GIVEN.get(option, {}).items()]
    settings = composed(*lines).to_mapping()
    for option in options:
        group = option.partition("/")[0]
        assert settings[group] == content_of(option) | GIVEN.get(option, {}), option


def test_every_option_is_in_a_round():
    assert {option for options in rounds() for option in options} == set(OPTIONS)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_setting_is_visible(option):
    text = (CONF / f"{option}.yaml").read_text()
    assert text.startswith("# "), "the first line says what the option is"
    content = content_of(option)
    owner = dataclass_of(option.partition("/")[0], content)
    hints = get_type_hints(owner, include_extras=True)
    assert sorted(content) == sorted(starmap(key_of, hints.items()))


def test_every_group_has_its_settings_and_every_setting_its_group():
    top = content_of("config")
    groups = {
        key
        for entry in top["defaults"]
        if isinstance(entry, dict)
        for key in entry
        if not key.startswith("override") and key != "sweeps"
    }
    assert groups == {option.partition("/")[0] for option in OPTIONS}
    settings = {key for key in top if key not in {"defaults", "hydra"}}
    assert groups | settings == {field.name for field in fields(RunConfig)}


def test_open_settings_take_entries_with_a_plus():
    model = composed("model=hf_gpt2", "+model.settings.n_positions=128").to_mapping()["model"]
    assert model["settings"]["n_positions"] == 128
    with pytest.raises(ConfigError, match=r"with a plus: \+model\.settings\.n_positions=VALUE"):
        composed("model=hf_gpt2", "model.settings.n_positions=128")
    custom = ["model=custom", "model._target_=my_models.Model"]
    assert composed(*custom, "+model.arguments.width=4").to_mapping()["model"]["arguments"]
    with pytest.raises(ConfigError, match=r"\+model\.arguments\.NAME=VALUE"):
        composed(*custom, "model.arguments={width: 4}")


def test_users_own_options_and_sweeps(tmp_path):
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text("name: sgd\nlearning_rate: 0.5\n")
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "mine.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - override /optimizer: mine\n"
        "optimizer:\n  momentum: 0.5\n"
        "hydra:\n  sweeper:\n    params:\n      seed: 'range(0,3)'\n"
    )
    grid = compose(["--config-dir", str(tmp_path), "sweeps=mine"], "batchscape sweep")
    assert grid.sweep_file == "mine"
    configs = [RunConfig.from_mapping(cell.settings) for cell in grid.cells]
    assert [config.seed for config in configs] == [0, 1, 2]
    assert all(config.optimizer.learning_rate == 0.5 for config in configs)
    assert all(config.to_mapping()["optimizer"]["momentum"] == 0.5 for config in configs)
