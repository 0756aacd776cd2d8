"""Figures as files, drawn by a process beside the one that goes on computing.

It imports matplotlib and nothing of the analysis, so that it is ready when the first figure is.
"""

from __future__ import annotations

import atexit
import gc
import io
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import IO, Any, NamedTuple, cast

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.text import Text
from pypdfium2 import PdfDocument

from batchscape.errors import AnalysisError
from batchscape.outgoing import outgoing

__all__ = ["Drawing", "Drawn", "draw", "main", "paper_style"]

_FONTS = ["Figures Sans", "DejaVu Sans"]
"""The first is made of the second."""
_LETTERS = (
    range(0x20, 0x7F),
    range(0xA0, 0x180),  # Latin
    range(0x370, 0x400),  # Greek
    range(0x2000, 0x2300),  # punctuation, arrows, signs of mathematics
)
_DPI = 200
_STYLE: Any = {
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 8,
    "figure.dpi": _DPI,
    "font.family": _FONTS,
    "font.size": 8,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
}
_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from batchscape.drawing import main; main()"
# A fresh interpreter imports from where this one does, installed or not.


class Drawn(NamedTuple):
    """The files of a figure."""

    png: bytes
    """To look at."""
    pdf: bytes
    """For a paper: fonts are embedded, and without a date equal figures are equal."""


@contextmanager
def paper_style() -> Iterator[None]:
    """Draw with the settings of this project and nothing of the caller's."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


@cache
def _make_font() -> None:
    """Write DejaVu Sans with the letters that figures have; others are taken from the whole.

    Every PDF holds the letters that it shows: to choose them from all took most of its time.
    """
    from fontTools import subset

    folder = TemporaryDirectory(prefix="batchscape-", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "figures.ttf"
    options = subset.Options(
        drop_tables=["FFTM", "GDEF", "GPOS", "GSUB"],
        layout_features=[],
        notdef_outline=True,
        name_IDs=["*"],
    )
    # Matplotlib's own: a search may find that of the system, in one process and not in the other.
    whole = Path(mpl.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    with subset.load_font(whole, options) as font:
        letters = subset.Subsetter(options)
        letters.populate(unicodes=[code for codes in _LETTERS for code in codes])
        letters.subset(font)
        for name in list(font["name"].names):
            where = name.nameID, name.platformID, name.platEncID, name.langID
            font["name"].setName(name.toUnicode().replace("DejaVu", "Figures"), *where)
        font.save(path)
    fontManager.addfont(path)


def draw(figure: Figure) -> Drawn:
    """Draw a figure, inside `paper_style`; its texts are as they may leave."""
    _make_font()
    for text in figure.findobj(Text):
        text.set_text(outgoing(text.get_text()))
    # Saving would lay the figure out, and draw it once more for that.
    if (layout := figure.get_layout_engine()) is not None:
        figure.set_dpi(_DPI)
        layout.execute(figure)
        figure.set_layout_engine(None)
    pdf, png = io.BytesIO(), io.BytesIO()
    figure.savefig(pdf, format="pdf", metadata={"CreationDate": None})
    # Made of the other file, in a third of the time that it takes to draw the figure again.
    with PdfDocument(pdf.getvalue()) as document:
        # It rounds sizes up, and those of pages are a little above themselves.
        picture = document[0].render(scale=_DPI / 72 * (1 - 1e-6)).to_pil()
    picture.convert("RGB").save(png, "png", compress_level=3, dpi=(_DPI, _DPI))
    return Drawn(png.getvalue(), pdf.getvalue())


class Drawing:
    """Figures at work, by name; the process that draws them ends with the context."""

    def __init__(self) -> None:
        self._files: dict[str, Future[Drawn]] = {}
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Drawing:
        paths = [entry or str(Path.cwd()) for entry in sys.path]
        self._worker = subprocess.Popen(
            [sys.executable, "-c", _BOOT, *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C ends the caller, and the end of what it reads ends this one.
            start_new_session=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._worker.terminate()
        self._thread.shutdown(cancel_futures=True)
        with suppress(BrokenPipeError), self._worker:
            pass

    def begin(self, name: str, figure: Figure) -> None:
        """Begin to draw a figure; it is not to be changed any more."""
        if name not in self._files:
            self._files[name] = self._thread.submit(self._ask, pickle.dumps(figure))

    def drawn(self, name: str) -> Drawn:
        """Return the files of a figure that was begun.

        Raises
        ------
        AnalysisError
            If the process that draws was killed.
        """
        return self._files[name].result()

    def _ask(self, pickled: bytes) -> Drawn:
        pipes = self._worker.stdin, self._worker.stdout
        asked, answers = cast("tuple[IO[bytes], IO[bytes]]", pipes)
        try:
            asked.write(pickled)
            asked.flush()
            answer = pickle.load(answers)  # noqa: S301  (of our own process)
        except (EOFError, BrokenPipeError):
            code = self._worker.wait()
            msg = (
                f"the process that draws figures ended with exit code {code} (below zero: a "
                "signal, often for lack of memory); give the same command again"
            )
            raise AnalysisError(msg) from None
        if isinstance(answer, Exception):
            raise answer
        return Drawn(*answer)


def main() -> None:
    """Draw each figure that stands in the standard input, until it ends."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    gc.set_threshold(1_000_000, 20, 100)
    atexit.register(gc.freeze)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # its temporary folder goes with it
    with paper_style():
        while True:
            try:
                figure = pickle.load(sys.stdin.buffer)  # noqa: S301  (of the process that began us)
            except EOFError:
                return
            try:
                answer: Drawn | Exception = draw(figure)
            except Exception as error:  # noqa: BLE001  (the other process raises it)
                answer = error
            answers.write(pickle.dumps(answer))
            answers.flush()
