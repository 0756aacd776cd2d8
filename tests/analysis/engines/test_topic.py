"""What the page says of engines, and of programs of others."""

import pandas as pd
import pytest

from batchscape.analysis import find_cells, load
from batchscape.analysis.engines.costs import engine_costs
from batchscape.analysis.engines.programs import observed_batches
from batchscape.analysis.engines.topic import engines_section
from batchscape.analysis.numbers import TIMES
from batchscape.record.files import read_json, write_json

FIVE = {"ddp": 1e-7, "fsdp": 2e-7, "accelerate": 1e-7, "deepspeed": 3e-7, "fabric": 0.0}


def section_of(sweep):
    tables = load(sweep.path)
    return engines_section(find_cells(tables.runs), tables)


@pytest.mark.slow
def test_five_engines_side_by_side(engines):
    every = {name: name == "deepspeed" for name in FIVE}
    section = section_of(engines(FIVE, cuts=[(1, 32, 1), (2, 8, 2)], seeds=(0,), every=every))
    # 3e-7 x 2 a step of the second cut, after 40 steps.
    assert f"differ by 2.4 {TIMES} 10⁻⁵ at most (deepspeed and fabric)" in section.answer[0]
    assert section.warnings == []
    losses, costs = section.tables
    assert len(losses.texts.rows) == 5 + 10
    assert len(costs.texts.rows) == 5 * 2
    two = {row[1]: row[-1] for row in costs.texts.rows if row[0].startswith("2")}
    assert (two["deepspeed"], two["fsdp"]) == ("every micro-step", "once")


@pytest.mark.slow
def test_engines_that_train_otherwise_are_said_loudly(engines):
    section = section_of(engines({"ddp": 0.0, "fsdp": 1e-3}))
    assert section.warnings == [
        "Engines differ by more than the margin of equivalence, 0.005: ddp and fsdp by 0.12. "
        "Their losses must not be pooled."
    ]


def test_costs_are_those_of_the_runs(engines):
    sweep = engines({"ddp": 0.0, "fsdp": 0.0}, seeds=(0, 1, 2))
    sweep.reject((2, 32, None), 32, "32 is no multiple of 2 x 32")
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    table = engine_costs(cells, tables.ranks)
    assert table["n"].tolist() == [3] * 6
    for row in table.to_dict("records"):
        cell_runs = cells.runs[cells.runs["cell"] == row["cell"]]
        assert row["step_time_s_mean"] == pytest.approx(
            cell_runs["step_time_s"].astype(float).mean()
        )
        assert row["exchanged_bytes"] == 1000
        assert row["n"] == 3
        assert row["run_ids"].count(";") == 2


@pytest.mark.slow
def test_times_that_are_not_valid_stay_out(build):
    sweep = build()
    for engine in ("ddp", "fsdp"):
        sweep.run((1, 32, 1), engine={"name": engine}, concurrent_runs=2)
    table = engine_costs(find_cells(load(sweep.path).runs), load(sweep.path).ranks)
    assert table["step_time_s_mean"].isna().all()
    assert table["peak_allocated_gib_mean"].notna().all()


def as_program(folder, observed):
    """Turn a run into one of a program, as if a command had been launched."""
    config = read_json(folder.config)
    config["config"]["engine"] = {"name": "command", "command": ["train"]}
    config["config"]["model"] = {"name": "external"}
    config["config"]["data"] = {"name": "external"}
    write_json(folder.config, config)
    if observed is not None:
        names = ("world_size", "micro_batch_size", "gradient_accumulation_steps")
        quantities = {name: observed.get(name) for name in (*names, "global_batch_size")}
        sources = {
            f"{name}_source": "not observed" if value is None else "the log"
            for name, value in quantities.items()
        }
        write_json(folder.command, {"observed": {**quantities, **sources}})


@pytest.fixture
def programs(build):
    sweep = build()
    as_program(sweep.run((2, 8, 2), seed=0), {"world_size": 2, "global_batch_size": 32})
    broken = sweep.run((2, 16, 1), seed=0, status="failed", reason="the plan says 2")
    as_program(broken, {"world_size": 1, "global_batch_size": 16})
    as_program(sweep.run((1, 8, 4), seed=0), {"world_size": 1})
    as_program(sweep.run((1, 32, 1), seed=0), None)
    return sweep


@pytest.mark.slow
def test_what_programs_were_seen_to_use(programs):
    cells = find_cells(load(programs.path).runs)
    table = observed_batches(cells)
    assert len(table) == 4
    agreement = {
        (row["planned_world_size"], row["planned_gradient_accumulation_steps"]): row["agrees"]
        for row in table.to_dict("records")
    }
    assert agreement[2, 2] is True
    assert agreement[2, 1] is False
    assert pd.isna(agreement[1, 4]), "ranks alone do not tell how large a batch was"
    assert pd.isna(agreement[1, 1])
    # What was observed is no setting that would tell cells apart.
    assert not any(name.startswith("observed.") for name in cells.settings)
    section = section_of(programs)
    assert section.answer == [
        "Of 4 runs of programs, 1 used the planned batch, 1 used another, 2 did not let their "
        "global batch be observed."
    ]
    assert section.warnings[0].startswith("Nothing confirms the global batch of 2 runs")
