"""Data of the user's own: made by a callable, checked before anything is launched.

`_target_(part=..., **arguments)` returns an object with `num_samples`, `count_labels(indices)` and
`batch(indices)`, see `batchscape.data.datasets.Dataset`; with `sequence_length` too, where the
settings give one. It may say more of itself: `classes`, `vocabulary`, `task`, `features` and
`content_hash`.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import numpy as np

from batchscape.config import CustomData
from batchscape.config.data import IGNORED
from batchscape.data.fingerprints import file_sha256
from batchscape.data.store import PARTS, manifest_hash
from batchscape.errors import BatchscapeError, ConfigError
from batchscape.record.spec import DataIdentity
from batchscape.user_code import call_by_path, named_files, source_hash

if TYPE_CHECKING:
    from torch import Tensor

    from batchscape.data.datasets import Dataset, Indices


_TASKS = ("next_token", "class", "other")
_CHECKED_SAMPLES = 4
"""Samples of the batch that is checked, spread over a part: the first may be unlike the rest."""


def make_custom(config: CustomData, part: str) -> Dataset:
    """Call the user's callable for one part.

    Raises
    ------
    ConfigError
        If it cannot be called so, or returns something else than data.
    """
    arguments = {"part": part, **config.arguments}
    if config.sequence_length is not None:
        arguments["sequence_length"] = config.sequence_length
    dataset: Dataset = call_by_path(config.target, arguments)
    for member in ("count_labels", "batch"):
        if not callable(getattr(dataset, member, None)):
            _refuse(config, f"must return an object with a method {member}; got {dataset!r:.100}")
    size = getattr(dataset, "num_samples", None)
    if not _is_count(size) or size == 0:
        _refuse(config, f"part={part!r}: num_samples must be an int above 0; got {size!r}")
    return dataset


def prepare_custom(config: CustomData) -> DataIdentity:
    """Make both parts, check what they promise on a first batch, and name them.

    The name is a hash of the callable's source and arguments, of files that arguments name, of the
    numbers of samples, and of `content_hash`, by which the data may stand for files of their own.

    Raises
    ------
    ConfigError
        If a promise is broken: which one, what was returned and what is wanted. If the user's code
        raises an error: with its traceback.
    """
    try:
        return _prepare(config)
    except BatchscapeError:
        raise
    except Exception:  # noqa: BLE001  (the code is not ours: whatever it raises is for its author)
        _refuse(config, f"it raised an error:\n{traceback.format_exc().rstrip()}")


def _prepare(config: CustomData) -> DataIdentity:
    parts = {part: make_custom(config, part) for part in PARTS}
    task = "other" if config.sequence_length is None else "next_token"
    declared: dict[str, dict[str, Any]] = {
        part: {
            "task": getattr(dataset, "task", task),
            "classes": getattr(dataset, "classes", 0),
            "vocabulary": getattr(dataset, "vocabulary", None),
            "features": getattr(dataset, "features", None),
        }
        for part, dataset in parts.items()
    }
    if declared["train"] != declared["held_out"]:
        _refuse(config, f"must declare the same for both parts; got {declared}")
    properties = declared["train"]
    _check_properties(config, properties)
    if properties["task"] == "next_token":  # labels are inputs too, so both have one vocabulary
        properties["classes"] = properties["classes"] or properties["vocabulary"] or 0
        properties["vocabulary"] = properties["vocabulary"] or properties["classes"] or None
    for part, dataset in parts.items():
        _Check(config, part, dataset, properties).run()
    contents = [getattr(dataset, "content_hash", None) for dataset in parts.values()]
    if any(content is not None for content in contents) and not all(
        isinstance(content, str) and content for content in contents
    ):
        _refuse(config, f"content_hash must be a text in both parts or in none; got {contents}")
    files = {text: file_sha256(file) for text, file in named_files(config.arguments).items()}
    samples = {part: int(dataset.num_samples) for part, dataset in parts.items()}
    manifest = {
        "custom": [contents, source_hash(config.target), config.target, config.arguments],
        "files": files,
        "samples": samples,
        "sequence_length": config.sequence_length,
        **properties,
    }
    return DataIdentity(
        manifest_hash=manifest_hash(manifest),
        folder="",
        train_samples=samples["train"],
        held_out_samples=samples["held_out"],
        classes=properties["classes"],
        task=properties["task"],
        features=properties["features"],
        vocabulary=properties["vocabulary"],
    )


def _check_properties(config: CustomData, properties: dict[str, Any]) -> None:
    if properties["task"] not in _TASKS:
        _refuse(config, f"task must be one of {', '.join(_TASKS)}; got {properties['task']!r}")
    classes, features, vocabulary = (
        properties["classes"],
        properties["features"],
        properties["vocabulary"],
    )
    if not _is_count(classes) or classes == 1:
        _refuse(config, f"classes must be an int of 2 or more, where it is given; got {classes!r}")
    if features is not None and (not _is_count(features) or features == 0):
        _refuse(config, f"features must be an int above 0 or None; got {features!r}")
    if vocabulary is not None and (not _is_count(vocabulary) or vocabulary < 2):
        _refuse(config, f"vocabulary must be an int of 2 or more, or None; got {vocabulary!r}")
    if properties["task"] == "next_token" and vocabulary is not None and vocabulary < classes:
        _refuse(
            config,
            "vocabulary must be at least classes where the next token is predicted; got "
            f"vocabulary={vocabulary}, classes={classes}",
        )


class _Check:
    """Checks one part on a few of its samples."""

    def __init__(
        self, config: CustomData, part: str, dataset: Dataset, properties: dict[str, Any]
    ) -> None:
        self._config = config
        self._part = part
        self._dataset = dataset
        self._properties = properties
        spread = np.linspace(0, dataset.num_samples - 1, min(_CHECKED_SAMPLES, dataset.num_samples))
        self._indices = spread.astype(np.int64)

    def run(self) -> None:
        """Check everything."""
        counts = self._check_counts()
        inputs, labels = self._batch(self._indices)
        self._check_shapes(inputs, labels)
        self._check_inputs(inputs)
        self._check_labels(labels, counts)
        self._check_repetition(inputs, labels)

    def _check_counts(self) -> list[int]:
        batch_count = self._count(self._indices)
        sample_counts = [self._count(self._indices[i : i + 1]) for i in range(len(self._indices))]
        if batch_count != sum(sample_counts):
            self._breach(
                "count_labels must add up over samples",
                f"{batch_count} for samples {self._indices.tolist()}, {sample_counts} one by one",
            )
        if batch_count == 0:
            self._breach(
                "count_labels must be above 0 for a batch",
                f"0 for samples {self._indices.tolist()}",
            )
        return sample_counts

    def _count(self, indices: Indices) -> int:
        count = self._dataset.count_labels(indices)
        if not _is_count(count):
            self._breach("count_labels must return an int of 0 or more", repr(count))
        return int(count)

    def _batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        import torch

        batch: object = self._dataset.batch(indices)  # its type is checked here
        if not (
            isinstance(batch, tuple)
            and len(batch) == 2
            and all(isinstance(one, torch.Tensor) for one in batch)
        ):
            kinds = [type(one).__name__ for one in batch] if isinstance(batch, tuple) else batch
            self._breach(
                "batch must return a tuple of two tensors, inputs and labels; inputs of several "
                "parts, such as source and target, are joined along a dimension here, and split "
                "by the model",
                f"{kinds!r:.100}",
            )
        inputs, labels = batch
        devices = [inputs.device, labels.device]
        if any(device.type != "cpu" for device in devices):
            self._breach("batch must return tensors on the CPU", str(devices))
        return inputs, labels

    def _check_shapes(self, inputs: Tensor, labels: Tensor) -> None:
        shapes = [tuple(inputs.shape), tuple(labels.shape)]
        size = len(self._indices)
        if any(len(shape) < 1 or shape[0] != size or 0 in shape for shape in shapes):
            self._breach(
                f"batch must return tensors whose first dimension is the samples, {size} here, and "
                "that are not empty",
                f"shapes {shapes}",
            )
        length, features = self._config.sequence_length, self._properties["features"]
        if length is not None and shapes[0][1:2] != (length,):
            self._breach(
                f"batch must return inputs of sequence_length={length} tokens", f"{shapes[0]}"
            )
        if features is not None and (
            shapes[0][1:] != (features,) or not inputs.is_floating_point()
        ):
            self._breach(
                f"batch must return real-valued inputs of features={features} numbers a sample",
                f"{inputs.dtype} of shape {shapes[0]}",
            )

    def _check_inputs(self, inputs: Tensor) -> None:
        import torch

        task, vocabulary = self._properties["task"], self._properties["vocabulary"]
        if inputs.dtype not in {torch.int32, torch.int64}:
            return
        if vocabulary is None:
            if task == "class":
                self._breach(
                    "a class of tokens needs an attribute vocabulary, above every token (negative "
                    "ones are padding)",
                    f"inputs of {inputs.dtype} and no vocabulary",
                )
            return
        if (largest := int(inputs.max())) >= vocabulary:
            self._breach(f"inputs must be below vocabulary={vocabulary}", f"an input {largest}")

    def _check_labels(self, labels: Tensor, counts: list[int]) -> None:
        import torch

        if self._properties["task"] == "other":
            return
        if labels.dtype != torch.int64:
            self._breach("batch must return int64 labels for this task", str(labels.dtype))
        classes, largest = self._properties["classes"], int(labels.max())
        if classes and largest >= classes:
            self._breach(f"labels must be below classes={classes}", f"a label {largest}")
        label_counts = [int((sample != IGNORED).sum()) for sample in labels]
        if counts != label_counts:
            self._breach(
                f"count_labels must be the number of labels that are not {IGNORED}",
                f"{counts} for samples {self._indices.tolist()}, whose batch has {label_counts}",
            )

    def _check_repetition(self, inputs: Tensor, labels: Tensor) -> None:
        import torch

        repetition = self._batch(self._indices)
        for name, before, after in zip(
            ("inputs", "labels"), (inputs, labels), repetition, strict=True
        ):
            if before.dtype != after.dtype or not torch.equal(before, after):
                self._breach(
                    "batch must return the same samples for the same indices, each time",
                    f"other {name} the second time",
                )
        single_batch = self._batch(self._indices[-1:])
        for name, in_batch, single in zip(
            ("inputs", "labels"), (inputs[-1:], labels[-1:]), single_batch, strict=True
        ):
            # Padding to the longest sample of a batch may change the shape.
            if in_batch.shape == single.shape and not torch.equal(in_batch, single):
                self._breach(
                    "a sample of batch must not depend on the others in it",
                    f"other {name} for sample {self._indices[-1]} alone",
                )

    def _breach(self, rule: str, got: str) -> NoReturn:
        _refuse(self._config, f"part={self._part!r}: {rule}; got {got}")


def _is_count(value: object) -> TypeGuard[int]:
    # An integer of numpy is as good as one of Python.
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return False
    return int(value) >= 0


def _refuse(config: CustomData, rule: str) -> NoReturn:
    msg = f"data._target_={config.target}: {rule}"
    raise ConfigError(msg)
