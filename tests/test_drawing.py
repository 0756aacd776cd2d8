from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import matplotlib as mpl
import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from batchscape.drawing import Drawing, draw, paper_style
from batchscape.errors import AnalysisError


def made(title: str = "loss", height: float = 2.5) -> Figure:
    with paper_style():
        figure = Figure(figsize=(3.5, height), layout="constrained")
        axes = figure.subplots()
        axes.plot([1, 2, 3], [3, 2, 1])
        axes.set_title(title)
    return figure


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(mpl.image.imread(BytesIO(png)))


def test_the_other_process_draws_what_this_one_would() -> None:
    with paper_style():
        here = draw(made())
    with Drawing() as drawing:
        drawing.begin("one", made())
        drawing.begin("two", made("other"))
        one, two = drawing.drawn("one"), drawing.drawn("two")
    assert one == here
    assert pixels(one.png).shape == (500, 700, 3)
    assert not np.array_equal(pixels(one.png), pixels(two.png))


def test_the_picture_shows_what_matplotlib_itself_would_draw() -> None:
    with paper_style():
        figure, own = made(height=2.9), BytesIO()  # a height that is none in floating point
        shown = pixels(draw(figure).png)
        figure.savefig(own, format="png", dpi=200)
    whole = pixels(own.getvalue())[..., :3]
    assert shown.shape == whole.shape
    near = (1 - whole).mean() / 2  # edges are smoothed otherwise
    assert np.abs(shown - whole).mean() < near
    assert np.abs(np.roll(shown, 2, axis=0) - whole).mean() > near


def test_letters_that_the_small_font_lacks_are_drawn_too(
    recwarn: pytest.WarningsRecorder,
) -> None:
    # Cyrillic is in DejaVu Sans, and not among the letters of figures.
    with paper_style():
        whole, half, none = (draw(made(title)) for title in ("a \u0416", "a", ""))
    fonts = re.findall(rb"/BaseFont /(\S+)", whole.pdf)
    assert {name.split(b"+")[-1] for name in fonts} == {b"FiguresSans", b"DejaVuSans"}
    assert b"DejaVuSans" not in half.pdf
    assert not np.array_equal(pixels(whole.png), pixels(half.png))
    assert not np.array_equal(pixels(half.png), pixels(none.png))
    assert not [found for found in recwarn if "Glyph" in str(found.message)]


def test_what_fails_there_is_raised_here() -> None:
    bad = made("$\\unknowncommand{$")
    with Drawing() as drawing:
        drawing.begin("bad", bad)
        drawing.begin("good", made())
        with pytest.raises(ValueError, match="unknowncommand"):
            drawing.drawn("bad")
        assert drawing.drawn("good").pdf.startswith(b"%PDF")


def test_a_process_that_is_killed_is_an_error_and_not_a_wait() -> None:
    with Drawing() as drawing:
        drawing.begin("first", made())
        drawing.drawn("first")
        os.kill(drawing._worker.pid, signal.SIGKILL)
        drawing.begin("second", made())
        with pytest.raises(AnalysisError, match="ended with exit code -9"):
            drawing.drawn("second")


def test_an_error_leaves_no_temporary_folder(tmp_path: Path) -> None:
    program = (
        "import sys; from batchscape.drawing import Drawing\n"
        "from matplotlib.figure import Figure\n"
        "with Drawing() as drawing:\n"
        "    drawing.begin('one', Figure()); drawing.drawn('one')\n"
        "    for number in range(50): drawing.begin(str(number), Figure())\n"
        "    sys.exit('an error')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.strip()) == (1, "an error")
    assert not list(tmp_path.iterdir())


def test_it_ends_with_its_caller(tmp_path: Path) -> None:
    figure = tmp_path / "figure.pickle"
    figure.write_bytes(pickle.dumps(made()))
    program = (
        "import os, pickle, sys; from batchscape.drawing import Drawing\n"
        "with Drawing() as drawing:\n"
        "    drawing.begin('one', pickle.load(open(sys.argv[1], 'rb')))\n"
        "    drawing.drawn('one'); print(drawing._worker.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", program, figure], stdout=subprocess.PIPE, text=True
    )
    assert caller.stdout is not None
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


def test_it_imports_nothing_of_the_analysis() -> None:
    program = "import sys, batchscape.drawing; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    found = done.stdout.split()
    assert "matplotlib.figure" in found
    assert not {"pandas", "scipy", "batchscape.analysis", "torch"} & set(found)
