"""Ramps: the one that the critical batch allows, and what they lose; real runs end to end."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from quadratic import AGES, SMALL, WINDOW, known_critical_batch, rate_of, tables

from batchscape.analysis.branches.critical import critical_batches
from batchscape.analysis.branches.ramps import (
    against_first_batch,
    compared_ramps,
    find_ramp,
    follows,
    late_against_early,
)
from batchscape.analysis.branches.topic import branches_section
from batchscape.analysis.cells import find_cells
from batchscape.cli import main
from batchscape.errors import AnalysisError
from batchscape.record.tables import load


def study(seeds: int) -> tuple[Any, pd.DataFrame]:
    runs, steps = tables(seeds)
    runs = runs.assign(
        **{"scaling.learning_rate": "sqrt", "launch.command": "batchscape sweep a=1"}
    )
    return find_cells(runs), steps


def test_a_ramp_is_up_to_the_low_ends() -> None:
    cells, steps = study(24)
    lows = critical_batches(cells, steps)["low"].tolist()
    assert SMALL < 8 < lows[1] < 16 < lows[2] < 32
    ramp = find_ramp(cells, steps)
    expected = [(SMALL, 0)] + [(8, AGES[0])] * (lows[0] >= 8) + [(8, AGES[1])] * (lows[0] < 8)
    found = list(zip(ramp.batches, ramp.begins, strict=True))
    assert found == [*expected, (16, AGES[2])]
    rates = [rate_of(batch) for batch in ramp.batches]
    assert [float(rate) for rate in re.findall(r"rate ([\d.]+)", ramp.schedule)] == pytest.approx(
        rates, rel=5e-3
    )
    assert ramp.samples == AGES[2] + WINDOW
    first, second = ramp.begins[1:]
    own = first // 4 + (second - first) // 8 + (ramp.samples - second) // 16
    assert (ramp.optimizer_steps, ramp.steps_of_first_batch) == (own, ramp.samples // 4)
    sizes = ((first, 4), (second - first, 8), (ramp.samples - second, 16))
    stages = ",".join(f"{{samples:{n},global_batch_size:{batch}}}" for n, batch in sizes)
    assert ramp.command is not None
    assert f"'batch.ramp=[],[{stages}]'" in ramp.command
    assert f"Whether it loses nothing: {ramp.command}" in ramp.lines
    # Where no rule makes the rates, each stage has its own.
    ruleless = cells.runs.assign(**{"scaling.learning_rate": "none"})
    command = find_ramp(replace(cells, runs=ruleless), steps).command
    assert command is not None
    assert "global_batch_size:4,learning_rate_factor:1}," in command
    assert "global_batch_size:16,learning_rate_factor:2}]" in command


def test_what_follows_the_critical_batch_never_exceeds_it() -> None:
    cells, steps = study(24)
    ages = critical_batches(cells, steps)
    known = [known_critical_batch(age) for age in AGES]
    assert 8 < known[0] < known[1] < 16 < known[2]

    def is_followed(*stages: tuple[int, int, float]) -> bool:
        all_stages = ((0, SMALL, rate_of(SMALL)), *stages)
        return follows(pd.Series({"settings": "", "stages": all_stages}), ages)

    grows = [(AGES[0], 8, rate_of(8)), (AGES[2], 16, rate_of(16))]
    assert is_followed(*grows)
    assert not is_followed((32, 8, rate_of(8)), grows[1]), "before the first age that is known"
    assert not is_followed(grows[0], (AGES[1], 16, rate_of(16))), "beyond the critical batch"
    assert not is_followed((AGES[0], 8, rate_of(SMALL))), "by another rule"
    assert not is_followed((AGES[0], SMALL, rate_of(SMALL) / 2)), "it does not grow"
    assert not is_followed()


def test_no_ramp_is_made_of_what_is_not_identified() -> None:
    cells, steps = study(2)
    with pytest.raises(AnalysisError, match=r"not identified: .*too few seeds \(n = 2; 3 needed\)"):
        find_ramp(cells, steps)
    cells, steps = study(3)
    early = steps[steps["samples"].le(AGES[0] + WINDOW)]
    with pytest.raises(AnalysisError, match="not identified: at no age a batch of 8 is surely"):
        find_ramp(cells, early)
    constant = find_cells(cells.runs[cells.runs["ramp_samples"].isna()].drop(columns="cell"))
    with pytest.raises(AnalysisError, match="sweeps=critical_batch_by_branches"):
        find_ramp(constant, steps)


def ramps(lost: dict[tuple[int, int], float]) -> Any:
    """Return cells of batches of 4 throughout, and of ramps to 8 and 16 with what they lose."""
    runs, _ = tables(4)
    runs = runs[runs["ramp_samples"].isna() & runs["planned_samples"].eq(AGES[0] + WINDOW)]
    rows = [runs.assign(final_eval_loss=2.0 + runs["seed"])]
    for (eight, sixteen), loss in lost.items():
        name = f"{eight}-{sixteen}-" + runs["run_id"]
        stages = ((0, 4, rate_of(4)), (eight, 8, rate_of(8)), (sixteen, 16, rate_of(16)))
        rows.append(
            runs.assign(
                run_id=name,
                trajectory_id=name,
                global_batch_size=16,
                micro_batch_size=16,
                stages=[stages] * len(runs),
                ramp_samples=f"{eight}, {sixteen - eight}",
                final_eval_loss=2.0 + runs["seed"] * 1.001 + loss,
            )
        )
    return find_cells(pd.concat(rows, ignore_index=True))


def test_ramps_are_compared_by_pairs_of_seeds() -> None:
    cells = ramps({(64, 128): 0.3, (128, 256): 0.1})
    rows = compared_ramps(cells)
    early, late = against_first_batch(rows)
    assert (early.mean, late.mean) == pytest.approx((0.1015, 0.3015))
    (switch,) = late_against_early(rows)
    assert switch.mean == pytest.approx(-0.2)
    section = branches_section(cells, pd.DataFrame(columns=["samples"]))
    assert section is not None
    (table,) = section.tables
    # 16 of 4, 8 of 8 and 28 of 16, in place of 144; 32, 16 and 20.
    assert table.frame["optimizer_steps"].tolist() == [68, 52]
    assert [row[2] for row in table.texts.rows] == ["53%", "64%"]
    assert table.frame["verdict"].tolist() == ["worse", "worse"]
    (chart,) = section.pictures
    (lost,) = [mark.table for mark in chart.marks if mark.kind == "point" and not mark.name]
    (margin,) = [mark.table for mark in chart.marks if mark.name == "margin"]
    assert lost["value"].tolist() == pytest.approx([0.1015, 0.3015])
    assert (lost["value_low"] > margin["value"]).all()
    assert lost["name"].str.endswith(("(68 steps)", "(52 steps)")).all()


def test_budgets_and_cuts_that_are_timed_alone_are_kept_apart() -> None:
    runs = ramps({(64, 128): 0.3, (128, 256): 0.1}).runs.drop(columns=["cell"])
    longer = runs.assign(
        planned_samples=2 * runs["planned_samples"],
        run_id="longer-" + runs["run_id"],
        trajectory_id="longer-" + runs["trajectory_id"],
    )
    timed = runs.assign(run_id="a-" + runs["run_id"], final_eval_loss=np.nan, timed_steps=40.0)
    cells = find_cells(pd.concat([timed, runs, longer], ignore_index=True))
    section = branches_section(cells, pd.DataFrame(columns=["samples"]))
    assert section is not None
    frame = section.tables[0].frame.sort_values("optimizer_steps")
    # The longer budget adds its samples in batches of 16.
    more = int(runs["planned_samples"].iloc[0]) // 16
    assert frame["optimizer_steps"].tolist() == sorted([68, 52, 68 + more, 52 + more])
    assert frame["n"].eq(4).all()


def test_runs_that_change_at_one_age_are_its_branches() -> None:
    cells = find_cells(tables(3)[0])
    assert against_first_batch(compared_ramps(cells)) == []


def test_a_ramp_without_its_first_batch_has_no_comparison() -> None:
    cells = ramps({(64, 128): 0.3, (128, 256): 0.1})
    alone = find_cells(cells.runs[cells.runs["ramp_samples"].notna()].drop(columns="cell"))
    assert not against_first_batch(compared_ramps(alone))
    assert len(late_against_early(compared_ramps(alone))) == 1


SETTINGS = (
    *("model=mlp", "model.hidden_sizes=[8]", "data=digits", "optimizer=sgd", "scaling=sqrt"),
    *("scaling.reference_global_batch_size=4", "optimizer.learning_rate=0.02", "seed=0,1,2"),
    *("launcher.device=cpu", "launcher.share_beginnings=true", "tracker=none", "batch.ramp="),
    *("batch.micro_batch_size=null", "batch.gradient_accumulation_steps=2"),
    *("measure.warmup_optimizer_steps=1", "measure.noise_scale_every=1", "measure.memory=false"),
    *("evaluation.samples=32", "evaluation.every_samples=null", "checkpoint.every_s=null"),
    "measure.equivalence_margin=1",
)


def test_branches_of_real_runs_end_in_a_ramp_that_is_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [*SETTINGS, "budget.samples=192", "batch.global_batch_size=4,8,16"]
    ramp = settings.index("batch.ramp=")
    settings[ramp] = "batch.ramp=[{samples:64,global_batch_size:4}]"
    assert main(["sweep", *settings, "sweep_dir=s"]) == 0, capsys.readouterr()
    assert main(["report", "s"]) == 0
    assert "The largest global batch that loses at most 1 nats against 4" in capsys.readouterr().out
    table = pd.read_csv("s/report/tables/critical_batch_by_age.csv")
    assert table[["age_samples", "window_samples", "n"]].to_numpy().tolist() == [[64, 128, 3]]
    runs = load("s").runs
    assert table["run_ids"].str.split().str.len().tolist() == [len(runs)]
    assert main(["recommend", "s", "--ramp", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batches"] == [4, 16]
    assert found["begins"] == [0, 64]
    assert (found["optimizer_steps"], found["steps_of_first_batch"]) == (16 + 8, 48)
    # The command that verifies it adds nothing: its runs are there.
    arguments = found["command"].replace("'", "").split()[1:]
    assert main(["plan", *arguments[1:]]) == 0
    assert "Runs: 6" in capsys.readouterr().out
