from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from batchscape.analysis import compare, find_cells, load, write_report
from batchscape.analysis.numbers import TIMES, with_spread
from batchscape.analysis.report.notes import find_notes
from batchscape.analysis.report.sections import in_short, sentence_markdown
from batchscape.analysis.report.table import Table
from batchscape.analysis.report.tables import comparison_table
from batchscape.analysis.report.topic import Section
from batchscape.analysis.report.write import Report
from batchscape.analysis.report.writers import escape_markdown
from batchscape.errors import RecordError

DIGITS = {
    "model": {"name": "mlp", "hidden_sizes": [8]},
    "data": {"name": "digits"},
    "task": "class",
}


def table_of(*sweeps: Any) -> Table:
    """Return the comparison of some sweeps."""
    cells = find_cells(load(*(sweep.path for sweep in sweeps)).runs)
    return comparison_table(compare(cells), cells)


def figures(report: Report) -> set[str]:
    return {file.stem for file in report.files if file.suffix == ".png"}


def shown(report: Report, width: int = 100) -> str:
    file = StringIO()
    report.render(Console(file=file, width=width))
    return file.getvalue()


def page_of(report: Report) -> str:
    return report.files[0].read_text()


def comparison_of(report: Report) -> str:
    """Return the comparison as the page has it."""
    return page_of(report).split("## Comparison\n\n")[1].split("\n\nFiles: ")[0]


def check_first_screen(report: Report) -> None:
    page = page_of(report)
    # A reader sees the answer in ten seconds.
    answer, _, below = page.partition("\n## ")
    assert len(answer.split()) <= 400
    terminal = shown(report)
    sentences = in_short(report.sections)
    assert sentences[0].startswith("Use ")
    assert 4 <= len(sentences) <= 5
    for number, sentence in enumerate(sentences, start=1):
        assert f"\n{number}. {escape_markdown(sentence)}\n" in answer
        assert f"{number}. {sentence}" in " ".join(terminal.split())
    assert f"Report: {report.files[0]}" in terminal
    # What the numbers cannot carry stands before them.
    assert below.startswith("Left out, and to be kept in mind\n")


def check_links(report: Report) -> None:
    text = page_of(report)
    linked = [report.out / path for path in re.findall(r"\]\(([^)]+)\)", text)]
    assert all(path.exists() for path in linked)
    names = ("paper", "macros", "methods", "results", "comparison", "appendix", "everything")
    paper = {report.out / "paper" / f"{name}.tex" for name in names}
    paper.add(report.out / "report_files.txt")
    files = {file for file in report.files if file.suffix != ".pdf"}
    assert files - set(linked) == {report.files[0], *paper}
    for section in report.sections:
        for text_of_section in (*section.answer, *section.settling_runs, *section.warnings):
            sentence, name, arguments = text_of_section.partition("batchscape ")
            assert escape_markdown(sentence).rstrip() in text
            # A command is copied from there as it stands.
            assert name + arguments in text
    assert all(escape_markdown(note) in text for note in report.notes)


@pytest.mark.slow
def test_a_whole_report_says_the_same_in_csv_markdown_latex_and_terminal(build):
    sweep = build().fork()
    report = write_report([sweep.path])
    assert report.out == sweep.path / "report"
    assert report.files[0] == sweep.path / "report" / "report.md"
    assert figures(report) == {
        "loss",
        "heat_map",
        "cost",
        "memory",
        "step_time",
        "equivalence",
        "divergence",
        "memory_model",
        "pareto",
    }
    for file in report.files:
        if file.suffix == ".png":
            assert file.read_bytes().startswith(b"\x89PNG")
            pdf = report.out / "paper" / "figures" / f"{file.stem}.pdf"
            assert pdf.read_bytes().startswith(b"%PDF")
    page = report.files[0].read_text()
    assert "Which cut of a global batch of 32 is cheapest" in page
    check_first_screen(report)
    assert "oversubscribed: 4 ranks on 2 cores" in page
    assert "Example CPU, 2 cores" in page
    # Footnotes stand under the table.
    markdown = comparison_of(report)
    assert " ± " in markdown
    assert "<sup>a</sup> " in markdown
    check_links(report)

    tables = report.out / "tables"
    comparison = pd.read_csv(tables / "comparison.csv")
    assert comparison["status"].tolist() == ["completed"] * 4 + ["rejected"] * 2
    row = comparison.iloc[2]
    time = f"{1000 * row['step_time_s_mean']:.2f}"
    latex = (report.out / "paper" / "tables" / "comparison.tex").read_text()
    assert f"| 2{TIMES}8{TIMES}2=32 | completed | 3 |" in markdown
    (cells,) = [line for line in markdown.splitlines() if f"2{TIMES}8{TIMES}2=32" in line]
    loss = with_spread(row["final_loss_mean"], row["final_loss_ci95"])
    assert loss in cells
    assert time[:4] in markdown
    assert loss.replace(" ± ", r"~$\pm$~") in latex
    assert r"2$\times$8$\times$2=32 & completed & 3 &" in latex
    text = shown(report, width=140)
    assert loss.replace("± ", "±") in text
    assert "must be a multiple of 2 x 32" in text
    assert str(report.files[0]) in text.replace("\n", "")
    runs = pd.read_csv(tables / "runs.csv")
    for ids in comparison["run_ids"]:
        assert set(ids.split(";")) <= set(runs["run_id"])


