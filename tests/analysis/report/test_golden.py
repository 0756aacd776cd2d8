"""One report, word for word: a change of what reports say is read in its diff."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from batchscape.analysis.report.write import write_report

GOLDEN = Path(__file__).with_name("golden_report.txt")


def test_a_report_says_what_it_said(build, tmp_path):
    sweep = build()
    cuts = {8: (1, 8, 1), 16: (1, 16, 1), 32: (1, 32, 1), 64: (1, 32, 2)}
    for size, cut in cuts.items():
        for seed in range(3):
            for rate in (0.002, 0.004, 0.008):

                def loss(step: np.ndarray, size=size, seed=seed, rate=rate) -> np.ndarray:
                    away = 0.05 * np.log2(rate / 0.0042) ** 2 + 0.01 * np.sin(seed * size)
                    return 2 + away + 3 * np.exp(-step * size / (size + 20) / 8)

                settings = {"optimizer__learning_rate": rate, "optimizer_steps": 1280 // size}
                sweep.run(cut, seed=seed, loss=loss, held_out=loss, **settings)
                if (size, rate) == (32, 0.004):
                    sweep.run((2, 16, 1), seed=seed, loss=loss, held_out=loss, **settings)
    settings = {"optimizer__learning_rate": 0.004, "optimizer_steps": 10}
    sweep.run((1, 128, 1), status="oom", reason="out of memory: forward", **settings)
    page = write_report([sweep.path], with_charts=False).files[0].read_text()
    written = tmp_path / GOLDEN.name
    written.write_text(page)
    assert page == GOLDEN.read_text(), f"if this is meant: cp {written} {GOLDEN}"
