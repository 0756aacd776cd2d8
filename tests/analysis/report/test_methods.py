from __future__ import annotations

import re
from typing import Any

from batchscape.analysis import find_cells, load
from batchscape.analysis.report.methods import methods
from batchscape.analysis.report.topic import Section


def said(sweeps: list[Any], *sections: Section) -> dict[str, str]:
    cells = find_cells(load(*(sweep.path for sweep in sweeps)).runs)
    return {title: " ".join(text) for title, text in methods(cells, sections).items()}


def test_what_varied_and_what_was_fixed_are_told_apart_by_sweep(build):
    cuts, rates = build("cuts", "cuts"), build("rates", "rates")
    for seed in (0, 1, 2):
        for geometry in ((1, 32, 1), (2, 8, 2)):
            cuts.run(geometry, seed=seed)
    cuts.reject((3, None, None), 32, "no such cut")
    for seed in (0, 7):
        for rate in (0.02, 0.004, 0.1):
            rates.run((1, 8, 1), seed=seed, optimizer__learning_rate=rate)
    text = said([cuts, rates])
    assert "13 runs in 6 cells (12 completed, 1 rejected)" in text["Runs"]
    assert (
        "cuts (6 completed, 1 rejected): devices 1, 2; micro-batch 8, 32; accumulation 1, 2; "
        "global batch 32; optimizer learning rate 0.001; seed 0, 1, 2." in text["Runs"]
    )
    assert (
        "rates (6 completed): devices 1; micro-batch 8; accumulation 1; global batch 8; "
        "optimizer learning rate 0.004, 0.02, 0.1; seed 0, 7." in text["Runs"]
    )
    assert "Model: gpt (n layers 2, n heads 4, d model 128" in text["Held fixed"]
    assert "Data: stdlib (held out pct 5, sequence length 64" in text["Held fixed"]
    assert "learning rate 0" not in text["Held fixed"]
    # 40 optimizer steps of 32 and of 8 samples.
    assert "A run was to see 320, 1280 samples, in 40 optimizer steps." in text["Held fixed"]
    assert "Completed runs of a cell: 2, 3." in text["Seeds and intervals"]


def test_a_setting_that_some_runs_lack_is_not_held_fixed(build):
    sweep = build()
    sweep.run()
    sweep.run(optimizer={"name": "sgd", "learning_rate": 0.1, "momentum": 0.85})
    text = said([sweep])
    assert re.search(r"optimizer (adamw, sgd|sgd, adamw);", text["Runs"])
    assert "momentum" not in text["Held fixed"]
    assert "beta1" not in text["Held fixed"]


def test_rules_of_scaling_stand_beside_the_settings_as_they_are_written(build):
    sweep = build()
    for micro in (8, 32):
        rules = {"reference_global_batch_size": 16, "learning_rate": "linear"}
        sweep.run((1, micro, 1), scaling=rules)
    text = said([sweep])["Held fixed"]
    assert "Optimizer: adamw (" in text
    assert "is given as written, before the rule" in text
    assert "Scaling: reference global batch size 16, learning rate linear" in text


def test_times_machines_and_what_was_left_out(build):
    sweep = build()
    sweep.run((1, 8, 4), measure__warmup_optimizer_steps=3)
    sweep.run((4, 8, 1), measure__warmup_optimizer_steps=3)
    sweep.run((1, 8, 2), measure__warmup_optimizer_steps=3, status="diverged", reason="NaN", done=5)
    sweep.run(
        (1, 8, 1), measure__warmup_optimizer_steps=3, concurrent_runs=2, hardware="Another CPU"
    )
    text = said([sweep])
    assert "without the first 3;" in text["Times"]
    assert "Each launcher ran up to 2 runs at a time." in text["Times"]
    assert "The times of 1 of 3 completed runs count." in text["Times"]
    assert "Those of 1 do not: oversubscribed: 4 ranks on 2 cores." in text["Times"]
    assert "Those of 1 do not: 2 runs at the same time." in text["Times"]
    assert "1 diverged or pruned run stay" not in text["Seeds and intervals"]
    assert "1 run diverged or was pruned" in text["Seeds and intervals"]
    assert "3 runs on Example CPU, 2 cores, cpu, float32" in text["Machines and software"]
    assert "1 run on Another CPU" in text["Machines and software"]


def test_without_a_launched_run_there_are_no_methods(build):
    sweep = build()
    sweep.reject((3, None, None), 32, "no such cut")
    assert said([sweep]) == {
        "Runs": "1 run in 1 cell (1 rejected); the runs of a cell differ in no setting that "
        "decides loss, memory or time but seed and timing repeat. fixed_global_batch: none of its "
        "1 run was launched."
    }
