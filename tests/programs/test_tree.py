"""Memory of a program's processes, read while they begin and end."""

from __future__ import annotations

import os
from types import SimpleNamespace

from batchscape.programs.tree import TreeMemory


def process(pid: int, uss_mib: int) -> SimpleNamespace:
    memory = SimpleNamespace(rss=uss_mib << 20, uss=uss_mib << 20)
    return SimpleNamespace(pid=pid, memory_full_info=lambda: memory)


def test_a_process_whose_memory_is_gone_already_is_not_read_as_one_without_any() -> None:
    """Between its last instruction and its end a process is there, with no memory."""
    tree = TreeMemory(os.getpid())
    tree._add(0, [process(2**30, 512)], None)
    tree._add(0, [process(2**30, 0)], None)
    assert tree.ranks[0].uss_gib == tree.ranks[0].peak_uss_gib == 0.5
    tree._add(0, [process(2**30, 256), process(2**30 + 1, 0)], None)
    assert tree.ranks[0].uss_gib == 0.25
    assert tree.ranks[0].processes == 1
