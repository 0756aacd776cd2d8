"""What a report says of batch and rate together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from planted_surface import HORIZONS, sweep

from batchscape.analysis.cells import find_cells
from batchscape.analysis.horizons.runs import runs_by_horizon, without_shorter_horizons
from batchscape.analysis.horizons.topic import horizons_section
from batchscape.analysis.report.analyze import analyze
from batchscape.analysis.report.latex import to_latex
from batchscape.analysis.report.writers import to_markdown
from batchscape.analysis.targets.foreign import ReadOptions
from batchscape.cli import main


def longest(cells):
    return without_shorter_horizons(cells, runs_by_horizon(cells)[0])


def finals(**options):
    return sweep(**options).rename(columns={"cost": "final_eval_loss"}).assign(group=0)


def test_exponents_are_held_against_published_ones():
    section = horizons_section(finals(sd=0.02), {})
    assert section.answer[0].startswith("The exponent of the best global batch (samples) in the ")
    assert section.answer[2].startswith("The best global batch (samples) after 8192 samples, ")
    optima, exponents = section.tables
    assert optima.frame["horizon"].tolist() == [*HORIZONS, *HORIZONS]
    assert exponents.frame["published"].tolist() == [
        "0.383 by Bergsma et al. 2025 inside and 0.571 by Li et al. 2025 outside",
        "0.307 by Li et al. 2025 inside",
    ]
    for table in section.tables:
        assert to_latex(table)
        assert to_markdown(table)
    assert list(section.headlines) == [
        "global_batch_size_exponent_in_horizon",
        "learning_rate_exponent_in_horizon",
        "global_batch_size_together",
        "learning_rate_together",
    ]
    assert section.headlines["global_batch_size_together"].unit == "samples"
    exponent = section.headlines["learning_rate_exponent_in_horizon"]
    assert exponent.value == pytest.approx(0.3, abs=0.05)


def test_published_slopes_are_drawn_through_the_middle_of_the_optima():
    (chart,) = horizons_section(finals(sd=0.02), {}).pictures
    (found,) = [m.table for m in chart.marks if m.kind == "point" and "learning_rate" in m.table]
    (line,) = [m.table for m in chart.marks if m.name == "horizon^0.307"]
    slope, height = np.polyfit(np.log(line["horizon"]), np.log(line["learning_rate"]), 1)
    assert slope == pytest.approx(0.307)
    middle = np.log(found[["horizon", "learning_rate"]]).mean()
    assert slope * middle["horizon"] + height == pytest.approx(middle["learning_rate"])


def test_two_seeds_hold_nothing_against_what_is_published():
    section = horizons_section(finals(sd=0.02, seeds=2), {})
    assert "side" not in " ".join(section.tables[1].frame["published"])
    assert section.answer[1].endswith(" (n = 2).")


def test_a_misfit_is_a_warning():
    section = horizons_section(
        finals(sd=0.01, shape=lambda x, y: 0.1 * x * x + 0.8 * (np.exp(y) - 1 - y)), {}
    )
    assert "no quadratic form of one curvature" in section.warnings[0]


def test_groups_are_told_apart_and_what_has_no_grid_is_not_shown():
    one, other = finals(sd=0.02), finals(sd=0.02, horizons=HORIZONS[:1]).assign(group=1)
    narrow = other[other["learning_rate"] < 0.002].assign(group=2)
    section = horizons_section(pd.concat([one, other, narrow]), {0: "mlp", 1: "gpt"})
    assert [answer.partition(":")[0] for answer in section.answer] == ["mlp"] * 4 + ["gpt"] * 2
    assert section.tables[0].frame["group"].tolist() == [0] * 8 + [1] * 2
    assert section.headlines["learning_rate_together_1"].group == "gpt"
    assert section.pictures[0].choices[0].options == {"0": "mlp", "1": "gpt"}
    assert horizons_section(narrow, {}) is None
    assert horizons_section(one.drop(columns="learning_rate"), {}) is None


def test_a_loss_that_has_no_logarithm_is_no_end_of_the_report():
    section = horizons_section(finals().assign(final_eval_loss=-1.0), {})
    assert section.answer == ["Not identified."]
    assert "losses above 0" in section.warnings[0]


def settings(schedule, **columns):
    """Runs of a sweep of two budgets and three batches, as they are loaded."""
    rows = [
        {
            "run_id": f"{batch}-{budget}",
            "trajectory_id": f"{batch}-{budget}",
            "sweep_dir": "sweep",
            "status": "completed",
            "data_parallel_size": 1,
            "micro_batch_size": batch,
            "gradient_accumulation_steps": 1,
            "global_batch_size": batch,
            "optimizer.learning_rate": 0.1,
            "schedule.name": schedule,
            "budget.samples": budget,
            "planned_samples": budget,
            "stop_reason": "budget",
            "hardware": "one",
            "attempts": 1,
        }
        for batch in (8, 16, 32)
        for budget in (320, 640)
    ]
    return find_cells(pd.DataFrame(rows).assign(**columns))


def test_only_a_schedule_that_ends_with_its_budget_has_horizons():
    decays = [80, 160] * 3
    runs, labels = runs_by_horizon(settings("wsd", **{"schedule.decay_samples": decays}))
    assert runs["horizon"].tolist() == [320, 640] * 3
    assert set(runs["group"]) == set(labels) == {0}
    assert len(runs_by_horizon(settings("cosine"))[0]) == 6
    assert runs_by_horizon(settings("cosine", **{"schedule.decay_samples": 640}))[0].empty
    assert runs_by_horizon(settings("constant"))[0].empty
    assert len(runs_by_horizon(settings("constant", planned_samples=640))[0]) == 6
    assert runs_by_horizon(settings("wsd", stop_reason="target"))[0].empty
    statuses = [*["completed"] * 5, "rejected"]
    started, _ = runs_by_horizon(settings("wsd", status=statuses))
    assert started["status"].eq("completed").all()
    assert len(started) == 5


def test_a_cut_that_is_timed_alone_is_at_no_horizon():
    runs, labels = runs_by_horizon(settings("wsd", timed_steps=[40, *[None] * 5]))
    assert runs["timed_steps"].isna().all()
    assert len(runs) == 5
    assert set(runs["group"]) == set(labels) == {0}


@pytest.mark.parametrize("has_run", [True, False])
def test_the_joint_fit_of_a_table_of_final_losses_is_that_of_runs(has_run, tmp_path):
    path = tmp_path / "finals.csv"
    planted = pd.concat([finals(sd=0.02).assign(model=model) for model in ("mlp", "gpt")])
    table = planted.rename(columns={"final_eval_loss": "loss", "horizon": "samples"})
    if has_run:
        table["run"] = range(len(table))
    table.drop(columns="group").to_csv(path, index=False)
    options = ReadOptions(group=["model", "samples"], minimise=None if has_run else "loss")
    apart = analyze(path, options).sections[1]
    together = horizons_section(finals(sd=0.02), {}).headlines
    assert len(apart.headlines) == 2 * len(together)
    for name, estimate in together.items():
        assert apart.headlines[f"{name}_0"].text(6) == estimate.text(6)


def without_shorter(runs):
    cells = find_cells(runs)
    return cells, without_shorter_horizons(cells, runs_by_horizon(cells)[0])


def test_losses_elsewhere_are_those_of_the_longest_horizon_where_it_has_all_runs():
    grid = pd.concat(
        [
            settings("cosine").runs.assign(
                **{"optimizer.learning_rate": rate, "learning_rate": rate}
            )
            for rate in (0.1, 0.2, 0.4)
        ],
        ignore_index=True,
    ).assign(final_eval_loss=1.0, seed=0)
    grid = grid.drop(columns=["cell", "timing_note"])
    launch = {"launch.world_size": 1, "launch.timing_valid": grid["learning_rate"] < 0.3}
    grid = grid.assign(**launch, **{"launch.timing_invalid_reason": "shared"})
    cells, longest = without_shorter(grid)
    assert longest.runs["timing_valid"].eq(longest.runs["learning_rate"] < 0.3).all()
    assert longest.runs["timing_note"].dropna().tolist() == ["shared"] * 3
    assert longest.runs["planned_samples"].tolist() == [640] * 9
    assert longest.contexts == ["optimizer.learning_rate"]
    assert cells.runs["cell"][longest.runs.index].tolist() == longest.runs["cell"].tolist()
    ends_late = grid["planned_samples"].eq(640)
    # One long run beside a grid, one that is at work, a cut that ran out of memory in short ones
    # alone, other schedules, two rates, no loss at all.
    hungry = grid[~ends_late].assign(status="oom", final_eval_loss=np.nan)
    hungry["micro_batch_size"] *= 2
    one_long = ~ends_late | (grid.index == ends_late.idxmax())
    at_work = grid.assign(status=grid["status"].mask(grid.index == ends_late.idxmax(), "running"))
    at_work["final_eval_loss"] = at_work["final_eval_loss"].where(at_work["status"] != "running")
    # A batch that only short ones completed; another machine, and another seed of the start.
    lost = grid.assign(status=grid["status"].mask(ends_late & (grid.index % 3 == 0), "diverged"))
    hardware = {"launch.device_model": grid["planned_samples"].map(lambda n: f"machine {n}")}
    for runs in (
        grid[one_long],
        lost,
        grid.assign(**hardware, device_type="cpu"),
        grid.assign(init_seed=grid["planned_samples"]),
        at_work,
        pd.concat([grid, hungry], ignore_index=True),
        grid.assign(**{"schedule.name": "constant"}),
        grid[grid["learning_rate"] < 0.3],
        grid.drop(columns="final_eval_loss"),
    ):
        cells, longest = without_shorter(runs)
        assert longest is cells


def test_one_horizon_needs_no_samples(tmp_path):
    path = tmp_path / "finals.csv"
    table = sweep(sd=0.02, horizons=[1024]).rename(columns={"cost": "loss"})
    table.drop(columns="horizon").to_csv(path, index=False)
    together = analyze(path).sections[1]
    assert together.answer[0].startswith("The best global batch (samples), batch and rate chosen")
    assert [table.name for table in together.tables] == ["horizons"]


def test_a_sweep_over_horizons_is_trained_and_reported(tmp_path, capsys):
    folder = tmp_path / "horizons"
    short = ["budget.samples=80,160,320", "evaluation.every_samples=80", "seed=0", "tracker=none"]
    grid = ["batch.global_batch_size=2,4,8", "optimizer.learning_rate=0.004,0.016,0.064"]
    study = ["sweep", "sweeps=horizons", "schedule.warmup_samples=8", "launcher.device=cpu"]
    assert main([*study, *short, *grid, f"sweep_dir={folder}"]) == 0, capsys.readouterr()
    printed = " ".join(capsys.readouterr().out.split())
    assert "Runs that begin as another one, and go on from its state: 18" in printed
    assert main(["report", str(folder)]) == 0
    tables = folder / "report" / "tables"
    optima = pd.read_csv(tables / "horizons.csv")
    assert optima["horizon"].tolist() == [80, 160, 320] * 2
    assert optima["run_ids"].str.count(";").eq(8).all()
    runs = pd.read_csv(tables / "runs.csv")
    assert (runs["schedule.decay_samples"] * 10 == runs["budget.samples"]).all()
    page = Path(folder / "report" / "report.md").read_text()
    assert "## Batch and rate together" in page
    assert "for the longest horizon of each training; 18 runs of shorter ones count in" in page
    methods = (folder / "report" / "paper" / "methods.tex").read_text()
    assert "longest horizon of each training; 18 runs" in " ".join(methods.split())
    reached = pd.read_csv(tables / "targets.csv")["run_ids"].str.split(";").explode()
    assert set(reached) <= set(runs.loc[runs["budget.samples"].eq(320), "run_id"])
    capsys.readouterr()
    assert main(["recommend", str(folder)]) == 0
    advice = " ".join(capsys.readouterr().out.split())
    assert "18 runs of shorter horizons are left out" in advice
    assert "For samples" not in advice