def test_the_first_screen_counts_the_warnings_of_a_topic():
    sections = [
        Section("One", first_screen=["Use it.", "It is fast."], warnings=["a", "b"]),
        Section("Two", answer=["Yes.", "Because."], warnings=["c"]),
        Section("Three", answer=["No."]),
        Section("Four", answer=["Not told: batchscape sweep sweeps=x"], warnings=["d"]),
    ]
    expected = ["Use it. (2 warnings)", "It is fast. (2 warnings)", "Yes. (1 warning)", "No."]
    expected.append("Not told: batchscape sweep sweeps=x")
    assert in_short(sections) == expected


def test_only_what_ends_in_a_command_has_one():
    text = "A study that ships with batchscape is named: batchscape sweep sweeps=a_b x='[1]' && b"
    assert sentence_markdown(text) == (
        "A study that ships with batchscape is named: `batchscape sweep sweeps=a_b x='[1]' && b`"
    )
    assert sentence_markdown("Ships with batchscape is a_b.", "**") == (
        "**Ships with batchscape is a\\_b.**"
    )


@pytest.mark.slow
def test_only_rejected_cells(build):
    sweep = build()
    sweep.reject((16, 7, 2), 224, "16 devices are needed, this machine has 2")
    report = write_report([sweep.path])
    assert figures(report) == set()
    assert report.comparison["status"].tolist() == ["rejected"]
    page = report.files[0].read_text()
    assert "![" not in page
    assert "No run has completed" in page
    assert "16 devices are needed" in shown(report)


@pytest.mark.slow
def test_no_run_has_completed(build):
    sweep = build()
    sweep.run(seed=0, status="running", done=4)
    sweep.run(seed=1, status="pending")
    sweep.run(seed=2, status="interrupted", reason="SIGTERM", done=4)
    sweep.run(seed=3, status="failed", reason="rank 1 exited with 3 [see log]", done=2)
    report = write_report([sweep.path])
    assert figures(report) == {"loss"}
    text = " ".join(shown(report).split())
    assert "not finished: 1 interrupted, 1 pending, 1 running" in text
    assert "rank 1 exited with 3 [see log]" in text
    ends = "1 failed, 1 interrupted, 1 pending, 1 running"
    assert f"1. No run has completed ({ends}), so there is nothing to compare." in text


@pytest.mark.slow
def test_a_single_run(build):
    sweep = build()
    sweep.run()
    report = write_report([sweep.path])
    assert figures(report) == {"loss", "memory", "step_time"}
    assert "no spread can be given" in page_of(report)
    assert "±" not in comparison_of(report).splitlines()[2]
    assert not (report.out / "tables" / "decompositions.csv").exists()


@pytest.mark.slow
def test_only_diverged_runs(build):
    sweep = build()
    sweep.run(status="diverged", reason="NaN", loss=lambda step: np.where(step < 5, step, np.nan))
    report = write_report([sweep.path])
    assert figures(report) == {"loss"}
    assert report.comparison["final_loss_mean"].isna().all()


@pytest.mark.parametrize("settings", [DIGITS, {"task": "other"}])
def test_samples_that_are_no_sequences_have_no_tokens(build, settings):
    sweep = build()
    sweep.run((1, 32, 1), **settings)
    sweep.run((1, 8, 4), **settings)
    runs = load(sweep.path).runs
    assert runs["tokens_per_s"].isna().all()
    assert runs["samples_per_s"].notna().all()


def test_padded_data_and_mixed_global_batches(build):
    sweep = build()
    for layout in ("packed", "padded"):
        for geometry in ((1, 8, 1), (1, 8, 4), (2, 8, 2)):
            sweep.run(geometry, data__layout=layout)
    cells = find_cells(load(sweep.path).runs)
    comparison = compare(cells)
    assert comparison["global_batch_size"].tolist() == [8, 32, 32] * 2
    assert comparison["data.layout"].tolist() == ["packed"] * 3 + ["padded"] * 3


