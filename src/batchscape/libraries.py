"""Members of other libraries, such as private ones, that an installed version may lack."""

from __future__ import annotations

import re
import traceback
from types import ModuleType

TESTED_VERSIONS = {
    "accelerate": "1.15",
    "deepspeed": "0.19.8",
    "hydra-core": "1.3",
    "torch": "2.13",
}
"""Versions that have every member in use; private ones are listed in
`tests/guards/test_private_members.py`."""
_DISTRIBUTIONS = {"hydra": "hydra-core"}
"""Names by which modules are installed, where these are others."""


def why_missing(error: BaseException) -> str | None:
    """Say which library lacks a member that our code uses, and which version has it; else None."""
    member = _missing_member(error)
    module = member.partition(".")[0]
    library = _DISTRIBUTIONS.get(module, module)
    # The last frame outside Python's import system: our code, if we asked for the member.
    callers = [
        frame.f_globals.get("__name__", "").partition(".")[0]
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name != "__getattr__"
    ]
    callers = [name for name in callers if name not in {"importlib", "_frozen_importlib"}]
    is_ours = callers[-1:] in (["batchscape"], ["hydra_plugins"])
    if library not in TESTED_VERSIONS or not is_ours:
        return None
    from importlib import metadata  # slow to import

    tested_version = TESTED_VERSIONS[library]
    try:
        installed_version = metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
    return (
        f"{library} {installed_version} has no {member}, which batchscape needs and {library} "
        f"{tested_version} has: pip install '{library}=={tested_version}.*'"
    )


def _missing_member(error: BaseException) -> str:
    """Return the full name of the member that a library lacks; empty for other errors."""
    if isinstance(error, ImportError):
        module = error.name or ""
        name = re.search(r"cannot import name '(\w+)'", str(error))
        return f"{module}.{name[1]}" if name else module
    if not isinstance(error, AttributeError):
        return ""
    owner = error.obj
    if isinstance(owner, ModuleType):
        return f"{owner.__name__}.{error.name}"
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}.{error.name}"
