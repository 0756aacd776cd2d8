"""Checkpoints are whole or refused, and loading one runs no code."""

from __future__ import annotations

import hashlib
import pickle

import pytest
import torch

from batchscape.errors import CheckpointError
from batchscape.train.checkpoint import checkpoints, load_checkpoint, save_checkpoint

STATE = {"run_id": "r", "optimizer_step": 3, "model": {"w": torch.arange(4.0)}}


def test_round_trip_and_keep_last(tmp_path):
    for step in (1, 2, 10):
        path = save_checkpoint(tmp_path, step, {**STATE, "optimizer_step": step}, keep_last=2)
    assert path.name.startswith("step-000000010-")
    assert len(list(tmp_path.iterdir())) == 2
    state = load_checkpoint(checkpoints(tmp_path)[0])
    assert state["optimizer_step"] == 10
    assert (state["model"]["w"] == STATE["model"]["w"]).all()


def test_nothing_there_is_no_checkpoint(tmp_path):
    assert checkpoints(tmp_path / "none") == []


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_damage_is_found(tmp_path, damage):
    save_checkpoint(tmp_path, 1, {**STATE, "optimizer_step": 1}, keep_last=5)
    newest = save_checkpoint(tmp_path, 2, {**STATE, "optimizer_step": 2}, keep_last=5)
    content = newest.read_bytes()
    newest.write_bytes(
        {"flip": content[:200] + bytes([content[200] ^ 1]) + content[201:],
         "truncate": content[:-10],
         "empty": b""}[damage]
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(newest)
    assert load_checkpoint(checkpoints(tmp_path)[1])["optimizer_step"] == 1


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
        save_checkpoint(tmp_path, 1, {"bad": lambda: None}, keep_last=2)
    assert list(tmp_path.iterdir()) == []
