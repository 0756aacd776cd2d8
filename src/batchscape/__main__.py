"""`python -m batchscape`: the same as the command `batchscape`."""

from __future__ import annotations

import sys

from batchscape.cli import main

if __name__ == "__main__":
    sys.exit(main())
