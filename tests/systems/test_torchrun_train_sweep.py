"""A plain script under torchrun; the oracle is what it prints, read without our readers."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.systems, pytest.mark.timeout(900)]


STEPS = "budget.optimizer_steps=12"


@pytest.fixture(scope="module")
def swept(sweep):
    return sweep("torchrun_train", STEPS, reports=True)


def test_cuts_of_one_batch_train_alike(swept, cuts):
    assert swept.code == 0, swept.printed
    cuts(swept, {(1, 8, 1), (1, 2, 4), (2, 2, 2)}, loss=1e-4)
    assert len(swept.tables.steps) == 6 * 12
    runs = swept.tables.runs.query("status == 'completed'")
    first = {
        seed: {swept.steps(i)["loss"].iloc[0] for i in of["run_id"]}
        for seed, of in runs.groupby("seed")
    }
    assert not first[0] & first[1], "seeds are passed on"


def test_torchrun_itself_trains_as_what_is_forked_in_its_place(swept, sweep):
    wide = ("seed=0", "batch.data_parallel_size=2", "batch.micro_batch_size=2")
    cold = sweep("torchrun_train", STEPS, *wide, cold=True)
    assert cold.code == 0, cold.printed
    (run,) = cold.tables.runs.query("status == 'completed'")["run_id"]
    losses = cold.steps(run)["loss"].tolist()
    assert losses == swept.steps(run)["loss"].tolist(), "bit for bit"
    assert len(losses) == 12


def test_it_ends_with_a_recommendation(swept, judges, recommends):
    recommends(swept, "1 x 8 x 1|1 x 2 x 4|2 x 2 x 2")
    judges(swept)


def test_tables_are_what_the_script_printed(swept):
    for run in swept.tables.runs.query("status == 'completed'").itertuples():
        lines = swept.log(run.run_id).splitlines()
        printed = [line.split() for line in lines if line.startswith("iter ")]
        steps = swept.steps(run.run_id)
        assert [int(words[1].rstrip(":")) for words in printed] == list(range(1, 13))
        assert steps["optimizer_step"].tolist() == list(range(1, 13))
        assert steps["loss"].tolist() == [float(words[3].rstrip(",")) for words in printed]
        seconds = [float(words[5].removesuffix("ms")) / 1000 for words in printed]
        assert steps["step_time_s"].tolist() == pytest.approx(seconds, rel=1e-12)
        assert steps["samples"].tolist() == [8 * step for step in range(1, 13)]
        assert "tokens per iteration will be: 512" in lines
        assert steps["tokens"].tolist() == [512 * step for step in range(1, 13)]
        (evaluated,) = (line for line in lines if "val loss" in line)
        assert swept.evaluation(run.run_id)["eval_loss"] == float(evaluated.split()[-1])


def test_times_come_from_the_program(swept):
    """Warm-up apart, the median step time of the tables is that of the printed times."""
    run = swept.tables.runs.query("status == 'completed'").iloc[0]
    steps = swept.steps(run["run_id"])
    assert run["step_time_s"] == pytest.approx(steps["step_time_s"].iloc[5:].median())


def test_an_accumulation_that_the_script_divides_by_the_ranks_is_found(sweep):
    """nanoGPT's trap: per rank in our words, of all ranks in its own."""
    own = ("{accumulation_over_ranks}", "{gradient_accumulation_steps}")
    settings = ["seed=0", "batch.data_parallel_size=2", "budget.optimizer_steps=6"]
    swept = sweep("torchrun_train", *settings, edit=own)
    assert swept.code != 0
    (run,) = swept.tables.runs.query("status != 'rejected'").itertuples()
    assert run.status == "failed"
    assert "tokens_per_optimizer_step=256" in run.reason, "4 samples of 64 tokens"
    assert "the plan says 512" in run.reason
