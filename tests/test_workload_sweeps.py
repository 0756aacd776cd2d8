"""Every source of data and of models, optimizer, schedule and rule, in a sweep and its report.

As a user calls them, from a folder of their own. What is asked of each is the second law: the
report finds that decompositions of one global batch trained alike, or says why they did not.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from batchscape.analysis import write_report
from batchscape.cli import main
from batchscape.record.tables import load

pytestmark = pytest.mark.slow

FAULTS = Path(__file__).parent / "faults"
BASE = [
    "launcher.device=cpu",
    "tracker=none",
    "engine.precision=float64",
    "batch.global_batch_size=16",
    "batch.micro_batch_size=4,8",
    "budget.samples=96",
    "schedule.warmup_samples=32",
    "evaluation.samples=16",
    "evaluation.batch_size=16",
    "evaluation.every_samples=null",
    "measure.memory=false",
]
TWO_RANKS = ["batch.data_parallel_size=1,2", "batch.micro_batch_size=8"]
"""One rank that accumulates over two micro-batches, and two that do not accumulate."""
SHORT = "data.sequence_length=16"
TEXTS = [f"record {n}: " + " ".join("abcdefgh"[: 1 + n % 8]) for n in range(400)]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """Work in a folder whose modules are found, as the command finds them, until the test ends."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def swept(*overrides, trajectories, cuts, optimizer_steps=6, tolerance=1e-9):
    """Run a sweep and its report; return the table of decompositions, the report and the tables.

    All that holds for every sweep is checked here.
    """
    assert main(["sweep", "--config-dir", ".", *BASE, *overrides, "sweep_name=here"]) == 0
    write_report([Path("outputs/here")], with_charts=False)
    tables = load(Path("outputs/here"))
    assert tables.runs["status"].tolist() == ["completed"] * (trajectories * cuts)
    assert tables.runs["trajectory_id"].nunique() == trajectories
    losses = tables.steps.groupby("run_id")["loss"]
    assert (losses.max() - losses.min()).min() > 1e-3, "a run that stands still is like any other"
    report = Path("outputs/here/report")
    decompositions = pd.read_csv(report / "tables" / "decompositions.csv")
    assert len(decompositions) == trajectories * (cuts - 1)
    assert (decompositions["precision"] == "float64").all()
    assert (decompositions["n_optimizer_steps"] == optimizer_steps).all()
    invariant = decompositions[decompositions["note"].isna()]
    assert (invariant["max_relative_difference"] < tolerance).all(), invariant.T.to_string()
    page = (report / "report.md").read_text()
    text = page.partition("## Left out, and to be kept in mind")[2].partition("\n## ")[0]
    assert ("Not decomposition-invariant" in text) == (len(invariant) < len(decompositions))
    return decompositions, text, tables


def option(file, **settings):
    """Write an option of the user's own for `data`."""
    Path("data").mkdir(exist_ok=True)
    lines = [f"{key}: {json.dumps(value)}\n" for key, value in settings.items()]
    Path("data", f"{file}.yaml").write_text("".join(lines))


def json_lines(path):
    lines = [json.dumps({"text": text, "kind": n % 3}) + "\n" for n, text in enumerate(TEXTS)]
    Path(path).write_text("".join(lines))


def token_files(folder):
    Path(folder).mkdir()
    tokens = np.random.default_rng(0).integers(0, 50, (3, 900)) % (1 + np.arange(900) % 50)
    for number, shard in enumerate(tokens):
        shard.astype("<u2").tofile(Path(folder, f"shard-{number}.bin"))


