"""What models are told of data, without any data."""

from __future__ import annotations

import pytest

from batchscape.record.spec import DataIdentity


@pytest.fixture
def text():
    """Bytes, for the next one."""
    return DataIdentity("hash", "folder", 100, 10, classes=256, task="next_token")


@pytest.fixture
def labelled():
    """Texts of bytes with one of four classes."""
    return DataIdentity("hash", "folder", 100, 10, classes=4, task="class", vocabulary=256)


@pytest.fixture
def vectors():
    """Vectors of six numbers with one of three classes."""
    return DataIdentity("hash", "folder", 100, 10, classes=3, task="class", features=6)
