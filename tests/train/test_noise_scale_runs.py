"""The noise of the gradient in real runs: known beforehand, or computed sample by sample."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from batchscape.analysis.noise_scale.estimate import run_noise_scales
from batchscape.data.datasets import open_dataset
from batchscape.models.build import build_model
from batchscape.record.noise_scale import estimate, noise_samples
from batchscape.record.tables import read_table
from batchscape.train.batches import to_device
from batchscape.train.stream import SampleStream
from batchscape.train.timeline import Timeline

FROZEN = {
    "optimizer": {"name": "sgd", "learning_rate": 1e-12, "gradient_clip_norm": 0.1},
    "schedule": {"name": "constant"},
}
DIGITS = {"data": {"name": "digits"}, "model": {"name": "mlp", "hidden_sizes": [12]}}


@pytest.fixture(scope="module", autouse=True)
def _importable():
    """Make what is trained importable here too: its data are prepared in this process."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
    yield
    sys.path.pop(0)


def known(trainer, geometry):
    """A run with the noise of `noisy_mean`, sampled in every optimizer step, in one epoch."""
    size, optimizer_steps = int(np.prod(geometry)), 600
    return trainer.make_spec(
        geometry,
        **FROZEN,
        model={"name": "custom", "_target_": "noisy_mean.Mean"},
        data={
            "name": "custom",
            "_target_": "noisy_mean.Gaussian",
            "arguments": {"num_samples": size * optimizer_steps, "seed": 0},
        },
        budget__optimizer_steps=optimizer_steps,
        measure__noise_scale_every=1,
    )


def interval(steps):
    """The row of `run_noise_scales` for the rows of one run."""
    where = {"sweep_dir": "sweep", "run_id": "run"}
    (row,) = run_noise_scales(pd.DataFrame([where]), steps.assign(**where)).itertuples()
    return row


@pytest.mark.parametrize("geometry", [(2, 2, 2), (1, 15, 1)], ids=str)
def test_interval_holds_the_truth(trainer, steps, tmp_path, geometry):
    from noisy_mean import NOISE, SIGNAL

    rows = steps(trainer.train(known(trainer, geometry), tmp_path))
    row = interval(rows)
    assert row.low < NOISE / SIGNAL < row.high
    # Of whole micro-batches every second one is cut, from the fourth on.
    assert row.n == (299 if geometry[0] == geometry[2] == 1 else 600)
    assert row.method == "Fieller over steps"
    assert row.low < row.estimate < row.high
    assert row.estimate == estimate(rows)
    samples = noise_samples(rows)
    for name, truth in (("noise", NOISE), ("signal", SIGNAL)):
        # Both means apart too: a common factor would leave their ratio.
        assert abs(samples[name].mean() - truth) < 3.5 * samples[name].sem()


def by_sample(spec):
    """Gradient of every sample of every optimizer step, shape (steps, samples, parameters).

    The weights hardly move, so that the initial ones serve for all steps.
    """
    module = build_model(spec.config, spec.data, spec.precision)
    parameters = dict(module.named_parameters())
    dataset = open_dataset(spec.config, spec.data, "train")
    timeline = Timeline(spec.stages)
    # One rank, and whole micro-batches: the set of samples is that of any decomposition.
    stream = SampleStream(dataset, spec.config.resolved_data_seed, timeline, 0)

    def loss(parameters, inputs, target):
        batch = inputs[None], target[None]
        return torch.func.functional_call(module, parameters, batch)[0]

    gradient = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    gradients = []
    for k in range(spec.optimizer_steps):
        batch = dataset.batch(stream.step(k).indices.ravel())
        batch = to_device(batch, torch.device("cpu"), spec.precision)
        parts = gradient(parameters, *batch).values()
        gradients.append(torch.cat([part.detach().flatten(1) for part in parts], dim=1))
    return torch.stack(gradients).numpy()


@pytest.fixture(scope="module")
def single_gradients(trainer):
    """Gradients of 16 samples a step."""
    return by_sample(trainer.make_spec((1, 16, 1), **FROZEN, **DIGITS, budget__optimizer_steps=4))


def train_digits(trainer, root, geometry, **more):
    """Train four optimizer steps, all of them sampled."""
    settings = {"budget__optimizer_steps": 4, "measure__noise_scale_every": 1, **more}
    spec = trainer.make_spec(geometry, **FROZEN, **DIGITS, **settings)
    return trainer.train(spec, root)