def tokenizer(folder):
    """Save a tokenizer of words, which need not be trained."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<end>", *words])}
    made = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<end>"}
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)


def saved_dataset(folder):
    import datasets

    datasets.disable_progress_bars()
    kinds = [("en", "py", "bits")[number % 3] for number in range(len(TEXTS))]
    table = datasets.Dataset.from_dict({"text": TEXTS, "kind": kinds})
    table.save_to_disk(folder, num_shards=2)


def test_models_by_optimizers():
    lines = ("model=gpt_nano,hf_gpt2", "optimizer=sgd,muon", "schedule=cosine")
    decompositions, _, _ = swept(SHORT, *lines, trajectories=4, cuts=2)
    assert decompositions["note"].isna().all()
    assert set(decompositions["optimizer.name"]) == {"sgd", "muon"}


def test_a_ramp_with_decay_and_average():
    """64 samples in steps of 8, then 96 in steps of 16."""
    decompositions, _, tables = swept(
        SHORT,
        *TWO_RANKS,
        "model=gpt_nano",
        "batch.micro_batch_size=4",
        "budget.samples=160",
        "schedule=wsd",
        "schedule.decay_samples=64",
        "batch.ramp=[{samples:64,global_batch_size:8}]",
        "evaluation.ema_half_life_tokens=500",
        trajectories=1,
        cuts=2,
        optimizer_steps=14,
    )
    assert decompositions["note"].isna().all()
    sizes = tables.steps.groupby("run_id")["global_batch_size"].agg(list)
    assert sizes.tolist() == [[8] * 8 + [16] * 6] * 2
    last = tables.evals.groupby("run_id").last()
    assert (last["eval_loss"] != last["raw_eval_loss"]).all()
    for name in ("eval_loss", "raw_eval_loss"):
        assert np.ptp(last[name].astype(float)) < 1e-9 * last[name].max()


def test_files_of_tokens_documents_and_text():
    """Each named by an option in the user's folder."""
    from pyarrow import json as reader
    from pyarrow import parquet

    token_files("tokens")
    json_lines("documents.jsonl")
    parquet.write_table(reader.read_json("documents.jsonl"), "documents.parquet")
    Path("text.txt").write_text("\n\n".join(TEXTS))
    tokenizer("words")
    length = {"sequence_length": 16, "held_out_pct": 20.0}
    option("by_tokens", name="tokens", path="tokens", **length)
    option("by_lines", name="documents", path="documents.jsonl", tokenizer="words", **length)
    option("by_rows", name="documents", path="documents.parquet", layout="padded", **length)
    option("by_text", name="text", path="text.txt", **length)
    decompositions, _, tables = swept(
        *TWO_RANKS,
        "model=gpt_nano",
        "data=by_tokens,by_lines,by_rows,by_text",
        trajectories=4,
        cuts=2,
    )
    assert decompositions["note"].isna().all()
    assert decompositions["data.path"].nunique() == 4
    # Weighting by targets is put to the test where documents are padded, and only there.
    sizes = tables.steps.groupby("run_id")["tokens"].agg(lambda tokens: tokens.diff().nunique())
    uneven = tables.runs.set_index("run_id")["data.path"][sizes[sizes > 1].index]
    assert uneven.tolist() == ["documents.parquet"] * 2


@pytest.mark.parametrize(
    ("prepare", "overrides", "tolerance"),
    [
        (
            saved_dataset,
            [
                "model=hf_bert",
                "data=documents",
                "data.path=saved",
                "data.label_field=kind",
                "data.layout=padded",
                "data.sequence_length=24",
                "data.held_out_pct=20",
            ],
            1e-9,
        ),
        # Its RMSNorm rounds to float32, whatever the precision of the parameters.
        (None, ["model=hf_llama", SHORT], 1e-5),
    ],
    ids=["saved dataset and hf_bert", "hf_llama"],
)
def test_models_that_need_their_data(prepare, overrides, tolerance):
    if prepare is not None:
        prepare("saved")
    decompositions, _, _ = swept(
        *TWO_RANKS, *overrides, trajectories=1, cuts=2, tolerance=tolerance
    )
    assert decompositions["note"].isna().all()


def test_what_is_not_invariant_is_labelled():
    """A module and data of the user's own, and dropout of the product's."""
    shutil.copy(FAULTS / "own_models.py", "my_models.py")
    shutil.copy(FAULTS / "own_data.py", "my_data.py")
    option("counting", name="custom", _target_="my_data.Counting")
    decompositions, text, _ = swept(
        "model=custom",
        "model._target_=my_models.Bigram,my_models.Normalised,my_models.Dropping",
        "data=counting",
        trajectories=3,
        cuts=2,
    )
    notes = decompositions.set_index("model._target_")["note"]
    assert pd.isna(notes["my_models.Bigram"])
    reason = "batch normalisation: model.norm"
    assert notes["my_models.Normalised"] == f"not decomposition-invariant: {reason}"
    assert f"Not decomposition-invariant ({reason}): 2 runs" in text
    assert notes["my_models.Dropping"].startswith("not decomposition-invariant: dropout")
    normalised = decompositions["model._target_"].eq("my_models.Normalised")
    assert decompositions.loc[normalised, "max_relative_difference"].max() > 1e-4
