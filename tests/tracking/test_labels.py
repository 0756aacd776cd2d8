"""What runs are called in W&B."""

from __future__ import annotations

import re

import pytest

from batchscape.errors import DamageError
from batchscape.record.files import read_json, write_json
from batchscape.record.status import Attempt
from batchscape.tracking.labels import label_of, passed_settings, sweep_id_of


@pytest.fixture
def cell(fake_training):
    """Makes a run whose settings differ from those of the others, begun at a time of its own."""

    def make(run_id: str, *, seed: int = 3, **settings):
        training = fake_training(run_id)
        content = read_json(training.folder.config)
        content["config"]["seed"] = seed
        content["resolved"] |= {"init_seed": seed, "data_seed": seed}
        for key, value in settings.items():
            group, _, name = key.partition("__")
            if name:
                content["config"][group][name] = value
            else:
                content["config"][group] = value
        write_json(training.folder.config, content)
        training.status.attempts = [Attempt(float(len(run_id)), 0)]
        training.status.write(training.folder.status)
        return training.folder

    return make


def test_names_tell_the_settings_and_groups_are_cells(sweep, cell) -> None:
    folders = [
        cell("a"),
        cell("aa", seed=4),
        cell("aaa", timing_repeat=1),
        cell("aaaa", engine__name="fsdp", optimizer__learning_rate=0.01),
        cell("aaaaa", engine__name="fsdp", optimizer__learning_rate=0.01, tracker__tags=["x"]),
        cell("aaaaaa", model__d_model=64),
    ]
    sweep_id = sweep_id_of(sweep.run_folders())
    assert re.fullmatch("fixed_global_batch-[0-9a-f]{8}", sweep_id)
    labels = [label_of(folder, sweep_id) for folder in folders]
    keys = [re.search(" ([0-9a-f]{6})( |$)", label.name)[1] for label in labels]
    # Tags decide nothing of a run, seeds and repeats are pooled; a width makes another cell.
    assert keys[0] == keys[1] == keys[2]
    assert keys[3] == keys[4]
    assert len(set(keys)) == 3
    assert [label.name for label in labels] == [
        f"2x8x2 ddp gpt adamw 0.001 {keys[0]} s3",
        f"2x8x2 ddp gpt adamw 0.001 {keys[0]} s4",
        f"2x8x2 ddp gpt adamw 0.001 {keys[0]} s3 repeat 1",
        f"2x8x2 fsdp gpt adamw 0.01 {keys[3]} s3",
        f"2x8x2 fsdp gpt adamw 0.01 {keys[3]} s3",
        f"2x8x2 ddp gpt adamw 0.001 {keys[5]} s3",
    ]
    for label in labels:
        assert label.name.startswith(label.group.removesuffix(f" ({sweep_id})"))


def test_a_seed_of_the_order_alone_is_in_the_name(cell) -> None:
    names = set()
    for number in (3, 4):
        folder = cell("a" * number)
        content = read_json(folder.config)
        content["config"]["data_seed"] = content["resolved"]["data_seed"] = number
        write_json(folder.config, content)
        names.add(label_of(folder, "s").name.rpartition(" ")[2])
    assert names == {"s3", "s3.4"}


def test_no_cell_that_is_added_moves_a_run_to_another_group(sweep, cell) -> None:
    first = cell("a")
    before = label_of(first, sweep_id_of(sweep.run_folders()))
    for name, settings in (
        ("aa", {"optimizer__learning_rate": 0.1}),
        ("aaa", {"model__d_model": 8}),
    ):
        cell(name, **settings)
        assert label_of(first, sweep_id_of(sweep.run_folders())) == before


def test_a_long_name_is_cut_and_a_damaged_config_is_told(cell) -> None:
    label = label_of(cell("a", model__name="x" * 300), "s")
    assert max(map(len, label)) <= 128
    folder = cell("aa")
    folder.config.write_text('{"geometry": null}')
    with pytest.raises(DamageError, match=r"config\.json is damaged"):
        label_of(folder, "s")


@pytest.mark.parametrize("other", ["stages", "warmup"])
def test_ramps_of_other_lengths_and_times_of_other_steps_are_other_cells(cell, other) -> None:
    folders = [cell("a"), cell("aa", seed=4), cell("aaa")]
    for folder in folders:
        content = read_json(folder.config)
        (last,) = content["resolved"]["stages"]
        short = {**last["geometry"], "gradient_accumulation_steps": 1, "global_batch_size": 16}
        samples = 256 if folder is folders[2] and other == "stages" else 128
        first = {**last, "samples": samples, "geometry": short}
        last = {**last, "samples": last["samples"] - samples}
        content["resolved"]["stages"] = [first, last]
        if folder is folders[2] and other == "warmup":
            content["config"]["measure"]["warmup_optimizer_steps"] = 7
        write_json(folder.config, content)
    groups = [label_of(folder, "s").group for folder in folders]
    assert groups[0] == groups[1] != groups[2]


def test_what_a_program_was_never_told_is_no_setting_of_its_run(fake_training) -> None:
    content = read_json(fake_training("a").folder.config)
    assert passed_settings(content) == content["config"]
    content["resolved"]["not_passed"] = ["seed", "optimizer.learning_rate", "loader"]
    settings = passed_settings(content)
    assert {"seed", "loader"} & settings.keys() == set()
    assert "learning_rate" not in settings["optimizer"]
    assert settings["model"] == content["config"]["model"]
