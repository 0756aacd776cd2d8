"""The peak that MFU refers to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from batchscape.config import Cluster
from batchscape.config.cluster import datasheet_of
from batchscape.measure import peak as peak_module
from batchscape.measure.peak import _listed, peak_flops, product_tflops

CPU = torch.device("cpu")
GIVEN = Cluster(tflops={"float32": 12.5})


def test_the_users_figure_wins():
    assert peak_flops(CPU, "float32", "highest", GIVEN) == (12.5, "given")


def test_the_users_figures_count_where_their_device_is():
    """One kind given leaves the others to the file; those of another declared device count not."""
    h100, l4 = "NVIDIA H100 80GB HBM3", "NVIDIA L4"
    cluster = Cluster(tflops={"bfloat16": 800.0, "float32": None})
    assert _listed(h100, "bfloat16", "highest", cluster) == (800.0, "given")
    assert _listed(h100, "float32", "highest", cluster).tflops == 67.0
    assert _listed(h100, "float32", "high", GIVEN).tflops == 494.5, "of TF32, as it computes"
    declared = datasheet_of(h100)
    assert declared is not None
    assert _listed(l4, "bfloat16", "highest", declared) == _listed(
        l4, "bfloat16", "highest", Cluster()
    )
    source = "datasheet of H100 SXM 80 GB, dense bfloat16"
    assert _listed(h100, "bfloat16", "highest", declared) == (989.5, source)


def test_a_processor_has_no_peak_that_each_run_would_measure_anew():
    tflops, source = peak_flops(CPU, "float32", "highest", Cluster())
    assert tflops is None
    assert source.endswith("give cluster.tflops.float32")


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
def test_the_best_product_counts(monkeypatch, precision):
    """With a clock that makes the products take 40, 10 and 30 ms, the second one is the peak."""
    edges = iter([0.0, 0.04, 1.0, 1.01, 2.0, 2.03])
    monkeypatch.setattr(peak_module, "time", SimpleNamespace(perf_counter=lambda: next(edges)))
    assert product_tflops(precision) == pytest.approx(512 * 512 * 1023 / 0.01 / 1e12, rel=1e-3)
    assert next(edges, None) is None


def test_measuring_leaves_the_random_state():
    state = torch.get_rng_state()
    product_tflops("float32")
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "precision", "matmul", "tflops"),
    [
        # Peak by hand: units x operations a clock x boost clock, from NVIDIA's white papers.
        ("NVIDIA A100-SXM4-80GB", "bfloat16", "highest", 108 * 4 * 512 * 1.410e-3),
        ("NVIDIA A100 80GB PCIe", "float32", "highest", 108 * 64 * 2 * 1.410e-3),
        ("NVIDIA A100-PCIE-40GB", "float32", "high", 108 * 4 * 256 * 1.410e-3),
        ("NVIDIA H100 80GB HBM3", "bfloat16", "highest", 132 * 4 * 1024 * 1.830e-3),
        ("NVIDIA H200", "float32", "high", 132 * 4 * 512 * 1.830e-3),
        ("NVIDIA H100 PCIe", "float16", "highest", 114 * 4 * 1024 * 1.620e-3),
        ("Tesla V100-SXM2-32GB", "float16", "highest", 80 * 8 * 128 * 1.530e-3),
        ("Tesla V100-SXM2-16GB", "float32", "high", 80 * 64 * 2 * 1.530e-3),
        ("Tesla T4", "float16", "highest", 40 * 8 * 128 * 1.590e-3),
        ("NVIDIA A10", "bfloat16", "highest", 72 * 4 * 256 * 1.695e-3),
        ("NVIDIA L4", "bfloat16", "highest", 58 * 4 * 256 * 2.040e-3),
        ("NVIDIA L40S", "float32", "highest", 142 * 128 * 2 * 2.520e-3),
        ("NVIDIA GeForce RTX 4090", "float16", "highest", 128 * 4 * 256 * 2.520e-3 / 2),
        ("NVIDIA GeForce RTX 3090", "bfloat16", "highest", 82 * 4 * 256 * 1.695e-3 / 2),
    ],
)
def test_datasheets_agree_with_units_times_clock(name, precision, matmul, tflops):
    listed, source = _listed(name, precision, matmul, Cluster())
    assert listed == pytest.approx(tflops, rel=0.05)
    assert source.startswith("datasheet of ")


@pytest.mark.parametrize(
    ("name", "precision", "reason"),
    [
        ("NVIDIA H200 MIG 1g.18gb", "bfloat16", "no datasheet of NVIDIA H200 MIG 1g.18gb"),
        ("NVIDIA A10G", "bfloat16", "no datasheet of NVIDIA A10G"),
        ("NVIDIA GeForce RTX 3090 Ti", "bfloat16", "give cluster.tflops.bfloat16"),
        ("Tesla T4", "bfloat16", "lists no bfloat16"),
        ("NVIDIA L4", "float64", "lists no float64"),
    ],
)
def test_what_is_not_known_is_missing_with_its_reason(name, precision, reason):
    tflops, source = _listed(name, precision, "highest", Cluster())
    assert tflops is None
    assert reason in source


@pytest.mark.gpu
def test_a_product_stays_below_the_listed_peak():
    device = torch.device("cuda")
    peak = peak_flops(device, "bfloat16", "highest", Cluster())
    if peak.tflops is None:
        pytest.skip(peak.source)
    matrix = torch.rand(8192, 8192, dtype=torch.bfloat16, device=device)
    matrix @ matrix
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        matrix @ matrix
    end.record()
    torch.cuda.synchronize()
    attained = 10 * 2 * 8192**3 / begin.elapsed_time(end) / 1e9
    assert 0.2 * peak.tflops < attained < 1.02 * peak.tflops
