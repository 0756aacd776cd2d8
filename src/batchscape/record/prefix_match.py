"""Whether the curve of a run is, as far as a prefix of it was trained, that of another one."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.errors import RecordError
from batchscape.record.files import read_json
from batchscape.record.folder import RunFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus, Status, StopReason
from batchscape.record.tables import read_table

__all__ = ["prefix_difference"]

_LOSSES = {"steps": "loss", "evals": "eval_loss"}
_BOUNDS = {"float64": 1e-10, "float32": 1e-4}
"""Differences of a loss that are rounding: in nats, or of a loss that is in none (task `other`), as
a share of it. Measured over 300 optimizer steps: 4e-15 in float64, 7e-6 in float32."""
_HALF_BOUND, _HALF_RMS = 5e-2, 1e-2
"""The same of lower precisions, one by one and as root mean square: 2e-2 and 6e-3 were measured."""


def prefix_difference(folder: RunFolder) -> str | None:
    """Say how a prefix differs from the curve that is to stand for it; None where by rounding.

    Parameters
    ----------
    folder : RunFolder
        Of a run whose prefix was trained, with `launch.json` saying how long it is, and of which
        run it is a prefix.

    Raises
    ------
    RecordError
        If the folder is damaged.
    """
    said = read_json(folder.launch)["prefix"]
    spec = RunSpec.read(folder.config)
    of = RunFolder(folder.path.parent / said["of"])
    begins = f"its first {said['optimizer_steps']} optimizer steps"
    try:
        status = RunStatus.read(of.status)
        is_whole = status.status is Status.COMPLETED and status.stop_reason != StopReason.PREFIX
        if not is_whole:
            return f"{begins} have nothing to be held against: {of.path.name} did not complete"
        for table, column in _LOSSES.items():
            own, other = read_table(folder, table), read_table(of, table)
            why = _difference(own, other, column, spec, int(said["optimizer_steps"]))
            if why is not None:
                return f"{begins} differ from those of {of.path.name} by more than rounding: {why}"
    except RecordError as error:
        return f"{begins} have nothing to be held against: {error}"
    return None


def _difference(
    own: pd.DataFrame, other: pd.DataFrame, column: str, spec: RunSpec, steps: int
) -> str | None:
    """Say where losses differ by more than rounding, if they do."""
    key = "optimizer_step"
    base = other.loc[other[key].le(steps), [key, column]]
    pairs = own[[key, column]].merge(base, on=key, suffixes=("", "_of"))
    what = {"loss": "training loss", "eval_loss": "held-out loss"}[column]
    if len(pairs) < max(len(own), len(base)):
        return f"of their {what} {len(pairs)} values are at the same steps"
    loss, of = (
        pairs[name].to_numpy(dtype=float, na_value=np.nan) for name in (column, f"{column}_of")
    )
    with np.errstate(invalid="ignore"):
        apart: NDArray[np.float64] = np.abs(loss - of)
        if spec.data.task == "other":
            apart /= np.abs(of)
    is_exact = spec.config.in_process.float32_matmul == "highest"
    bound = _BOUNDS.get(spec.precision, _HALF_BOUND) if is_exact else _HALF_BOUND
    # What is not a number is no match.
    if not (apart <= bound).all():
        first = pairs[key].iloc[int(np.argmax(~(apart <= bound)))]
        return f"{what} by {np.max(apart):.2g} at most, beyond {bound:g} from step {first} on"
    rms = math.sqrt(float(np.mean(apart**2)))
    if bound == _HALF_BOUND and rms > _HALF_RMS:
        return f"{what} by {rms:.2g} as root mean square, beyond {_HALF_RMS:g}"
    return None
