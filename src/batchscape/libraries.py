"""What other libraries lack of that which our own code asks them for, such as a private member."""

from __future__ import annotations

import re
import traceback
from types import ModuleType

__all__ = ["SEEN_WITH", "why_missing"]

SEEN_WITH = {
    "accelerate": "1.15",
    "deepspeed": "0.19.8",
    "hydra-core": "1.3",
    "torch": "2.13",
}
"""Versions that have every member that is asked for; private ones are listed in
`tests/guards/test_private_members.py`."""
_DISTRIBUTIONS = {"hydra": "hydra-core"}
"""Names by which modules are installed, where these are others."""
_ASKING = ("importlib", "_frozen_importlib")


def why_missing(error: BaseException) -> str | None:
    """Say which library lacks what our own code asked it for, and which version has it.

    Parameters
    ----------
    error : BaseException

    Returns
    -------
    str or None
        None of any other error, and where the code that asked is not ours.
    """
    module, asked = _asked(error)
    library = _DISTRIBUTIONS.get(module, module)
    if library not in SEEN_WITH or not _was_asked_by_us(error):
        return None
    from importlib import metadata  # slow to import

    seen = SEEN_WITH[library]
    try:
        installed = metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
    return (
        f"{library} {installed} has no {asked}, which batchscape asks it for and {library} {seen} "
        f"has: pip install '{library}=={seen}.*'"
    )


def _asked(error: BaseException) -> tuple[str, str]:
    """Return the library that was asked, and the full name of what it has not."""
    if isinstance(error, ImportError):
        module = error.name or ""
        name = re.search(r"cannot import name '(\w+)'", str(error))
        return module.partition(".")[0], f"{module}.{name[1]}" if name else module
    if not isinstance(error, AttributeError):
        return "", ""
    owner = error.obj
    if isinstance(owner, ModuleType):
        place = owner.__name__
    else:
        kind = owner if isinstance(owner, type) else type(owner)
        place = f"{kind.__module__}.{kind.__qualname__}"
    return place.partition(".")[0], f"{place}.{error.name}"


def _was_asked_by_us(error: BaseException) -> bool:
    """Whether the last to ask, before Python and the library looked, was code of batchscape."""
    asking = [
        frame.f_globals.get("__name__", "")
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name != "__getattr__"
    ]
    asking = [name for name in asking if name.partition(".")[0] not in _ASKING]
    return bool(asking) and asking[-1].partition(".")[0] in {"batchscape", "hydra_plugins"}
