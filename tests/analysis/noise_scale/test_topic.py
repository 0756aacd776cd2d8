"""The noise scale in a report: what it says is what was put in."""

from __future__ import annotations

from typing import Any

import pytest

from batchscape.analysis import find_cells, load
from batchscape.analysis.noise_scale.estimate import cell_noise_scales
from batchscape.analysis.noise_scale.topic import noise_scale_section
from batchscape.analysis.report.notes import find_notes


def table_of(sweep: Any) -> Any:
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    estimates = cell_noise_scales(cells, tables.steps)
    section = noise_scale_section(cells, tables.steps, estimates, {})
    return section.tables[0]


def test_the_report_shows_what_was_put_in(build):
    sweep = build()
    for seed in range(3):
        sweep.run((1, 8, 4), seed=seed, optimizer_steps=200, noise=(90.0, 1.0))
        sweep.run((1, 32, 1), seed=seed, optimizer_steps=200)
    ((*_, samples, tokens, small, big, runs, n),) = table_of(sweep).texts.rows
    assert (small, big, runs, n) == ("8", "32", "3", "3 runs")
    assert float(samples.split(" [")[0]) == pytest.approx(90, rel=0.05)
    low, high = map(float, samples.split("[")[1].rstrip("]").split(", "))
    assert low < 90 < high < 180
    # 64 tokens a sample.
    assert float(tokens.split(" [")[0]) == pytest.approx(64 * 90, rel=0.05)


def test_no_signal_is_not_identified(build):
    sweep = build()
    sweep.run((1, 8, 4), optimizer_steps=60, noise=(90.0, 0.0))
    (row,) = table_of(sweep).texts.rows
    assert row[1].startswith("not identified")
    assert row[2].startswith("not identified")


def test_one_sampled_step_has_a_value_in_the_table_that_no_text_quotes(build):
    sweep = build()
    sweep.run((1, 8, 4), optimizer_steps=5, noise=(90.0, 1.0))
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    table = cell_noise_scales(cells, tables.steps)
    assert table["n"].tolist() == [1]
    section = noise_scale_section(cells, tables.steps, table, {})
    assert section.tables[0].texts.rows[0][1].endswith("(n = 1)")
    (estimate,) = section.headlines.values()
    assert not estimate.is_identified
    assert estimate.note == "not identified"


def test_classes_are_no_tokens(build):
    sweep = build()
    mlp = {"name": "mlp", "hidden_sizes": [8]}
    for seed in range(3):
        sweep.run(
            (1, 8, 4),
            seed=seed,
            model=mlp,
            data={"name": "digits"},
            noise=(90.0, 1.0),
            task="class",
        )
    grid = table_of(sweep).texts
    assert "noise scale (samples)" in grid.headers
    assert "noise scale (tokens)" not in grid.headers


def test_other_objectives_of_small_batches_are_left_out(build):
    sweep = build()
    label = {"not_invariant": "loss not additive over samples"}
    sweep.run((1, 8, 4), noise=(90.0, 1.0), ranks=label)
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    assert cell_noise_scales(cells, tables.steps).empty
    notes = find_notes(cells, {})
    assert any("The gradient noise scale of 1 run is left out" in note for note in notes)
