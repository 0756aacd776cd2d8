"""What leaves does nothing where it arrives: no escape is obeyed, no cell run, no secret told."""

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Group
from rich.table import Table
from rich.text import Text

from batchscape.analysis.figures.chart import Axis, Chart, Look, Marks
from batchscape.analysis.figures.vega import page_chart, paper_chart
from batchscape.analysis.report.latex import escape_latex, to_latex
from batchscape.analysis.report.table import Column
from batchscape.analysis.report.table import Table as Shown
from batchscape.analysis.report.writers import escape_markdown, to_markdown, write_csv
from batchscape.cli import main
from batchscape.outgoing import make_printable, outgoing, outgoing_cell, outgoing_json
from batchscape.terminal import OutgoingConsole

RED = "\x1b[31mred\x1b[0m"
LINK = "\x1b]8;;http://x.test\x1b\\link\x1b]8;;\x07"
HOSTILE = f"{RED} {LINK} \x9b2J\x1bc\x07\x00\r\u202eback \ud800"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def test_sequences_are_removed_and_other_controls_shown():
    assert make_printable(RED) == "red"
    assert make_printable(LINK) == "link"
    assert make_printable("\x1b]0;title\x07\x9b1;31mx\x1b(B") == "x"
    assert make_printable("a\x07b\x1b") == r"a\x07b\x1b"
    assert make_printable("10%\r20%\r\nend\tx") == "10%\\x0d20%\nend\tx"
    assert make_printable("\u202eabc\ud800") == r"\u202eabc\ud800"
    # One that is cut, or put together from two, is not obeyed either.
    assert make_printable("\x1b\x1b[31m[31m") == r"\x1b[31m"
    plain = "µ ≤ 3 · 日本 👩‍🔬 [31m"
    assert make_printable(plain) == plain


def test_begins_of_strings_without_an_end_are_looked_at_once():
    """Each searched to the end of the text, this would not end."""
    count = 300_000
    assert make_printable("\x1b]" * count) == ""
    assert make_printable("\x1b]0;x\x9d1;y" * count) == "0;x\\x9d1;y" * count
    assert make_printable("\x1b]0;" + "x" * count + "\x07") == ""


ANYTHING = st.text(
    st.sampled_from("\x1b\x9b\x9d\x07\r\n\t[]0;31m\\=+-@'a\u202e\ud800") | st.characters()
)


@given(ANYTHING)
@example(HOSTILE)
def test_nothing_that_is_obeyed_is_left(text):
    clean = make_printable(text)
    assert not OBEYED.search(clean)
    assert make_printable(clean) == clean
    clean.encode()


@given(ANYTHING)
@example("=1+1")
@example("-1")
@example("-1+cmd|' /C calc'!A0")
@example("\t=1")
def test_a_cell_is_no_formula_and_a_number_stays_one(text):
    cell = outgoing_cell(text)
    begins = cell[:1] in {"=", "+", "-", "@", "\t", "\r", "\n"}
    if begins:
        float(cell)
    try:
        float(text)
    except ValueError:
        pass
    else:
        if text == text.strip():
            assert cell == text
    assert outgoing_cell(cell) == cell


def test_a_csv_file_reads_back_as_it_was_but_for_what_would_run(tmp_path):
    table = pd.DataFrame(
        {
            "loss": [-0.5, np.nan, 2.0],
            "n": [-1, 2, 3],
            "done": [True, False, True],
            "note": ["=cmd|' /C calc'!A0", "-0.5", None],
            "reason": [f"{RED}: x, y", "two\nlines", "@SUM(A1)"],
            "tags": [["=a"], ["b"], None],
            "=name": ["plain", "+1", "-1"],
        }
    )
    before = table.copy(deep=True)
    write_csv(tmp_path / "t.csv", table)
    pd.testing.assert_frame_equal(table, before)
    read = pd.read_csv(tmp_path / "t.csv")
    for name in ("loss", "n", "done"):
        pd.testing.assert_series_equal(read[name], table[name])
    assert read["note"].tolist()[:2] == ["'=cmd|' /C calc'!A0", "-0.5"]
    assert read["note"].isna().tolist() == [False, False, True]
    assert read["reason"].tolist() == ["red: x, y", "two\nlines", "'@SUM(A1)"]
    assert list(read) == ["loss", "n", "done", "note", "reason", "tags", "'=name"]
    assert pd.read_csv(tmp_path / "t.csv")["'=name"].tolist() == ["plain", "+1", "-1"]


def test_the_console_cleans_texts_cells_and_titles_and_keeps_its_own_styles():
    out = io.StringIO()
    console = OutgoingConsole(file=out, width=100, markup=False, force_terminal=True)
    table = Table(f"head {RED}", title=f"title {RED}")
    table.add_row(f"cell {LINK}")
    table.add_row(Text(f"styled {RED}", style="bold"))
    console.print(f"bare {HOSTILE}")
    console.print(Group(table, Text(f"grouped {RED}")))
    console.print(Text("ours", style="red"))
    output = out.getvalue()
    assert "\x1b[31mours\x1b[0m" in output
    style_codes = re.compile(r"\x1b\[[0-9;]*m")
    assert not OBEYED.search(style_codes.sub("", output))
    assert "\x1b[31mred" not in output
    for text in ("head red", "title red", "cell link", "styled red", "grouped red", "bare red"):
        assert text in style_codes.sub("", output)


