"""Law 2 and 3: decompositions of one global batch differ by rounding, and by nothing else."""

from __future__ import annotations

import numpy as np
import pytest

DECOMPOSITIONS = [(1, 32, 1), (4, 4, 2)]
"""The others are in the contract of the engines."""
OPTIMIZER_STEPS = 20


@pytest.fixture
def curves(trainer, steps, tmp_path):
    """Train every decomposition in a precision."""

    def train(precision, geometries=DECOMPOSITIONS, folder="runs", **more):
        settings = {"data": PADDED, "budget__optimizer_steps": OPTIMIZER_STEPS}
        specs = [
            trainer.make_spec(cut, engine__precision=precision, **settings) for cut in geometries
        ]
        return [steps(trainer.train(spec, tmp_path / folder, **more)) for spec in specs]

    return train


PADDED = {"name": "stdlib", "sequence_length": 32, "layout": "padded"}
CLIP = 1.0


@pytest.mark.slow
def test_float64_curves_agree(curves):
    tables = curves("float64")
    losses = np.array([table["loss"] for table in tables], dtype=float)
    assert losses.shape == (2, OPTIMIZER_STEPS)
    assert losses[0, -1] < losses[0, 0] - 0.05, "nothing was learned: the curves could not differ"
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9, atol=0)
    norms = np.array([table["gradient_norm"] for table in tables], dtype=float)
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-9, atol=0)
    assert (norms[0] > 1.1 * CLIP).sum() > 5, "too little is clipped to tell whose norm counts"
    for column in ("samples", "tokens", "learning_rate"):
        assert tables[1][column].tolist() == tables[0][column].tolist()
    tokens = tables[0]["tokens"].diff().dropna()
    assert tokens.nunique() > 10, "even batches would say nothing about the weighting"


@pytest.mark.slow
def test_float32_differs_no_more_than_rounding_grows(curves):
    """The tolerance is measured: the same batches summed in other orders, with no decomposition.

    Two orders give two samples of how rounding grows under this very training; a decomposition
    changes the order of every sum too, at several places, hence the factor.
    """
    losses = np.array([table["loss"] for table in curves("float32")], dtype=float)
    orders = []
    for seed in ("1", "2"):
        permuted = {"entry": "faulty_workers:permuted", "PERMUTATION": seed}
        (table,) = curves("float32", [(1, 32, 1)], seed, **permuted)
        orders.append(table["loss"].to_numpy(dtype=float))
    growth = max(np.abs(order - losses[0]).max() for order in orders)
    assert 0 < growth < 1e-4
    assert np.abs(losses[1:] - losses[0]).max() < 10 * growth
