"""What the documents say of columns, statuses and modules is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from batchscape.record.columns import COLUMNS
from batchscape.record.status import Status
from batchscape.record.summary import SUMMARY

ROOT = Path(__file__).parents[1]
RECORD = (ROOT / "docs" / "record.md").read_text()


def test_every_column_is_documented_as_it_is():
    documented = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \|$", RECORD, re.MULTILINE)
    assert documented == [
        (name, column.dtype, column.meaning)
        for columns in COLUMNS.values()
        for name, column in columns.items()
    ]


def test_every_figure_is_documented_as_it_is():
    documented = re.findall(r"^\| `(\w+)` \| ([^|]*) \|$", RECORD, re.MULTILINE)
    assert documented == list(SUMMARY.items())


def test_every_status_is_documented():
    said = RECORD.split("## Statuses")[1].split("## Columns")[0]
    assert all(f"`{status}`" in said for status in Status if status != Status.PRUNED)


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md")))
def test_paths_in_documents_exist(page):
    """A path in backticks that starts with a folder of ours names something that is there."""
    folders = "conf|sweeps|analysis|benchmarks|docs|tests|src|train|record|data|plan|launch|models"
    for found in re.findall(rf"`((?:{folders})/[\w./]*)`", page.read_text()):
        assert any((base / found).exists() for base in (ROOT, ROOT / "src" / "batchscape")), found
