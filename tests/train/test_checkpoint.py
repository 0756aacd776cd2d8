"""Checkpoints are whole or refused, and loading one runs no code."""

from __future__ import annotations

import hashlib
import pickle
import sys
from pathlib import Path

import pytest
import torch

from batchscape.errors import CheckpointError, DiskError
from batchscape.train.checkpoint import checkpoints, load_checkpoint, save_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from small_disk import fill, with_small_disk

STATE = {"run_id": "r", "optimizer_step": 3, "model": {"w": torch.arange(4.0)}}


def test_round_trip_and_the_two_that_are_kept(tmp_path):
    for step in (1, 2, 10):
        path = save_checkpoint(tmp_path, step, {**STATE, "optimizer_step": step})
    assert path.name.startswith("step-000000010-")
    assert len(list(tmp_path.iterdir())) == 2
    state = load_checkpoint(checkpoints(tmp_path)[0])
    assert state["optimizer_step"] == 10
    assert (state["model"]["w"] == STATE["model"]["w"]).all()


def test_nothing_there_is_no_checkpoint(tmp_path):
    assert checkpoints(tmp_path / "none") == []


def test_a_pickle_with_code_is_refused_though_its_digest_fits(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("code ran",))

    content = pickle.dumps(Evil())
    path = tmp_path / f"step-000000001-{hashlib.sha256(content).hexdigest()[:16]}.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_checkpoint(path)


def test_a_failed_write_leaves_nothing_half(tmp_path):
    with pytest.raises(Exception, match="pickle"):
        save_checkpoint(tmp_path, 1, {"bad": lambda: None})
    assert list(tmp_path.iterdir()) == []


def save_until_full(folder):
    torch.set_num_threads(1)
    first = save_checkpoint(folder, 1, STATE)
    fill(folder, leave=100_000)
    with pytest.raises(DiskError) as raised:
        save_checkpoint(folder, 2, {**STATE, "large": torch.zeros(500_000)})
    names = [path.name for path in folder.iterdir() if path.name != "filler"]
    return str(raised.value), names, load_checkpoint(first)["optimizer_step"]


@pytest.mark.slow
def test_a_full_disk_is_named_and_the_one_before_stays(tmp_path):
    place = tmp_path / "disk"
    message, names, step = with_small_disk(place, 1 << 20, save_until_full, place)
    assert message.startswith(f"{place} cannot be written: No space left on device, ")
    assert len(names) == 1
    assert step == 3
