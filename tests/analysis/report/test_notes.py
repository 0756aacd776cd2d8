from __future__ import annotations

import json
from typing import Any

from batchscape.analysis import find_cells, load
from batchscape.analysis.report.notes import find_notes
from batchscape.record.files import read_json, write_json


def notes_of(sweep: Any) -> str:
    tables = load(sweep.path)
    return "\n".join(find_notes(find_cells(tables.runs), tables.damaged))


def test_rejected_and_oversubscribed(build):
    notes = notes_of(build().fork(seeds=(0, 1)))
    assert "2 cells (4 runs)" in notes
    assert "2 runs are left out (oversubscribed: 4 ranks on 2 cores)" in notes


def test_a_busy_machine(build):
    sweep = build()
    for seed, share in enumerate((0.04, 0.06, 0.08, 0.3)):
        sweep.run(seed=seed, core_wait=share)
    sweep.run((4, 8, 1), core_wait=0.9)
    assert "In 2 of 3 runs with valid times the training waited for a core" in notes_of(sweep)
    assert "(at most 8 %; core_wait_pct)" in notes_of(sweep)
    excluded = "Times and throughput of 1 run are left out (other work took the core for more than"
    assert excluded in notes_of(sweep)


def test_many_failures_are_counted(build):
    sweep = build()
    for seed in range(13):
        sweep.run(seed=seed, status="failed", reason="out of luck", done=1)
    notes = notes_of(sweep)
    assert notes.count("is failed: out of luck.") == 10
    assert "3 more runs are failed" in notes


def test_what_the_metrics_of_a_program_lack_is_said(build):
    sweep = build()
    for seed in range(3):
        sweep.run(seed=seed, reason="its metrics begin late" if seed else None)
    assert "Of 2 completed runs (" in notes_of(sweep)
    assert "): its metrics begin late." in notes_of(sweep)


def test_targets_labels_and_missing_losses(build):
    sweep = build()
    label = {"not_invariant": "dropout 0.1"}
    sweep.run(seed=0, ranks=label, stop_reason="target")
    sweep.run(seed=1, loss=lambda step: float("nan") * step)
    unevaluated = sweep.run(seed=2, evaluated=False)
    assert unevaluated.parquet("evals").exists()
    notes = notes_of(sweep)
    assert "1 run stopped at a target loss" in notes
    assert "Not decomposition-invariant (dropout 0.1): 1 run." in notes
    assert "1 run completed without a finite final loss; " in notes
    assert "1 run completed without a finite final eval loss; " in notes


def test_a_warmup_that_outlasts_the_training_is_noted(build):
    sweep = build()
    sweep.run(schedule={"name": "constant", "warmup_samples": 40 * 32})
    sweep.run(seed=1, schedule={"name": "constant", "warmup_samples": 40 * 32 - 1})
    assert "In 1 run the warm-up lasts as long as the training" in notes_of(sweep)


def test_times_without_a_measured_step_are_left_out_with_a_reason(build):
    sweep = build()
    sweep.run(optimizer_steps=5)
    assert "no optimizer step was measured" in notes_of(sweep)


def test_mixed_software_in_a_cell(build):
    sweep = build()
    sweep.run(seed=0)
    other = sweep.run(seed=1)
    text = json.dumps(read_json(other.environment))
    text = text.replace("2.9.0", "2.10.0").replace("0.1.0", "0.2.0")
    write_json(other.environment, json.loads(text))
    assert "Some cells hold runs that differ in batchscape, packages.torch." in notes_of(sweep)


def test_equal_settings_but_another_trajectory(build):
    sweep = build()
    sweep.run()
    runs = load(sweep.path).runs
    twice = find_cells(runs.loc[[0, 0]].assign(trajectory_id=["a", "b"], run_id=["a", "b"]))
    assert any("another trajectory_id" in note for note in find_notes(twice, {}))


def noted(sweep: Any, **figures: float | str) -> None:
    """Give the latest run figures of a device in its summary."""
    path = max(sweep.path.glob("runs/*/status.json"), key=lambda path: path.stat().st_mtime_ns)
    content = read_json(path)
    write_json(path, {**content, "summary": {**content["summary"], **figures}})


def test_time_between_steps_is_told_where_it_is_much(build):
    sweep = build()
    for seed, share in enumerate((0.5, 4.9, 5.1, 23.0)):
        sweep.run(seed=seed)
        noted(sweep, gap_pct=share)
    notes = notes_of(sweep)
    assert (
        "In 2 of 4 runs with valid times gaps between optimizer steps take more than 5 %" in notes
    )
    assert "(at most 23 %; gap_pct)" in notes


def test_what_happened_to_runs_is_counted(build):
    sweep = build()
    for seed, (retries, skipped) in enumerate(((0, 2), (0, 1), (3, 0))):
        sweep.run(seed=seed)
        noted(
            sweep,
            allocator_retries=retries,
            skipped_optimizer_steps=skipped,
            throttled=seed == 1,
            power_capped=[None, False, True][seed],
        )
    notes = notes_of(sweep)
    assert "In 1 run: The allocator had no room left" in notes
    assert "In 2 runs: Updates were left out" in notes
    assert "In 1 run: Heat or the hardware's protection" in notes
    assert "In 1 run: The power limit" in notes


def test_different_kernels_of_attention_are_told(build):
    sweep = build()
    for seed, kernel in enumerate(("flash", "math")):
        sweep.run((1, 32, 1), seed=seed)
        noted(sweep, attention_kernel=kernel)
    assert "kernels" not in notes_of(sweep), "of two trainings"
    sweep.run((1, 8, 4), seed=0)
    noted(sweep, attention_kernel="efficient")
    sentence = "different kernels of attention (flash in 1 run, efficient in 1 run)"
    assert sentence in notes_of(sweep)