# Ranks, accumulation, both, and neither: there the micro-batch is cut.
@pytest.mark.parametrize("geometry", [(2, 8, 1), (1, 4, 4), (2, 4, 2), (1, 16, 1)], ids=str)
def test_norms_are_those_of_single_gradients(trainer, steps, tmp_path, single_gradients, geometry):
    """As they are recorded, and summed by hand."""
    rows = steps(train_digits(trainer, tmp_path, geometry))
    sampled = rows["small_batch_size"].notna().to_numpy()
    assert sampled.any()
    rows, single = rows[sampled], single_gradients[sampled]
    small = int(rows["small_batch_size"].unique().item())
    means = single.reshape(len(single), -1, small, single.shape[-1]).mean(axis=2)
    squares = (means**2).sum(axis=-1).mean(axis=-1)
    norms = np.linalg.norm(means.mean(axis=1), axis=-1)
    assert norms.min() > FROZEN["optimizer"]["gradient_clip_norm"], "nothing would be clipped"
    np.testing.assert_allclose(rows["small_gradient_square"].to_numpy(float), squares, rtol=1e-9)
    np.testing.assert_allclose(rows["gradient_norm"].to_numpy(float), norms, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_low_precision_samples_unscaled_gradients(
    trainer, steps, tmp_path, single_gradients, precision
):
    rows = steps(train_digits(trainer, tmp_path, (1, 4, 4), engine__precision=precision))
    squares = (single_gradients.reshape(4, 4, 4, -1).mean(axis=2) ** 2).sum(axis=-1).mean(axis=-1)
    recorded = rows["small_gradient_square"].to_numpy(dtype=float, na_value=np.nan)
    # The first steps may overflow, until the scale of the loss has come down.
    usable = np.isfinite(recorded)
    assert usable.any()
    np.testing.assert_allclose(recorded[usable], squares[usable], rtol=0.05)


PADDED = {"name": "stdlib", "sequence_length": 16, "layout": "padded"}


@pytest.mark.slow
@pytest.mark.parametrize("geometry", [(2, 8, 1), (1, 16, 1)], ids=str)
def test_sampling_does_not_change_the_training(trainer, steps, tmp_path, geometry):
    tables = []
    for every in (None, 3):
        spec = trainer.make_spec(
            geometry, data=PADDED, budget__optimizer_steps=9, measure__noise_scale_every=every
        )
        tables.append(steps(trainer.train(spec, tmp_path / str(every))))
    plain, sampled = tables
    rows = sampled[sampled["small_gradient_square"].notna()]
    assert rows["optimizer_step"].tolist() == [3, 6, 9]
    assert rows["small_batch_size"].tolist() == [8] * 3
    assert plain["small_batch_size"].isna().all()
    for name in ("loss", "gradient_norm"):
        if geometry == (1, 16, 1):
            np.testing.assert_allclose(sampled[name], plain[name], rtol=1e-9)
        else:
            assert sampled[name].tolist() == plain[name].tolist()
    for name in ("samples", "tokens", "learning_rate"):
        assert sampled[name].tolist() == plain[name].tolist()


@pytest.mark.slow
def test_the_memory_probe_is_the_same_with_sampling(trainer, tmp_path):
    """Probed steps stand for the others, which are not cut."""
    peaks = []
    for every in (None, 1):
        spec = trainer.make_spec(
            (1, 8, 1),
            budget__optimizer_steps=2,
            measure={"memory": True, "noise_scale_every": every},
        )
        folder = trainer.train(spec, tmp_path / str(every))
        (row,) = pd.read_json(folder.lines("ranks"), lines=True).to_dict("records")
        peaks.append(row["peak_allocated_gib"])
    assert peaks[0] == peaks[1] > 0


@pytest.mark.parametrize(
    ("geometry", "samples"),
    [((1, 8, 1), 0), pytest.param((1, 4, 2), 2, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_batch_is_not_cut_where_that_would_change_the_training(
    trainer, steps, tmp_path, geometry, samples
):
    """With dropout halves of a batch draw otherwise; micro-batches that are there are sampled."""
    tables = []
    for every in (None, 3):
        spec = trainer.make_spec(
            geometry,
            model__dropout=0.1,
            budget__optimizer_steps=6,
            measure__noise_scale_every=every,
        )
        tables.append(steps(trainer.train(spec, tmp_path / str(every))))
    assert tables[1]["small_gradient_square"].notna().sum() == samples
    assert tables[0]["loss"].tolist() == tables[1]["loss"].tolist()


@pytest.mark.slow
def test_a_compiled_model_trains_and_is_sampled_alike(trainer, steps, tmp_path):
    """And no step waits for a compilation: the parts of a batch have their code beforehand.

    The time of that is apart, although the rehearsal of memory has compiled the same model before.
    """
    tables = []
    for compiled in (False, True):
        spec = trainer.make_spec(
            (1, 8, 1),
            model={"name": "gpt", "n_layers": 1, "n_heads": 2, "d_model": 16},
            engine__compile=compiled,
            evaluation={"samples": 10, "batch_size": 5},
            budget__optimizer_steps=6,
            measure={"memory": compiled, "noise_scale_every": 3},
        )
        folder = trainer.train(spec, tmp_path / str(compiled), entry="late_compilation:refused")
        tables.append(steps(folder))
        compile_s = read_table(folder, "ranks")["compile_s"].iloc[0]
        assert compile_s > 0 if compiled else compile_s is pd.NA
    plain, compiled = tables
    for name in ("loss", "gradient_norm", "small_gradient_square"):
        np.testing.assert_allclose(
            compiled[name].to_numpy(float, na_value=np.nan),
            plain[name].to_numpy(float, na_value=np.nan),
            rtol=1e-9,
        )