def test_markdown_latex_figures_and_json_are_clean():
    secret = "hf_" + "aB3" * 11
    columns = [Column("h", f"h {RED}", is_left=True), Column("v")]
    frame = pd.DataFrame({"h": [HOSTILE], "v": [secret]}, dtype=object)
    table = Shown("name", RED, frame, columns, footnotes=[[HOSTILE]])
    for text in (
        to_markdown(table),
        to_latex(table),
        escape_markdown(f"{HOSTILE} {secret}"),
        escape_latex(f"{HOSTILE} {secret}"),
        json.dumps(outgoing_json({RED: [HOSTILE, secret, 1, None]}), ensure_ascii=False),
    ):
        assert not OBEYED.search(text)
        assert "red" in text
        assert "31m" not in text
        assert "aB3aB3" not in text
    texts = pd.DataFrame({"series": [HOSTILE], "text": [secret]}, dtype=object)
    rows = texts.assign(x=1, y=2)
    titled = Axis({"x": f"{HOSTILE}{secret}"}), Axis({"y": RED})
    chart = Chart("one", RED, HOSTILE, *titled, [Marks("point", rows, text="text")],
                  {HOSTILE: Look("#000000")})  # fmt: skip
    for spec in (paper_chart(chart), page_chart(chart, lambda table: [[]] * len(table))):
        text = json.dumps(spec, ensure_ascii=False)
        assert not OBEYED.search(text)
        assert "red" in text
        assert "aB3aB3" not in text


# Every way in, every way out

SMALL = (
    *("budget.samples=32", "batch.micro_batch_size=4", "launcher.device=cpu"),
    *("tracker=none", "engine=command"),
)


TELLS = r"""
import os, sys
sys.stderr.write("\x1b]0;owned\x07\x1b[31m" + os.environ["PGPASSWORD"] + " SSHPASS="
    + os.environ["ANY"] + " \x1b[0m =cmd|x ghp_" + "aB3d" * 9 + " \x9b2J\n")
sys.exit(3)
"""


def batchscape(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "batchscape", *arguments], capture_output=True, check=False
    )


@pytest.mark.slow
def test_what_a_program_says_leaves_clean_by_every_way(tmp_path, monkeypatch):
    """Its last words reach status, report, tables and JSON without escapes and without secrets."""
    secrets = {"PGPASSWORD": "hunter22q9", "ANY": "Zx81kQp9"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tells.py").write_text(TELLS)
    ran = batchscape(
        *("sweep", *SMALL, "engine.argv=['{python}','tells.py','{note}']"),
        *("+engine.values.note='=1+1','\x1b[31mred\x1b[0m'", "sweep_dir=o"),
    )
    assert ran.returncode == 1, ran.stderr
    outputs = {"sweep": ran.stdout + ran.stderr}
    for verb in (["report", "o"], ["status", "o"], ["status", "o", "--json"]):
        done = batchscape(*verb)
        assert done.returncode == 0, done.stderr
        outputs[" ".join(verb)] = done.stdout + done.stderr
    files = [path for path in (tmp_path / "o").rglob("*") if path.is_file()]
    # A program's own log is kept as it is.
    logs = [path.read_text(errors="replace") for path in files if path.name == "log.txt"]
    assert [secrets["PGPASSWORD"] in log for log in logs] == [True] * 2
    written = {str(path): path.read_bytes() for path in files if path.name != "log.txt"}
    for where, content in {**outputs, **written}.items():
        for secret in (*secrets.values(), "aB3daB3d"):
            assert secret.encode() not in content, where
    leaving = {
        **outputs,
        **{k: v for k, v in written.items() if k.endswith((".md", ".tex", ".csv"))},
    }
    for where, content in leaving.items():
        assert not OBEYED.search(content.decode()), where
    assert b"[PGPASSWORD] SSHPASS=[SSHPASS]" in outputs["sweep"]
    assert any(b"[PGPASSWORD]" in v for k, v in written.items() if k.endswith("runs.csv"))
    # What begins a formula is defused in both tables of runs, and nothing else is changed.
    for table in ("o/plan.csv", "o/report/tables/runs.csv"):
        with Path(table).open(newline="") as file:
            cells = {cell for row in csv.reader(file) for cell in row}
        assert "'=1+1" in cells
        assert not [c for c in cells if c[:1] in set("=+-@") and not re.fullmatch(r"[-+.\de]+", c)]


def test_a_refused_option_is_quoted_as_it_may_leave(capsys):
    token = "hf_" + "aB3d" * 6
    assert main(["report", "x", "--target", f"{RED}{token}"]) == 2
    error = capsys.readouterr().err
    assert "[a token of Hugging Face]" in error
    assert not OBEYED.search(error)
    assert main([f"\x1b[31mplanne\x1b[0m{token}"]) == 2
    error = capsys.readouterr().err
    assert "aB3d" not in error
    assert not OBEYED.search(error)


def test_a_token_with_an_escape_in_it_is_found():
    token = "ghp_" + "aB3d" * 9
    assert outgoing(f"{token[:9]}\x1b[0m{token[9:]}") == "[a token of GitHub]"
