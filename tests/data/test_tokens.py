"""Token files of other programs: recognised, hashed once, cut into samples, never copied."""

from __future__ import annotations

import json
import os
import struct
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchscape.config import TokenFiles
from batchscape.data import token_files
from batchscape.data.corpus import prepare
from batchscape.data.datasets import TokenDataset, open_dataset
from batchscape.data.token_files import recognise
from batchscape.errors import ConfigError, RecordError

GPT2 = 50257


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tokens_of(count, seed=0, largest=GPT2 - 1):
    tokens = np.random.default_rng(seed).integers(0, largest, count)
    tokens[count // 2] = largest
    return tokens


def raw(tokens, dtype="<u2"):
    return tokens.astype(dtype).tobytes()


def litgpt(tokens, code=8, dtype="<u2", version=1):
    # lit_gpt/packed_dataset.py: magic, version as <Q, type code as <B, count as <Q.
    header = b"LITPKDS" + struct.pack("<Q", version) + struct.pack("<B", code)
    return header + struct.pack("<Q", len(tokens)) + raw(tokens, dtype)


def llmc(tokens, magic=20240520, dtype="<u2"):
    # llm.c, dev/data/data_common.py: 256 int32, then the tokens.
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, 1, len(tokens)
    return header.tobytes() + raw(tokens, dtype)


def settings_of(path, **more):
    more = {"sequence_length": 16, "held_out_pct": 10.0, **more}
    return TokenFiles(name="tokens", path=str(path), **more)


def opened(config, part):
    identity = prepare(config)
    return open_dataset(SimpleNamespace(data=config), identity, part), identity


def everything(dataset):
    return dataset.batch(np.arange(dataset.num_samples))


@pytest.mark.parametrize(
    ("content", "more"),
    [
        (raw, {}),
        (lambda t: raw(t, "<u4"), {}),
        (litgpt, {}),
        (lambda t: litgpt(t, 4, "<i4"), {}),
        (llmc, {}),
        (lambda t: llmc(t, 20240801, "<u4"), {}),
    ],
    ids=["raw16", "raw32", "litgpt16", "litgpt32", "llmc16", "llmc32"],
)
def test_every_layout_gives_the_same_samples(tmp_path, content, more):
    tokens = tokens_of(2000)
    path = tmp_path / "train.bin"
    path.write_bytes(content(tokens))
    dataset, identity = opened(settings_of(path, **more), "train")
    inputs, labels = everything(dataset)
    assert identity.classes == GPT2
    assert identity.task == "next_token"
    assert (identity.train_samples, identity.held_out_samples) == (1799 // 16, 199 // 16)
    # The labels are the tokens, each once, but for the first and a rest.
    assert labels.flatten().tolist() == tokens[1 : 1 + 112 * 16].tolist()
    assert inputs.flatten().tolist() == tokens[: 112 * 16].tolist()
    assert dataset.count_labels(np.array([0, 5])) == 32
    held_out, _ = opened(settings_of(path, **more), "held_out")
    assert everything(held_out)[1].flatten().tolist() == tokens[1801 : 1801 + 12 * 16].tolist()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
    st.integers(2, 7),
    st.floats(1, 60),
)
def test_no_sample_crosses_a_file_and_no_target_is_in_both_parts(tmp_path, sizes, length, pct):
    """Every token of a shard is a number of its own: where it went can be seen."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    for number, size in enumerate(sizes):
        shard = 100 * number + np.arange(size)
        (folder / f"shard-{number}.bin").write_bytes(raw(shard))
    config = settings_of(folder, sequence_length=length, held_out_pct=pct)
    cuts = [size - round(size * pct / 100) for size in sizes]
    expected = {
        "train": [
            list(range(100 * n + b, 100 * n + b + length + 1))
            for n, cut in enumerate(cuts)
            for b in range(0, cut - length, length)
        ],
        "held_out": [
            list(range(100 * n + b, 100 * n + b + length + 1))
            for n, (cut, size) in enumerate(zip(cuts, sizes, strict=True))
            for b in range(cut, size - length, length)
        ],
    }
    if not all(expected.values()):
        with pytest.raises(ConfigError, match="holds no sample"):
            prepare(config)
        return
    rows_by_part = {}
    for part, samples in expected.items():
        dataset, identity = opened(config, part)
        inputs, labels = everything(dataset)
        assert np.column_stack([inputs, labels[:, -1]]).tolist() == samples
        assert (inputs[:, 1:] == labels[:, :-1]).all()
        assert dataset.num_samples == len(samples) == getattr(identity, f"{part}_samples")
        rows_by_part[part] = set(labels.flatten().tolist())
        shuffled = np.random.default_rng(0).permutation(dataset.num_samples)
        assert (dataset.batch(shuffled)[0] == inputs[shuffled]).all()
    assert not rows_by_part["train"] & rows_by_part["held_out"]


def test_held_out_files_of_their_own(tmp_path):
    for name, seed in (("train.bin", 1), ("val.bin", 2)):
        (tmp_path / name).write_bytes(raw(tokens_of(500, seed)))
    config = settings_of(tmp_path / "train.bin", held_out_path=str(tmp_path / "val.bin"))
    train, identity = opened(config, "train")
    assert (identity.train_samples, identity.held_out_samples) == (499 // 16, 499 // 16)
    held_out, _ = opened(config, "held_out")
    assert everything(held_out)[0].flatten().tolist() == tokens_of(500, 2)[:496].tolist()
    assert everything(train)[0].flatten().tolist() == tokens_of(500, 1)[:496].tolist()
    same = settings_of(tmp_path / "train.bin", held_out_path=str(tmp_path / "train.bin"))
    with pytest.raises(ConfigError, match="other files"):
        prepare(same)


def test_content_and_rules_name_the_data_and_places_do_not(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.bin").write_bytes(raw(tokens_of(500)))
    first, copy = (prepare(settings_of(tmp_path / folder)) for folder in ("one", "two"))
    assert first.manifest_hash == copy.manifest_hash
    assert first.folder != copy.folder, "each copy is listed where it lies"
    hashes = {first.manifest_hash}
    for more in ({"sequence_length": 8}, {"held_out_pct": 20.0}, {"vocabulary_size": GPT2 + 1}):
        hashes.add(prepare(settings_of(tmp_path / "one", **more)).manifest_hash)
    assert len(hashes) == 4
    # What is left to be found, and found, is the same as what is given.
    identity = prepare(settings_of(tmp_path / "one", vocabulary_size=GPT2))
    assert identity.manifest_hash == first.manifest_hash
    changed = tokens_of(500)
    changed[7] += 1
    (tmp_path / "one" / "a.bin").write_bytes(raw(changed))
    assert prepare(settings_of(tmp_path / "one")).manifest_hash not in hashes


def test_a_large_file_is_read_once_and_never_copied(tmp_path, monkeypatch):
    path = tmp_path / "train.bin"
    path.write_bytes(raw(tokens_of(200_000)))
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 10**11))
    first = prepare(settings_of(path))
    written = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file())
    assert written < 5000
    monkeypatch.setattr(token_files, "_scan_blocks", lambda *_: pytest.fail("read again"))
    assert prepare(settings_of(path)) == first


def test_tokens_are_mapped_not_read(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(llmc(tokens_of(2000)))
    tokens = recognise(path).map()
    assert isinstance(tokens, np.memmap)
    assert tokens.tolist() == tokens_of(2000).tolist()


def test_files_that_changed_after_planning_are_refused(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(raw(tokens_of(500)))
    config = settings_of(path)
    identity = prepare(config)
    path.write_bytes(raw(tokens_of(500, seed=9)))
    os.utime(path, ns=(0, 0))
    with pytest.raises(RecordError, match="were changed"):
        TokenDataset(Path(identity.folder), "train", 16)
    path.unlink()
    with pytest.raises(RecordError, match="cannot be read"):
        TokenDataset(Path(identity.folder), "train", 16)


@pytest.mark.parametrize("vocabulary", [1, GPT2 - 1])
def test_a_token_outside_of_the_vocabulary_is_refused(tmp_path, vocabulary):
    path = tmp_path / "train.bin"
    path.write_bytes(raw(tokens_of(500)))
    with pytest.raises(ConfigError, match=f"given {vocabulary}, .*holds {GPT2 - 1}"):
        prepare(settings_of(path, vocabulary_size=vocabulary))


@pytest.mark.parametrize("largest", [15, 255, 50_256, 128_255])
def test_the_type_is_read_off_the_values(tmp_path, largest):
    """Of a vocabulary up to 2**20 the upper halves of uint32 are next to nothing."""
    tokens = tokens_of(2000, largest=largest)
    (tmp_path / "train.bin").write_bytes(raw(tokens, "<u4"))
    dataset, identity = opened(settings_of(tmp_path / "train.bin"), "train")
    assert identity.classes == largest + 1
    assert everything(dataset)[0].flatten().tolist() == tokens[: 112 * 16].tolist()


def test_a_vocabulary_that_uint16_does_not_hold_is_of_uint32(tmp_path):
    tokens = tokens_of(2000, largest=1_400_000)
    (tmp_path / "train.bin").write_bytes(raw(tokens, "<u4"))
    dataset, _ = opened(settings_of(tmp_path / "train.bin", vocabulary_size=1_500_000), "train")
    assert everything(dataset)[0].flatten().tolist() == tokens[: 112 * 16].tolist()


def test_a_short_shard_is_of_the_type_of_the_others(tmp_path):
    """A few tokens alone do not tell; read as uint16 they would be twice as many."""
    long, short = tokens_of(2000, largest=128_255), tokens_of(400, seed=1, largest=128_255)
    for name, tokens in (("train_000.bin", long), ("train_001.bin", short)):
        (tmp_path / name).write_bytes(raw(tokens, "<u4"))
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "other.bin").write_bytes(raw(tokens_of(500, seed=2), "<u4"))
    settings = settings_of(
        tmp_path, sequence_length=399, held_out_path=str(tmp_path / "held" / "other.bin")
    )
    samples = everything(opened(settings, "train")[0])[0].tolist()
    assert short[:399].tolist() in samples
    assert len(samples) == 5 + 1


def test_raw_files_of_two_types_are_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(raw(tokens_of(2000, largest=128_255), "<u4"))
    (tmp_path / "b.bin").write_bytes(raw(tokens_of(2000)))
    with pytest.raises(
        ConfigError, match=r"b\.bin, read as uint32, holds the token \d+, which is large"
    ):
        prepare(settings_of(tmp_path))
    (tmp_path / "b.bin").write_bytes(raw(tokens_of(2001)))
    with pytest.raises(ConfigError, match=r"a\.bin needs uint32, and .*b\.bin holds no whole"):
        prepare(settings_of(tmp_path))


def test_true_uint16_tokens_are_not_taken_for_another_type(tmp_path):
    """Neither rare large tokens, nor small vocabularies, nor many zeros make a uint32."""
    tokens = tokens_of(4000)
    zeros = tokens.copy()
    zeros[::3] = 0
    for number, content in enumerate((zeros, tokens % 8, tokens % 300, tokens // 4000)):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(raw(content))
        assert prepare(settings_of(path)).classes == content.max() + 1


@pytest.mark.parametrize("largest", [15, 50_256, 128_255])
def test_the_default_type_of_numpy_is_found_out(tmp_path, largest):
    path = tmp_path / "train.bin"
    path.write_bytes(raw(tokens_of(2000, largest=largest), "<i8"))
    with pytest.raises(ConfigError, match="looks like int64") as refusal:
        prepare(settings_of(path))
    assert "astype('uint16').tofile" in str(refusal.value)


@pytest.mark.parametrize("dtype", ["<f4", ">u2", ">u4"])
def test_other_numbers_are_not_taken_for_uint16(tmp_path, dtype):
    path = tmp_path / "train.bin"
    path.write_bytes(raw(tokens_of(4000), dtype))
    with pytest.raises(ConfigError, match=r"give data\.vocabulary_size, above all of them"):
        prepare(settings_of(path))


def test_a_large_vocabulary_of_uint16_is_to_be_given(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(raw(tokens_of(2000, largest=65_529)))
    with pytest.raises(ConfigError, match="holds the token 65529"):
        prepare(settings_of(path))
    assert prepare(settings_of(path, vocabulary_size=65_530)).classes == 65_530
    path.write_bytes(llmc(tokens_of(2000, largest=65_529)))
    assert prepare(settings_of(path)).classes == 65_530


def test_chunks_of_litdata_are_refused_by_name(tmp_path):
    path = tmp_path / "chunk-0-0.bin"
    path.write_bytes(raw(tokens_of(500)))
    (tmp_path / "index.json").write_text("[]")
    assert prepare(settings_of(tmp_path)).classes == GPT2
    (tmp_path / "index.json").write_text(json.dumps({"chunks": [], "config": {}}))
    with pytest.raises(ConfigError, match="a chunk of litdata"):
        prepare(settings_of(tmp_path))


def test_a_copy_of_a_training_file_is_not_held_out(tmp_path):
    for name, seed in (("a", 1), ("b", 2), ("c", 2), ("d", 3)):
        (tmp_path / f"{name}.bin").write_bytes(raw(tokens_of(500, seed)))
    config = settings_of(tmp_path / "[ab].bin", held_out_path=str(tmp_path / "[cd].bin"))
    with pytest.raises(ConfigError, match=r"the same content is in .*c\.bin and .*b\.bin"):
        prepare(config)


def test_an_edit_in_place_is_seen_though_its_time_was_put_back(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(raw(tokens_of(500)))
    identity = prepare(settings_of(path))
    status = path.stat()
    time.sleep(0.05)
    with path.open("r+b") as file:
        file.write(b"\7\0")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(RecordError, match="were changed"):
        TokenDataset(Path(identity.folder), "train", 16)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\1\2\3", "not a whole number of uint16"),
        (b"", "0 bytes"),
        (llmc(tokens_of(100))[:-2], "not complete"),
        (litgpt(tokens_of(100)) + b"\0\0", "not complete"),
        (litgpt(tokens_of(100), version=2), "version 2"),
        (litgpt(tokens_of(100), code=6), "type code 6"),
        (b"LITPKDS\1", "ends within"),
        (b"\x93NUMPY\1\0 and more", "numpy"),
        (b"\x1f\x8b\x08\0", "gzip"),
        (litgpt(-tokens_of(100), 4, "<i4"), "0 or above"),
    ],
)
def test_what_is_no_whole_token_file_is_refused(tmp_path, content, message):
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        prepare(settings_of(path))


def test_no_files_are_refused(tmp_path):
    (tmp_path / "tokens.txt").write_text("1 2 3")
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ConfigError, match=r"folder of \.bin files"):
            prepare(settings_of(path))


def test_a_pattern_chooses_among_the_files_of_a_folder(tmp_path):
    for name, seed in (("x_train_1", 1), ("x_train_0", 0), ("x_val_0", 2)):
        (tmp_path / f"{name}.bin").write_bytes(llmc(tokens_of(161, seed)))
    pattern = tmp_path / "x_train_*.bin"
    config = settings_of(pattern, held_out_path=str(tmp_path / "x_val_*.bin"))
    dataset, identity = opened(config, "train")
    assert (identity.train_samples, identity.held_out_samples) == (20, 10)
    expected = [*tokens_of(161, 0)[:160], *tokens_of(161, 1)[:160]]
    assert everything(dataset)[0].flatten().tolist() == expected


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "no_file.bin").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be read: .*no_file\.bin is not a file"):
        prepare(settings_of(tmp_path))
    (tmp_path / "no_file.bin").rmdir()
    (tmp_path / "shard.bin").symlink_to(tmp_path / "gone.bin")
    with pytest.raises(ConfigError, match=r"cannot be read: .*shard\.bin is not a file"):
        prepare(settings_of(tmp_path))
