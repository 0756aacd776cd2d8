"""Data of the user's own: what is promised is checked, and what names them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from batchscape.config import CustomData
from batchscape.data import prepare
from batchscape.data.datasets import open_dataset
from batchscape.errors import ConfigError

GOOD = """
import numpy as np
import torch

class Data:
    classes = 5
    task = "next_token"

    def __init__(self, part, size=8, sequence_length=None):
        self.num_samples = size if part == "train" else 3
        self.length = sequence_length or 6

    def count_targets(self, indices):
        return len(indices) * self.length

    def batch(self, indices):
        tokens = (indices[:, None] + np.arange(self.length + 1)) % 5
        return torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(tokens[:, 1:].copy())
"""
modules = (f"own_module_{number}" for number in itertools.count())


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module of the user's, and settings that name what is in it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source, name="Data", module=None, **more):
        module = module or next(modules)
        (tmp_path / f"{module}.py").write_text(source)
        return CustomData(name="custom", _target_=f"{module}.{name}", **more)

    return write


def test_sizes_and_facts_are_taken_over(module):
    config = module(GOOD, arguments={"size": 7})
    identity = prepare(config)
    assert (identity.train_samples, identity.held_out_samples) == (7, 3)
    assert (identity.classes, identity.task, identity.features) == (5, "next_token", None)
    dataset = open_dataset(SimpleNamespace(data=config), identity, "held_out")
    inputs, targets = dataset.batch(np.array([2, 0]))
    assert inputs.tolist() == [[2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 0]]
    assert targets.tolist() == [[3, 4, 0, 1, 2, 3], [1, 2, 3, 4, 0, 1]]


def test_the_sequence_length_is_given_where_there_is_one(module):
    config = module(GOOD, sequence_length=4)
    dataset = open_dataset(SimpleNamespace(data=config), prepare(config), "train")
    assert dataset.batch(np.array([0]))[0].shape == (1, 4)


def test_what_is_not_said_is_not_known(module):
    source = GOOD.replace("    classes = 5\n", "").replace('    task = "next_token"\n', "")
    for more, task in (({}, "other"), ({"sequence_length": 6}, "next_token")):
        identity = prepare(module(source, **more))
        assert (identity.classes, identity.task) == (0, task)


def test_source_and_arguments_name_the_data(module, tmp_path):
    hashes = [prepare(module(GOOD, module="named")).manifest_hash]
    assert prepare(module(GOOD, module="named")).manifest_hash == hashes[0]
    hashes.append(prepare(module(GOOD, module="named", arguments={"size": 7})).manifest_hash)
    hashes.append(prepare(module(GOOD, module="named", sequence_length=6)).manifest_hash)
    (tmp_path / "named.py").write_text(GOOD + "\n# changed\n")
    config = CustomData(name="custom", _target_="named.Data")
    hashes.append(prepare(config).manifest_hash)
    assert len(set(hashes)) == 4


def test_a_content_hash_names_the_data_whatever_the_source(module):
    source = GOOD.replace("    classes = 5\n", "    classes = 5\n    content_hash = 'HASH'\n")
    one = prepare(module(source.replace("HASH", "one")))
    moved = prepare(module(source.replace("HASH", "one") + "\n# elsewhere\n"))
    two = prepare(module(source.replace("HASH", "two")))
    assert one.manifest_hash == moved.manifest_hash != two.manifest_hash


BREACHES = {
    "no-batch": ("    def batch(", "    def fetch(", "object with a method batch"),
    "no-count": ("    def count_targets(", "    def count(", "object with a method count_targets"),
    "no-samples": ("size if part", "0 if part", "num_samples must be an int above 0; got 0"),
    "float-samples": ("size if part", "8.0 if part", r"num_samples must be .*; got 8\.0"),
    "task": ('"next_token"', '"translation"', "task must be one of next_token, class, other"),
    "classes": ("classes = 5", "classes = 1", "classes must be an int of 2 or more"),
    "features": ("classes = 5", "features = -1; classes = 5", "features must be"),
    "parts-differ": (
        "        self.num_samples",
        "        self.classes = 5 if part == 'train' else 6\n        self.num_samples",
        "must say the same of both parts",
    ),
    "count-type": ("len(indices) * self.length", "6.0", r"count_targets must return an int.*6\.0"),
    "mean-count": ("len(indices) * self.length", "self.length", "must add up over samples; got 6"),
    "no-targets": ("len(indices) * self.length", "0", "must be above 0"),
    "no-tuple": ("return torch.from_numpy(tokens[:, :-1].copy()),", "return", "tuple of two"),
    "arrays": (
        "torch.from_numpy(tokens[:, 1:].copy())",
        "tokens[:, 1:]",
        "two tensors, .*'ndarray'",
    ),
    "first-dimension": ("tokens[:, :-1].copy()", "tokens[:1, :-1].copy()", "first dimension"),
    "other-device": ("tokens[:, 1:].copy())", "tokens[:, 1:].copy()).to('meta')", "on the CPU"),
    "target-type": ("tokens[:, 1:].copy())", "tokens[:, 1:].copy()).int()", "int64 targets"),
    "target-range": ("tokens[:, 1:].copy())", "tokens[:, 1:].copy()) + 5", "below classes=5"),
    "moves": (
        "        tokens = (",
        "        Data.calls = getattr(Data, 'calls', 0) + 1\n        tokens = (Data.calls + ",
        "the same samples for the same indices",
    ),
    "batch-mates": ("indices[:, None] +", "indices[:, None] + len(indices) +", "depend on the oth"),
    "content-hash": ("classes = 5", "content_hash = 3; classes = 5", "content_hash must be a text"),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_broken_promise_is_named(module, breach):
    old, new, message = BREACHES[breach]
    assert old in GOOD
    config = module(GOOD.replace(old, new))
    with pytest.raises(ConfigError, match=message) as refusal:
        prepare(config)
    assert str(refusal.value).startswith(f"data._target_={config.target}: ")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            GOOD.replace("self.length = sequence_length or 6", "self.length = 6"),
            "sequence_length=4",
        ),
        (GOOD.replace("return len(indices) * self.length", "return len(indices)"), "a sample, 16"),
    ],
)
def test_full_sequences_are_as_long_as_they_should_be(module, source, message):
    with pytest.raises(ConfigError, match=message):
        prepare(module(source, sequence_length=4))


def test_what_cannot_be_called_is_explained(module):
    with pytest.raises(ConfigError, match="has no 'Nothing'"):
        prepare(module(GOOD, name="Nothing"))
    with pytest.raises(ConfigError, match="does not take these arguments"):
        prepare(module(GOOD, arguments={"colour": 1}))
    missing = CustomData(name="custom", _target_="no_such_module.Data")
    with pytest.raises(ConfigError, match="no module 'no_such_module'"):
        prepare(missing)


@pytest.mark.parametrize("place", ["        self.num_samples", "        tokens ="])
def test_what_fails_in_the_users_code_is_shown_with_its_place(module, place):
    config = module(GOOD.replace(place, f"        raise OSError('disk on fire')\n{place}"))
    with pytest.raises(ConfigError, match="OSError: disk on fire") as refusal:
        prepare(config)
    assert "line" in str(refusal.value)
    assert f"{config.target.partition('.')[0]}.py" in str(refusal.value)


def test_the_contract_holds_for_data_as_users_write_them(monkeypatch):
    faults = Path(__file__).parents[1] / "faults"
    monkeypatch.syspath_prepend(str(faults))
    for name, more, facts in (
        ("Blobs", {}, (3, "class", 4)),
        ("Counting", {}, (16, "next_token", None)),
        ("Counting", {"sequence_length": 12}, (16, "next_token", None)),
    ):
        config = CustomData(name="custom", _target_=f"own_data.{name}", **more)
        identity = prepare(config)
        assert (identity.classes, identity.task, identity.features) == facts
        assert re.fullmatch("[0-9a-f]{16}", identity.manifest_hash)
