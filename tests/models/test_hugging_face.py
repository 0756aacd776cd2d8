"""Models of transformers: from settings and from folders, and what they refuse."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch.nn import functional

from batchscape.compose import compose
from batchscape.errors import ConfigError
from batchscape.models.build import build_model
from batchscape.models.checkpointing import checkpoint_activations
from batchscape.models.invariance import why_not_invariant

transformers = pytest.importorskip("transformers")

GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
}
BERT = {
    "model_type": "bert",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


@pytest.fixture
def build(config_of):
    def build(data, settings=None, precision="float64", length=32, **model):
        config = config_of(
            model={"name": "transformers", "settings": settings or {}, **model},
            data__sequence_length=length,
        )
        return build_model(config, data, precision)

    return build


def tokens_of(samples=3, length=32):
    return torch.randint(256, (samples, length), generator=torch.manual_seed(1))


@pytest.mark.parametrize("settings", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_causal_loss_is_the_sum_of_what_the_library_averages(build, text, settings):
    module = build(text, settings).eval()
    tokens = tokens_of()
    loss, right = module(tokens[:, :-1], tokens[:, 1:])
    theirs = module.model.network(input_ids=tokens, labels=tokens)
    torch.testing.assert_close(loss / tokens[:, 1:].numel(), theirs.loss.double())
    assert right == (theirs.logits[:, :-1].argmax(-1) == tokens[:, 1:]).sum()


@pytest.mark.parametrize("settings", [GPT2, LLAMA, BERT], ids=["gpt2", "llama", "bert"])
def test_classes_do_not_depend_on_the_padding(build, labelled, settings):
    """Each document alone and unpadded gives the logits that it has within a padded batch."""
    module = build(labelled, settings)
    tokens = tokens_of()
    lengths = (32, 5, 17)
    for row, length in enumerate(lengths):
        tokens[row, length:] = -1
    tokens[1, 4] = 0  # a document may end with any token
    logits = module.model(tokens)
    assert logits.shape == (3, 4)
    for row, length in enumerate(lengths):
        alone = module.model(tokens[row : row + 1, :length])
        torch.testing.assert_close(alone[0], logits[row], rtol=1e-6, atol=1e-9)
    classes = torch.tensor([0, 3, 2])
    loss, _ = module(tokens, classes)
    torch.testing.assert_close(loss, functional.cross_entropy(logits, classes, reduction="sum"))


def test_padding_has_a_row_of_its_own_where_there_is_room(build, labelled):
    network = build(labelled, GPT2).model.network
    assert (network.config.vocab_size, network.config.pad_token_id) == (257, 256)
    network = build(labelled, GPT2 | {"vocab_size": 300}).model.network
    assert (network.config.vocab_size, network.config.pad_token_id) == (300, 256)
    network = build(labelled, GPT2 | {"vocab_size": 256, "pad_token_id": 7}).model.network
    assert network.config.pad_token_id == 7
    with pytest.raises(ConfigError, match=r"needs a token that pads.*above the data's.* 256"):
        build(labelled, GPT2 | {"vocab_size": 256})


def test_parameters_follow_the_seed_alone(config_of, text):
    def weights(**seeds):
        config = config_of(model={"name": "transformers", "settings": GPT2}, **seeds)
        return build_model(config, text, "float32").state_dict()

    first = weights(init_seed=1)
    torch.rand(3)
    again, other = weights(init_seed=1), weights(init_seed=2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "model.network.transformer.wte.weight"
    assert not torch.equal(first[name], other[name])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (GPT2 | {"n_layers": 3}, r"settings\.n_layers is no setting of gpt2; did you mean n_layer"),
        (GPT2 | {"num_labels": 3}, "num_labels is decided by the classes of the data"),
        (GPT2 | {"dtype": "bfloat16"}, r"dtype is decided by engine\.precision"),
        (GPT2 | {"n_layer": "two"}, "cannot read this model configuration.*n_layer"),
        (GPT2 | {"vocab_size": 255}, "at least the data's vocabulary, 256; given 255"),
        (GPT2 | {"n_positions": 31}, r"at most the positions.*n_positions=31; given 32"),
        ({"model_type": "gpt_2"}, "'gpt_2' is unknown to transformers; did you mean.*gpt2"),
        ({"model_type": "t5"}, "encoder with a decoder"),
        ({"model_type": "vit"}, "vit"),
        (BERT, r"bert sees later tokens.*is_decoder=true"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:20],
)
def test_what_the_library_would_swallow_is_refused(build, text, settings, message):
    with pytest.raises(ConfigError, match=message):
        build(text, settings)


def test_attribute_names_of_other_models_are_understood(build, text):
    renamed = {"hidden_size": 48} | {k: v for k, v in GPT2.items() if k != "n_embd"}
    assert build(text, renamed).model.network.config.n_embd == 48


def test_an_encoder_that_decodes_is_taken(build, text):
    module = build(text, BERT | {"is_decoder": True})
    assert module(tokens_of(), tokens_of())[0].isfinite()


@pytest.fixture
def saved(tmp_path, build, text):
    network = build(text, GPT2, "float32").model.network
    network.save_pretrained(tmp_path)
    return tmp_path, network


def test_a_folder_gives_shape_and_weights(build, text, saved):
    folder, network = saved
    loaded = build(text, path=str(folder), pretrained=True).model.network
    for name, weight in network.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.double()), name
    fresh = build(text, path=str(folder), settings={"n_layer": 1}).model.network
    assert len(fresh.transformer.h) == 1
    assert not torch.equal(fresh.transformer.wte.weight, network.transformer.wte.weight.double())
    assert loaded.training


def chosen(*arguments):
    grid = compose(arguments, "batchscape run")
    return dict(grid.cells[0].settings["model"])


@pytest.mark.parametrize("pretrained", ["false", "true"])
def test_the_option_for_folders_has_the_sizes_of_the_folder(build, text, saved, pretrained):
    folder, network = saved
    model = chosen("model=hf", f"model.path='{folder}'", f"model.pretrained={pretrained}")
    built = build(text, **model).model.network
    shapes = {name: weight.shape for name, weight in network.named_parameters()}
    assert {name: weight.shape for name, weight in built.named_parameters()} == shapes


@pytest.mark.parametrize("preset", ["hf_gpt2", "hf_llama", "hf_bert"])
def test_a_folder_and_the_sizes_of_a_preset_are_refused(build, text, saved, preset):
    model = chosen(f"model={preset}", f"model.path='{saved[0]}'")
    with pytest.raises(ConfigError, match=r"Use model=hf model\.path="):
        build(text, **model)


def test_weights_in_halves_are_widened(build, text, saved):
    folder, network = saved
    network.bfloat16().save_pretrained(folder)
    loaded = build(text, precision="float32", path=str(folder), pretrained=True)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


def test_a_classifier_takes_the_body_and_draws_its_head(build, labelled, saved):
    folder, network = saved
    model = {"path": str(folder), "pretrained": True, "settings": {"pad_token_id": 0}}
    loaded = build(labelled, **model).model.network
    body = network.transformer.wte.weight.double()
    assert torch.equal(loaded.transformer.wte.weight, body)
    assert torch.equal(loaded.score.weight, build(labelled, **model).model.network.score.weight)


def test_folders_that_do_not_fit_are_refused(build, text, saved, tmp_path):
    folder, _ = saved
    for model_type in ("llama", "gpt2"):
        message = rf"model_type={model_type} .*Use model=hf model\.path"
        with pytest.raises(ConfigError, match=message):
            build(text, path=str(folder), settings={"model_type": model_type})
    with pytest.raises(ConfigError, match="n_head_s is no setting of gpt2"):
        build(text, path=str(folder), settings={"n_head_s": 1})
    with pytest.raises(ConfigError, match=r"the weights in .* lack 12 parameters"):
        build(text, path=str(folder), pretrained=True, settings={"n_layer": 3})
    with pytest.raises(ConfigError, match=r"no config\.json in this folder"):
        build(text, path="gpt2")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="needs weights"):
        build(text, path=str(folder), pretrained=True)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "no_such"}))
    with pytest.raises(ConfigError, match="cannot read this model configuration"):
        build(text, path=str(other))


def test_vectors_are_refused(build, vectors):
    with pytest.raises(ConfigError, match=r"takes sequences of tokens.* data has vectors"):
        build(vectors, GPT2)


def test_a_missing_library_is_told(build, text, monkeypatch):
    monkeypatch.delitem(sys.modules, "batchscape.models.offline_transformers", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'batchscape\[hf\]'"):
        build(text, GPT2)


@pytest.mark.parametrize(
    ("settings", "dropout"),
    [(GPT2, "attn_pdrop"), (LLAMA, "attention_dropout")],
    ids=["gpt2", "llama"],
)
def test_dropout_is_found_wherever_it_is(build, text, settings, dropout):
    tokens = tokens_of(4, 33)
    batch = (tokens[:, :-1], tokens[:, 1:])
    assert why_not_invariant(build(text, settings, "float32"), batch) is None
    reason = why_not_invariant(build(text, settings | {dropout: 0.1}, "float32"), batch)
    assert reason is not None
    assert reason.startswith("dropout")


@pytest.mark.parametrize("settings", [GPT2, LLAMA, BERT], ids=["gpt2", "llama", "bert"])
def test_activations_are_recomputed_alike(build, text, labelled, settings):
    data = labelled if settings is BERT else text
    labels = torch.tensor([0, 1, 3]) if settings is BERT else tokens_of()
    losses = []
    for recomputes in (False, True):
        module = build(data, settings)
        if recomputes:
            checkpoint_activations(module)
        loss, _ = module(tokens_of(), labels)
        loss.backward()
        losses.append([loss, *(p.grad for p in module.parameters())])
    for plain, recomputed in zip(*losses, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-12, atol=1e-14)
