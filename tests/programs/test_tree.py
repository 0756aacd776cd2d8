"""Memory of a program's processes, read while they begin and end."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from types import SimpleNamespace

from batchscape.programs.tree import TreeMemory


def process(pid: int, uss_mib: int) -> SimpleNamespace:
    memory = SimpleNamespace(rss=uss_mib << 20, uss=uss_mib << 20)
    return SimpleNamespace(pid=pid, memory_full_info=lambda: memory)


def test_a_process_whose_memory_is_gone_already_is_not_read_as_one_without_any() -> None:
    """Between its last instruction and its end a process is there, with no memory."""
    tree = TreeMemory(os.getpid())
    tree._add(0, [process(2**30, 512)], {})
    tree._add(0, [process(2**30, 0)], {})
    assert tree.ranks[0].uss_gib == tree.ranks[0].peak_uss_gib == 0.5
    tree._add(0, [process(2**30, 256), process(2**30 + 1, 0)], {})
    assert tree.ranks[0].uss_gib == 0.25


def test_processes_on_its_devices_that_are_not_the_programs_are_counted() -> None:
    """The program is what is below this process; process 1 is not."""
    with ExitStack() as ending:

        def start() -> int:
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            ending.callback(child.communicate, b"\n")
            return child.pid

        process = start()
        listed: list[int] = []
        tree = TreeMemory(os.getpid(), lambda: dict.fromkeys(listed, 1))
        memory = []
        for pids in (
            [],
            [1, 2**22 + 1],  # a container: not even the program's own are listed
            [process],
            [process, 1],
            [process],
        ):
            listed[:] = pids
            tree._look()
            memory.append(tree.foreign_processes)
        assert memory == [None, None, 0, 1, 1]

        # One that begins between the look at processes and the driver's answer is the program's.
        late = TreeMemory(os.getpid(), lambda: {process: 1, start(): 1})
        late._look()
        assert late.foreign_processes == 0
