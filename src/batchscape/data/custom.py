"""Data of the user's own: made by a callable, checked before anything is launched.

`_target_(part=..., **arguments)` returns an object with `num_samples`, `count_labels(indices)` and
`batch(indices)`, see `batchscape.data.datasets.Dataset`; with `sequence_length` too, where the
settings give one. It may say more of itself: `classes`, `vocabulary`, `task`, `features` and
`content_hash`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

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

_Demand = Callable[[bool, str, object], None]
"""Refuses data that do not keep a rule: whether they do, the rule, and what they returned."""


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
    demand = partial(_demand, f"data._target_={config.target}: ")
    for name in ("count_labels", "batch"):
        if not callable(getattr(dataset, name, None)):
            # The text of a dataset may hold all of its samples.
            demand(False, f"must return an object with a method {name}", f"{dataset!r:.100}")
    size = getattr(dataset, "num_samples", None)
    rule = f"part={part!r}: num_samples must be an int above 0"
    demand(_is_count(size, least=1), rule, repr(size))
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
        error = traceback.format_exc().rstrip()
        raise ConfigError(f"data._target_={config.target}: it raised an error:\n{error}") from None


def _prepare(config: CustomData) -> DataIdentity:
    parts = {part: make_custom(config, part) for part in PARTS}
    defaults: dict[str, Any] = {
        "task": "other" if config.sequence_length is None else "next_token",
        "classes": 0,
        "vocabulary": None,
        "features": None,
    }
    declared = {
        part: {name: getattr(dataset, name, default) for name, default in defaults.items()}
        for part, dataset in parts.items()
    }
    properties = declared["train"]
    place = f"data._target_={config.target}: "
    demand = partial(_demand, place)
    demand(properties == declared["held_out"], "must declare the same for both parts", declared)
    _check_properties(properties, demand)
    if properties["task"] == "next_token":  # labels are inputs too, so both have one vocabulary
        properties["classes"] = properties["classes"] or properties["vocabulary"] or 0
        properties["vocabulary"] = properties["vocabulary"] or properties["classes"] or None
    for part, dataset in parts.items():
        of_part = partial(_demand, f"{place}part={part!r}: ")
        _check_part(dataset, {**properties, "length": config.sequence_length}, of_part)
    contents = [getattr(dataset, "content_hash", None) for dataset in parts.values()]
    are_texts = all(isinstance(content, str) and content for content in contents)
    demand(
        are_texts or {*map(type, contents)} == {type(None)},
        "content_hash must be a text in both parts or in none",
        contents,
    )
    samples = {part: int(dataset.num_samples) for part, dataset in parts.items()}
    manifest = {
        "custom": [contents, source_hash(config.target), config.target, config.arguments],
        "files": {text: file_sha256(file) for text, file in named_files(config.arguments).items()},
        "samples": samples,
        "sequence_length": config.sequence_length,
        **properties,
    }
    return DataIdentity(
        manifest_hash=manifest_hash(manifest),
        folder="",
        train_samples=samples["train"],
        held_out_samples=samples["held_out"],
        **properties,
    )


def _check_properties(properties: dict[str, Any], demand: _Demand) -> None:
    """Check what the data say of themselves."""
    classes, features, vocabulary = map(properties.get, ("classes", "features", "vocabulary"))
    for name, is_right, rule in (
        ("task", properties["task"] in _TASKS, f"one of {', '.join(_TASKS)}"),
        ("classes", _is_count(classes) and classes != 1, "an int of 2 or more, where it is given"),
        ("features", features is None or _is_count(features, least=1), "an int above 0 or None"),
        (
            "vocabulary",
            vocabulary is None or _is_count(vocabulary, least=2),
            "an int of 2 or more, or None",
        ),
    ):
        demand(is_right, f"{name} must be {rule}", repr(properties[name]))
    demand(
        properties["task"] != "next_token" or vocabulary is None or vocabulary >= classes,
        "vocabulary must be at least classes where the next token is predicted",
        f"{vocabulary=}, {classes=}",
    )


def _check_part(dataset: Dataset, properties: dict[str, Any], demand: _Demand) -> None:
    """Check one part on a few of its samples."""
    import torch

    size = min(_CHECKED_SAMPLES, dataset.num_samples)
    indices = np.linspace(0, dataset.num_samples - 1, size).astype(np.int64)
    counts: list[Any] = [dataset.count_labels(one) for one in (indices, *indices[:, None])]
    for count in counts:
        demand(_is_count(count), "count_labels must return an int of 0 or more", repr(count))
    total, *counts = map(int, counts)
    demand(
        total == sum(counts),
        "count_labels must add up over samples",
        f"{total} for samples {indices.tolist()}, {counts} one by one",
    )
    rule = "count_labels must be above 0 for a batch"
    demand(total > 0, rule, f"0 for samples {indices.tolist()}")
    inputs, labels = batch = _checked_batch(dataset, indices, demand)
    shapes = [tuple(inputs.shape), tuple(labels.shape)]
    demand(
        all(shape[:1] == (size,) and 0 not in shape for shape in shapes),
        f"batch must return tensors whose first dimension is the samples, {size} here, and that "
        "are not empty",
        f"shapes {shapes}",
    )
    _check_inputs(inputs, properties, demand)
    if properties["task"] != "other":
        rule = "batch must return int64 labels for this task"
        demand(labels.dtype == torch.int64, rule, labels.dtype)
        classes, largest = properties["classes"], int(labels.max())
        demand(
            not classes or largest < classes,
            f"labels must be below classes={classes}",
            f"a label {largest}",
        )
        label_counts = [int((sample != IGNORED).sum()) for sample in labels]
        demand(
            counts == label_counts,
            f"count_labels must be the number of labels that are not {IGNORED}",
            f"{counts} for samples {indices.tolist()}, whose batch has {label_counts}",
        )
    repetition = _checked_batch(dataset, indices, demand)
    single_batch = _checked_batch(dataset, indices[-1:], demand)
    for name, first, again, single in zip(
        ("inputs", "labels"), batch, repetition, single_batch, strict=True
    ):
        demand(
            first.dtype == again.dtype and torch.equal(first, again),
            "batch must return the same samples for the same indices, each time",
            f"other {name} the second time",
        )
        demand(
            # Padding to the longest sample of a batch may change the shape.
            first[-1:].shape != single.shape or torch.equal(first[-1:], single),
            "a sample of batch must not depend on the others in it",
            f"other {name} for sample {indices[-1]} alone",
        )


def _checked_batch(dataset: Dataset, indices: Indices, demand: _Demand) -> tuple[Tensor, Tensor]:
    """Return a batch that is two tensors on the CPU."""
    import torch

    batch: Any = dataset.batch(indices)
    is_tuple = isinstance(batch, tuple)
    demand(
        is_tuple and [isinstance(one, torch.Tensor) for one in batch] == [True, True],
        "batch must return a tuple of two tensors, inputs and labels; inputs of several parts, "
        "such as source and target, are joined along a dimension here, and split by the model",
        f"{[type(one).__name__ for one in batch] if is_tuple else batch!r:.100}",
    )
    inputs, labels = batch
    devices = [inputs.device, labels.device]
    is_on_cpu = all(device.type == "cpu" for device in devices)
    demand(is_on_cpu, "batch must return tensors on the CPU", devices)
    return inputs, labels


def _check_inputs(inputs: Tensor, properties: dict[str, Any], demand: _Demand) -> None:
    """Check length, features and vocabulary of inputs."""
    shape = tuple(inputs.shape)
    length, features, vocabulary = map(properties.get, ("length", "features", "vocabulary"))
    demand(
        length is None or shape[1:2] == (length,),
        f"batch must return inputs of sequence_length={length} tokens",
        shape,
    )
    demand(
        features is None or (shape[1:] == (features,) and inputs.is_floating_point()),
        f"batch must return real-valued inputs of features={features} numbers a sample",
        f"{inputs.dtype} of shape {shape}",
    )
    if str(inputs.dtype) not in {"torch.int32", "torch.int64"}:
        return
    demand(
        vocabulary is not None or properties["task"] != "class",
        "a class of tokens needs an attribute vocabulary, above every token (negative ones are "
        "padding)",
        f"inputs of {inputs.dtype} and no vocabulary",
    )
    largest = int(inputs.max())
    demand(
        vocabulary is None or largest < vocabulary,
        f"inputs must be below vocabulary={vocabulary}",
        f"an input {largest}",
    )


def _is_count(value: object, least: int = 0) -> bool:
    # An integer of numpy is as good as one of Python.
    return (
        isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= least
    )


def _demand(place: str, is_kept: bool, rule: str, got: object) -> None:
    if not is_kept:
        raise ConfigError(f"{place}{rule}; got {got}")
