"""A launcher in a process of its own, to be interrupted or killed.

Arguments: sweep folder, `fork` or `spawn`, run names. The environment may say how to mirror.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

here = Path(__file__).parent
sys.path.insert(0, str(here))

if __name__ == "__main__":
    from sweeps_of_fakes import ENTRY, MACHINE, spec_named

    from batchscape.launch.launcher import Launcher
    from batchscape.record.folder import SweepFolder

    folder, method, *names = sys.argv[1:]
    mode = os.environ.get("LAUNCH_WITH_MIRROR")
    tracker = {"name": "wandb", "mode": mode} if mode else None
    result = Launcher(
        SweepFolder(Path(folder)),
        MACHINE,
        [spec_named(name, tracker=tracker) for name in names],
        entry=ENTRY,
        method=method,
    ).run()
    sys.exit(130 if result.interrupted else len(result.failed))
