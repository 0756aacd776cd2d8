"""Traps of plain torch: DistributedDataParallel, clipping and loss scaling."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.systems


def test_without_no_sync_every_micro_step_exchanges(found):
    it = found("ddp", 2)
    assert it["without no_sync"]["bytes"] == it["accumulation"] * it["one"] == 48
    assert it["right"]["bytes"] == it["one"] == 24
    # More traffic, and the same gradient: nothing but the bytes tells.
    assert it["without no_sync"]["error"] < 1e-12


def test_no_sync_around_the_backward_alone_exchanges_all_the_same(found):
    it = found("ddp", 2)
    assert it["backward alone in no_sync"]["bytes"] == it["accumulation"] * it["one"]
    assert it["right"]["bytes"] == it["one"]


def test_ddp_averages_means_of_ranks(found):
    it = found("ddp", 2)
    assert it["mean of means"]["as predicted"] < 1e-12
    assert it["mean of means"]["error"] == pytest.approx(0.0381, abs=5e-5)
    assert it["right"]["error"] < 1e-12


def test_clipping_every_micro_step_is_not_clipping_the_gradient(found):
    it = found("ddp", 2)
    assert it["clipped in every micro-step"]["error"] == pytest.approx(0.134, abs=5e-4)
    assert it["clipped once"]["error"] < 1e-5


def test_clipping_before_unscaling_bounds_the_scaled_gradient(found):
    it = found("ddp", 2)
    # The scale is 1024: the bound holds for what the optimizer never sees.
    assert it["clipped before unscaling"] == pytest.approx(it["bound"] / 1024, rel=1e-3)
    assert it["clipped after unscaling"] == pytest.approx(it["bound"], rel=1e-3)
