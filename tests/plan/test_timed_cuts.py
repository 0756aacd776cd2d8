"""Cuts that are timed alone, while another cut of the same training is trained whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from tests.exact import assert_same_rows

from batchscape.analysis import find_cells, steps_to_target
from batchscape.analysis.targets.curves import curves_of
from batchscape.cli import main
from batchscape.plan.build import Plan
from batchscape.record.tables import Tables, load

CUTS = ["batch.data_parallel_size=1", "batch.micro_batch_size=4,8,16,32", "seed=0,1"]
SMALL = (
    *("sweep", "data=digits", "model=mlp", "optimizer=sgd", "launcher.device=cpu", "tracker=none"),
    *("batch.global_batch_size=32", "batch.data_parallel_size=1", "batch.micro_batch_size=8,16,32"),
    *("seed=0,1", "budget.samples=640", "schedule.warmup_samples=0", "evaluation.every_samples=64"),
    *("measure.warmup_optimizer_steps=2", "evaluation.samples=64", "evaluation.batch_size=64"),
    *("engine.precision=float64", "measure.noise_scale_every=5"),
)
CURVE = ["optimizer_step", "samples", "loss", "gradient_norm", "learning_rate"]


def test_the_cut_of_the_smallest_micro_batch_is_trained_whole(plan: Callable[..., Plan]) -> None:
    whole = plan(*CUTS).specs
    specs = plan(*CUTS, "measure.steps_of_further_cuts=40").specs
    assert {spec.timed_steps for spec in specs if spec.geometry.micro_batch_size == 4} == {None}
    assert {spec.optimizer_steps for spec in specs if spec.geometry.micro_batch_size > 4} == {40}
    assert [spec.trajectory_id for spec in specs] == [spec.trajectory_id for spec in whole]
    ends = ["" if spec.timed_steps is None else "-t40" for spec in specs]
    assert [s.run_id for s in specs] == [s.run_id + e for s, e in zip(whole, ends, strict=True)]


@pytest.mark.parametrize(
    "settings",
    [
        ["measure.steps_of_further_cuts=120"],
        ["measure.steps_of_further_cuts=40", "batch.ramp=[{samples:640,global_batch_size:64}]"],
    ],
    ids=["no shorter", "with a ramp"],
)
def test_other_cuts_train_their_budget(settings: list[str], plan: Callable[..., Plan]) -> None:
    assert {spec.timed_steps for spec in plan(*CUTS, *settings).specs} == {None}


def of_micro_batch(tables: Tables, size: int, of_size: bool = True) -> list[str]:
    runs = tables.runs
    return list(runs.loc[runs["micro_batch_size"].eq(size) == of_size, "run_id"])


def curves(tables: Tables, run_ids: list[str], until: int) -> pd.DataFrame:
    steps = tables.steps[tables.steps["optimizer_step"] <= until]
    names = steps["run_id"].astype(str).str.removesuffix("-t8")
    steps = steps.assign(run=names)[names.isin([r.removesuffix("-t8") for r in run_ids])]
    return steps.sort_values(["run", "optimizer_step"])[["run", *CURVE]].reset_index(drop=True)


@pytest.mark.slow
def test_further_cuts_stop_once_they_are_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, short = tmp_path / "whole", tmp_path / "short"
    assert main([*SMALL, f"sweep_dir={whole}"]) == 0
    timed = "measure.steps_of_further_cuts=8"
    assert main([*SMALL, timed, f"sweep_dir={short}"]) == 0
    capsys.readouterr()
    tables, all_whole = load(short), load(whole)
    further = of_micro_batch(tables, 8, of_size=False)
    runs = tables.runs.set_index("run_id").loc[further]
    assert len(further) == 4
    assert (runs["stop_reason"].eq("timed") & runs["status"].eq("completed")).all()
    assert runs["optimizer_steps"].eq(8).all()
    assert runs["measured_optimizer_steps"].eq(6).all(), "none of them samples the noise"
    assert runs[["final_loss", "final_eval_loss"]].isna().all(axis=None)
    memory = all_whole.runs.set_index(all_whole.runs["run_id"] + "-t8")["peak_allocated_gib"]
    assert runs["peak_allocated_gib"].tolist() == memory.loc[further].tolist()
    # The steps are those of the whole training.
    assert_same_rows(curves(tables, further, 8), curves(all_whole, further, 8))
    reached = steps_to_target(curves_of(find_cells(tables.runs), tables), [1.5])
    assert sorted(reached["run_id"]) == of_micro_batch(tables, 8)
    # The same command without the setting trains the others as well.
    assert main([*SMALL, f"sweep_dir={short}"]) == 0
    assert load(short).runs["stop_reason"].value_counts().to_dict() == {"budget": 6, "timed": 4}
    # What was trained whole stays so, and is enough.
    smaller = "batch.micro_batch_size=4,8,16,32"
    assert main([*SMALL, smaller, timed, f"sweep_dir={short}"]) == 0
    runs = load(short).runs
    assert runs["stop_reason"].value_counts().to_dict() == {"budget": 6, "timed": 6}
    assert set(runs.loc[runs["micro_batch_size"].eq(4), "stop_reason"]) == {"timed"}


def test_a_cut_needs_steps_to_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL[1:], "measure.steps_of_further_cuts=2"]) == 2
    assert "warmup_optimizer_steps=2, which are not timed; given 2; with" in capsys.readouterr().err
