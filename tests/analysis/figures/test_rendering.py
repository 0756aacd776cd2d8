"""Figures rendered by a process of their own are those that are rendered here."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from batchscape.analysis.figures.rendering import Renderer
from batchscape.analysis.figures.style import paper_style, render


def line(slope: float) -> Figure | None:
    if slope == 0:
        return None
    figure = Figure(figsize=(2, 1.5), layout="constrained")
    figure.subplots().plot([0, 1], [0, slope])
    return figure


def here(slope: float) -> dict[str, bytes]:
    figure = line(slope)
    assert figure is not None
    return render(figure)


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True])
def test_files_are_those_of_render(beside, monkeypatch):
    # The other process imports what draws, which is this module.
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    with paper_style():
        wanted = [here(slope) for slope in (1, 2, 3)]
        with Renderer(beside=beside) as renderer:
            drawn = [renderer.draw(line, slope) for slope in (1, 2)]
            if beside:
                # Not left to this process, which would help in the end.
                assert drawn[0].result(60) == wanted[0]
            given = line(3)
            assert given is not None
            drawn.append(renderer.submit(given))
            nothing = renderer.draw(line, 0)
    assert [files.result(0) for files in drawn] == wanted
    assert nothing.result(0) == {}


def test_the_process_starts_before_there_is_a_figure(monkeypatch, tmp_path):
    started = tmp_path / "started"
    monkeypatch.setattr(
        "batchscape.analysis.figures.rendering._START",
        "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
        f"open({str(started)!r}, 'w').close(); sys.stdin.buffer.read()",
    )
    deadline = time.monotonic() + 60
    with Renderer(beside=True):
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert started.exists()


def test_what_cannot_be_sent_is_rendered_here():
    with paper_style():
        wanted = here(1)
    with Renderer(beside=True) as renderer:
        files = renderer.draw(lambda: line(1))
    assert files.result(0) == wanted


@pytest.mark.slow
def test_a_process_that_dies_leaves_no_figure_out(monkeypatch):
    monkeypatch.setattr(
        "batchscape.analysis.figures.rendering._START", "import sys; sys.stdin.buffer.read(1)"
    )
    with paper_style():
        wanted = here(1)
    with Renderer(beside=True) as renderer:
        drawn = [renderer.draw(line, slope) for slope in (1, 1)]
    assert [files.result(0) for files in drawn] == [wanted, wanted]


def fail_within(renderer: Renderer) -> None:
    with renderer:
        renderer.draw(line, 1)
        msg = "told so"
        raise RuntimeError(msg)


def test_an_error_ends_the_process_and_comes_through():
    with pytest.raises(RuntimeError, match="told so"):
        fail_within(Renderer(beside=True))
