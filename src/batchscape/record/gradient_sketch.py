"""The sketch of a run's first gradient on the disk: one array, readable with numpy alone."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from numpy.typing import NDArray

from batchscape.errors import DamageError
from batchscape.record.files import write_atomically
from batchscape.record.folder import RunFolder

__all__ = ["read_sketch", "write_sketch"]


def write_sketch(folder: RunFolder, sketch: NDArray[np.float64]) -> None:
    """Write the sketch of the gradient of the first optimizer step.

    Parameters
    ----------
    folder : RunFolder
    sketch : ndarray, shape (buckets,)
        As `measure.gradient_sketch` makes it.
    """
    content = BytesIO()
    np.save(content, sketch)
    write_atomically(folder.gradient_sketch, content.getvalue())


def read_sketch(folder: RunFolder) -> NDArray[np.float64] | None:
    """Read what `write_sketch` wrote.

    Parameters
    ----------
    folder : RunFolder

    Returns
    -------
    ndarray, shape (buckets,), or None
        None where the run left none: it ended before its first update, its engine shards
        gradients, or it is older than sketches.

    Raises
    ------
    RecordError
        If the file is damaged.
    """
    path = folder.gradient_sketch
    try:
        sketch = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        msg = f"{path} is damaged: {error}"
        raise DamageError(msg) from None
    if not isinstance(sketch, np.ndarray) or sketch.dtype != np.float64 or sketch.ndim != 1:
        msg = f"{path} is damaged: a row of float64 numbers is expected"
        raise DamageError(msg)
    return sketch
