"""What is particular to accelerate."""

from __future__ import annotations

import pytest
import torch

from batchscape.engines import build_engine
from batchscape.errors import ConfigError

pytestmark = pytest.mark.systems

accelerate = pytest.importorskip("accelerate")

CPU = torch.device("cpu")


def spec_with(spec_of, precision="float64", geometry=(1, 4, 3)):
    return spec_of(geometry, engine={"name": "accelerate", "precision": precision})


def test_float16_on_a_cpu_is_refused_as_accelerate_drops_it(spec_of):
    """Asked for fp16 there, it neither lowers the arithmetic nor scales the loss."""
    with pytest.raises(ConfigError, match=r"cannot train with engine\.precision=float16 on a CPU"):
        build_engine(spec_with(spec_of, "float16"), CPU)


def test_settings_of_an_accelerator_before_are_not_taken_over(spec_of):
    """Of a user's own code in the same process, as of an engine before: its states are global."""
    accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=7)
    engine = build_engine(spec_with(spec_of), CPU)
    assert engine.reported().gradient_accumulation_steps == 3
    assert engine._accelerator.mixed_precision == "no"
    engine.close()
    assert not accelerate.state.PartialState._shared_state
    assert not accelerate.state.AcceleratorState._shared_state
    assert not accelerate.state.GradientState._shared_state


def test_an_accumulation_that_accelerate_takes_from_elsewhere_is_reported(spec_of):
    engine = build_engine(spec_with(spec_of), CPU)
    engine._accelerator.gradient_accumulation_steps = 2
    assert engine.reported().gradient_accumulation_steps == 2
    engine.close()


def test_a_missing_library_is_named_with_what_installs_it(spec_of, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "batchscape.engines.accelerate", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'batchscape\[accelerate\]'"):
        build_engine(spec_with(spec_of), CPU)
