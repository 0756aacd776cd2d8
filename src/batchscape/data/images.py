"""Images of handwritten digits as vectors with a class."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchscape.config import Digits
from batchscape.data.order import SampleOrder
from batchscape.data.store import PARTS, Arrays, Facts, keep
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
    held_out_count = round(len(labels) * config.held_out_pct / 100)
    content = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()

    def build() -> tuple[dict[str, Arrays], Facts]:
        held_out = np.zeros(len(labels), dtype=bool)
        held_out[SampleOrder(len(labels), 0).indices(np.arange(held_out_count))] = True
        return {
            part: {"images": images[chosen], "labels": labels[chosen]}
            for part, chosen in zip(PARTS, (~held_out, held_out), strict=True)
        }, {}

    manifest = {"files": [("digits", content)], "held_out_images": held_out_count}
    place, _ = keep(config.name, manifest, build)
    return DataIdentity(**place, classes=_CLASSES, task="class", features=_PIXELS)


def _table() -> NDArray[np.float64]:
    """Read the file of scikit-learn's `load_digits` (1.9), whose import takes seconds."""
    package = find_spec("sklearn")
    file = Path((package and package.origin) or "").parent / _FILE
    if not file.is_file():
        msg = f"data=digits reads {_FILE} of scikit-learn, and there is no {file}"
        raise ConfigError(f"{msg}; pip install scikit-learn")
    return np.loadtxt(file, delimiter=",")
