"""The file of the sketch of a run's first gradient: one array, readable with numpy alone."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from numpy.typing import NDArray

from batchscape.errors import DamageError, RecordError
from batchscape.record.files import write_atomically
from batchscape.record.folder import RunFolder


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
        None where there is none: the run ended before its first update, or its engine shards
        gradients.

    Raises
    ------
    RecordError
        If the file is damaged.
    """
    path = folder.gradient_sketch
    try:
        sketch: NDArray[np.float64] = np.load(path, allow_pickle=False)
        if sketch.dtype != np.float64 or sketch.ndim != 1:
            raise ValueError("a row of float64 numbers is expected")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # noqa: BLE001  (a header is parsed as Python: all kinds are raised)
        raise DamageError(f"{path} is damaged: {error}") from None
    return sketch
