"""Data of the user's own: what is promised is checked, and what names them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from batchscape.config import CustomData
from batchscape.data.corpus import prepare
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

    def count_labels(self, indices):
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
    inputs, labels = dataset.batch(np.array([2, 0]))
    assert inputs.tolist() == [[2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 0]]
    assert labels.tolist() == [[3, 4, 0, 1, 2, 3], [1, 2, 3, 4, 0, 1]]


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


def test_a_content_hash_is_named_beside_source_target_and_arguments(module):
    source = GOOD.replace("    classes = 5\n", "    classes = 5\n    content_hash = 'HASH'\n")
    one = source.replace("HASH", "one")
    configs = [
        module(one, module="hashed"),
        module(one, module="hashed", arguments={"size": 9}),
        module(one, module="hashed_elsewhere"),
        module(one + "\n# edited\n", module="hashed_and_edited"),
        module(source.replace("HASH", "two"), module="hashed_twice"),
        module(GOOD, module="not_hashed"),
    ]
    hashes = [prepare(config).manifest_hash for config in configs]
    assert len(set(hashes)) == len(configs)
    assert prepare(configs[0]).manifest_hash == hashes[0]


@pytest.mark.parametrize("part", ["train", "held_out"])
def test_sizes_that_come_from_elsewhere_name_the_data(module, tmp_path, part):
    """Files that the source reads of its own accord."""
    size = tmp_path / "size"
    old, new = ("size if part", "read() if part") if part == "train" else ("else 3", "else read()")
    read = (
        f"\ndef read():\n    with open({str(size)!r}) as file:\n        return int(file.read())\n"
    )
    config = module(GOOD.replace(old, new) + read)
    hashes = set()
    for samples in (5, 6):
        size.write_text(str(samples))
        hashes.add(prepare(config).manifest_hash)
    assert len(hashes) == 2


def test_files_that_arguments_name_count_by_their_content(module, tmp_path):
    source = GOOD.replace("sequence_length=None", "sequence_length=None, files=None")
    file = tmp_path / "corpus.txt"
    config = module(source, arguments={"files": [{"first": str(file)}, "x" * 5000, "a\0b"]})
    hashes = [prepare(config).manifest_hash]
    for content in ("one", "two"):
        file.write_text(content)
        hashes.append(prepare(config).manifest_hash)
    assert len(set(hashes)) == 3
    assert prepare(config).manifest_hash == hashes[2]


MASKED = GOOD.replace(
    "torch.from_numpy(tokens[:, 1:].copy())",
    "torch.from_numpy(np.where(np.arange(self.length) < 2, -100, tokens[:, 1:]))",
)


@pytest.mark.parametrize("length", [None, 6])
def test_only_labels_that_bear_a_loss_are_counted(module, length):
    with pytest.raises(
        ConfigError, match=r"not -100; got \[6, 6, 6, 6\] .* batch has \[4, 4, 4, 4\]"
    ):
        prepare(module(MASKED, sequence_length=length))
    counted = MASKED.replace("len(indices) * self.length", "len(indices) * (self.length - 2)")
    assert prepare(module(counted, sequence_length=length)).classes == 5


CLASSES = """
import numpy as np
import torch

class Data:
    classes = 2
    task = "class"
    vocabulary = 7
    num_samples = 8

    def __init__(self, part):
        pass

    def count_labels(self, indices):
        return len(indices)

    def batch(self, indices):
        tokens = indices[:, None] % 4 + np.array([0, 3, -9])
        return torch.from_numpy(tokens), torch.from_numpy(indices % 2)
"""


def test_classes_of_tokens_need_a_vocabulary_above_them(module):
    identity = prepare(module(CLASSES))
    assert (identity.classes, identity.vocabulary) == (2, 7)
    for old, new, message in (
        ("    vocabulary = 7\n", "", "needs an attribute vocabulary.*no vocabulary"),
        ("= 7", "= 6", "inputs must be below vocabulary=6; got an input 6"),
        ("= 7", "= 1.5", "vocabulary must be an int of 2 or more"),
        ("len(indices)\n", "2 * len(indices)\n", "the number of labels that are not -100"),
    ):
        assert old in CLASSES
        with pytest.raises(ConfigError, match=message):
            prepare(module(CLASSES.replace(old, new)))


def test_a_vocabulary_stands_for_the_classes_of_the_next_token(module):
    for declared, settled in (
        ("classes = 5", (5, 5)),
        ("vocabulary = 6", (6, 6)),
        ("classes = 5; vocabulary = 9", (5, 9)),
    ):
        identity = prepare(module(GOOD.replace("classes = 5", declared)))
        assert (identity.classes, identity.vocabulary) == settled
    for declared, message in (
        ("classes = 6; vocabulary = 5", "at least classes"),
        ("vocabulary = 4", "inputs must be below vocabulary=4"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(module(GOOD.replace("classes = 5", declared)))


BREACHES = {
    "no-batch": ("    def batch(", "    def fetch(", "object with a method batch"),
    "no-count": ("    def count_labels(", "    def count(", "object with a method count_labels"),
    "no-samples": ("size if part", "0 if part", "num_samples must be an int above 0; got 0"),
    "float-samples": ("size if part", "8.0 if part", r"num_samples must be .*; got 8\.0"),
    "task": ('"next_token"', '"translation"', "task must be one of next_token, class, other"),
    "classes": ("classes = 5", "classes = 1", "classes must be an int of 2 or more"),
    "features": ("classes = 5", "features = -1; classes = 5", "features must be"),
    "parts-differ": (
        "        self.num_samples",
        "        self.classes = 5 if part == 'train' else 6\n        self.num_samples",
        "must declare the same for both parts",
    ),
    "count-type": ("len(indices) * self.length", "6.0", r"count_labels must return an int.*6\.0"),
    "mean-count": ("len(indices) * self.length", "self.length", "must add up over samples; got 6"),
    "no-labels": ("len(indices) * self.length", "0", "must be above 0"),
    "no-tuple": ("return torch.from_numpy(tokens[:, :-1].copy()),", "return", "tuple of two"),
    "arrays": (
        "torch.from_numpy(tokens[:, 1:].copy())",
        "tokens[:, 1:]",
        "two tensors, .*'ndarray'",
    ),
    "first-dimension": ("tokens[:, :-1].copy()", "tokens[:1, :-1].copy()", "first dimension"),
    "other-device": ("tokens[:, 1:].copy())", "tokens[:, 1:].copy()).to('meta')", "on the CPU"),
    "label-type": ("tokens[:, 1:].copy())", "tokens[:, 1:].copy()).int()", "int64 labels"),
    "label-range": ("tokens[:, 1:].copy())", "tokens[:, 1:].copy()) + 5", "below classes=5"),
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
        (GOOD.replace("return len(indices) * self.length", "return len(indices)"), "not -100"),
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
