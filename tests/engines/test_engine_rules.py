"""What engines are refused before a run is launched, and what they are not."""

from __future__ import annotations

import pytest

from batchscape.errors import ConfigError

MUON = {"name": "muon", "learning_rate": 0.01}
ADAMW = {"name": "adamw", "learning_rate": 0.01}
FSDP, DDP, ACCELERATE, FABRIC = ({"name": n} for n in ("fsdp", "ddp", "accelerate", "fabric"))
RAMP = [{"global_batch_size": 16, "samples": 160}]


def zero(stage):
    return {"name": "deepspeed", "zero_stage": stage}


@pytest.mark.parametrize("engine", [FSDP, zero(1)], ids=str)
def test_muon_needs_whole_matrices(config_of, engine):
    with pytest.raises(ConfigError, match="optimizer=muon needs whole matrices"):
        config_of(engine=engine, optimizer=MUON)
    config_of(engine=engine, optimizer=ADAMW)


@pytest.mark.parametrize("engine", [DDP, ACCELERATE, FABRIC, zero(0)], ids=str)
def test_muon_goes_with_engines_of_whole_matrices(config_of, engine):
    assert config_of(engine=engine, optimizer=MUON).optimizer.name == "muon"


def test_weights_that_are_kept_apart_are_not_averaged(config_of):
    with pytest.raises(ConfigError, match="ema_half_life_tokens averages parameters where they"):
        config_of(engine=zero(3), evaluation__ema_half_life_tokens=1024)
    for engine in (zero(2), FSDP, DDP):
        config_of(engine=engine, evaluation__ema_half_life_tokens=1024)


@pytest.mark.parametrize("engine", [ACCELERATE, zero(0)], ids=str)
def test_libraries_of_one_geometry_have_no_ramp(config_of, engine):
    with pytest.raises(ConfigError, match=r"batch\.ramp changes the geometry"):
        config_of(engine=engine, batch__ramp=RAMP)
    for able in (DDP, FSDP, FABRIC):
        assert config_of(engine=able, batch__ramp=RAMP).batch.ramp


def test_hooks_of_a_library_are_not_compiled(config_of):
    with pytest.raises(ConfigError, match=r"engine\.compile"):
        config_of(engine=zero(0) | {"compile": True})
    for able in (DDP, FSDP):
        assert config_of(engine=able | {"compile": True}).engine.compile


@pytest.mark.parametrize(
    ("engine", "precision"),
    [(FSDP, "float16"), (zero(1), "float16"), (zero(1), "float64")],
    ids=str,
)
def test_an_arithmetic_that_an_engine_lacks_is_refused(config_of, engine, precision):
    message = rf"engine={engine['name']} has no {precision}, .*use float32 or bfloat16"
    with pytest.raises(ConfigError, match=message):
        config_of(engine=engine | {"precision": precision})
    assert config_of(engine=DDP | {"precision": precision}).engine.precision == precision
