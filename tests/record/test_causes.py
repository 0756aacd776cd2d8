"""Causes in `status.json`: what old folders lack, and what the page says of each."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from batchscape.errors import RecordError
from batchscape.record.folder import FORMAT_VERSION
from batchscape.record.heartbeat import Phase
from batchscape.record.status import Attempt, Cause, RunStatus, Status

DOCS = Path(__file__).parents[2] / "docs"


def test_the_pages_have_every_cause_and_phase_and_what_is_tried_again() -> None:
    table = (DOCS / "statuses.md").read_text().partition("## Causes")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|", table, re.MULTILINE))
    assert rows.keys() == set(Cause)
    assert {name for name, again in rows.items() if again == "yes"} == {
        str(cause) for cause in Cause if cause.is_of_the_machine
    }
    text = (DOCS / "record.md").read_text()
    assert all(f"`{phase}`" in text for phase in Phase)


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
        "format_version": FORMAT_VERSION,
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
    status = RunStatus.read(path)
    assert (status.status, status.reason, status.rank) == (Status.FAILED, "planted", 1)
    assert (status.cause, status.phase, status.peak_memory_gib) == (None, None, None)
    assert status.attempts[0].cause is None
    path.write_text(json.dumps({**old, "cause": "bad luck"}))
    with pytest.raises(RecordError, match="bad luck"):
        RunStatus.read(path)
