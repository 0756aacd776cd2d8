"""Law 2 and 3: decompositions of one global batch differ by rounding, and by nothing else."""

from __future__ import annotations

import numpy as np
import pytest

DECOMPOSITIONS = [(1, 32, 1), (4, 8, 1), (2, 8, 2), (1, 8, 4)]
OPTIMIZER_STEPS = 30


@pytest.fixture(scope="module")
def curves(trainer, steps, tmp_path_factory):
    """Train every decomposition once for a kind of data and precision."""
    done = {}

    def train(precision, data, **model):
        key = (precision, *data.items())
        if key not in done:
            root = tmp_path_factory.mktemp("decompositions")
            done[key] = [
                steps(
                    trainer.train(
                        trainer.make_spec(
                            geometry,
                            engine__precision=precision,
                            data=data,
                            budget__optimizer_steps=OPTIMIZER_STEPS,
                            **model,
                        ),
                        root,
                    )
                )
                for geometry in DECOMPOSITIONS
            ]
        return done[key]

    return train


@pytest.fixture(scope="module")
def steps():
    from batchscape.record.tables import read_table

    return lambda folder: read_table(folder, "steps")


PADDED = {"name": "stdlib", "sequence_length": 32, "layout": "padded"}
DIGITS = {"name": "digits"}
CLIP = 1.0
MLP = {
    "model": {"name": "mlp", "hidden_sizes": [16]},
    # SGD feels the length of a gradient, which AdamW hardly does.
    "optimizer": {"name": "sgd", "learning_rate": 0.5, "gradient_clip_norm": CLIP},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "model"),
    [(PADDED, {}), (DIGITS, MLP)],
    ids=["padded", "mlp"],
)
def test_float64_curves_agree(curves, data, model):
    tables = curves("float64", data, **model)
    losses = np.array([table["loss"] for table in tables], dtype=float)
    assert losses.shape == (4, OPTIMIZER_STEPS)
    assert losses[0, -1] < losses[0, 0] - 0.05, "nothing was learned: the curves could not differ"
    np.testing.assert_allclose(losses[1:], np.tile(losses[0], (3, 1)), rtol=1e-9, atol=0)
    norms = np.array([table["gradient_norm"] for table in tables], dtype=float)
    np.testing.assert_allclose(norms[1:], np.tile(norms[0], (3, 1)), rtol=1e-9, atol=0)
    assert (norms[0] > 1.1 * CLIP).sum() > 5, "too little is clipped to tell whose norm counts"
    for column in ("samples", "tokens", "learning_rate"):
        for table in tables[1:]:
            assert table[column].tolist() == tables[0][column].tolist()
    if data is PADDED:
        tokens = tables[0]["tokens"].diff().dropna()
        assert tokens.nunique() > 10, "even batches would say nothing about the weighting"


@pytest.mark.slow
def test_float32_differs_no_more_than_rounding_grows(curves, trainer, steps, tmp_path):
    """The tolerance is measured: the same batches summed in other orders, with no decomposition.

    Two orders give two samples of how rounding grows under this very training; a decomposition
    changes the order of every sum too, at several places, hence the factor.
    """
    tables = curves("float32", PADDED)
    losses = np.array([table["loss"] for table in tables], dtype=float)
    orders = [
        steps(
            trainer.train(
                trainer.make_spec(
                    (1, 32, 1),
                    engine__precision="float32",
                    data=PADDED,
                    budget__optimizer_steps=OPTIMIZER_STEPS,
                ),
                tmp_path / str(permutation),
                entry="faulty_workers:permuted",
                PERMUTATION=str(permutation),
            )
        )["loss"].to_numpy(dtype=float)
        for permutation in (1, 2)
    ]
    growth = max(np.abs(order - losses[0]).max() for order in orders)
    assert 0 < growth < 1e-4
    assert np.abs(losses[1:] - losses[0]).max() < 10 * growth
