"""`make chaos` with few kills: of a rank while it trains, of the launcher during a checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).with_name("chaos.py")
KILLS = 2
SEEDS = 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_survives_kills_at_random_moments(tmp_path: Path) -> None:
    command = [sys.executable, str(CHAOS), "--json", "--kills", str(KILLS), "--seed", "241"]
    command += ["--seeds", str(SEEDS)]
    ended = subprocess.run(
        [*command, "--delay", "0.004", "--dir", str(tmp_path / "chaos")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    counts = json.loads(ended.stdout)
    print(counts)
    assert sum(counts["kills"].values()) == KILLS
    assert sum(counts["moments"].values()) == KILLS
    assert counts["sealed_runs"] == 4 * SEEDS * counts["sweeps"]
    assert counts["from_trunk"] > 0
    assert sum(int(n) * runs for n, runs in counts["attempts"].items()) > counts["sealed_runs"]
