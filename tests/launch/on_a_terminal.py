"""Become the foreground program of a terminal: its path, then the command."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    path, *command = sys.argv[1:]
    # What the leader of a session opens first becomes its terminal: Ctrl-C is a signal then.
    terminal = os.open(path, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(terminal, stream)
    os.execv(command[0], command)  # noqa: S606  (no shell is wanted)
