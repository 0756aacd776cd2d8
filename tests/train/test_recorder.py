"""Rows of optimizer steps: what ranks tell is added up alike, whenever it is exchanged."""

from __future__ import annotations

import json
import math
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import pytest

from batchscape.record.files import read_json_lines
from batchscape.record.folder import RunFolder


@pytest.mark.slow
def test_a_loss_does_not_depend_on_when_it_was_exchanged(trainer: Any, tmp_path: Path) -> None:
    """Three ranks: to the last bit the sum in the order of the ranks, whatever stood beside it."""
    spec = trainer.make_spec((3, 1, 1))
    root = trainer.train(spec, tmp_path, entry="recording_ranks:main").path
    losses_by_rank = [json.loads((root / f"losses-{rank}.json").read_text()) for rank in range(3)]
    # Not by `sum`, which compensates from Python 3.12 on.
    expected = [reduce(add, losses) for losses in zip(*losses_by_rank, strict=True)]
    # The case can fail: in another order some sums are others.
    assert expected != [math.fsum(losses) for losses in zip(*losses_by_rank, strict=True)]
    for every in (1, 7, 40):
        rows = list(read_json_lines(RunFolder(root / str(every)).lines("steps")))
        assert [row["optimizer_step"] for row in rows] == list(range(1, 41))
        assert [row["loss"] for row in rows] == expected