def test_mfu_names_its_peak(build):
    sweep = build()
    use = {"model_flops_per_sample": 1e9, "peak_tflops": 0.5, "peak_source": "Some datasheet"}
    sweep.run((1, 32, 1), ranks=use)
    sweep.run((1, 8, 4), ranks=use)
    table = table_of(sweep)
    row = table.frame.iloc[0]
    expected = 100 * 1e9 * row["samples_per_s_mean"] / 0.5e12
    assert row["mfu_pct_mean"] == pytest.approx(expected)
    assert "0.5 (Some datasheet)" in " ".join(table.notes)


def test_cells_that_are_not_invariant_have_a_footnote(build):
    sweep = build()
    for geometry in ((1, 32, 1), (1, 8, 4)):
        sweep.run(geometry, ranks={"not_invariant": "BatchNorm"})
    texts = table_of(sweep).texts
    assert "not decomposition-invariant: BatchNorm" in texts.footnotes.values()


def test_ramps_that_differ_in_the_learning_rate_alone_are_one_group(build):
    sweep = build()
    for rate in (0.001, 0.002):
        optimizer = {"name": "adamw", "learning_rate": rate}
        sweep.run((1, 32, 1), ramp=((320, (1, 8, 1)),), ramp_factor=2.0, optimizer=optimizer)
    cells = find_cells(load(sweep.path).runs).table
    assert len(cells) == 2
    assert "ramp_learning_rate_factors" not in cells, "they do not differ in it"


def test_ramps_of_other_batches_samples_or_rates_are_other_cells(build):
    sweep = build()
    sweep.run((1, 32, 1))
    for seed, samples in enumerate((320, 640)):
        sweep.run((1, 32, 1), ramp=((samples, (1, 8, 1)),), seed=seed)
    cells = find_cells(load(sweep.path).runs).table
    assert cells["ramp_samples"].tolist() == ["320", "640", "null"]
    rates = build("rates")
    for seed, factor in enumerate((1.0, 2.0)):
        rates.run((1, 32, 1), ramp=((320, (1, 8, 1)),), ramp_factor=factor, seed=seed)
    cells = find_cells(load(rates.path).runs).table
    assert cells["ramp_learning_rate_factors"].tolist() == ["2\u21921", "null"]


@pytest.mark.slow
def test_damaged_folders_are_listed_and_the_rest_is_shown(build):
    sweep = build()
    sweep.run(seed=0)
    torn, changed, empty = (sweep.run(seed=seed) for seed in (1, 2, 3))
    torn.status.write_text('{"format_ver')
    changed.parquet("steps").write_bytes(b"not parquet")
    empty.config.write_text('{"format_version": 4}')
    report = write_report([sweep.path], with_charts=False)
    assert report.comparison["n"].tolist() == [1]
    page = page_of(report).replace("\\", "")
    for folder in (torn, changed, empty):
        assert f"Damaged, and in no table: {folder.path}" in page


def test_nothing_readable_is_refused(build, tmp_path):
    sweep = build()
    sweep.run().config.unlink()
    with pytest.raises(RecordError, match=r"no run folder could be read:\n.*config\.json"):
        write_report([sweep.path])
    with pytest.raises(RecordError, match="does not exist"):
        write_report([tmp_path / "nowhere"])
    with pytest.raises(RecordError, match="at least one sweep folder"):
        write_report([])


def test_several_sweeps_side_by_side(build):
    sweeps = here, there, task = build("here"), build("there", "other"), build("task", "digits")
    for seed in (0, 1):
        for geometry in ((1, 32, 1), (1, 8, 4)):
            here.run(geometry, seed=seed)
            there.run(geometry, seed=seed, device_type="cuda", hardware="Accelerator")
            task.run(geometry, seed=seed, **DIGITS)
    table = table_of(*sweeps)
    assert len(table.frame) == 6
    assert table.frame["n"].tolist() == [2] * 6
    assert table.frame["throughput_ratio"].count() == 6
    headers = " ".join(table.texts.headers)
    assert "tokens/s" in headers
    assert "samples/s" in headers


def test_a_folder_named_twice_changes_nothing_and_a_copy_is_refused(build, tmp_path):
    sweep = build().fork()
    copy = tmp_path / "copy"
    shutil.copytree(sweep.path, copy)
    once = compare(find_cells(load(sweep.path).runs))
    assert once["n"].tolist() == [3] * 6
    tables = load(sweep.path, sweep.path, sweep.path / "runs" / "..")
    pd.testing.assert_frame_equal(compare(find_cells(tables.runs)), once)
    with pytest.raises(RecordError, match=r"is a copy of .* would count twice"):
        write_report([sweep.path, copy], with_charts=False)


