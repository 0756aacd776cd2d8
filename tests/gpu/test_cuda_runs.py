"""Whole runs on CUDA: they learn, agree with the CPU and one another, and end as they should."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu

PARTS = ["forward_backward_s", "exchange_s", "optimizer_s"]


def losses_of(run):
    return run.table("steps")["loss"].to_numpy(dtype=float)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16", "float64"])
def test_a_run_learns_and_leaves_every_figure(cuda_spec, train, precision):
    spec = cuda_spec(
        (1, 16, 2),
        engine__precision=precision,
        budget__optimizer_steps=60,
        measure__warmup_optimizer_steps=5,
        evaluation__every_samples=32 * 20,
    )
    run = train(spec)
    losses = losses_of(run)
    assert len(losses) == 60
    assert losses[-5:].mean() < losses[0] - 1
    rows = run.table("steps")
    assert rows[["step_time_s", *PARTS]].notna().all(axis=None)
    # Events resolve about half a microsecond.
    assert (rows[PARTS].sum(axis=1) - rows["step_time_s"]).abs().max() < 5e-6
    assert (rows[["exchange_s", "exchange_span_s"]] == 0).all(axis=None)
    assert not rows["skipped"].any()
    (rank,) = run.table("ranks").to_dict("records")
    assert rank["device"] == "cuda:0"
    assert rank["memory_method"] == "cuda allocator"
    assert rank["reduction_precision"] == "float32"
    assert rank["libraries"].startswith(f"CUDA {torch.version.cuda}, cuDNN ")
    assert rank["attention_kernel"] in {"flash", "efficient", "cudnn", "math"}
    assert rank["allocator_retries"] == 0
    assert 0 < rank["workspace_gib"] < rank["peak_allocated_gib"]
    # Each evaluation is at a multiple of 20, and what follows the warm-up begins anew.
    assert rows["optimizer_step"][rows["gap_s"].isna()].tolist() == [1, 6, 21, 41]
    assert (rows["gap_s"].dropna() >= 0).all()
    assert run.status.summary["final_eval_loss"] < losses[0]


def test_float64_on_cuda_is_float64_on_the_cpu(cuda_spec, spec_of, train, trainer, steps, tmp_path):
    """Two implementations of every kernel; what is left is rounding."""
    on_cuda = losses_of(train(cuda_spec((1, 8, 4))))
    on_cpu = steps(trainer.train(spec_of((1, 8, 4)), tmp_path / "cpu"))["loss"].to_numpy(float)
    np.testing.assert_allclose(on_cuda, on_cpu, rtol=1e-9)


def test_decompositions_agree_also_of_ranks_that_share_the_device(cuda_spec, launch):
    """Law 2 and 3 on CUDA; the ranks of one device exchange through gloo."""
    settings = {"checkpoint__every_s": 0.0, "evaluation__every_samples": 320}
    geometries = [(1, 32, 1), (1, 8, 4), (2, 8, 2), (4, 8, 1)]
    specs = [cuda_spec(geometry, launcher__oversubscribe=4, **settings) for geometry in geometries]
    devices = torch.cuda.device_count()
    one, *others = launch(*specs)
    for run in (one, *others):
        assert run.status.status == "completed", f"{run.status.reason}\n{run.log}"
    assert losses_of(one)[-1] < losses_of(one)[0] - 0.05
    for run, (ranks, _, _) in zip(others, geometries[1:], strict=True):
        np.testing.assert_allclose(losses_of(run), losses_of(one), rtol=1e-9)
        table = run.table("ranks").sort_values("rank")
        assert table["device"].tolist() == [f"cuda:{r % min(ranks, devices)}" for r in range(ranks)]
        assert run.launch["oversubscribed"] == (ranks > min(devices, run.launch["usable_cores"]))
        # The energy of a device is told by the first of its ranks.
        assert table["energy_j"].notna().sum() <= min(ranks, devices)
        if ranks > devices:
            assert not run.launch["timing_valid"]
            noun = "CUDA device" if devices == 1 else "CUDA devices"
            assert f"{ranks} ranks share {devices} {noun}" in run.launch["timing_invalid_reason"]


def test_float16_skips_an_overflow_and_goes_on(cuda_spec, train):
    """A loss scaled beyond float16 in one step: no update, and training as before after it."""
    spec = cuda_spec(
        (1, 32, 1),
        engine__precision="float16",
        measure__memory=False,
        budget__optimizer_steps=40,
    )
    run = train(spec, entry="cuda_workers:overflowing")
    rows = run.table("steps")
    assert rows["optimizer_step"][rows["skipped"]].tolist() == [4]
    assert run.status.summary["skipped_optimizer_steps"] == 1
    losses = losses_of(run)
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] - 0.5


def test_tf32_is_what_is_asked_for(cuda_spec, launch):
    """`high` multiplies with 10 bits of mantissa: other losses, not far from those of float32."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("TF32 is there since compute capability 8.0")
    curves = []
    for products in ("highest", "highest", "high"):
        spec = cuda_spec(
            engine__precision="float32", engine__float32_matmul=products, model__d_model=128
        )
        (run,) = launch(spec)
        curves.append(losses_of(run))
    np.testing.assert_allclose(curves[1], curves[0], atol=1e-4)
    assert np.abs(curves[2] - curves[0]).max() > np.abs(curves[1] - curves[0]).max()
    np.testing.assert_allclose(curves[2], curves[0], atol=2e-2)


