"""Sweeps of several engines, with losses that a test can compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

CUTS = [(1, 32, 1), (1, 8, 4), (2, 8, 2)]


def loss_of(seed: int, offset: float) -> Callable[[np.ndarray], np.ndarray]:
    """Return a curve of its seed, moved by an offset that grows with the steps."""

    def curve(step: np.ndarray) -> np.ndarray:
        noise = np.random.default_rng(seed).normal(0, 0.05, len(step))
        return np.asarray(2.4 + 3.1 * np.exp(-step / 12) + noise + offset * step)

    return curve


@pytest.fixture
def engines(build: Any) -> Callable[..., Any]:
    """Return a maker of sweeps: an offset of the loss for each engine."""

    def make(
        offsets: dict[str, float],
        cuts: list[tuple[int, int, int]] = CUTS,
        seeds: tuple[int, ...] = (0, 1),
        every: dict[str, bool] | None = None,
        **settings: Any,
    ) -> Any:
        sweep = build()
        for engine, offset in offsets.items():
            ranks = {"exchanges_every_micro_step": every[engine]} if every else None
            for seed in seeds:
                for place, cut in enumerate(cuts):
                    sweep.run(
                        cut,
                        seed=seed,
                        engine={"name": engine},
                        loss=loss_of(seed, offset * (place + 1)),
                        rounding=0.0,
                        ranks=ranks,
                        **settings,
                    )
        return sweep

    return make
