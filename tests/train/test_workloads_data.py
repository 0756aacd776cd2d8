"""Laws 2 and 3 for data of the user's: decompositions of one global batch train alike."""

from __future__ import annotations

import numpy as np
import pytest

DECOMPOSITIONS = [(1, 8, 1), (2, 2, 2)]
OPTIMIZER_STEPS = 12
RTOL = 1e-9

TEXTS = [f"record {n}: " + " ".join("abcdefgh"[: 1 + n % 8]) for n in range(400)]


def tokenized(root):
    """Text by a tokenizer: words, so that it need not be trained."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<end>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<end>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(str(root / "tokenizer"))
    (root / "text.txt").write_text("\n\n".join(TEXTS))
    return {
        "name": "text",
        "path": str(root / "text.txt"),
        "tokenizer": str(root / "tokenizer"),
        "sequence_length": 4,
        "layout": "padded",
        "held_out_pct": 20.0,
    }


CASES = {
    "padded text by a tokenizer": (tokenized, {}, False),
    "points of the user's": (
        lambda _: {"name": "custom", "_target_": "own_data.Blobs"},
        {"model": {"name": "mlp", "hidden_sizes": [8]}},
        True,
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_decompositions_train_alike(trainer, steps, tmp_path, case):
    make, more, even = CASES[case]
    data = make(tmp_path)
    tables = [
        steps(
            trainer.train(
                trainer.make_spec(
                    geometry,
                    data=data,
                    budget__optimizer_steps=OPTIMIZER_STEPS,
                    evaluation__samples=8,
                    **more,
                ),
                tmp_path / "runs",
            )
        )
        for geometry in DECOMPOSITIONS
    ]
    losses, norms = (
        np.array([table[name] for table in tables], dtype=float)
        for name in ("loss", "gradient_norm")
    )
    assert losses.shape == (len(DECOMPOSITIONS), OPTIMIZER_STEPS)
    assert np.mean(losses[0, -5:]) < np.mean(losses[0, :5]), "nothing was learned"
    for values in (losses, norms):
        np.testing.assert_allclose(values[1], values[0], rtol=RTOL, atol=0)
    for table in tables[1:]:
        assert table["tokens"].tolist() == tables[0]["tokens"].tolist()
    # Where samples are of one length, weighting cannot go wrong; where they are not, it could.
    labels = tables[0]["tokens"].diff().dropna().nunique()
    assert (labels == 1) == even
