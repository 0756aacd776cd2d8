"""What names a model that is not part of the package."""

from __future__ import annotations

import hashlib
import json

import pytest

from batchscape.errors import ConfigError
from batchscape.models.source import model_source_hash, weight_files


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def transformers(path, **settings):
    return {"name": "transformers", "path": str(path), **settings}


def test_settings_alone_need_no_further_name(config_of):
    assert model_source_hash(config_of()) is None
    settings = {"name": "transformers", "settings": {"model_type": "gpt2"}}
    assert model_source_hash(config_of(model=settings)) is None


def test_the_name_is_that_of_the_contents(config_of, folder):
    def digest(name):
        return hashlib.sha256((folder / name).read_bytes()).hexdigest()

    line = f"config.json\0{digest('config.json')}\0"
    expected = hashlib.sha256(line.encode()).hexdigest()[:16]
    assert model_source_hash(config_of(model=transformers(folder))) == expected
    line += f"model.safetensors\0{digest('model.safetensors')}\0"
    expected = hashlib.sha256(line.encode()).hexdigest()[:16]
    assert model_source_hash(config_of(model=transformers(folder, pretrained=True))) == expected


def test_weights_count_where_they_are_used(config_of, folder):
    def names():
        return [
            model_source_hash(config_of(model=transformers(folder, pretrained=pretrained)))
            for pretrained in (False, True)
        ]

    fresh, pretrained = names()
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert names()[0] == fresh
    assert names()[1] != pretrained
    (folder / "config.json").write_text("{}")
    assert names()[0] != fresh


def test_shards_are_those_of_the_index(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "2.safetensors", "b": "1.safetensors"}}))
    with pytest.raises(ConfigError, match=r"not there: 1\.safetensors, 2\.safetensors"):
        weight_files(tmp_path)
    for name in ("1.safetensors", "2.safetensors"):
        (tmp_path / name).touch()
    assert [file.name for file in weight_files(tmp_path)] == [
        "model.safetensors.index.json",
        "1.safetensors",
        "2.safetensors",
    ]
    index.write_text("[]")
    with pytest.raises(ConfigError, match="damaged"):
        weight_files(tmp_path)


def test_what_is_missing_is_told(config_of, tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json.*not looked up"):
        model_source_hash(config_of(model=transformers(tmp_path / "gpt2")))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="needs weights as model"):
        model_source_hash(config_of(model=transformers(tmp_path, pretrained=True)))


def test_a_custom_model_is_named_by_its_source(config_of, tmp_path, monkeypatch):
    (tmp_path / "mine_for_hash.py").write_text("def build(): ...\n")
    monkeypatch.chdir(tmp_path)
    config = config_of(model={"name": "custom", "_target_": "mine_for_hash.build"})
    before = model_source_hash(config)
    (tmp_path / "mine_for_hash.py").write_text("def build(): return 1\n")
    assert before != model_source_hash(config)


def test_files_that_a_custom_model_is_given_count(config_of, tmp_path, monkeypatch):
    (tmp_path / "mine_with_files.py").write_text("def build(weights): ...\n")
    monkeypatch.chdir(tmp_path)
    config = config_of(
        model={
            "name": "custom",
            "_target_": "mine_with_files.build",
            "arguments": {"weights": {"first": ["weights.bin"]}},
        }
    )
    names = [model_source_hash(config)]
    for content in (b"one", b"two"):
        (tmp_path / "weights.bin").write_bytes(content)
        names.append(model_source_hash(config))
    assert len(set(names)) == 3
    assert model_source_hash(config) == names[2]