def test_cells_show_how_many_of_their_runs_completed(build):
    sweep = build()
    for seed in (0, 1):
        sweep.run(seed=seed)
    sweep.run(seed=2, status="failed", reason="out of luck", done=4)
    table = table_of(sweep)
    (row,) = table.texts.rows
    assert "2 of 3" in row
    assert any("over the completed runs only" in note for note in table.notes)
    losses = load(sweep.path).runs.dropna(subset="final_loss")
    completed = losses[losses["status"] == "completed"]["final_loss"]
    assert table.frame["final_loss_mean"].item() == pytest.approx(completed.mean())


def test_the_same_runs_in_two_folders_are_counted_once_for_losses(build):
    one, two = build("one"), build("two")
    for seed in (0, 1):
        one.run(seed=seed)
        two.run(seed=seed, core_wait=0.01)
    cells = find_cells(load(one.path, two.path).runs)
    row = compare(cells).iloc[0]
    assert (row["n"], row["final_loss_n"]) == (4, 2)
    assert any("more than one sweep folder" in note for note in find_notes(cells, {}))


@pytest.mark.slow
def test_a_report_removes_only_what_an_earlier_one_wrote(build, tmp_path):
    sweep = build()
    sweep.run()
    out = write_report([sweep.path], with_charts=False).out
    ours = ["tables/gone.csv", "paper/tables/gone.tex", "paper/figures/gone.pdf"]
    theirs = ["tables/mine.csv", "figures/mine.png"]
    theirs += ["paper/figures/architecture.pdf", "paper/tables/related_work.tex", "paper/mine.tex"]
    for name in (*ours, *theirs):
        (out / name).write_text("")
    (tmp_path / "elsewhere.csv").write_text("precious")
    listing = out / "report_files.txt"
    outside = ["../elsewhere.csv", str(tmp_path / "elsewhere.csv"), "paper/paper.tex", "", "tables"]
    listing.write_text("\n".join([*listing.read_text().splitlines(), *ours, *outside]))
    report = write_report([sweep.path], with_charts=False)
    remaining = {path for path in out.rglob("*") if path.is_file()}
    assert remaining == {*report.files, *(out / name for name in theirs)}
    assert (tmp_path / "elsewhere.csv").read_text() == "precious"
    names = {path.relative_to(out).as_posix() for path in report.files}
    assert set(listing.read_text().splitlines()) == names - {"report_files.txt"}


@pytest.mark.slow
def test_a_report_after_a_killed_one_has_the_files_of_a_fresh_one(build, tmp_path):
    """Of a sweep with more tables, killed at its first one; then of a sweep with fewer."""
    more, less = build("more").fork(), build("less")
    less.run()
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    code = (
        "import sys, pathlib; from batchscape.analysis import write_report; "
        "sweep, out = map(pathlib.Path, sys.argv[1:]); "
        "write_report([sweep], out, with_charts=False)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(more.path), str(out)]) as process:
        while not (out / "tables" / "comparison.csv").exists():
            assert process.poll() is None
            time.sleep(0.001)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    torn = {path for path in out.rglob("*") if path.is_file()}
    listed = set((out / "report_files.txt").read_text().splitlines())
    expected = {*listed, "report_files.txt", "mine.txt"}
    assert {path.relative_to(out).as_posix() for path in torn} <= expected
    fresh = write_report([less.path], tmp_path / "fresh", with_charts=False)
    write_report([less.path], out, with_charts=False)
    remaining = {path.relative_to(out) for path in out.rglob("*") if path.is_file()}
    assert remaining == {*(path.relative_to(fresh.out) for path in fresh.files), Path("mine.txt")}
    assert (out / "mine.txt").read_text() == "mine"


@pytest.mark.slow
def test_the_analysis_needs_no_runtime():
    code = (
        "import sys, batchscape.analysis; "
        "print({'torch', 'hydra', 'wandb', 'omegaconf'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_cell_that_lacks_something_has_a_footnote(build):
    sweep = build()
    sweep.run(seed=0, stop_reason="target")
    sweep.run(seed=1)
    sweep.run((1, 16, 2), seed=0, status="pruned", done=4)
    sweep.run((1, 8, 4), seed=0, status="failed", reason="out of luck", done=4)
    texts = table_of(sweep).texts
    notes = [[texts.footnotes[mark] for mark in marks] for marks in texts.marks]
    stopped = "1 of 2 stopped at a target loss: final losses are those there"
    assert {stopped} | {"pruned"} | {"out of luck"} <= {note for row in notes for note in row}
    assert all(notes)
