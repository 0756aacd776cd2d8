"""Tokenizers of `transformers` and folders of `datasets`, against those packages themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from batchscape.config import Documents, TextFiles
from batchscape.config.data import IGNORED
from batchscape.data import coding
from batchscape.data.coding import FolderCoder, tokenizer_hash
from batchscape.data.corpus import prepare
from batchscape.data.datasets import open_dataset
from batchscape.errors import ConfigError

datasets.disable_progress_bars()

TEXTS = [f"def name_{number}(self):\n    return {number} * self" for number in range(40)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def save_tokenizer(folder, vocabulary=300, *, end=True, framed=False):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<end>", "[CLS]", "[SEP]"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if framed:
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    special = {"eos_token": "<end>"} if end else {}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(str(folder))
    return str(folder)


@pytest.fixture
def tokenizer(tmp_path):
    return save_tokenizer(tmp_path / "tokenizer")


def ids_of(folder, text, **options):
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)(text, **options)[
        "input_ids"
    ]


def opened(config, part="train"):
    identity = prepare(config)
    return open_dataset(SimpleNamespace(data=config), identity, part), identity


def stream_of(dataset):
    inputs, labels = dataset.batch(np.arange(dataset.num_samples))
    return [*inputs.flatten().tolist(), labels[-1, -1].item()]


def write_folder(root, texts):
    root.mkdir()
    for number, text in enumerate(texts):
        (root / f"{number:02}.py").write_text(text)
    return str(root)


def test_packed_files_are_tokens_with_an_end_between_them(tmp_path, tokenizer):
    path = write_folder(tmp_path / "files", TEXTS)
    config = TextFiles(
        name="text", path=path, tokenizer=tokenizer, sequence_length=8, held_out_pct=20.0
    )
    train, identity = opened(config)
    held_out, _ = opened(config, "held_out")
    assert identity.classes == len(AutoTokenizer.from_pretrained(tokenizer))
    total = 0
    for dataset in (train, held_out):
        stream = stream_of(dataset)
        total += stream.count(0)
        # Decoding gives whole files back, and the parts are told apart by the numbers in them.
        text = AutoTokenizer.from_pretrained(tokenizer).decode(stream)
        pieces = text.split("<end>")
        assert all(piece in TEXTS for piece in pieces[:-1])
        assert any(text.startswith(pieces[-1]) for text in TEXTS)
        assert stream[: len(ids_of(tokenizer, pieces[0]))] == ids_of(tokenizer, pieces[0])
    assert 30 < total < 40


def test_without_an_end_token_a_blank_line_is_between(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer", end=False)
    path = write_folder(tmp_path / "files", TEXTS)
    config = TextFiles(name="text", path=path, tokenizer=tokenizer, sequence_length=8)
    stream = stream_of(opened(config)[0])
    assert "self\n\ndef" in AutoTokenizer.from_pretrained(tokenizer).decode(stream)


def test_padded_blocks_are_encoded_one_by_one(tmp_path, tokenizer):
    text = "\n\n".join(TEXTS) + "\n"
    (tmp_path / "all.txt").write_text(text)
    config = TextFiles(
        name="text",
        path=str(tmp_path / "all.txt"),
        tokenizer=tokenizer,
        sequence_length=12,
        layout="padded",
        held_out_pct=10.0,
    )
    dataset, _ = opened(config)
    inputs, labels = dataset.batch(np.arange(dataset.num_samples))
    expected = []
    for block in (one + "\n" for one in TEXTS):
        ids = ids_of(tokenizer, block)
        expected += [ids[begin : begin + 13] for begin in range(0, len(ids) - 1, 12)]
    samples = [
        [row[0], *(token for token in targets if token != IGNORED)]
        for row, targets in zip(inputs.tolist(), labels.tolist(), strict=True)
    ]
    # The last block of the part is cut where the held-out one begins.
    assert len(samples) > 40
    assert samples[:-2] == expected[: len(samples) - 2]


def test_tokens_take_the_smallest_type(tmp_path):
    (array,) = FolderCoder(save_tokenizer(tmp_path / "tokenizer")).encode([b"text"])
    assert array.dtype == "uint16"


def test_gaps_between_the_numbers_of_tokens_are_part_of_the_vocabulary(tmp_path):
    words = {"<end>": 0, "self": 5, "def": 70_000}
    special = {"unk_token": "<end>"}
    tokenizer = Tokenizer(models.WordLevel(words, **special))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(str(tmp_path / "gaps"))
    coder = FolderCoder(str(tmp_path / "gaps"))
    assert coder.vocabulary == 70_001
    assert coder.encode([b"def self"])[0].tolist() == [70_000, 5]


def test_long_texts_are_encoded_in_pieces_without_a_seam(tokenizer, monkeypatch):
    """At the ends of lines, where this tokenizer never joins two tokens."""
    text = "\n".join(TEXTS).encode()
    (tokens,) = FolderCoder(tokenizer).encode([text])
    monkeypatch.setattr(coding, "_PIECE_CHARACTERS", 200)
    (pieced,) = FolderCoder(tokenizer).encode([text])
    decoded = AutoTokenizer.from_pretrained(tokenizer)
    assert decoded.decode(pieced.tolist()) == decoded.decode(tokens.tolist()) == text.decode()
    (unbroken,) = FolderCoder(tokenizer).encode([b"x" * 1000])
    assert decoded.decode(unbroken.tolist()) == "x" * 1000


@pytest.mark.parametrize("saved", [True, False], ids=["save_to_disk", "jsonl"])
def test_documents_of_datasets_with_special_tokens_for_classes(tmp_path, saved):
    tokenizer = save_tokenizer(tmp_path / "tokenizer", framed=True)
    labels = [number % 2 for number in range(40)]
    table = datasets.Dataset.from_dict({"text": TEXTS, "label": labels}).shuffle(seed=3)
    if saved:
        path = str(tmp_path / "saved")
        table.save_to_disk(path, num_shards=3)
    else:
        path = str(tmp_path / "lines.jsonl")
        table.to_json(path)
    config = Documents(
        name="documents",
        path=path,
        tokenizer=tokenizer,
        label_field="label",
        layout="padded",
        sequence_length=14,
        held_out_pct=25.0,
    )
    rows_by_part = {}
    for part in ("train", "held_out"):
        dataset, identity = opened(config, part)
        inputs, classes = dataset.batch(np.arange(dataset.num_samples))
        for row, one in zip(inputs.tolist(), classes.tolist(), strict=True):
            rows_by_part[tuple(row)] = one
    assert (identity.classes, identity.vocabulary) == (2, len(FolderCoder(tokenizer)._tokenizer))
    expected = {}
    for text, label in zip(TEXTS, labels, strict=True):
        ids = ids_of(tokenizer, text, truncation=True, max_length=14)
        assert (ids[0], ids[-1]) == (1, 2)
        expected[tuple(ids + [-1] * (14 - len(ids)))] = label
    assert rows_by_part == expected


def test_documents_in_the_order_of_the_saved_shards(tmp_path):
    table = datasets.Dataset.from_dict({"text": TEXTS}).shuffle(seed=1).select(range(30))
    table.save_to_disk(str(tmp_path / "saved"), num_shards=4)
    config = Documents(
        name="documents",
        path=str(tmp_path / "saved"),
        layout="padded",
        sequence_length=200,
        held_out_pct=10.0,
    )
    dataset, _ = opened(config)
    inputs, _ = dataset.batch(np.arange(dataset.num_samples))
    texts = [bytes(row).rstrip(b"\0").decode() for row in inputs.tolist()]
    order = datasets.load_from_disk(str(tmp_path / "saved"))["text"]
    assert texts == [text for text in order if text in set(texts)]
    assert 15 < len(texts) < 30


def test_splits_have_to_be_named(tmp_path):
    table = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(ConfigError, match="the splits test, train"):
        prepare(Documents(name="documents", path=str(tmp_path / "both")))


def test_the_tokenizer_is_part_of_the_name_and_read_once(tmp_path, tokenizer, monkeypatch):
    path = write_folder(tmp_path / "files", TEXTS)
    config = TextFiles(name="text", path=path, tokenizer=tokenizer, sequence_length=8)
    first = prepare(config)
    plain = TextFiles(name="text", path=path, sequence_length=8)
    other = TextFiles(
        name="text",
        path=path,
        tokenizer=save_tokenizer(tmp_path / "other", 280),
        sequence_length=8,
    )
    hashes = {prepare(one).manifest_hash for one in (config, plain, other)}
    assert len(hashes) == 3
    before = tokenizer_hash(tokenizer)
    (Path(tokenizer) / "model.safetensors").write_bytes(b"weights")
    assert tokenizer_hash(tokenizer) == before
    # What was encoded before is not encoded again.
    monkeypatch.setattr("batchscape.data.coding.FolderCoder", lambda _: pytest.fail("read again"))
    assert prepare(config) == first


def test_what_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 200)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    for name, message in (
        ("nothing", "no such folder"),
        ("empty", "no tokenizer in it"),
        ("broken", "no tokenizer could be read"),
    ):
        config = TextFiles(
            name="text", path=str(tmp_path / "a.txt"), tokenizer=str(tmp_path / name)
        )
        with pytest.raises(ConfigError, match=message):
            prepare(config)


def test_without_transformers_the_extra_is_named(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'batchscape\[hf\]'"):
        FolderCoder(tokenizer)
