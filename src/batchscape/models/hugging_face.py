"""Models of Hugging Face `transformers`, built from local files and settings alone."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
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
"""Entries of a model's configuration that the user may not set here, and what decides them."""

_PROBE_TOKENS = 4


class HuggingFaceModel(nn.Module):
    """Token ids of shape (samples, length) to logits, for the next token or for a class."""

    def __init__(self, network: nn.Module, padding: int | None) -> None:
        super().__init__()
        self.network = network
        self.padding = padding

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (samples, length, vocabulary) or (samples, classes)."""
        inputs = {"input_ids": tokens}
        if self.padding is not None:
            real = tokens >= 0
            padded = torch.where(real, tokens, self.padding)
            inputs = {"input_ids": padded, "attention_mask": real.long()}
        logits: Tensor = self.network(**inputs).logits
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
        raise ConfigError(
            f"model=hf needs transformers: pip install 'batchscape[hf]' ({error})"
        ) from None
    classifies = data.task == "class"
    if data.features is not None or data.task not in {"next_token", "class"}:
        content = "vectors" if data.features is not None else f"the task {data.task}"
        raise ConfigError(
            "model=hf takes sequences of tokens, to predict the next one or a class; data has "
            f"{content}: use model=mlp, or data of tokens such as data=documents"
        )
    try:
        library_config = _read_config(transformers, config)
    except ConfigError:
        raise
    except Exception as error:  # each model checks its configuration with errors of its own
        raise ConfigError(f"transformers cannot read this model configuration: {error}") from error
    rows, padding = _rows_and_padding(config, library_config, data, pads=classifies)
    if config.path is None:
        library_config.vocab_size = rows
    if "pad_token_id" not in config.settings:
        library_config.pad_token_id = padding
    library_config.use_cache = False
    if classifies:
        library_config.num_labels = data.classes
    positions = getattr(library_config, "max_position_embeddings", None)
    if isinstance(positions, int) and sequence_length is not None and sequence_length > positions:
        name = library_config.attribute_map.get(
            "max_position_embeddings", "max_position_embeddings"
        )
        raise ConfigError(
            f"data.sequence_length may be at most the positions of the model, {name}={positions}; "
            f"given {sequence_length}"
        )
    network = _network(transformers, config, library_config, classifies=classifies)
    model = HuggingFaceModel(network, padding if classifies else None)
    if not classifies:
        _check_causal(model, library_config)
    return model


@contextmanager
def nothing_packed() -> Iterator[None]:
    """Let `transformers` build masks for tensors without numbers.

    It looks whether positions begin anew within a sample, and writes out a mask where it cannot
    know. The model counts ours itself, so that they never begin anew.
    """
    masks: Any = importlib.import_module("transformers.masking_utils")
    find_packed = masks.find_packed_sequence_indices
    masks.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = find_packed


def _read_config(transformers: Any, config: Transformers) -> Any:  # noqa: ANN401
    """Return the configuration that folder and settings give."""
    settings = dict(config.settings)
    for name, decider in _DECIDED_ELSEWHERE.items():
        if name in settings:
            raise ConfigError(f"model.settings.{name} is decided by {decider}; leave it out")
    model_type, known_types = settings.pop("model_type", None), list(transformers.CONFIG_MAPPING)
    if config.path is not None:
        folder = Path(config.path)
        config_file(folder)  # refuses a folder without one
        read = partial(transformers.AutoConfig.from_pretrained, folder, local_files_only=True)
    elif model_type in known_types:
        read = partial(transformers.AutoConfig.for_model, model_type)
    else:
        msg = f"model.settings.model_type={model_type!r} is unknown to transformers"
        raise ConfigError(msg + did_you_mean(near_names(str(model_type), known_types, 3)))
    library_config = read()
    # The library would take other settings without an error and never read them.
    setting_names = {*type(library_config)().to_dict(), *library_config.attribute_map}
    setting_names -= _DECIDED_ELSEWHERE.keys()
    for name in settings:
        if name not in setting_names:
            msg = f"model.settings.{name} is no setting of {library_config.model_type}"
            raise ConfigError(msg + suggest(name, sorted(setting_names)))
    if config.path is None:
        # By default the class has special tokens of a vocabulary that is not in use.
        settings = {"bos_token_id": None, "eos_token_id": None, **settings}
    return read(**settings)


def _rows_and_padding(
    config: Transformers,
    library_config: Any,  # noqa: ANN401
    data: DataIdentity,
    *,
    pads: bool,
) -> tuple[int, int | None]:
    """Settle the rows of the embedding, and the token that pads; None where nothing needs one."""
    data_rows = data_vocabulary(data)
    has_size = config.path is not None or "vocab_size" in config.settings
    # A row more, for a padding token that no real token equals.
    rows: int = library_config.vocab_size if has_size else data_rows + pads
    check_vocabulary("the model's vocab_size", rows, data)
    padding: int | None = None
    if config.path is not None or "pad_token_id" in config.settings:
        padding = library_config.pad_token_id
    if padding is None and pads:
        padding = data_rows if rows > data_rows else library_config.pad_token_id
        if padding is None:
            # The classifier reads the last token that is not padding: if the text itself has this
            # one, an earlier token, which is the same in every batch.
            padding = library_config.eos_token_id
    if pads and not (isinstance(padding, int) and 0 <= padding < rows):
        raise ConfigError(
            f"a classifier of sequences needs a token that pads: give model.settings.pad_token_id "
            f"below vocab_size={rows}, or a vocab_size above the data's vocabulary, {data_rows}"
        )
    return rows, padding


def _network(
    transformers: Any,  # noqa: ANN401
    config: Transformers,
    library_config: Any,  # noqa: ANN401
    *,
    classifies: bool,
) -> nn.Module:
    """Build the network, with random parameters or those of the folder."""
    class_name = "AutoModelForSequenceClassification" if classifies else "AutoModelForCausalLM"
    if library_config.is_encoder_decoder:
        raise ConfigError(
            f"model=hf cannot train {library_config.model_type}, an encoder with a decoder; use a "
            f"model that is one of the two, such as {'bert' if classifies else 'gpt2'}"
        )
    options = {"attn_implementation": "sdpa", "dtype": torch.float32}
    loading_info: dict[str, Any] = {}
    if config.pretrained and config.path is not None:
        weight_files(Path(config.path))  # refuses a folder without them
    try:
        if config.pretrained:
            network, loading_info = getattr(transformers, class_name).from_pretrained(
                config.path,
                config=library_config,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
        else:
            network = getattr(transformers, class_name).from_config(library_config, **options)
    except Exception as error:  # each model refuses its configuration with errors of its own
        raise ConfigError(
            f"transformers cannot build this {library_config.model_type} ({class_name}): {error}"
        ) from error
    body_prefix = f"{network.base_model_prefix}."
    # Only the head of a classifier may be new: no body with random parts passes for pretrained.
    missing_parameters = [
        n
        for n in loading_info.get("missing_keys", ())
        if not classifies or n.startswith(body_prefix)
    ]
    if missing_parameters:
        count = count_text(len(missing_parameters), "parameter")
        names = list_text(sorted(missing_parameters), "and", 3)
        raise ConfigError(f"the weights in {config.path} lack {count}: {names}")
    trained: nn.Module = network.train()
    return trained


def _check_causal(model: HuggingFaceModel, library_config: Any) -> None:  # noqa: ANN401
    """Refuse a model that sees the token it has to predict, as encoders do."""
    tokens = torch.zeros(2, _PROBE_TOKENS, dtype=torch.long)
    tokens[1, -1] = 1
    model.eval()
    with torch.no_grad():
        first_logits, second_logits = model(tokens)[:, :-1]
    model.train()
    if first_logits.is_meta or type(first_logits) is not Tensor:
        return  # tensors without numbers: the training itself will check the model
    if not torch.allclose(first_logits, second_logits, rtol=1e-4, atol=1e-5):
        raise ConfigError(
            f"this {library_config.model_type} sees later tokens, so it cannot learn to predict "
            "them; use a causal model (for some encoders: model.settings.is_decoder=true)"
        )
