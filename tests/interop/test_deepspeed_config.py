"""The generated DeepSpeed configuration, as the library itself reads it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.errors import ConfigError
from batchscape.geometry import BatchGeometry
from batchscape.interop.write import deepspeed_config

COUNTS = st.integers(1, 64)
GEOMETRIES = st.builds(BatchGeometry, COUNTS, COUNTS, COUNTS, COUNTS)


def written(geometry, **changes):
    arguments = {"zero_stage": 1, "precision": "float32", "gradient_clip_norm": 1.0, **changes}
    return deepspeed_config(geometry, **arguments)


@given(GEOMETRIES)
def test_all_batch_numbers_are_written_and_multiply(geometry):
    config = json.loads(json.dumps(written(geometry)))
    product = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert config["train_batch_size"] == product * geometry.data_parallel_size


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"zero_stage": 4}, r"0, 1, 2 or 3; given zero_stage=4"),
        ({"precision": "float64"}, r"float32 or bfloat16, given precision='float64'"),
        ({"precision": "float16"}, r"float32 or bfloat16, given precision='float16'"),
    ],
)
def test_what_the_library_cannot_do_is_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        written(BatchGeometry(1, 1, 4, 2), **change)


@pytest.mark.systems
class TestInTheLibrary:
    """Read by the installed DeepSpeed, in a world of one."""

    @pytest.fixture
    def read(self, monkeypatch):
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
        config = pytest.importorskip("deepspeed.runtime.config")
        return config.DeepSpeedConfig

    @pytest.mark.parametrize("stage", range(4))
    @pytest.mark.parametrize("precision", ["float32", "bfloat16"])
    def test_it_has_the_same_geometry_and_settings(self, read, stage, precision):
        geometry = BatchGeometry(1, 1, 6, 5)
        config = read(written(geometry, zero_stage=stage, precision=precision))
        assert (
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
        ) == (30, 6, 5)
        assert config.zero_optimization_stage == stage
        assert config.gradient_clipping == 1.0
        assert str(config.communication_data_type) == "torch.float32"
        assert config.torch_autocast_enabled == (precision == "bfloat16")
        assert config.torch_autocast_lower_precision_safe_modules == []
        assert not config.float16_config.enabled
        assert not config.bfloat16_config.enabled
        assert not config.wall_clock_breakdown
        assert config.steps_per_print is None
