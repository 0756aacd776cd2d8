"""Images: which are held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from batchscape.config import Digits
from batchscape.data.corpus import prepare
from batchscape.data.datasets import ImageDataset
from batchscape.errors import ConfigError


def test_digits_have_all_classes_in_both_parts():
    identity = prepare(Digits(name="digits"))
    assert (identity.train_samples, identity.held_out_samples, identity.classes) == (1438, 359, 10)
    for part in ("train", "held_out"):
        dataset = ImageDataset(Path(identity.folder), part)
        images, labels = dataset.batch(np.arange(dataset.num_samples))
        assert images.shape == (dataset.num_samples, 64)
        assert 0 <= images.min() < images.max() == 1
        assert labels.unique().tolist() == list(range(10))


@pytest.mark.parametrize("pct", [0.1, 1.0, 30.0, 40.0, 66.0, 75.0, 99.9])
def test_digits_hold_out_the_share_that_was_asked_for(pct):
    identity = prepare(Digits(name="digits", held_out_pct=pct))
    assert abs(identity.held_out_samples - 1797 * pct / 100) <= 0.5
    assert identity.train_samples + identity.held_out_samples == 1797
    parts = [
        np.load(Path(identity.folder) / f"{part}_images.npy") for part in ("train", "held_out")
    ]
    rows = np.concatenate(parts)
    # All images, each in one part: the same rows as those of the library, in another order.
    expected = (load_digits().data / 16).astype(np.float32)
    assert np.array_equal(rows[np.lexsort(rows.T)], expected[np.lexsort(expected.T)])


def test_more_held_out_digits_hold_out_the_fewer_ones():
    held_out = []
    for pct in (5.0, 20.0):
        identity = prepare(Digits(name="digits", held_out_pct=pct))
        images = np.load(Path(identity.folder) / "held_out_images.npy")
        held_out.append({image.tobytes() for image in images})
    assert held_out[0] < held_out[1]


def test_a_library_without_the_file_is_named(monkeypatch):
    monkeypatch.setattr("batchscape.data.images.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="of scikit-learn, and there is no"):
        prepare(Digits(name="digits", held_out_pct=30.0))


def test_a_share_that_leaves_no_digit_is_refused():
    for pct, part in ((0.01, "held_out"), (99.99, "train")):
        with pytest.raises(ConfigError, match=f"the {part} part holds no sample"):
            prepare(Digits(name="digits", held_out_pct=pct))
