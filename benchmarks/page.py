"""The page of many runs: its size, how long it takes to open, and to follow a drag over a chart.

Runs are made up in the real format (`report_at_scale.py`) and reported. Chromium, without a GPU,
opens the page; the mouse drags the loss curves about. A move takes from its event to the end of the
frame that follows it, with the layout and drawing in between.

    python benchmarks/page.py [--runs 500] [--points 200] [--moves 40]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from report_at_scale import write_sweep

_WATCH = """() => {
  window.moves = [];
  addEventListener("pointermove", () => {
    const begin = performance.now();
    requestAnimationFrame(() => setTimeout(() => window.moves.push(performance.now() - begin)));
  }, true);
}"""

_CENTRE = """(element) => {
  const { x, y, width, height } = element.getBoundingClientRect();
  return [x + width / 2, y + height / 2];
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--moves", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        folder = Path(place) / "sweep"
        write_sweep(folder, options.runs, options.points, seeds=5)
        command = [sys.executable, "-m", "batchscape", "report", str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report = folder / "report" / "report.html"
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = chromium.new_page(viewport={"width": 1200, "height": 900})
        page.goto(report.as_uri())
        chart = page.locator("figure.chart[data-drawn=yes] canvas").first
        chart.wait_for()
        opened = page.evaluate("performance.now()")
        chart.scroll_into_view_if_needed()
        x, y = chart.evaluate(_CENTRE)
        before = chart.screenshot()
        page.evaluate(_WATCH)
        page.mouse.move(x, y)
        page.mouse.down()
        for number in range(options.moves):
            page.mouse.move(x + 2 * number, y + number % 5)
            page.wait_for_timeout(50)
        page.mouse.up()
        if chart.screenshot() == before:
            raise RuntimeError("the chart did not follow the mouse")
        moves = page.evaluate("window.moves")
        print(
            f"{options.runs} runs: {report.stat().st_size / 1e6:.1f} MB, opened in "
            f"{opened / 1000:.1f} s, a move of a drag {statistics.median(moves):.0f} ms, at most "
            f"{max(moves):.0f} ms ({len(moves)} moves)"
        )


if __name__ == "__main__":
    main()
