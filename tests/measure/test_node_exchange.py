"""The exchange within a node and between nodes, on real gloo ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from batchscape.measure.node_exchange import groups_of

RANK = Path(__file__).with_name("exchanging.py")


@given(st.integers(1, 6), st.integers(1, 8))
def test_each_rank_is_once_within_and_once_between(nodes: int, devices: int) -> None:
    within, between = groups_of(nodes * devices, devices)
    everyone = list(range(nodes * devices))
    assert sorted(chain(*within)) == sorted(chain(*between)) == everyone
    assert all(len({rank // devices for rank in group}) == 1 for group in within)
    assert all({rank // devices for rank in group} == set(range(nodes)) for group in between)
    assert all(len({rank % devices for rank in group}) == 1 for group in between)


def test_both_are_told_for_the_whole_gradient(tmp_path: Path) -> None:
    command = [sys.executable, str(RANK), str(tmp_path)]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(4)
    ]
    for rank in ranks:
        printed, _ = rank.communicate(timeout=120)
        assert rank.returncode == 0
        # Within a node four parts of 32 MiB, a quarter of a second each; of the half between nodes
        # two, two seconds each. Five repeats, and one before them; of the slow exchange, two.
        assert json.loads(printed) == [1.0, 4.0, 6, 3]
