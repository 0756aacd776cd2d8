"""The noise scale in a report: what it says is what was put in."""

from __future__ import annotations

from typing import Any

import pytest

from batchscape.analysis import find_cells, load, write_report
from batchscape.analysis.noise_scale.estimate import cell_noise_scales, noise_scale_curves
from batchscape.analysis.noise_scale.figures import noise_scale_charts
from batchscape.analysis.noise_scale.topic import noise_scale_section
from batchscape.analysis.report.notes import find_notes

pytestmark = pytest.mark.slow


def table_of(sweep: Any) -> Any:
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    estimates = cell_noise_scales(cells, tables.steps)
    section = noise_scale_section(cells, tables.steps, estimates, {})
    assert section is not None
    return section.tables[0]


def test_the_report_shows_what_was_put_in(build: Any) -> None:
    sweep = build()
    for seed in range(3):
        sweep.run((1, 8, 4), seed=seed, optimizer_steps=200, noise=(90.0, 1.0))
        sweep.run((1, 32, 1), seed=seed, optimizer_steps=200)
    report = write_report([sweep.path], figures=False)
    assert len((report.out / "tables" / "noise_scale.csv").read_text().splitlines()) == 2
    grid = report.tables["noise_scale"].texts
    ((*_, samples, tokens, small, big, runs, n),) = grid.rows
    assert (small, big, runs, n) == ("8", "32", "3", "3 runs")
    assert float(samples.split(" [")[0]) == pytest.approx(90, rel=0.05)
    low, high = map(float, samples.split("[")[1].rstrip("]").split(", "))
    assert low < 90 < high < 180
    # 64 tokens a sample.
    assert float(tokens.split(" [")[0]) == pytest.approx(64 * 90, rel=0.05)


def test_no_signal_is_not_identified(build: Any) -> None:
    sweep = build()
    sweep.run((1, 8, 4), optimizer_steps=60, noise=(90.0, 0.0))
    (row,) = table_of(sweep).texts.rows
    assert row[1].startswith("not identified")
    assert row[2].startswith("not identified")


def test_one_sampled_step_has_a_value_in_the_table_that_no_text_quotes(build: Any) -> None:
    sweep = build()
    sweep.run((1, 8, 4), optimizer_steps=5, noise=(90.0, 1.0))
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    table = cell_noise_scales(cells, tables.steps)
    assert table["n"].tolist() == [1]
    section = noise_scale_section(cells, tables.steps, table, {})
    assert section is not None
    assert section.tables[0].texts.rows[0][1].endswith("(n = 1)")
    (estimate,) = section.headlines.values()
    assert not estimate.is_identified
    assert estimate.note == "not identified"


def test_classes_are_no_tokens(build: Any) -> None:
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


def test_other_objectives_of_small_batches_are_left_out(build: Any) -> None:
    sweep = build()
    label = {"not_invariant": "loss not additive over samples"}
    sweep.run((1, 8, 4), noise=(90.0, 1.0), ranks=label)
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    assert cell_noise_scales(cells, tables.steps).empty
    notes = find_notes(cells, {})
    assert any("The gradient noise scale of 1 run is left out" in note for note in notes)


def test_settings_are_a_choice(build: Any) -> None:
    sweep = build()
    for rate, noise in ((0.001, 30.0), (0.002, 90.0)):
        for seed in range(3):
            sweep.run(
                (1, 8, 4),
                seed=seed,
                optimizer_steps=200,
                noise=(noise, 1.0),
                optimizer__learning_rate=rate,
            )
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    table = cells.table.join(cell_noise_scales(cells, tables.steps), how="inner")
    *_, chart = noise_scale_charts(cells, table, noise_scale_curves(cells, tables.steps), [])
    (choice,) = chart.choices
    assert list(choice.options.values()) == ["learning rate 0.001", "learning rate 0.002"]
    rows = next(marks.table for marks in chart.marks if marks.kind == "line")
    for option, noise in zip(choice.options, (30, 90), strict=True):
        option_rows = rows[[option in options for options in rows["setting"]]]
        assert option_rows["estimate"].median() == pytest.approx(noise, rel=0.2)


def test_what_is_equal_when_written_is_written_once(build: Any) -> None:
    sweep = build()
    for micro in (4, 8):
        for seed in range(3):
            sweep.run((1, micro, 32 // micro), seed=seed, optimizer_steps=50, noise=(90.0, 1.0))
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    estimates = cell_noise_scales(cells, tables.steps)
    estimates["estimate"] = [7.651, 7.652]
    section = noise_scale_section(cells, tables.steps, estimates, {})
    assert section is not None
    assert section.answer[0].startswith("The gradient noise scale is 7.65 samples over")
