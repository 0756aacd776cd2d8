"""Waiting for a core is seen where there is competition, and only there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchscape.measure.contention import CoreWaits

BUSY = "import time\nwhile time.monotonic() < {end}: pass"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not tell")
def test_a_core_shared_with_two_others_is_waited_for_two_thirds_of_the_time():
    core = min(os.sched_getaffinity(0))
    seconds = 1.5
    probe = (
        "import os, time\n"
        "from batchscape.measure.contention import CoreWaits\n"
        f"os.sched_setaffinity(0, {{{core}}})\n"
        "waits = CoreWaits()\n"
        "began = time.perf_counter()\n"
        f"while time.perf_counter() - began < {seconds}: pass\n"
        "found = waits.since_last()\n"
        "print(found.core_wait_s / (time.perf_counter() - began), found.involuntary_switches)\n"
    )
    rivals = [
        subprocess.Popen(
            [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\n"
             + BUSY.format(end=time.monotonic() + 30)]
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        printed = subprocess.run(
            [sys.executable, "-c", probe], capture_output=True, text=True, check=True
        ).stdout
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()
    share, switches = printed.split()
    # Other work on the machine can only add to it.
    assert float(share) > 0.5
    assert int(switches) > 10


def test_sleeping_is_not_waiting():
    waits = CoreWaits()
    time.sleep(0.2)
    found = waits.since_last()
    waits.close()
    assert found.core_wait_s is None or found.core_wait_s < 0.1
