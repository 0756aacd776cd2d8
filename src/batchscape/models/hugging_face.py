"""Models of Hugging Face `transformers`, built from local files and settings alone."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from batchscape.config import Transformers
from batchscape.errors import ConfigError
from batchscape.models.source import config_file, weight_files
from batchscape.models.vocabulary import check_vocabulary, data_vocabulary
from batchscape.record.spec import DataIdentity
from batchscape.text import count_text, did_you_mean, list_text, near_names, suggest

_DECIDED_ELSEWHERE = {
    "num_labels": "the classes of the data",
    "id2label": "the classes of the data",
    "label2id": "the classes of the data",
    "problem_type": "the classes of the data",
    "architectures": "what the data are for",
    "dtype": "engine.precision",
    "torch_dtype": "engine.precision",
    "attn_implementation": "batchscape, which counts the operations of sdpa",
    "_attn_implementation": "batchscape, which counts the operations of sdpa",
    "use_cache": "the training, which has no use for it",
    "return_dict": "the training, which reads the logits",
    "output_hidden_states": "the training, which reads the logits",
    "output_attentions": "the training, which reads the logits",
}
"""Entries of a model's configuration that are not the user's to set here, and what decides them."""

_PROBE_TOKENS = 4


@dataclass(frozen=True)
class _Vocabulary:
    rows: int
    padding: int | None
    """Token that fills short sequences; None where nothing needs one."""


class HuggingFaceModel(nn.Module):
    """Token ids of shape (samples, length) to logits, for the next token or for a class."""

    def __init__(self, network: nn.Module, padding: int | None) -> None:
        super().__init__()
        self.network = network
        self.padding = padding

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (samples, length, vocabulary) or (samples, classes)."""
        if self.padding is None:
            logits: Tensor = self.network(input_ids=tokens).logits
        else:
            real = tokens >= 0
            logits = self.network(
                input_ids=torch.where(real, tokens, self.padding), attention_mask=real.long()
            ).logits
        return logits


def build_hugging_face(
    config: Transformers, data: DataIdentity, sequence_length: int | None
) -> HuggingFaceModel:
    """Build a causal language model, or a sequence classifier where the data have classes.

    Nothing is fetched: a folder is read, never a hub. Random parameters come from torch's current
    random state.
    """
    try:
        from batchscape.models.offline_transformers import library as transformers
    except ImportError as error:
        msg = f"model=hf needs transformers: pip install 'batchscape[hf]' ({error})"
        raise ConfigError(msg) from None
    classifies = data.task == "class"
    if data.features is not None or data.task not in {"next_token", "class"}:
        content = "vectors" if data.features is not None else f"the task {data.task}"
        msg = (
            "model=hf takes sequences of tokens, to predict the next one or a class; data has "
            f"{content}: use model=mlp, or data of tokens such as data=documents"
        )
        raise ConfigError(msg)
    try:
        plain = _plain_config(transformers, config)
    except ConfigError:
        raise
    except Exception as error:  # each model checks its configuration with errors of its own
        msg = f"transformers cannot read this model configuration: {error}"
        raise ConfigError(msg) from error
    vocabulary = _vocabulary(config, plain, data, pads=classifies)
    if config.path is None:
        plain.vocab_size = vocabulary.rows
    if "pad_token_id" not in config.settings:
        plain.pad_token_id = vocabulary.padding
    plain.use_cache = False
    if classifies:
        plain.num_labels = data.classes
    _check_length(plain, sequence_length)
    network = _network(transformers, config, plain, classifies=classifies)
    model = HuggingFaceModel(network, vocabulary.padding if classifies else None)
    if not classifies:
        _check_causal(model, plain)
    return model


@contextmanager
def nothing_packed() -> Iterator[None]:
    """Let `transformers` build masks for tensors without numbers.

    It looks whether positions begin anew within a sample, and writes out a mask where it cannot
    know. Ours are counted by the model itself, and never do.
    """
    masks: Any = importlib.import_module("transformers.masking_utils")
    looking = masks.find_packed_sequence_indices
    masks.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = looking


def _plain_config(transformers: Any, config: Transformers) -> Any:  # noqa: ANN401
    """Return the configuration that folder and settings give."""
    settings = dict(config.settings)
    for name, decider in _DECIDED_ELSEWHERE.items():
        if name in settings:
            msg = f"model.settings.{name} is decided by {decider}; leave it out"
            raise ConfigError(msg)
    model_type = settings.pop("model_type", None)
    if config.path is None:
        known_types = list(transformers.CONFIG_MAPPING)
        if model_type not in known_types:
            msg = f"model.settings.model_type={model_type!r} is unknown to transformers"
            raise ConfigError(msg + did_you_mean(near_names(str(model_type), known_types, 3)))
        _check_known(settings, transformers.AutoConfig.for_model(model_type), model_type)
        # The class's own special tokens are those of a vocabulary that is not in use.
        unused = {"bos_token_id": None, "eos_token_id": None}
        return transformers.AutoConfig.for_model(model_type, **{**unused, **settings})
    folder = Path(config.path)
    config_file(folder)
    plain = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    _check_known(settings, plain, plain.model_type)
    return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, **settings)


