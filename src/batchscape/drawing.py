"""Figures as files, drawn by a process beside the one that computes.

Charts are specifications of Vega-Lite; vl-convert holds its interpreter to itself while it draws.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

import vl_convert

from batchscape.errors import AnalysisError

_DPI = 200
_WIDTH_TOLERANCE = 0.03
"""Share of the wanted width: a paper scales so little unseen, and the first drawing is kept."""
_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from batchscape.drawing import main; main()"
# A fresh interpreter imports from where this one does, installed or not.


def draw(spec: Mapping[str, Any], files: list[Path]) -> None:
    """Draw a figure into files: `.pdf` (fonts embedded), `.png` or `.svg`.

    It is as wide as its `usermeta.width`, in points. Vega fits only a single panel to a width; of
    several a first drawing shows the width of the axes.
    """
    chart, width = dict(spec), spec["usermeta"]["width"]
    if panels := chart.get("concat"):
        svg = vl_convert.vegalite_to_svg(chart)
        excess = float(svg.partition(' width="')[2].partition('"')[0]) - width
        if abs(excess) > _WIDTH_TOLERANCE * width:
            for panel in panels:
                panel["width"] = max(panel["width"] - excess / chart["columns"], 40)
            svg = vl_convert.vegalite_to_svg(chart)
    else:
        fit = {"width": width, "autosize": {"type": "fit-x", "contains": "padding"}}
        svg = vl_convert.vegalite_to_svg(chart | fit)
    for file in files:
        if file.suffix == ".pdf":
            file.write_bytes(vl_convert.svg_to_pdf(svg))
        elif file.suffix == ".png":
            file.write_bytes(vl_convert.svg_to_png(svg, scale=_DPI / 72, ppi=72))
        else:
            file.write_text(svg, encoding="utf-8")


class Drawing:
    """Draws figures in a process of its own, which ends with the context."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._pending = 0

    def __enter__(self) -> Drawing:
        paths = [entry or str(Path.cwd()) for entry in sys.path]
        self._worker = subprocess.Popen(
            [sys.executable, "-c", _BOOT, *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C ends the caller, and the end of its input ends this process.
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

    def begin(self, spec: Mapping[str, Any], files: list[Path]) -> None:
        """Begin to draw a figure into files, whose folders are there."""
        line = json.dumps({"spec": spec, "files": [str(file.absolute()) for file in files]})
        self._pending += 1
        self._thread.submit(self._send, line.encode())

    def _send(self, line: bytes) -> None:
        requests = cast("IO[bytes]", self._worker.stdin)
        with suppress(BrokenPipeError):  # `finish` finds that it ended
            requests.write(line + b"\n")
            requests.flush()

    def finish(self) -> None:
        """Wait until every figure is drawn; an AnalysisError names one that cannot be."""
        answers = cast("IO[bytes]", self._worker.stdout)
        for _ in range(self._pending):
            answer = answers.readline()
            if not answer:
                code = self._worker.wait()
                raise AnalysisError(
                    f"the process that draws figures ended with exit code {code} (below zero: a "
                    "signal, often for lack of memory); give the same command again"
                )
            if problem := json.loads(answer):
                raise AnalysisError(problem)
        self._pending = 0


def main() -> None:
    """Draw the figure of each line of the standard input, until it ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        problem = None
        try:
            draw(request["spec"], [Path(file) for file in request["files"]])
        except (ValueError, RuntimeError, OSError) as error:
            # The other lines are the library's own stack.
            reason = " ".join(str(error).splitlines()[:2])
            problem = f"{request['files'][0]} cannot be drawn: {reason}"
        answers.write(json.dumps(problem) + "\n")
        answers.flush()
