"""Sketches that real runs leave: of the whole gradient, the same in every decomposition."""

from __future__ import annotations

import numpy as np
import pytest

from batchscape.record.gradient_sketch import read_sketch

PADDED = {"name": "stdlib", "sequence_length": 32, "layout": "padded"}


def first(trainer, steps, root, geometry, **settings):
    """Sketch and norm of the first gradient of a run."""
    spec = trainer.make_spec(geometry, data=PADDED, budget__optimizer_steps=2, **settings)
    folder = trainer.train(spec, root)
    return read_sketch(folder), float(steps(folder)["gradient_norm"].iloc[0])


def away(sketch, reference):
    return np.linalg.norm(sketch - reference) / np.linalg.norm(reference)


@pytest.fixture(scope="module")
def reference(trainer, tmp_path_factory):
    from batchscape.record.tables import read_table

    root = tmp_path_factory.mktemp("whole")
    spec = trainer.make_spec((1, 32, 1), data=PADDED, budget__optimizer_steps=2)
    folder = trainer.train(spec, root)
    return read_sketch(folder), float(read_table(folder, "steps")["gradient_norm"].iloc[0])


def test_it_is_of_the_gradient_whose_norm_is_recorded(reference):
    sketch, norm = reference
    # Five standard deviations; clipping (at 1.0) has no part in it.
    assert np.linalg.norm(sketch) == pytest.approx(norm, rel=5 * 0.022)


def test_decompositions_agree_in_float64(reference, trainer, steps, tmp_path):
    sketch, _ = first(trainer, steps, tmp_path, (2, 8, 2))
    assert 0 < away(sketch, reference[0]) < 1e-12


@pytest.mark.slow
def test_float32_starts_from_the_same_values(reference, trainer, steps, tmp_path):
    sketch, _ = first(trainer, steps, tmp_path, (2, 8, 2), engine__precision="float32")
    assert 1e-8 < away(sketch, reference[0]) < 5e-6


@pytest.mark.slow
def test_the_scale_of_float16_is_divided_out(reference, trainer, steps, tmp_path):
    sketch, _ = first(trainer, steps, tmp_path, (1, 8, 4), engine__precision="float16")
    assert 1e-5 < away(sketch, reference[0]) < 2e-2