def test_out_of_memory_ends_the_run_as_oom_and_not_the_sweep(cuda_spec, launch):
    """A rank that may take 2 % of the device, with a batch whose logits take 17 GiB alone."""
    small = cuda_spec((1, 32, 1), budget__optimizer_steps=3)
    large = cuda_spec((1, 2**19, 1), engine__precision="float32", budget__optimizer_steps=3)
    again = replace(small, run_id="again")
    runs = launch(small, large, again, entry="cuda_workers:cramped")
    assert [str(run.status.status) for run in runs] == ["completed", "oom", "completed"]
    reason = runs[1].status.reason
    where = r"out of memory in forward of optimizer step 1: OutOfMemoryError: CUDA out of memory"
    assert re.match(where, reason), reason
    ended = runs[1].status
    assert (ended.rank, ended.cause, ended.phase) == (0, "out_of_memory", "forward")
    assert ended.peak_memory_method == "allocated"
    assert 0 < ended.peak_memory_gib < 17


def test_a_compiled_run_agrees_and_its_compile_time_is_apart(cuda_spec, launch):
    found = []
    for compiled in (False, True):
        spec = cuda_spec(
            (1, 16, 2),
            engine__precision="bfloat16",
            engine__compile=compiled,
            budget__optimizer_steps=60,
        )
        (run,) = launch(spec)
        assert run.status.status == "completed", f"{run.status.reason}\n{run.log}"
        found.append(losses_of(run))
        compile_s = run.table("ranks")["compile_s"].iloc[0]
        if compiled:
            assert compile_s > 0
    eager, compiled_losses = found
    assert compiled_losses[-5:].mean() < compiled_losses[0] - 1
    # Fused kernels round elsewhere: as decompositions in bfloat16, pointwise.
    np.testing.assert_allclose(compiled_losses, eager, atol=5e-2)


def test_gpt2_124m_trains_within_the_memory_that_was_predicted(cuda_spec, train):
    """Peak of GPT-2 124M at 4 x 1024 tokens, bfloat16 and flash attention: 5334 MiB.

    Predicted by tracking the tensors of the same model, without a device; the tracker knows no
    workspaces, and blocks of the allocator are rounded up.
    """
    if torch.cuda.get_device_properties(0).total_memory < 12 * 2**30:
        pytest.skip("needs 12 GiB")
    spec = cuda_spec(
        (1, 4, 1),
        model={
            "name": "gpt",
            "n_layers": 12,
            "n_heads": 12,
            "d_model": 768,
            "vocabulary_size": 50257,
        },
        data={"name": "stdlib", "sequence_length": 1024},
        optimizer={"name": "adamw", "learning_rate": 6e-4},
        schedule={"name": "constant"},
        engine__precision="bfloat16",
        budget__optimizer_steps=10,
        measure__warmup_optimizer_steps=3,
        evaluation={"samples": 8, "batch_size": 4},
    )
    run = train(spec)
    losses = losses_of(run)
    assert losses[0] == pytest.approx(np.log(50257), abs=0.5)
    assert losses[-1] < losses[0] - 1
    figures = run.status.summary
    assert figures["peak_allocated_gib"] == pytest.approx(5334 / 1024, rel=0.1)
    assert figures["peak_reserved_gib"] >= figures["peak_allocated_gib"]
    parameters = 12 * 12 * 768**2 + 50257 * 768 + 1024 * 768
    assert figures["allocated_after_model_gib"] == pytest.approx(4 * parameters / 2**30, rel=0.01)


def test_telemetry_of_a_run(cuda_spec, train):
    """A run of some seconds has power, clock and energy, and they fit together."""
    spec = cuda_spec(
        (1, 64, 1),
        engine__precision="float32",
        model__d_model=512,
        model__n_layers=6,
        data__sequence_length=256,
        budget__optimizer_steps=300,
        measure__warmup_optimizer_steps=5,
    )
    run = train(spec)
    rows, (rank,) = run.table("steps"), run.table("ranks").to_dict("records")
    power, clock = rows["power_w"].dropna(), rows["clock_mhz"].dropna()
    if power.empty:
        pytest.skip("the driver tells no power here")
    assert len(power) <= rows["train_time_s"].iloc[-1] + 2  # at most once a second
    assert power.between(10, 2000).all()
    assert clock.between(100, 5000).all()
    assert rank["throttled"] in {True, False}
    measured_s = rows.loc[~rows["warmup"], "step_time_s"].sum()
    assert 10 < rank["energy_j"] / measured_s < 2000
    if measured_s > 3:
        assert rank["energy_j"] / measured_s == pytest.approx(power.iloc[1:].mean(), rel=0.5)
