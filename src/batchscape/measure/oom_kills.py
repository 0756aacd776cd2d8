"""The number of kills for lack of memory in the cgroup of this process.

A process that is killed for want of memory cannot say so; the kernel counts it. Version 2 of
cgroups has the count in `memory.events`, version 1 in `memory.oom_control`. Source: the kernel's
Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst, key `oom_kill`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


def oom_kills(root: Path = _ROOT) -> int | None:
    """Return the kills that were counted so far in the memory cgroup of this process.

    Those of cgroups below it count as well. Where the process sees its cgroup under another name
    than it has (as in some containers), the one that is mounted counts.

    Parameters
    ----------
    root : Path
        Of the file system.

    Returns
    -------
    int or None
        None where no cgroup tells: there is none, or it is that of the whole machine.
    """
    for events in _files(root):
        try:
            count = re.search(r"^oom_kill (\d+)$", events.read_text(), re.MULTILINE)
        except OSError:
            continue
        if count is not None:
            return int(count[1])
    return None


def _files(root: Path) -> Iterator[Path]:
    """Yield the files that may hold the count, the likeliest first."""
    try:
        member = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    cgroups: dict[str, str] = {}
    for line in member:
        _, controllers, path = line.split(":", 2)
        cgroups |= dict.fromkeys(controllers.split(","), path)
    for line in mounts:
        mounted, _, described = line.partition(" - ")
        kind, _, options = described.split(" ", 2)
        source, point = mounted.split(" ")[3:5]
        if kind == "cgroup2" and "" in cgroups:
            path, name = cgroups[""], "memory.events"
        elif (
            kind == "cgroup"
            and "memory" in options.split(" ")[-1].split(",")
            and "memory" in cgroups
        ):
            path, name = cgroups["memory"], "memory.oom_control"
        else:
            continue
        mount, cgroup = root / point.lstrip("/"), PurePosixPath(path)
        yield mount / cgroup.relative_to(source if cgroup.is_relative_to(source) else "/") / name
        yield mount / name
