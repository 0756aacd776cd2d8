"""What `CUDA_VISIBLE_DEVICES` means, read as CUDA reads it, without CUDA.

Source: CUDA C++ Programming Guide, section "CUDA Environment Variables"; where it is silent
(numbers with something behind them, numbers beside UUIDs, repeated entries) what torch makes of it:
`_parse_visible_devices` in https://github.com/pytorch/pytorch/blob/main/torch/cuda/__init__.py
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["hides_all", "names_mig", "visible_indices", "visible_problem"]

_NUMBER = re.compile(r"[+-]?[0-9]+")
_NONE_ON_PURPOSE = {"", "-1", "none", "void", "nodevfiles"}
"""Values by which people and schedulers hide every device."""


def visible_indices(variable: str | None, uuids: Sequence[str]) -> list[int]:
    """Return which devices `CUDA_VISIBLE_DEVICES` leaves visible, in its order.

    Parameters
    ----------
    variable : str or None
        Its value; None where it is not set.
    uuids : sequence of str
        UUID of every device, in the driver's order.

    Returns
    -------
    list of int
        Positions in `uuids`.

    Notes
    -----
    Entries are all numbers, or all unambiguous beginnings of a UUID; what is behind a number is
    passed over. The list ends at the first entry that names no device. A repeated device leaves
    none visible.
    """
    if variable is None:
        return list(range(len(uuids)))
    if variable.startswith("GPU-"):
        return _by_uuid(variable.split(","), uuids)
    named: list[int] = []
    for entry in variable.split(","):
        number = _NUMBER.match(entry.strip())
        if number is None or int(number[0]) < 0:
            break
        if int(number[0]) in named:
            return []
        named.append(int(number[0]))
    unknown = next((i for i, number in enumerate(named) if number >= len(uuids)), len(named))
    return named[:unknown]


def _by_uuid(entries: Sequence[str], uuids: Sequence[str]) -> list[int]:
    found: list[int] = []
    for position, entry in enumerate(entries):
        if entry in entries[:position]:
            return []
        if not entry.startswith("GPU-"):
            break
    for entry in entries:
        matches = [i for i, uuid in enumerate(uuids) if uuid.startswith(entry)]
        if not entry.startswith("GPU-") or len(matches) != 1:
            break
        if matches[0] in found:
            return []
        found += matches
    return found


def hides_all(variable: str | None) -> bool:
    """Whether `CUDA_VISIBLE_DEVICES` hides every device on purpose."""
    return variable is not None and variable.strip().lower() in _NONE_ON_PURPOSE


def names_mig(variable: str | None) -> bool:
    """Whether `CUDA_VISIBLE_DEVICES` names slices of devices."""
    return any(part.strip().startswith("MIG-") for part in (variable or "").split(","))


def visible_problem(
    variable: str | None, models: Sequence[str], uuids: Sequence[str], order: str | None
) -> str | None:
    """Say why devices cannot be chosen as `CUDA_VISIBLE_DEVICES` has it; None where they can.

    Parameters
    ----------
    variable : str or None
        Its value; None where it is not set.
    models : sequence of str
        Model of every device, in the driver's order, by PCI bus.
    uuids : sequence of str
        UUID of every device.
    order : str or None
        Value of `CUDA_DEVICE_ORDER`.

    Returns
    -------
    str or None
        None too where all devices are hidden on purpose, or slices are named.
    """
    if variable is None or not uuids or names_mig(variable):
        return None
    found = visible_indices(variable, uuids)
    if not found and not hides_all(variable):
        last = len(uuids) - 1
        numbers = "is 0" if last == 0 else f"are 0 to {last}"
        return (
            f"CUDA_VISIBLE_DEVICES={variable} names no CUDA device of this machine (their numbers "
            f"{numbers}; a repeated one hides all); name some, unset it, or use launcher.device=cpu"
        )
    by_number = not variable.startswith("GPU-")
    if by_number and order != "PCI_BUS_ID" and 0 < len(found) < len(uuids) and len(set(models)) > 1:
        return (
            f"CUDA_VISIBLE_DEVICES={variable} counts devices by their speed, and there are several "
            f"models here ({', '.join(dict.fromkeys(models))}); set CUDA_DEVICE_ORDER=PCI_BUS_ID "
            "to count as nvidia-smi does, or name UUIDs (nvidia-smi -L), or use launcher.device=cpu"
        )
    return None