def _check_known(settings: dict[str, Any], plain: Any, model_type: str) -> None:  # noqa: ANN401
    """Refuse settings that the library would take without an error and never read."""
    setting_names = {*type(plain)().to_dict(), *plain.attribute_map} - {*_DECIDED_ELSEWHERE}
    for name in settings:
        if name not in setting_names:
            msg = f"model.settings.{name} is no setting of {model_type}"
            raise ConfigError(msg + suggest(name, sorted(setting_names)))


def _vocabulary(
    config: Transformers,
    plain: Any,  # noqa: ANN401
    data: DataIdentity,
    *,
    pads: bool,
) -> _Vocabulary:
    """Settle the rows of the embedding, and the token that pads."""
    needed = data_vocabulary(data)
    has_size = config.path is not None or "vocab_size" in config.settings
    # One row more stands for the padding, so that no real token is taken for it.
    rows: int = plain.vocab_size if has_size else needed + pads
    check_vocabulary("the model's vocab_size", rows, data)
    if config.path is not None or "pad_token_id" in config.settings:
        padding: int | None = plain.pad_token_id
    else:
        padding = None
    if padding is None and pads:
        padding = needed if rows > needed else plain.pad_token_id
    if padding is None and pads:
        # The last token that is not padding is looked for: at worst an earlier one is found, the
        # same for a sample in whatever batch it is.
        padding = plain.eos_token_id
    if pads and not (isinstance(padding, int) and 0 <= padding < rows):
        msg = (
            f"a classifier of sequences needs a token that pads: give model.settings.pad_token_id "
            f"below vocab_size={rows}, or a vocab_size above the data's vocabulary, {needed}"
        )
        raise ConfigError(msg)
    return _Vocabulary(rows, padding)


def _check_length(plain: Any, sequence_length: int | None) -> None:  # noqa: ANN401
    most = getattr(plain, "max_position_embeddings", None)
    if isinstance(most, int) and sequence_length is not None and sequence_length > most:
        name = plain.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        msg = (
            f"data.sequence_length may be at most the positions of the model, {name}={most}; "
            f"given {sequence_length}"
        )
        raise ConfigError(msg)


def _network(
    transformers: Any,  # noqa: ANN401
    config: Transformers,
    plain: Any,  # noqa: ANN401
    *,
    classifies: bool,
) -> nn.Module:
    """Build the network, with random parameters or those of the folder."""
    kind = "AutoModelForSequenceClassification" if classifies else "AutoModelForCausalLM"
    if plain.is_encoder_decoder:
        msg = f"{plain.model_type} is an encoder with a decoder; model=hf trains neither"
        raise ConfigError(msg)
    options = {"attn_implementation": "sdpa", "dtype": torch.float32}
    loading: dict[str, Any] = {}
    try:
        if config.pretrained and config.path is not None:
            weight_files(Path(config.path))
            network, loading = getattr(transformers, kind).from_pretrained(
                config.path,
                config=plain,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
        else:
            network = getattr(transformers, kind).from_config(plain, **options)
    except ConfigError:
        raise
    except Exception as error:  # each model refuses its configuration with errors of its own
        msg = f"transformers cannot build this {plain.model_type} ({kind}): {error}"
        raise ConfigError(msg) from error
    body = f"{network.base_model_prefix}."
    # A classifier's head is new; a body with random parts would pass for a pretrained model.
    missing = [n for n in loading.get("missing_keys", ()) if not classifies or n.startswith(body)]
    if missing:
        count, names = count_text(len(missing), "parameter"), list_text(sorted(missing), "and", 3)
        msg = f"the weights in {config.path} lack {count}: {names}"
        raise ConfigError(msg)
    trained: nn.Module = network.train()
    return trained


def _check_causal(model: HuggingFaceModel, plain: Any) -> None:  # noqa: ANN401
    """Refuse a model that sees the token it has to predict, as encoders do."""
    tokens = torch.zeros(2, _PROBE_TOKENS, dtype=torch.long)
    tokens[1, -1] = 1
    model.eval()
    with torch.no_grad():
        one, other = model(tokens)[:, :-1]
    model.train()
    if one.is_meta or type(one) is not Tensor:
        return  # a prediction has no numbers to compare; the training will
    if not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
        msg = (
            f"this {plain.model_type} sees later tokens, so it cannot learn to predict them; "
            "use a causal model (for some encoders: model.settings.is_decoder=true)"
        )
        raise ConfigError(msg)
