"""Law 2 and 3: decompositions of one global batch differ by rounding, and by nothing else."""

from __future__ import annotations

from itertools import pairwise

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


PACKED = {"name": "stdlib", "sequence_length": 32, "layout": "packed"}
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
    [
        (PACKED, {}),
        (PADDED, {}),
        (DIGITS, MLP),
    ],
    ids=["packed", "padded", "mlp"],
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "model"), [(PACKED, {}), (PADDED, {}), (DIGITS, MLP)], ids=["packed", "padded", "mlp"]
)
def test_progress_and_schedule_are_identical(curves, data, model):
    tables = curves("float64", data, **model)
    for column in ("samples", "tokens", "learning_rate"):
        for one, other in pairwise(tables):
            assert one[column].tolist() == other[column].tolist()


@pytest.mark.slow
def test_padded_batches_are_uneven(curves):
    """Else the padded case would say nothing about the weighting."""
    tokens = curves("float64", PADDED)[0]["tokens"].diff().dropna()
    assert tokens.nunique() > 10
    assert (tokens < 32 * 32).mean() > 0.9


@pytest.mark.slow
def test_mean_of_means_is_found_out(curves, trainer, steps, tmp_path):
    """The same comparison fails where micro-batches are averaged with equal weights."""
    spec = trainer.make_spec((2, 8, 2), data=PADDED, budget__optimizer_steps=OPTIMIZER_STEPS)
    wrong = trainer.train(
        spec,
        tmp_path,
        entry="faulty_workers:mean_of_means",
        ACCUMULATION="2",
        RANKS="2",
    )
    right = curves("float64", PADDED)[0]
    # The gradient's norm too: a fault that reached the reported loss only would be another one.
    for name in ("loss", "gradient_norm"):
        error = np.abs(steps(wrong)[name] / right[name] - 1)
        assert error.max() > 1e-3, name


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


@pytest.mark.slow
def test_gradient_bytes_are_those_declared(curves, trainer):
    """One exchange of every gradient an optimizer step, whatever the accumulation (law 4)."""
    from batchscape.models.build import build_model

    spec = trainer.make_spec(data=PACKED)
    declared = 8 * sum(
        p.numel() for p in build_model(spec.config, spec.data, "float64").parameters()
    )
    for table, (ranks, _, _) in zip(curves("float64", PACKED), DECOMPOSITIONS, strict=True):
        assert table["exchanged_bytes"].unique().tolist() == [declared if ranks > 1 else 0]
