"""Launchers in processes of their own, as a shell would start them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sweeps_of_fakes import pids_in, wait_until

from batchscape.record.folder import SweepFolder
from batchscape.record.status import RunStatus

__all__ = ["Elsewhere"]

SCRIPT = Path(__file__).with_name("launch_elsewhere.py")


class Elsewhere:
    """A launcher in another process, in a process group of its own."""

    def __init__(self, sweep: Path, method: str, *names: str, log: str = "1") -> None:
        self.sweep = SweepFolder(sweep)
        self._output = sweep.with_suffix(f".{log}.txt")
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(sweep), method, *names],
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def wait_for_pids(self, name: str, count: int) -> dict[str, int]:
        """Wait until the ranks of a run have noted `count` processes."""
        folder = self.sweep.run(name).path
        wait_until(lambda: len(pids_in(folder)) >= count, "the ranks do not start")
        return pids_in(folder)

    def end(self) -> None:
        """Kill it, if it lives."""
        self.process.kill()
        self.process.wait()

    @property
    def printed(self) -> str:
        """What it has printed so far."""
        return self._output.read_text()

    def status(self, name: str) -> RunStatus:
        """How a run stands."""
        return RunStatus.read(self.sweep.run(name).status)
