"""Ramps: the one that the critical batch allows, and what they lose; real runs end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from quadratic import AGES, SMALL, WINDOW, tables

from batchscape.analysis.branches.critical import critical_batches
from batchscape.analysis.branches.ramps import (
    against_constant,
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
    batches, begins, rates = ramp.schedule
    expected = [(SMALL, 0)] + [(8, AGES[0])] * (lows[0] >= 8) + [(8, AGES[1])] * (lows[0] < 8)
    assert list(zip(batches, begins, strict=True)) == [*expected, (16, AGES[2])]
    assert rates == pytest.approx([rates[0] * (batch / SMALL) ** 0.5 for batch in batches])
    assert ramp.samples == AGES[2] + WINDOW
    first, second = begins[1:]
    steps_of_all = first // 4 + (second - first) // 8 + (ramp.samples - second) // 16
    assert f"takes {steps_of_all} optimizer steps in place of {ramp.samples // 4}" in ramp.lines[1]
    stages = (
        f"{{samples:{first},global_batch_size:4}},{{samples:{second - first},global_batch_size:8}},"
        f"{{samples:{ramp.samples - second},global_batch_size:16}}"
    )
    assert ramp.command is not None
    assert f"'batch.ramp=[],[{stages}]'" in ramp.command
    assert follows(ramp.schedule, "", critical_batches(cells, steps))
    early = ramp.schedule._replace(begins=(0, 32, AGES[0]))
    assert not follows(early, "", critical_batches(cells, steps))
    falling = ramp.schedule._replace(rates=tuple(reversed(rates)))
    assert not follows(falling, "", critical_batches(cells, steps))


def test_no_ramp_is_made_of_what_is_not_identified() -> None:
    cells, steps = study(2)
    with pytest.raises(AnalysisError, match=r"not identified: .*too few seeds \(n = 2; 3 needed\)"):
        find_ramp(cells, steps)
    cells, steps = study(3)
    with pytest.raises(AnalysisError, match="not identified: at no age a batch of 8 is surely"):
        find_ramp(cells, steps[steps["samples"].le(AGES[0] + WINDOW)])
    constant = find_cells(cells.runs[cells.runs["ramp"].isna()].drop(columns="cell"))
    with pytest.raises(AnalysisError, match="sweeps=critical_batch_by_branches"):
        find_ramp(constant, steps)


def ramps(lost: dict[tuple[int, ...], float]) -> Any:
    """Return cells of constant batches of 4 and of ramps to 8 and 16, each with what it loses."""
    runs, _ = tables(4)
    runs = runs[runs["ramp"].isna() & runs["planned_samples"].eq(AGES[0] + WINDOW)]
    rows = [runs.assign(final_eval_loss=2.0 + runs["seed"])]
    for begins, loss in lost.items():
        name = f"{begins}-" + runs["run_id"]
        rows.append(
            runs.assign(
                run_id=name,
                trajectory_id=name,
                global_batch_size=16,
                micro_batch_size=16,
                ramp="4\u21928\u219216",
                ramp_samples=", ".join(map(str, np.diff([0, *begins]))),
                final_eval_loss=2.0 + runs["seed"] * 1.001 + loss,
            )
        )
    return find_cells(pd.concat(rows, ignore_index=True))


def test_ramps_are_compared_by_pairs_of_seeds() -> None:
    cells = ramps({(64, 128): 0.3, (128, 256): 0.1})
    contrasts = against_constant(cells)
    means = {each.level.begins: each.mean for each in contrasts}
    assert means == pytest.approx({(0, 64, 128): 0.3015, (0, 128, 256): 0.1015})
    (late,) = late_against_early(cells)
    assert late.mean == pytest.approx(-0.2)
    section = branches_section(cells, pd.DataFrame(columns=["samples"]))
    assert section is not None
    (table,) = section.tables
    rows = {row[0]: row[1:3] for row in table.texts.rows}
    # 16 of 4, 8 of 8, 28 of 16, in place of 144.
    assert rows["4, 8 from 64, 16 from 128"] == ["52", "64%"]
    assert table.frame["verdict"].tolist() == ["worse", "worse"]


def test_one_ramp_alone_is_a_branch() -> None:
    cells = ramps({(64, 128): 0.3})
    assert not against_constant(cells)
    assert not late_against_early(cells)


def test_a_ramp_without_its_constant_batch_has_no_comparison() -> None:
    cells = ramps({(64, 128): 0.3, (128, 256): 0.1})
    alone = find_cells(cells.runs[cells.runs["ramp"].notna()].drop(columns="cell"))
    assert not against_constant(alone)
    assert len(late_against_early(alone)) == 1


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
    table = pd.read_csv("s/report/tables/critical_batch.csv")
    assert table[["age_samples", "window_samples", "n"]].to_numpy().tolist() == [[64, 128, 3]]
    runs = load("s").runs
    assert table["run_ids"].str.split().str.len().tolist() == [len(runs)]
    assert main(["recommend", "s", "--ramp", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batches"] == [4, 16]
    assert found["begins"] == [0, 64]
    assert found["optimizer_steps"] == 16 + 8
    # The command that verifies it adds nothing: its runs are there.
    arguments = found["command"].replace("'", "").split()[1:]
    assert main(["plan", *arguments[1:]]) == 0
    assert "Runs: 6" in capsys.readouterr().out
