"""Every source of a model trains alike however its batch is cut, or is labelled."""

from __future__ import annotations

import json

import numpy as np
import pytest

from batchscape.launch.child import WORKER
from batchscape.launch.forkserver import Forked
from batchscape.record.tables import read_table

LLAMA = {"name": "llama", "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_model": 32, "d_ff": 48}
HF_BERT = {
    "name": "transformers",
    "settings": {
        "model_type": "bert",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}
CUTS = [(1, 8, 1), (2, 2, 2)]
STEPS = 20


def own(name, **arguments):
    return {"name": "custom", "_target_": f"own_models.{name}", "arguments": arguments}


def documents(folder):
    """Write lines of two kinds, each with its class."""
    rng = np.random.default_rng(0)
    path = folder / "documents.jsonl"
    with path.open("w") as file:
        for number in range(400):
            kind = int(rng.integers(3))
            words = rng.choice([["the", "a"], ["def", "if"], ["0", "1"]][kind], rng.integers(2, 9))
            record = {"text": f"{' '.join(words)} {number}", "kind": ["en", "py", "bits"][kind]}
            file.write(json.dumps(record) + "\n")
    return {
        "name": "documents",
        "path": str(path),
        "label_field": "kind",
        "layout": "padded",
        "sequence_length": 24,
        "held_out_pct": 20.0,
    }


@pytest.fixture(scope="module")
def warm(trainer):
    """Return a trainer whose ranks are forked with `transformers` imported."""
    pytest.importorskip("transformers")
    running = type(trainer)()
    running.close()
    running._processes = Forked(f"{WORKER} batchscape.models.offline_transformers")
    yield running
    running.close()


@pytest.fixture(scope="module")
def train(trainer, tmp_path_factory):
    """Train under several cuts; return losses of shape (cuts, steps), and the rows of ranks."""

    def train(cuts=CUTS, trainer=trainer, **settings):
        root = tmp_path_factory.mktemp("workloads")
        settings = {
            "engine__precision": "float64",
            "budget__optimizer_steps": STEPS,
            "schedule__warmup_samples": 16,
        } | settings
        folders = [trainer.train(trainer.make_spec(cut, **settings), root) for cut in cuts]
        losses = [read_table(folder, "steps")["loss"].to_numpy(float) for folder in folders]
        return np.array(losses), [read_table(folder, "ranks") for folder in folders]

    return train


def assert_alike(losses, ranks, tolerance=1e-9):
    assert losses.shape == (len(ranks), STEPS)
    assert losses[0, -1] < losses[0, 0] - 0.02, "nothing was learned: the curves could not differ"
    np.testing.assert_allclose(losses, np.broadcast_to(losses[0], losses.shape), rtol=tolerance)
    for table in ranks:
        first = table.set_index("rank").loc[0]
        assert table["not_invariant"].isna().all()
        assert first["model_flops_per_sample"] > 0
        assert table["peak_tflops"].isna().all()


@pytest.mark.slow
def test_a_llama_trains_alike_with_recomputed_activations_too(train):
    losses, ranks = train(model=LLAMA)
    assert_alike(losses, ranks)
    recomputed, others = train(CUTS[1:], model=LLAMA, engine__activation_checkpointing=True)
    np.testing.assert_allclose(recomputed[0], losses[1], rtol=1e-12)
    # Rank 0 counts, whose row may come second.
    one, other = (table[0]["model_flops_per_sample"].max() for table in (ranks, others))
    assert one == other > 0


@pytest.mark.slow
def test_a_classifier_of_sequences_trains_alike(train, warm, tmp_path):
    assert_alike(*train(model=HF_BERT, data=documents(tmp_path), trainer=warm))


@pytest.mark.slow
def test_a_slow_library_is_imported_once_for_all_ranks(trainer, warm, tmp_path):
    spec = trainer.make_spec((1, 8, 1))
    for running, verb in ((trainer, "is not"), (warm, "is")):
        folder = running.train(spec, tmp_path / verb, entry="own_models:tell_what_is_imported")
        assert folder.log.read_text() == f"transformers {verb} there\n"


def test_a_custom_loss_trains_alike(train):
    losses, ranks = train(
        model=own("Brier", hidden=8), data={"name": "digits"}, optimizer__learning_rate=3e-2
    )
    assert_alike(losses, ranks)


@pytest.mark.slow
def test_a_model_that_cannot_is_labelled_and_does_differ(train):
    # One rank draws the same numbers however it accumulates; two ranks draw others.
    losses, ranks = train(model=own("Dropping"))
    for table in ranks:
        label = table.set_index("rank")["not_invariant"][0]
        assert label.startswith("dropout or other randomness")
    assert np.abs(losses[1] / losses[0] - 1).max() > 1e-4


def test_a_model_that_is_refused_ends_its_run_with_the_reason(trainer, outcome, tmp_path):
    spec = trainer.make_spec((1, 8, 1), model=own("MeanLoss"))
    folder = trainer.start(spec, tmp_path)
    assert trainer.wait(spec) == [1]
    ended = outcome(folder)
    assert ended["status"] == "failed"
    assert "the model's loss is a mean" in ended["reason"]
    assert "Traceback" not in folder.log.read_text()
