"""What the page says of engines, and of programs of others."""

import pandas as pd
import pytest

from batchscape.analysis import find_cells, load
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
    # 2e-7 x 2 a step of the second cut, after 40 steps.
    assert f"differ by 1.6 {TIMES} 10⁻⁵ at most (deepspeed and ddp)" in section.answer[0]
    assert section.answer[1] == (
        "Exchange of gradients: deepspeed: in every micro-step; "
        "accelerate, ddp, fabric, fsdp: once an optimizer step."
    )
    assert section.warnings == []
    assert len(section.tables[0].texts.rows) == 4 * 2


@pytest.mark.slow
def test_engines_that_train_otherwise_are_said_loudly(engines):
    section = section_of(engines({"ddp": 0.0, "fsdp": 1e-3}))
    assert section.warnings == [
        "Engines differ by more than the margin of equivalence, 0.005. Their losses must not be "
        "pooled."
    ]


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
