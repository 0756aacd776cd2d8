"""Figures are drawn by another process, which ends as it should whatever happens."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from batchscape.analysis.figures.chart import Axis, Chart, Choice, Look, Marks
from batchscape.analysis.figures.vega import paper_chart
from batchscape.drawing import Drawing
from batchscape.errors import AnalysisError

WIDTH = 252.0


def made(title="loss", kind="line"):
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "usermeta": {"width": WIDTH},
        "width": 120,
        "height": 90,
        "title": title,
        "data": {"values": [{"x": x, "y": 3 - x} for x in range(3)]},
        "mark": kind,
        "encoding": {
            "x": {"field": "x", "type": "quantitative"},
            "y": {"field": "y", "type": "quantitative"},
        },
    }


def test_files_are_as_wide_as_asked_for_and_show_other_pictures(tmp_path):
    files = {name: [tmp_path / f"{name}{end}" for end in (".png", ".pdf")] for name in "ab"}
    with Drawing() as drawing:
        drawing.begin(made(), files["a"])
        drawing.begin(made("other"), files["b"])
        drawing.finish()
    one, other = (Image.open(paths[0]) for paths in files.values())
    assert one.width == pytest.approx(WIDTH / 72 * 200, rel=0.03)
    assert one.tobytes() != other.tobytes()
    for _, pdf in files.values():
        assert pdf.read_bytes().startswith(b"%PDF")


def test_what_fails_there_is_raised_here(tmp_path):
    with Drawing() as drawing:
        drawing.begin(made(kind="nonsense"), [tmp_path / "bad.png"])
        drawing.begin(made(), [tmp_path / "good.png"])
        with pytest.raises(AnalysisError, match=r"bad\.png cannot be drawn"):
            drawing.finish()


def test_a_process_that_is_killed_is_an_error_and_not_a_wait(tmp_path):
    with Drawing() as drawing:
        drawing.begin(made(), [tmp_path / "first.png"])
        drawing.finish()
        os.kill(drawing._worker.pid, signal.SIGKILL)
        drawing.begin(made(), [tmp_path / "second.png"])
        with pytest.raises(AnalysisError, match="ended with exit code -9"):
            drawing.finish()


def test_it_ends_with_its_caller(tmp_path):
    program = (
        "import json, os, pathlib, sys; from batchscape.drawing import Drawing\n"
        "with Drawing() as drawing:\n"
        "    drawing.begin(json.loads(sys.argv[1]), [pathlib.Path(sys.argv[2])])\n"
        "    drawing.finish(); print(drawing._worker.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)"
    )
    arguments = [sys.executable, "-c", program, json.dumps(made()), tmp_path / "one.png"]
    caller = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    # The pipe has its end once both have gone: what draws inherits no end of it, but its errors.
    pid = int(caller.stdout.readline())
    caller.wait()
    caller.stdout.close()
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        signal.sigtimedwait([], 0.05)
    pytest.fail("the process that draws outlives its caller")


def test_a_legend_whose_only_name_is_in_another_layer_is_left_out(tmp_path):
    rows = pd.DataFrame({"x": [1, 2], "y": [1, 2], "layer": ["a", "b"], "series": ["kept", "lost"]})
    chart = Chart(
        "map",
        "Map",
        "Places.",
        Axis({"x": "x"}, kind="names"),
        Axis({"y": "y"}, kind="names"),
        [Marks("point", rows[["x", "y", "layer"]]), Marks("point", rows[rows["series"] == "lost"])],
        {"lost": Look("#222222")},
        choices=[Choice("layer", "Layer", {"a": "a", "b": "b"})],
    )
    with Drawing() as drawing:
        drawing.begin(paper_chart(chart), [tmp_path / "map.png"])
        drawing.finish()
    with Image.open(tmp_path / "map.png") as picture:
        assert picture.height < 1000
