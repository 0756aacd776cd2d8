"""How long a prefix is, and when it is that of another curve."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from batchscape.config import RunConfig
from batchscape.geometry import solve
from batchscape.measure.noise_scale import is_sampled
from batchscape.record.files import JsonLines, write_json
from batchscape.record.folder import RunFolder
from batchscape.record.prefix import LEAST_STEPS, MEASURED_STEPS, prefix_steps
from batchscape.record.prefix_match import prefix_difference
from batchscape.record.spec import DataIdentity, RunSpec, Stage
from batchscape.record.status import RunStatus, Status, StopReason


def spec_of(
    optimizer_steps: int = 1000,
    warmup: int = 5,
    every: int | None = None,
    *,
    one_curve: bool = True,
    precision: str = "float32",
    float32_matmul: str = "highest",
) -> RunSpec:
    geometry = solve(data_parallel_size=1, micro_batch_size=4, gradient_accumulation_steps=2)
    config = RunConfig.from_mapping(
        {
            "batch": {"global_batch_size": 8},
            "model": {"name": "mlp", "hidden_sizes": [8]},
            "data": {"name": "digits"},
            "optimizer": {"name": "sgd", "learning_rate": 0.1},
            "schedule": {"name": "constant"},
            "scaling": {},
            "budget": {"optimizer_steps": optimizer_steps},
            "evaluation": {},
            "engine": {"name": "ddp", "precision": precision, "float32_matmul": float32_matmul},
            "loader": {},
            "checkpoint": {},
            "measure": {"warmup_optimizer_steps": warmup, "noise_scale_every": every},
            "launcher": {"name": "local", "one_curve": one_curve},
            "tracker": {"name": "none"},
        }
    )
    return RunSpec(
        run_id="own",
        trajectory_id="t",
        sweep_name="s",
        stages=(Stage(8 * optimizer_steps, geometry, config.optimizer),),
        device_type="cpu",
        precision=precision,
        evaluation_every_samples=None,
        data=DataIdentity("0", "/nowhere", 100, 10, 10, task="class", features=64),
        config=config,
    )


def test_the_median_of_the_measured_steps_is_known_within_their_quartiles() -> None:
    def lies_within(n: int) -> bool:
        # From the k-th to the (n + 1 - k)-th: the median is below the k-th with this chance.
        ranks = range(1, n // 2 + 1)
        k = max((k for k in ranks if stats.binom.cdf(k - 1, n, 0.5) <= 0.025), default=0)
        return k >= (n + 1) / 4

    assert min(n for n in range(1, 40) if lies_within(n)) == MEASURED_STEPS


@given(st.integers(0, 60), st.none() | st.integers(1, 30), st.integers(1, 300))
def test_a_prefix_has_the_measured_steps_and_no_more(
    warmup: int, every: int | None, optimizer_steps: int
) -> None:
    steps = prefix_steps(spec_of(optimizer_steps, warmup, every))

    def measured(n: int) -> int:
        return sum(not is_sampled(step, every) for step in range(warmup, n))

    enough = [n for n in range(LEAST_STEPS, optimizer_steps) if measured(n) >= MEASURED_STEPS]
    assert steps == (enough[0] if enough else None)


def test_what_cannot_be_shortened_is_trained_in_full() -> None:
    spec = spec_of()
    assert prefix_steps(spec) == LEAST_STEPS
    assert prefix_steps(spec_of(one_curve=False)) is None
    assert prefix_steps(spec_of(optimizer_steps=LEAST_STEPS)) is None
    ramp = dataclasses.replace(spec, stages=spec.stages * 2)
    assert prefix_steps(ramp) is None


def write_run(
    folder: RunFolder,
    spec: RunSpec,
    losses: list[float],
    status: RunStatus,
    evals: dict[int, float] | None = None,
) -> None:
    dataclasses.replace(spec, run_id=folder.path.name).write(folder.config)
    write_json(folder.launch, {"prefix": {"optimizer_steps": 20, "of": "full"}})
    rows = [{"optimizer_step": k, "loss": loss} for k, loss in enumerate(losses, start=1)]
    held_out = {0: 2.5} if evals is None else evals
    found = [{"optimizer_step": k, "eval_loss": loss} for k, loss in held_out.items()]
    for table, lines_of in (("steps", rows), ("evals", found)):
        lines = JsonLines(folder.lines(table))
        lines.append(lines_of)
        lines.close()
    status.write(folder.status)


FULL = list(2.0 + 0.1 * np.cos(np.arange(50)))
WHOLE = RunStatus(Status.COMPLETED, stop_reason=StopReason.BUDGET)


def difference(tmp_path, spec: RunSpec, own: list[float], **others) -> str | None:
    write_run(RunFolder(tmp_path / "full"), spec, FULL, others.pop("full", WHOLE))
    folder = RunFolder(tmp_path / "own")
    write_run(folder, spec, own, RunStatus(Status.RUNNING), **others)
    return prefix_difference(folder)


@pytest.mark.parametrize(
    ("precision", "matmul", "rounding", "fault"),
    [
        ("float64", "highest", 1e-12, 1e-9),
        ("float32", "highest", 1e-5, 1e-3),
        ("float32", "high", 5e-3, 6e-2),
        ("bfloat16", "highest", 5e-3, 6e-2),
    ],
)
def test_rounding_is_told_from_a_fault_by_precision(
    tmp_path, precision: str, matmul: str, rounding: float, fault: float
) -> None:
    spec = spec_of(precision=precision, float32_matmul=matmul)
    signs = np.resize([1, -1], 20)
    near = list(np.array(FULL[:20]) + rounding * signs)
    assert difference(tmp_path / "near", spec, near) is None
    off = near.copy()
    off[13] += fault
    said = difference(tmp_path / "off", spec, off)
    assert said is not None
    assert "differ from those of full by more than rounding: training loss" in said
    assert "from step 14 on" in said


def test_many_small_differences_of_halves_are_no_rounding(tmp_path) -> None:
    spec = spec_of(precision="bfloat16")
    said = difference(tmp_path, spec, [loss + 0.03 for loss in FULL[:20]])
    assert said is not None
    assert "training loss by 0.03 as root mean square, beyond 0.01" in said


def test_a_loss_that_is_not_in_nats_is_judged_by_its_share(tmp_path) -> None:
    spec = spec_of()
    spec = dataclasses.replace(spec, data=dataclasses.replace(spec.data, task="other"))
    folder = RunFolder(tmp_path / "own")
    write_run(RunFolder(tmp_path / "full"), spec, [1e6] * 50, WHOLE)
    write_run(folder, spec, [1e6 + 10] * 20, RunStatus(Status.RUNNING))
    assert prefix_difference(folder) is None


def test_held_out_losses_and_missing_rows_count(tmp_path) -> None:
    spec = spec_of()
    said = difference(tmp_path / "a", spec, FULL[:20], evals={0: 2.6})
    assert "held-out loss by 0.1 at most" in str(said)
    said = difference(tmp_path / "b", spec, FULL[:19])
    assert "of their training loss 19 values are at the same steps" in str(said)
    said = difference(tmp_path / "c", spec, [*FULL[:19], float("nan")])
    assert "from step 20 on" in str(said)


@pytest.mark.parametrize(
    "status",
    [
        RunStatus(Status.COMPLETED, stop_reason=StopReason.PREFIX),
        RunStatus(Status.DIVERGED),
        RunStatus(Status.PENDING),
    ],
)
def test_nothing_stands_for_a_prefix_but_a_whole_curve(tmp_path, status: RunStatus) -> None:
    said = difference(tmp_path, spec_of(), FULL[:20], full=status)
    assert "nothing to be held against: full did not complete" in str(said)


def test_a_prefix_whose_full_run_is_gone_is_told(tmp_path) -> None:
    folder = RunFolder(tmp_path / "own")
    write_run(folder, spec_of(), FULL[:20], RunStatus(Status.RUNNING))
    assert "nothing to be held against" in str(prefix_difference(folder))
