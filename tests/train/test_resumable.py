"""What a run goes on from when its checkpoints or rows are damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from batchscape.errors import CheckpointError, DamageError
from batchscape.record.files import JsonLines
from batchscape.record.folder import RunFolder
from batchscape.train.checkpoint import checkpoints, find_resumable, save_checkpoint
from exact import assert_same_rows


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Seven rows, and checkpoints after the third and the sixth step."""
    folder = RunFolder(tmp_path / "r")
    lines = JsonLines(folder.lines("steps"))
    lines.append({"optimizer_step": k, "loss": 1 / k} for k in range(1, 8))
    lines.close()
    for step in (3, 6):
        state = {"run_id": "r", "optimizer_step": step, "w": torch.full((4,), float(step))}
        save_checkpoint(folder.checkpoints, step, state)
    return folder


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_the_newest_one_is_taken(folder: RunFolder) -> None:
    resumable = find_resumable(folder, "r")
    assert resumable.state is not None
    assert resumable.state["optimizer_step"] == 6
    assert (resumable.notes, resumable.damaged_checkpoints) == ((), ())


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_an_older_one_is_taken_where_the_newest_is_damaged(folder: RunFolder, damage: str) -> None:
    newest, older = checkpoints(folder.checkpoints)
    content = newest.read_bytes()
    if damage == "flip":
        flip(newest, 300)
    else:
        newest.write_bytes(content[:-9] if damage == "cut" else b"")
    resumable = find_resumable(folder, "r")
    assert resumable.state is not None
    assert resumable.state["w"].tolist() == [3.0] * 4
    first, second = resumable.notes
    assert first.startswith(f"checkpoint {newest.name} was passed over: ")
    assert "is damaged" in first
    assert second == f"going on from {older.name} instead"
    assert resumable.damaged_checkpoints == (newest,)


def test_without_a_whole_one_a_run_begins_anew(folder: RunFolder) -> None:
    for path in checkpoints(folder.checkpoints):
        flip(path, 300)
    resumable = find_resumable(folder, "r")
    assert resumable.state is None
    assert len(resumable.notes) == 3
    assert (
        resumable.notes[-1] == "no checkpoint is left, so that the run begins with its first step"
    )
    none = find_resumable(RunFolder(folder.path.with_name("other")), "r")
    assert none == (None, (), ())


def test_a_checkpoint_whose_rows_are_gone_is_passed_over(folder: RunFolder) -> None:
    """A table with a gap would be sealed as if nothing were missing."""
    path = folder.lines("steps")
    rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(rows[:4]))
    resumable = find_resumable(folder, "r")
    assert resumable.state is not None
    assert resumable.state["optimizer_step"] == 3
    assert f"{path} must have optimizer steps 1 to 6, once each" in resumable.notes[0]
    assert "it has 4 rows up to there" in resumable.notes[0]
    path.write_bytes(b"".join(rows[:1] + rows[2:]))
    assert find_resumable(folder, "r").state is None


def test_damaged_rows_are_no_rows_to_go_on_from(folder: RunFolder) -> None:
    folder.lines("steps").write_bytes(b"[1]\n")
    with pytest.raises(DamageError, match="damaged in line 1"):
        find_resumable(folder, "r")


def test_a_whole_checkpoint_that_cannot_be_loaded_here_is_kept(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little memory on this machine is no damage: the work of the run is not thrown away."""

    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError("can't allocate 4 GB")

    kept = checkpoints(folder.checkpoints)
    monkeypatch.setattr(torch, "load", no_memory)
    with pytest.raises(CheckpointError, match="cannot be loaded: can't allocate"):
        find_resumable(folder, "r")
    assert checkpoints(folder.checkpoints) == kept
    monkeypatch.undo()
    assert find_resumable(folder, "r").damaged_checkpoints == ()


def test_checkpoints_of_another_run_are_refused_and_kept(folder: RunFolder) -> None:
    folder.lines("steps").unlink()
    kept = checkpoints(folder.checkpoints)
    with pytest.raises(CheckpointError, match="holds checkpoints of run r, and this is run anoth"):
        find_resumable(folder, "another")
    assert checkpoints(folder.checkpoints) == kept


SETTINGS = {
    "engine__precision": "float32",
    "model": {"name": "gpt", "n_layers": 1, "n_heads": 2, "d_model": 16, "dropout": 0.1},
    "data__sequence_length": 16,
    "budget__optimizer_steps": 30,
    "checkpoint__every_s": 0.0,
    "evaluation__every_samples": 640,
}
MEASURED = ["optimizer_step", "samples", "tokens", "loss", "learning_rate", "gradient_norm"]


@pytest.mark.slow
def test_two_ranks_go_on_from_the_same_place_bit_for_bit(trainer, steps, tmp_path):
    """Damage is met by every rank, and all of them take the same way around it."""
    spec = trainer.make_spec((2, 8, 2), **SETTINGS)
    undisturbed = trainer.train(spec, tmp_path / "undisturbed")
    for lost in ("newest", "rows"):
        folder = RunFolder(tmp_path / lost / spec.run_id)
        shutil.copytree(undisturbed.path, folder.path)
        newest, older = checkpoints(folder.checkpoints)
        done, before = (int(path.name.split("-")[1]) for path in (newest, older))
        if lost == "newest":
            flip(newest, newest.stat().st_size // 2)
        else:
            rows = folder.lines("steps").read_bytes().splitlines(keepends=True)
            folder.lines("steps").write_bytes(b"".join(rows[: done - 1]))
        trainer.train(spec, tmp_path / lost, attempt=1)
        assert steps(folder)["attempt"].tolist() == [0] * before + [1] * (30 - before)
        assert_same_rows(steps(folder)[MEASURED], steps(undisturbed)[MEASURED])
        assert f"{newest.name} was passed over" in folder.log.read_text()
        # It is out of the way of those that are kept.
        assert newest not in checkpoints(folder.checkpoints)
