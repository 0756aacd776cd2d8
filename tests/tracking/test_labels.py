"""What runs are called in W&B, and when W&B says that their rows came to be."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from batchscape.cli import main
from batchscape.config import WandbTracker
from batchscape.record.columns import COLUMNS, RESIDENT
from batchscape.record.files import read_json, write_json
from batchscape.record.status import Attempt, Status
from batchscape.tracking.labels import Labels, told_settings
from batchscape.tracking.mirror import Mirror
from batchscape.tracking.times import row_times, run_time_s

OFFLINE = WandbTracker(name="wandb", mode="offline", project="geometry")


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


def test_names_tell_what_was_swept_and_groups_are_cells(sweep, cell) -> None:
    folders = [
        cell("a"),
        cell("aa", seed=4),
        cell("aaa", timing_repeat=1),
        cell("aaaa", engine__name="fsdp", optimizer__learning_rate=0.01),
        cell("aaaaa", engine__name="fsdp", optimizer__learning_rate=0.01, tracker__tags=["x"]),
    ]
    labels = Labels(sweep)
    labels.refresh(None)
    found = [labels.of(folder) for folder in folders]
    assert [label.name for label in found] == [
        "2x8x2 ddp learning_rate=0.001 s3",
        "2x8x2 ddp learning_rate=0.001 s4",
        "2x8x2 ddp learning_rate=0.001 s3 repeat 1",
        "2x8x2 fsdp learning_rate=0.01 s3",
        "2x8x2 fsdp learning_rate=0.01 s3",
    ]
    # Tags decide nothing of a run, seeds and repeats are pooled.
    one, other = found[0].group, found[3].group
    assert [label.group for label in found] == [one, one, one, other, other]
    assert one == f"2x8x2 ddp learning_rate=0.001 ({labels.sweep_id})"
    # More cells keep the name of the sweep; theirs follow what is swept now.
    cell("aaaaaa", model__d_model=64)
    labels.refresh(None)
    assert labels.of(folders[0]).group == (
        f"2x8x2 ddp d_model=32 learning_rate=0.001 ({labels.sweep_id})"
    )
    again = Labels(sweep)
    again.refresh(None)
    assert again.sweep_id == labels.sweep_id
    assert again.of(folders[0]) == labels.of(folders[0])


def test_cells_that_would_be_called_alike_are_told_apart(sweep, cell) -> None:
    """Of a long value the name has the beginning only."""
    words = "x" * 50
    folders = [cell(n * "a", schedule__name=f"{words}{n}", seed=n % 2) for n in (1, 2)]
    labels = Labels(sweep)
    labels.refresh(None)
    first, second = (labels.of(folder) for folder in folders)
    assert first is not None
    assert second is not None
    assert first.group != second.group
    assert max(map(len, (first.name, first.group, second.name))) <= 128


@pytest.mark.parametrize("other", ["stages", "warmup"])
def test_ramps_of_other_lengths_and_times_of_other_steps_are_other_cells(
    sweep, cell, other
) -> None:
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
    labels = Labels(sweep)
    labels.refresh(None)
    said = {
        "stages": ("stage_samples=[128,256]", "stage_samples=[256,128]"),
        "warmup": ("warmup_optimizer_steps=5", "warmup_optimizer_steps=7"),
    }[other]
    names = [labels.of(folder).name for folder in folders]
    assert names == [f"2x8x2 {said[0]} s3", f"2x8x2 {said[0]} s4", f"2x8x2 {said[1]} s3"]
    groups = [labels.of(folder).group for folder in folders]
    assert groups[0] == groups[1] != groups[2]


def test_what_a_program_was_never_told_is_no_setting_of_its_run(fake_training) -> None:
    content = read_json(fake_training("a").folder.config)
    assert told_settings(content) == content["config"]
    content["resolved"]["not_passed"] = ["seed", "optimizer.learning_rate", "loader"]
    told = told_settings(content)
    assert {"seed", "loader"} & told.keys() == set()
    assert "learning_rate" not in told["optimizer"]
    assert told["model"] == content["config"]["model"]


def test_rows_have_the_times_of_the_training() -> None:
    """Two attempts: what came before the first step, steps, gaps, evaluations; never too late."""

    def table(name, **columns):
        return pd.DataFrame(columns).reindex(columns=list(COLUMNS[name]))

    steps = table(
        "steps",
        optimizer_step=[1, 2, 3],
        attempt=[0, 0, 1],
        step_time_s=[1.0, 2.0, 400.0],
        gap_s=[None, 0.5, None],
    )
    evals = table("evals", optimizer_step=[0, 2], attempt=[0, 0], evaluation_s=[10.0, 20.0])
    ranks = table("ranks", rank=[0, 1], attempt=[0, 0], startup_s=[3.0, 4.0], compile_s=[6.0, 5.0])
    attempts = [Attempt(1000.0, 0, ended_at=1100.0), Attempt(2000.0, 2, ended_at=2050.0)]
    first = 1000.0 + 4.0 + 6.0
    assert row_times(steps, evals, ranks, attempts) == {
        1: first + 10,
        2: first + 11,
        4: first + 13.5,
        5: first + 33.5,
        6: 2050.0,
    }
    assert run_time_s([*attempts, Attempt(3000.0, 3)]) == 150.0
    assert row_times(steps, evals, ranks, attempts[:1]).keys() == {1, 2, 4, 5}


@pytest.mark.slow
def test_what_is_not_known_of_a_program_is_not_in_wandb(
    sweep, fake_training, offline_segments
) -> None:
    """Resident memory does not pass for allocated memory, nor a setting for one that it had."""
    training = fake_training("run-a")
    content = read_json(training.folder.config)
    lacking = ["seed", "init_seed", "data_seed", "optimizer.learning_rate"]
    content["resolved"]["not_passed"] = lacking
    write_json(training.folder.config, content)
    training.begin()
    training.train(range(1, 5))
    training.folder.lines("ranks").write_text(
        json.dumps({"rank": 0, "attempt": 0, "memory_method": RESIDENT, "uss_gib": 0.2}) + "\n"
    )
    training.end(Status.COMPLETED)
    assert training.status.summary["peak_allocated_gib"] == 0.5
    assert Mirror(OFFLINE, sweep, live=False).finish(10, interrupted=False) is None
    (segment,) = offline_segments(training.folder)
    assert "memory/peak_allocated_gib" not in segment.summary
    assert not [row for row in segment.history if "memory/peak_allocated_gib" in row]
    assert segment.summary["memory/uss_gib"] == 0.2
    run = segment.of("run")[0]
    assert run["display_name"] == "2x8x2"
    config = run["config"]["update"]
    assert not {"not_passed", "seed", "init_seed", "data_seed"} & config.keys()
    (stage,) = config["stages"]
    for optimizer in (config["optimizer"], stage["optimizer"]):
        assert optimizer["name"] == "adamw"
        assert "learning_rate" not in optimizer
    # When the training wrote them, not when they were mirrored.
    (attempt,) = training.status.attempts
    for row in segment.history:
        assert attempt.started_at <= row["_timestamp"] <= attempt.ended_at


@pytest.mark.slow
def test_names_and_groups_follow_when_cells_are_added(sweep, server, fake_training, capsys) -> None:
    """By the same W&B runs, and without their rows."""
    first = fake_training("run-a")
    first.begin()
    first.train(range(1, 3))
    first.end(Status.COMPLETED)
    assert main(["sync", str(sweep.path)]) == 0
    run = server.run_of("run-a")
    assert run.settings["displayName"] == "2x8x2 s3"
    other = fake_training("run-b")
    content = read_json(other.folder.config)
    content["config"]["optimizer"]["learning_rate"] = 0.01
    write_json(other.folder.config, content)
    other.begin()
    other.train(range(1, 3))
    other.end(Status.COMPLETED)
    assert main(["sync", str(sweep.path)]) == 0
    assert "uploaded 1 run, 1 name; 1 had been" in capsys.readouterr().out
    assert run.settings["displayName"] == "2x8x2 learning_rate=0.001 s3"
    assert run.settings["groupName"].startswith("2x8x2 learning_rate=0.001 (")
    assert run.lines_received == len(run.history)
    assert run.state == "finished"
    assert len(server.runs) == 2


@pytest.mark.slow
def test_a_name_that_is_refused_is_told_and_tried_again(
    sweep, server, fake_training, rows_of, monkeypatch, capsys
) -> None:
    """The run was deleted at the server; the others go on."""
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "4")

    def add(run_id: str, learning_rate: float):
        training = fake_training(run_id)
        content = read_json(training.folder.config)
        content["config"]["optimizer"]["learning_rate"] = learning_rate
        write_json(training.folder.config, content)
        training.begin()
        training.train(range(1, 3))
        training.end(Status.COMPLETED)
        return training

    def sync() -> tuple[int, str]:
        return main(["sync", str(sweep.path)]), " ".join(capsys.readouterr().out.split())

    add("run-a", 0.001)
    assert sync()[0] == 0
    ((id_, deleted),) = server.runs.items()
    del server.runs[id_]
    server.deleted.add(id_)
    other = add("run-b", 0.01)
    for uploaded in ("uploaded 1 run; ", ""):
        code, said = sync()
        assert code == 1
        assert "run-a: not uploaded: W&B refuses to call it by its new name" in said
        assert "409" in said
        assert f"Biases: {uploaded}1 not uploaded: the same command tries again" in said
    assert server.run_of("run-b").visible_history == rows_of(other.folder)
    assert len(server.runs) == 1

    server.deleted.clear()
    server.runs[id_] = deleted
    assert sync() == (0, "Weights & Biases: uploaded 1 name; 2 had been uploaded before")
    assert deleted.settings["displayName"] == "2x8x2 learning_rate=0.001 s3"
    assert deleted.lines_received == len(deleted.history)
    assert sync() == (0, "Weights & Biases: nothing to upload; 2 had been uploaded before")
