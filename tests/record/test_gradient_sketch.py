"""The sketch of the first gradient on the disk, and under the seal."""

from __future__ import annotations

import numpy as np
import pytest

from batchscape.errors import RecordError
from batchscape.record.folder import SweepFolder
from batchscape.record.gradient_sketch import read_sketch, write_sketch
from batchscape.record.status import RunStatus, Status
from batchscape.record.tables import load, seal, verify_seal

SKETCH = np.random.default_rng(0).normal(size=1024)


@pytest.fixture
def folder(spec_of, tmp_path):
    spec = spec_of()
    folder = SweepFolder(tmp_path).run(spec.run_id)
    spec.write(folder.config)
    return folder


def test_it_is_read_as_written_also_by_numpy_alone(folder):
    assert read_sketch(folder) is None
    write_sketch(folder, SKETCH)
    assert np.array_equal(read_sketch(folder), SKETCH)
    assert np.array_equal(np.load(folder.path / "gradient_sketch.npy"), SKETCH)


@pytest.mark.parametrize("content", [b"", b"torn", b"\x93NUMPY\x01\x00v\x00"])
def test_a_damaged_one_is_said_to_be(folder, content):
    folder.gradient_sketch.write_bytes(content)
    with pytest.raises(RecordError, match=r"gradient_sketch\.npy is damaged"):
        read_sketch(folder)


def test_another_array_is_refused(folder):
    write_sketch(folder, SKETCH.astype(np.float32))
    with pytest.raises(RecordError, match="float64"):
        read_sketch(folder)


def test_the_seal_covers_it(folder):
    write_sketch(folder, SKETCH)
    status = RunStatus(Status.COMPLETED)
    seal(folder, status, 1)
    verify_seal(folder, status)
    write_sketch(folder, SKETCH + 1e-9)
    with pytest.raises(RecordError, match=r"gradient_sketch\.npy is missing or differs"):
        verify_seal(folder, status)
    assert len(load(folder.path.parent.parent).damaged) == 1


def test_a_run_without_one_is_sealed_as_before(folder):
    status = RunStatus(Status.COMPLETED)
    seal(folder, status, 1)
    verify_seal(folder, status)
    assert folder.gradient_sketch.name not in status.seal
