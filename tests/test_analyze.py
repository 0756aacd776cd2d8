"""`batchscape analyze` on tables of others: a published one, simulated ones, broken ones."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from batchscape.analysis.report.analyze import Analysis, analyze
from batchscape.analysis.targets.foreign import ReadOptions
from batchscape.cli import main
from batchscape.errors import AnalysisError

# Steps to a target loss by Zhang et al. 2024 (arXiv:2410.21676), as fitted by the authors in
# plots/chinchilla.ipynb of github.com/hlzhang109/critical-batch-size at commit c5b509d (MIT).
ZHANG = {
    "85M": (46000, 23000, 13282, 7000, 3840, 2528, 1917, 1600, 1600),
    "151M": (96000, 49000, 24000, 12000, 7128, 4350, 2940, 2400, 2300),
    "302M": (196000, 90000, 46000, 23400, 13300, 7224, 4980, 3400, 2879),
    "604M": (311000, 166000, 81000, 37440, 21320, 11400, 7199, 4700, 3800),
    "1.2B": (642000, 331000, 176000, 94000, 46500, 25000, 15360, 8900, 6500),
}
BATCHES = [64 * 2**k for k in range(9)]


def zhang() -> pd.DataFrame:
    rows = [
        {"model": model, "batch_size": batch, "steps_used": steps, "target_loss": loss}
        for (model, steps_by_batch), loss in zip(
            ZHANG.items(), (3.42, 3.24, 3.07, 2.92, 2.736), strict=True
        )
        for batch, steps in zip(BATCHES, steps_by_batch, strict=True)
    ]
    return pd.DataFrame(rows)


def simulated(
    rates: tuple[float, ...] = (0.1,),
    noise: float = 0.01,
    batches: tuple[int, ...] = (8, 16, 32, 64, 128, 256),
    seeds: int = 4,
    every: int = 5,
) -> pd.DataFrame:
    """Curves with steps S = a (1 + 64/B) to every loss, measured often."""
    rng = np.random.default_rng(0)
    parts = []
    for batch in batches:
        for rate in rates:
            for seed in range(seeds):
                step = np.arange(0, 1200, every)
                slow = (1 + 64 / batch) * np.exp(noise * rng.normal() + np.log(rate / 0.1) ** 2)
                loss = 2 + 4 / (1 + step / slow / 20)
                parts.append(
                    pd.DataFrame(
                        {"bs": batch, "lr": rate, "seed": seed, "step": step, "val_loss": loss}
                    )
                )
    return pd.concat(parts, ignore_index=True)


def test_a_published_table_gives_its_published_critical_batches(tmp_path):
    zhang().to_csv(tmp_path / "zhang.csv", index=False)
    analysis = analyze(
        tmp_path / "zhang.csv",
        ReadOptions(group=["model"], columns={"steps_to_target": "steps_used"}),
        form="two_term",
        reference_batch_size=256,
    )
    views = {view.name: view.frame for section in analysis.sections for view in section.tables}
    table = views["critical_batch"]
    published = [745.3, 955.2, 1393.7, 1888.5, 2533.4]
    assert table["overhead_batch_size"].tolist() == pytest.approx(published, abs=0.05)
    ratios = [2191, 3240, 5433, 7907, 11131]
    assert table["critical_batch_size"].tolist() == pytest.approx(ratios, rel=1e-3)


def test_the_shell_says_what_it_took_and_writes_everything(tmp_path, capsys):
    zhang().query("model == '85M'").to_csv(tmp_path / "zhang.csv", index=False)
    arguments = ["analyze", str(tmp_path / "zhang.csv"), "--group", "model"]
    arguments += ["--column", "steps_to_target=steps_used", "--reference-batch", "256"]
    arguments += ["--form", "two_term"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    output = capsys.readouterr().out
    assert "steps_used is taken for steps_to_target" in output
    assert "batch_size is taken for global_batch_size" in output
    assert "UNTUNED" in output
    table = pd.read_csv(tmp_path / "out" / "tables" / "critical_batch.csv")
    assert table["overhead_batch_size"].tolist() == pytest.approx([745.3], abs=0.05)
    page = (tmp_path / "out" / "analysis.md").read_text()
    methods = (tmp_path / "out" / "paper" / "methods.tex").read_text()
    (critical,) = re.findall(r"Interval of [^.]*critical batch size[^.]*\.", page)
    assert "steps\\_used is taken for" in page.partition("## Methods")[2]
    assert critical in methods.replace("{-}", "-")


def test_curves_give_the_critical_batch_that_made_them(tmp_path):
    simulated().to_csv(tmp_path / "curves.csv", index=False)
    analysis = analyze(tmp_path / "curves.csv", targets=[3.0])
    assert analysis.runs["outcome"].eq("reached").all()
    tradeoff = next(section for section in analysis.sections if section.headlines)
    critical = next(e for n, e in tradeoff.headlines.items() if n.startswith("critical_batch_size"))
    assert critical.value == pytest.approx(64, rel=0.05)
    assert critical.low < 64 < critical.high


@pytest.mark.slow
def test_the_best_learning_rate_of_each_batch_is_used(tmp_path):
    simulated((0.03, 0.1, 0.3)).to_csv(tmp_path / "curves.csv", index=False)
    analysis = analyze(tmp_path / "curves.csv", targets=[3.0])
    assert "Learning rate" in [section.title for section in analysis.sections]
    table = analysis.sections[0].tables[0].frame
    assert table["learning_rate"].eq(0.1).all()
    assert not any("UNTUNED" in text for s in analysis.sections for text in s.warnings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 2.5}, "positive whole number of samples"),
        ({"steps_used": -1}, "steps_to_target is a number above 0 .* such as '-1' in row 1"),
        ({}, r"no other; given 1\.5; a table of loss curves"),
    ],
)
def test_bad_tables_end_with_a_message_and_code_2(tmp_path, capsys, change, message):
    zhang().assign(**change).to_csv(tmp_path / "t.csv", index=False)
    arguments = ["analyze", str(tmp_path / "t.csv"), "--column", "steps_to_target=steps_used"]
    assert main([*arguments, "--group", "model", "--target", "1.5"]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_another_separator_is_named(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("batch_size;steps_used\n64;1,5\n")
    with pytest.raises(AnalysisError, match=r"'batch_size;steps_used', has none.*looks like ';'"):
        analyze(path)
    path.write_text("batch_size\tsteps_used\n64\t15\n")
    with pytest.raises(AnalysisError, match="looks like a tab"):
        analyze(path)
    path.write_text("only\n1\n")
    with pytest.raises(AnalysisError, match="global_batch_size"):
        analyze(path)


def test_no_such_table(capsys):
    assert main(["analyze", "nowhere.csv"]) == 2
    assert capsys.readouterr().err == "nowhere.csv: there is no such file\n"


@pytest.mark.parametrize("kind", ["one batch", "one seed", "nobody reached", "all diverged"])
def test_data_that_say_nothing_are_not_an_error(tmp_path, kind):
    curves = simulated()
    if kind == "one batch":
        curves = curves[curves["bs"].eq(8)]
    elif kind == "one seed":
        curves = curves[curves["seed"].eq(0)]
    elif kind == "all diverged":
        curves = curves.assign(val_loss=np.where(curves["step"] < 600, curves["val_loss"], np.nan))
    curves.to_csv(tmp_path / "c.csv", index=False, na_rep="nan")
    analysis = analyze(tmp_path / "c.csv", targets=[1.0 if kind == "nobody reached" else 3.0])
    headlines = {name: e for s in analysis.sections for name, e in s.headlines.items()}
    if kind != "one seed":
        assert not any(estimate.is_identified for estimate in headlines.values())
    text = " ".join(text for s in analysis.sections for text in [*s.answer, *s.warnings])
    assert text


def broken(rng):
    """Break a good table in one to three ways."""
    if rng.random() < 0.5:
        table = simulated((0.1,), 0.1, (8, 64, 256), 2, 150).astype(object)
    else:
        table = zhang().rename(columns={"steps_used": "steps"}).iloc[5:14].astype(object)
        table["seed"] = pd.Series(rng.integers(0, 4, len(table)), dtype=object)
    odd = [None, np.nan, np.inf, -np.inf, 0, -1, 2.5, 1e300, "x", "", "1e3", True, "8 samples"]
    for _ in range(rng.integers(1, 4)):
        column = table.columns[rng.integers(len(table.columns))]
        row = rng.integers(max(len(table), 1))
        how = rng.integers(6)
        if how == 0:
            table = table.drop(columns=column) if len(table.columns) > 1 else table
        elif how == 1 and len(table):
            table[column] = table[column].astype(object)
            table.iloc[row, table.columns.get_loc(column)] = odd[rng.integers(len(odd))]
        elif how == 2:
            table[column] = odd[rng.integers(len(odd))]
        elif how == 3:
            table = pd.concat([table, table.iloc[: int(rng.integers(3))]], ignore_index=True)
        elif how == 4:
            table = table.iloc[: int(rng.integers(4))].reset_index(drop=True)
        else:
            other = rng.choice(["samples", "lr", "target", "status", "loss", "outcome", "batch"])
            table = table.rename(columns={column: other})
            table = table.loc[:, ~table.columns.duplicated()]
    return table


def outcome_of(number, folder):
    rng = np.random.default_rng(number)
    path = folder / f"{number}.csv"
    broken(rng).to_csv(path, index=False)
    group = ["model"] if "model" in path.read_text().partition("\n")[0] else []
    try:
        analyze(path, ReadOptions(group=group))
    except AnalysisError as error:
        return "refused" if len(str(error)) > 10 else "refused without a word"
    return "analysed"


def test_broken_tables_are_refused_or_analysed(tmp_path):
    assert {outcome_of(number, tmp_path) for number in range(10)} == {"refused", "analysed"}


def tables_of(analysis: Analysis) -> dict[str, pd.DataFrame]:
    return {view.name: view.frame for section in analysis.sections for view in section.tables}


def texts_of(analysis: Analysis) -> str:
    return " ".join(text for s in analysis.sections for text in [*s.answer, *s.warnings])


def test_empty_cells_are_no_divergence(tmp_path):
    """A log whose last rows have no held-out loss gives what it gives without these rows."""
    curves = simulated(seeds=2, every=15)
    last = curves.groupby(["bs", "seed"]).tail(1)
    ended = pd.concat([curves, last.assign(step=1200, val_loss=np.nan)])
    curves.to_csv(tmp_path / "without.csv", index=False)
    ended.to_csv(tmp_path / "with.csv", index=False)
    ended.to_csv(tmp_path / "logged.csv", index=False, na_rep="nan")
    plain, holed, logged = (
        analyze(tmp_path / f"{name}.csv", targets=[3.0]) for name in ("without", "with", "logged")
    )
    fits = [
        tables_of(analysis)["critical_batch"]["critical_batch_size"] for analysis in (plain, holed)
    ]
    assert fits[0].tolist() == fits[1].tolist()
    assert fits[0].iloc[0] == pytest.approx(64, rel=0.05)
    assert holed.runs["outcome"].eq("reached").all()
    assert any("12 of 972 rows have no loss" in note for note in holed.notes)
    assert logged.runs["outcome"].eq("diverged").all()
    assert "12 diverged" in texts_of(logged)


@pytest.mark.slow
def test_a_column_of_groups_is_never_pooled(tmp_path):
    rows = [
        {"group": f"at {critical}", "batch": 2**k, "seed": seed + 3 * (critical > 100),
         "steps": 1000 * (1 + critical / 2**k) * (1 + 0.01 * ((seed + k) % 3 - 1))}
        for critical in (50, 800) for k in range(3, 13) for seed in range(3)
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(tmp_path / "t.csv", index=False)
    analysis = analyze(tmp_path / "t.csv")
    sizes = tables_of(analysis)["critical_batch"]["critical_batch_size"].tolist()
    assert sizes == pytest.approx([50, 800], rel=0.03)
    assert any("2 groups, never pooled: at 50 and at 800" in note for note in analysis.notes)


def final_losses(tie: bool = False) -> pd.DataFrame:
    """Final losses of a learning-rate study: parabolas whose optimum grows as B^0.5."""
    rng = np.random.default_rng(0)
    rows = []
    for batch in (16, 32, 64, 128, 256):
        for rate in 0.001 * 2.0 ** np.arange(-1, 7):
            for seed in range(3):
                away = np.log(rate / (0.001 * batch**0.5))
                noise = 0.003 * rng.normal()
                loss = 2 + 0.05 * away**2 + noise
                rows.append({"batch": batch, "lr": rate, "seed": seed, "steps": 8192 // batch,
                             "val_loss": round(loss, 1) if tie else loss})  # fmt: skip
    return pd.DataFrame(rows)


@pytest.mark.slow
def test_final_losses_are_minimised_and_no_target_is_made_up(tmp_path, capsys):
    final_losses().to_csv(tmp_path / "t.csv", index=False)
    analysis = analyze(tmp_path / "t.csv")
    views = tables_of(analysis)
    assert {"final_losses", "learning_rates"} <= set(views)
    assert not {"targets", "critical_batch"} & set(views)
    best = views["learning_rates"]
    optima = 0.001 * best["global_batch_size"] ** 0.5
    assert best["learning_rate"].to_numpy() == pytest.approx(optima, rel=0.1)
    assert not re.search("target|held-out", texts_of(analysis))  # of whatever it is a loss
    losses = final_losses().query("batch == 16 and lr == 0.004")["val_loss"]
    table = views["final_losses"]
    row = table.query("global_batch_size == 16 and learning_rate == 0.004").iloc[0]
    interval = stats.ttest_1samp(losses, 0).confidence_interval()
    assert [row["mean"], row["ci95"], row["sd"]] == pytest.approx(
        [losses.mean(), (interval.high - interval.low) / 2, losses.std()]
    )
    for wrong, message in ((["--target", "2"], "leave --target out"),
                           (["--crossing", "first"], "one of final losses")):  # fmt: skip
        assert main(["analyze", str(tmp_path / "t.csv"), *wrong]) == 2
        assert message in capsys.readouterr().err


def test_ties_and_unequal_lengths_are_said(tmp_path):
    final_losses(tie=True).assign(steps=100).to_csv(tmp_path / "t.csv", index=False)
    text = texts_of(analyze(tmp_path / "t.csv"))
    assert re.search(r"TIES: .* B = 16: 0\.00\d+.* and 0\.00\d+", text)
    assert "runs ended after 1600 to 25600 samples" in text


def test_a_table_of_runs_that_all_ended_early_is_refused(tmp_path):
    table = pd.DataFrame({"batch_size": [8, 16, 32], "seed": 0, "val_loss": [2.0, 2.1, None]})
    table.assign(state=["crashed", "running", "finished"]).to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(AnalysisError, match=r"2 of 3 runs did not end \(failed, running\)") as got:
        analyze(tmp_path / "t.csv")
    assert "1 of 3 runs have no final loss" in str(got.value)


FOREIGN = Path(__file__).parent / "foreign_tables"
OPTUNA = {
    "loss": "value",
    "global_batch_size": "params_batch_size",
    "learning_rate": "params_learning_rate",
}


def views_of(analysis: Analysis) -> dict[str, pd.DataFrame]:
    return {view.name: view.frame for section in analysis.sections for view in section.tables}


def critical(analysis: Analysis) -> list[float]:
    return views_of(analysis)["critical_batch"]["critical_batch_size"].tolist()


def test_a_pruned_trial_of_optuna_has_no_final_loss():
    """Written by Optuna: trial 5 was pruned at a loss of 1.0, below all that ended."""
    analysis = analyze(FOREIGN / "optuna_trials.csv", ReadOptions(columns=OPTUNA))
    table = pd.read_csv(FOREIGN / "optuna_trials.csv")
    ended = table[table["state"].eq("COMPLETE")]
    assert len(analysis.runs) == len(ended) == 13
    assert sorted(analysis.runs["final_eval_loss"]) == sorted(ended["value"])
    assert "2 of 15 runs did not end (failed, pruned) and are left out" in analysis.notes
    assert "of status, COMPLETE for completed, FAIL for failed is taken" in analysis.notes


def with_three_seeds(name: str, tmp_path: Path) -> Path:
    """Write a table of one seed as one of three that are alike; return its path."""
    table = pd.read_csv(FOREIGN / name)
    parts = [
        table.assign(seed=k, run_name=f"{k}-" + table["batch_size"].astype(str)) for k in "123"
    ]
    pd.concat(parts).to_csv(tmp_path / name, index=False)
    return tmp_path / name


def test_the_calls_of_log_are_no_optimizer_steps(tmp_path):
    """Curves of a Trainer, to a loss of 2.6 in 400 (1 + 64 / B) steps, as W&B exports them."""
    path = with_three_seeds("wandb_history_hf.csv", tmp_path)
    analysis = analyze(
        path, ReadOptions(columns={"loss": "eval/loss"}), targets=[2.6], form="two_term"
    )
    assert critical(analysis) == pytest.approx([64.0], rel=0.005)
    assert "train/global_step is taken for optimizer_step" in analysis.notes
    steps = analysis.runs.groupby("global_batch_size")["steps_to_target"].mean()
    right = {batch: 400 * (1 + 64 / batch) for batch in (8, 32, 128, 512)}
    assert steps.to_dict() == pytest.approx(right, rel=0.005)


def test_a_table_with_nothing_but_the_calls_of_log_is_refused(tmp_path):
    table = pd.read_csv(FOREIGN / "wandb_history_hf.csv").drop(columns="train/global_step")
    table.to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(
        AnalysisError, match=r"_step \(or Step\) counts calls of its log, .* --column"
    ):
        analyze(tmp_path / "t.csv", ReadOptions(columns={"loss": "eval/loss"}))
    chosen = {"loss": "eval/loss", "optimizer_step": "_step"}
    assert analyze(tmp_path / "t.csv", ReadOptions(columns=chosen, first_step=1)).sections


def test_steps_that_are_counted_from_0_are_asked_about(tmp_path, capsys):
    """Lightning's: 1600 samples an epoch, evaluated behind it; S = a (1 + 400 / B)."""
    path = with_three_seeds("lightning_epochs.csv", tmp_path)
    command = ["analyze", str(path), "--column", "loss=val_loss"]
    assert main(command) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert "measured at 15, 31, 47, each one less than a multiple of 16" in text
    analysis = analyze(path, ReadOptions(columns={"loss": "val_loss"}, first_step=0))
    assert critical(analysis) == pytest.approx([400.0] * 5, rel=0.005)
    assert (
        min(critical(analyze(path, ReadOptions(columns={"loss": "val_loss"}, first_step=1)))) > 410
    )
