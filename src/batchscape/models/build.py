"""From a configuration to a module that returns a sum of losses."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional

from batchscape.config import (
    CustomModel,
    ExternalModel,
    Gpt,
    LanguageModel,
    Mlp,
    RunConfig,
    Transformers,
)
from batchscape.config.data import IGNORED
from batchscape.errors import ConfigError
from batchscape.models.custom import build_custom
from batchscape.models.gpt import GptModel
from batchscape.models.hugging_face import build_hugging_face
from batchscape.models.llama import LlamaModel
from batchscape.models.mlp import MlpModel
from batchscape.models.next_token import NextTokenModel
from batchscape.models.vocabulary import check_classes, vocabulary_size
from batchscape.record.spec import DataIdentity


class LossModule(nn.Module):
    """A model and its loss, so that the wrapper of an engine sees one forward.

    The loss is the sum of the losses over the labels that bear one: whoever sums over
    micro-steps and ranks divides once, by the global number of labels (never a mean of means).
    A model may have methods `loss_sum(outputs, labels)` and `count_right(outputs, labels)`. Without
    them the loss is the cross-entropy over the last dimension of the outputs, and a prediction is
    right where the largest output is that of the label.

    Parameters
    ----------
    model : nn.Module
    chunk : int, optional
        Labels of a `NextTokenModel` whose logits exist at the same time; None: all. With a chunk
        right predictions are not counted: nobody asks for those of next tokens.
    """

    def __init__(self, model: nn.Module, chunk: int | None = None) -> None:
        super().__init__()
        self.model = model
        self._chunk = chunk

    def forward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses, and how many predictions were right; both scalars.

        Parameters
        ----------
        inputs : Tensor, shape (samples, ...)
        labels : Tensor, shape (samples, ...)
            For the default loss class indices, of the shape of the outputs without their last
            dimension; -100 is padding and bears no loss.

        Raises
        ------
        ConfigError
            If outputs and labels do not fit each other, or a loss is no scalar.
        """
        if self._chunk is not None and isinstance(self.model, NextTokenModel):
            in_parts = self.model.chunked_loss_sum(inputs, labels, self._chunk)
            return in_parts, in_parts.new_zeros(())
        outputs = self.model(inputs)
        loss: Tensor = getattr(self.model, "loss_sum", _cross_entropy_sum)(outputs, labels)
        _check_scalar("loss_sum", loss)
        if self.training:
            return loss, loss.new_zeros(())
        right: Tensor = getattr(self.model, "count_right", _largest_is_label)(outputs, labels)
        _check_scalar("count_right", right)
        return loss, right


def build_model(config: RunConfig, data: DataIdentity, precision: str) -> LossModule:
    """Build the model of a run on the CPU, the same for every geometry and device.

    Parameters are drawn in float32 from `init_seed`, then widened for float64.

    Parameters
    ----------
    config : RunConfig
    data : DataIdentity
        Tells the vocabulary or the classes, and what a sample is.
    precision : str
        `float32`, `bfloat16` or `float16` (parameters stay float32), or `float64`.

    Raises
    ------
    ConfigError
        If the model does not fit the data, or cannot be built.
    """
    torch.manual_seed(config.resolved_init_seed)
    model = _build(config, data)
    if precision == "float64":
        # `Module.double` cannot widen tensors without numbers.
        for tensor in chain(model.parameters(), model.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.double()
    chunk = config.model.loss_chunk if isinstance(config.model, LanguageModel) else None
    return LossModule(model, chunk)


def _build(config: RunConfig, data: DataIdentity) -> nn.Module:
    model = config.model
    if isinstance(model, ExternalModel):
        raise AssertionError("model=external is built by a program, not by our own loop")
    if isinstance(model, CustomModel):
        return build_custom(model, data)
    check_classes(model.name, data)
    if isinstance(model, Transformers):
        return build_hugging_face(model, data, config.sequence_length)
    if isinstance(model, Mlp):
        if data.features is None:
            other = "model=hf" if data.task == "class" else "a language model, such as gpt_nano"
            raise ConfigError(
                "model=mlp needs samples that are vectors; these data are sequences of tokens: use "
                f"{other}, or a model of your own"
            )
        return MlpModel(model, data.features, data.classes)
    if data.features is not None or data.task == "class":
        kind = "vectors" if data.features is not None else "classes"
        raise ConfigError(
            f"model={model.name} predicts the next token of a sequence, and these data have "
            f"{kind}; use model=mlp for vectors, model=hf for classes of sequences"
        )
    if config.sequence_length is None:
        raise ConfigError(f"model={model.name} needs data.sequence_length, the tokens of a sample")
    rows = vocabulary_size(model, data)
    if isinstance(model, Gpt):
        return GptModel(model, rows, config.sequence_length)
    return LlamaModel(model, rows, config.sequence_length)


def _cross_entropy_sum(outputs: Tensor, labels: Tensor) -> Tensor:
    if not isinstance(outputs, Tensor) or outputs.shape[:-1] != labels.shape:
        shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ConfigError(
            "the default loss needs outputs of the shape of the labels with one dimension more, "
            f"the classes; got {shape} for labels of {tuple(labels.shape)}; give the model a "
            "method loss_sum(outputs, labels), or data that fit it"
        )
    flat = outputs.flatten(0, -2)
    # Autocast gives logits of half the width; their exponentials are summed in float32.
    if flat.dtype in {torch.bfloat16, torch.float16}:
        flat = flat.float()
    return functional.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def _largest_is_label(outputs: Tensor, labels: Tensor) -> Tensor:
    if not isinstance(outputs, Tensor) or outputs.shape[:-1] != labels.shape:
        # The model has its own loss, and outputs that are neither right nor wrong.
        return torch.zeros((), device=labels.device)
    return (outputs.argmax(-1) == labels).sum()


def _check_scalar(name: str, value: object) -> None:
    if not isinstance(value, Tensor) or value.ndim:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(f"the model's {name} must return a scalar tensor; it returned {got}")
