"""Tables of runs with effects that a test plants."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pytest

from batchscape.analysis.cells import find_cells
from batchscape.analysis.claims.evidence import Evidence

Cut = tuple[int, int, int]


@dataclass
class World:
    """Runs, steps, evaluations, ranks and reaches, as the reader gives them."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    steps: list[pd.DataFrame] = field(default_factory=list)
    evals: list[pd.DataFrame] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    reaches: list[dict[str, Any]] = field(default_factory=list)

    def run(
        self,
        cut: Cut,
        seed: int,
        *,
        rate: float = 1e-3,
        hardware: str = "Example",
        status: str = "completed",
        sweep_dir: str = "sweep",
        curve: np.ndarray | None = None,
        held_out: np.ndarray | None = None,
        noise: float | None = None,
        rank0: float | None = None,
        reach: float | None = None,
        reach_s: float | None = None,
        **figures: Any,
    ) -> None:
        """Add a run; `curve` is one loss a step, `held_out` one at equal distances."""
        devices, micro, accumulation = cut
        batch = devices * micro * accumulation
        trajectory = f"b{batch}-r{rate:g}-s{seed}-{figures.get('model.name', 'gpt')}"
        name = hashlib.sha256(repr((trajectory, cut, hardware, sweep_dir)).encode()).hexdigest()
        keys = {"sweep_dir": sweep_dir, "run_id": name[:12]}
        row = {
            **keys,
            "trajectory_id": trajectory,
            "sweep_name": "study",
            "status": status,
            "stop_reason": "budget" if status == "completed" else None,
            "reason": None,
            "data_parallel_size": devices,
            "micro_batch_size": micro,
            "gradient_accumulation_steps": accumulation,
            "global_batch_size": batch,
            "learning_rate": rate,
            "optimizer.learning_rate": rate,
            "model.name": "gpt",
            "device_type": "cpu",
            "launch.device_model": hardware,
            "launch.world_size": devices,
            "launch.timing_valid": True,
            "launch.timing_invalid_reason": None,
            "environment.cpu.usable_cores": 16,
            "precision": "float32",
            "train_samples": 100.0,
            "samples": 1280.0,
            "seed": seed,
            "timing_repeat": 0,
            "final_loss": None,
            "final_eval_loss": None,
        }
        self.runs.append({**row, **figures})
        if curve is not None or noise is not None:
            self._rows(keys, batch, curve, held_out, noise, seed)
        for rank in range(devices) if rank0 is not None else ():
            memory = rank0 if rank == 0 else 1.0
            self.ranks.append({**keys, "rank": rank, "attempt": 0, "device_used_gib": memory})
        if reach is not None:
            reached = np.isfinite(reach)
            self.reaches.append(
                {
                    **keys,
                    "target_loss": 2.0,
                    "outcome": "reached" if reached else "censored",
                    "time_to_target_s": np.nan if reach_s is None else reach_s,
                    "samples_to_target": reach if reached else np.nan,
                    "steps_to_target": reach / batch if reached else np.nan,
                    "steps_low": (reach if reached else 1e6) // batch,
                }
            )

    def _rows(
        self,
        keys: dict[str, str],
        batch: int,
        curve: np.ndarray | None,
        held_out: np.ndarray | None,
        noise: float | None,
        seed: int,
    ) -> None:
        count = 200 if curve is None else len(curve)
        step = np.arange(1, count + 1)
        rng = np.random.default_rng([seed, batch])
        trace = np.full(count, 1.0 if noise is None else noise * batch)
        # A gradient of 8 numbers: the true one, and what a batch is off by.
        off = rng.normal(size=(count, 8)) * np.sqrt(trace / batch / 8)[:, None]
        gradients = np.eye(8)[0] * (1 - 0.3 * step / count)[:, None] + off
        frame = {
            "optimizer_step": step,
            "samples": step * batch,
            "tokens": np.nan,
            "global_batch_size": batch,
            "loss": np.ones(count) if curve is None else curve,
            "gradient_norm": np.linalg.norm(gradients, axis=1),
            "small_batch_size": np.nan if noise is None else batch / 2,
            "small_gradient_square": np.nan if noise is None else 1 + 2 * trace / batch,
        }
        self.steps.append(pd.DataFrame(frame).assign(**keys))
        if held_out is not None:
            when = np.arange(1, len(held_out) + 1) * (count * batch // len(held_out))
            frame = {"samples": when, "eval_loss": held_out}
            self.evals.append(pd.DataFrame(frame).assign(**keys))

    def evidence(self, order: Sequence[int] | None = None) -> Evidence:
        """Sort the runs into cells; `order` permutes the rows of every table of runs."""
        runs = pd.DataFrame(self.runs)
        reaches, ranks = pd.DataFrame(self.reaches), pd.DataFrame(self.ranks)
        if order is not None:
            rng = np.random.default_rng(list(order))
            runs, reaches, ranks = (
                frame.iloc[rng.permutation(len(frame))].reset_index(drop=True)
                for frame in (runs, reaches, ranks)
            )
        steps = pd.concat(self.steps) if self.steps else pd.DataFrame()
        evals = pd.concat(self.evals) if self.evals else pd.DataFrame()
        return Evidence(find_cells(runs), steps, evals, ranks, reaches)


@pytest.fixture
def world() -> Callable[[], World]:
    """Return a maker of empty worlds."""
    return World
