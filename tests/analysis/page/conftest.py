"""Sweeps with all that a page has to show, and a real browser to open pages in."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SEEDS = (0, 1, 2)
SAMPLES = 1280


@pytest.fixture
def varied(build: Callable[..., Any]) -> Any:
    """Write a sweep over cuts and global batches with every way for a run to end."""
    sweep = build().fork(SEEDS)
    for micro in (4, 8, 16, 64):
        for seed in SEEDS:

            def loss(step: np.ndarray, micro: int = micro, seed: int = seed) -> np.ndarray:
                rng = np.random.default_rng([micro, seed])
                return 2.4 + 3.1 * np.exp(-step * micro / 400) + 0.01 * rng.normal(size=len(step))

            sweep.run((1, micro, 1), seed=seed, optimizer_steps=SAMPLES // micro, loss=loss)
    lost = {"stop_reason": None, "optimizer_steps": SAMPLES // 128}
    sweep.run((1, 128, 1), status="oom", reason="CUDA out of memory", done=2, **lost)
    sweep.run((2, 64, 1), status="diverged", reason="the loss is NaN at step 9", done=8, **lost)
    steps = SAMPLES // 8
    sweep.run((2, 4, 1), status="pruned", reason="hopeless", done=60, optimizer_steps=steps)
    return sweep


def require_browser() -> str:
    """Skip without Chromium, but where the continuous integration promised to install it."""
    executable = shutil.which("chromium")
    if executable is None:
        reason = "not installed: chromium"
        assert "BATCHSCAPE_REQUIRE_TOOLS" not in os.environ, reason
        pytest.skip(reason)
    return executable


@pytest.fixture
def browser() -> Iterator[Any]:
    """Start a browser; what goes wrong in a page fails the test."""
    executable = require_browser()
    from playwright.sync_api import sync_playwright

    wrong: list[str] = []
    with sync_playwright() as playwright:
        # Containers of the continuous integration run as root, where the sandbox cannot.
        chromium = playwright.chromium.launch(
            executable_path=executable, args=["--no-sandbox", "--disable-gpu"]
        )
        context = chromium.new_context(offline=True, viewport={"width": 1200, "height": 900})

        def open_page(place: Path | str) -> Any:
            """Open a file, or an address of this machine: only then there is a network."""
            context.set_offline(isinstance(place, Path))
            page = context.new_page()
            page.on("console", lambda message: wrong.append(message.text))
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("requestfailed", lambda request: wrong.append(request.url))
            page.goto(place.as_uri() if isinstance(place, Path) else place)
            return page

        open_page.wrong = wrong
        yield open_page
        chromium.close()
    assert wrong == []
