"""Causes in `status.json`: what old folders lack, and what the page says of each."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from batchscape.errors import RecordError
from batchscape.record.causes import Cause
from batchscape.record.heartbeat import Phase
from batchscape.record.status import Attempt, RunStatus, Status

PAGE = Path(__file__).parents[2] / "docs" / "record.md"


def test_the_page_has_every_cause_and_whether_it_is_tried_again() -> None:
    text = PAGE.read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (yes|no) \|$", text, re.MULTILINE)
    assert dict(rows) == {str(c): "yes" if c.is_of_the_machine else "no" for c in Cause}
    for phase in Phase:
        assert f"`{phase}`" in text


def test_causes_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    status = RunStatus(
        Status.OOM,
        reason="out of memory",
        cause=Cause.OUT_OF_MEMORY,
        rank=3,
        phase="backward",
        peak_memory_gib=1.5,
        peak_memory_method="allocated",
        attempts=[Attempt(1.0, 0, 2.0, "oom", "out of memory", "out_of_memory")],
    )
    status.write(path)
    assert RunStatus.read(path) == status


def test_folders_without_causes_are_read_as_before(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    attempt = {
        "started_at": 1.0,
        "from_optimizer_step": 0,
        "ended_at": 2.0,
        "status": "failed",
        "reason": "planted",
    }
    old = {
        "format_version": 2,
        "status": "failed",
        "stop_reason": None,
        "reason": "planted",
        "rank": 1,
        "attempts": [attempt],
        "summary": {},
        "seal": {},
        "updated_at": 3.0,
    }
    path.write_text(json.dumps(old))
    found = RunStatus.read(path)
    assert (found.status, found.reason, found.rank) == (Status.FAILED, "planted", 1)
    assert (found.cause, found.phase, found.peak_memory_gib) == (None, None, None)
    assert found.attempts[0].cause is None
    path.write_text(json.dumps({**old, "cause": "bad luck"}))
    with pytest.raises(RecordError, match="bad luck"):
        RunStatus.read(path)
