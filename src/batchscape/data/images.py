"""Images of handwritten digits as vectors with a class."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchscape.config import Digits
from batchscape.data.order import SampleOrder
from batchscape.data.store import DataArrays, keep
from batchscape.errors import ConfigError
from batchscape.record.spec import DataIdentity

_FILE = Path("datasets/data/digits.csv.gz")
_PIXELS = 64
_CLASSES = 10


def prepare_digits(config: Digits) -> DataIdentity:
    """Hold out `held_out_pct` percent of the images, to the nearest whole image.

    They are the first ones of one fixed permutation, whatever the seeds of the runs, so a larger
    percentage holds out the same images and more.
    """
    table = _table()
    images = (table[:, :_PIXELS] / 16.0).astype(np.float32)
    labels = table[:, _PIXELS].astype(np.int64)
    count = round(len(labels) * config.held_out_pct / 100)
    content = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()

    def build() -> DataArrays:
        held_out = np.zeros(len(labels), dtype=bool)
        held_out[SampleOrder(len(labels), 0).indices(np.arange(count))] = True
        arrays: dict[str, NDArray[Any]] = {}
        for part, chosen in (("train", ~held_out), ("held_out", held_out)):
            arrays |= {f"{part}_images": images[chosen], f"{part}_labels": labels[chosen]}
        return DataArrays(arrays, {"train": len(labels) - count, "held_out": count})

    stored = keep(config.name, {"files": [("digits", content)], "held_out_images": count}, build)
    return stored.identity("class", _CLASSES, features=_PIXELS)


def _table() -> NDArray[np.float64]:
    """Read the file of scikit-learn's `load_digits` (1.9), whose import takes seconds."""
    package = find_spec("sklearn")
    file = Path((package and package.origin) or "").parent / _FILE
    if not file.is_file():
        msg = f"data=digits is read from {_FILE} of scikit-learn, which is not there: {file}"
        raise ConfigError(f"{msg}; pip install scikit-learn")
    return np.loadtxt(file, delimiter=",")
