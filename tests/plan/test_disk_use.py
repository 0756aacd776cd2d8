"""What a plan says of the disk, against models that are built and folders that are written."""

import dataclasses
import sys
from pathlib import Path

import pytest

from batchscape.plan import disk_use as plan_disk
from batchscape.plan.disk_use import disk_warning
from batchscape.plan.parameters import count_parameters
from batchscape.record.folder import SweepFolder

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from small_disk import with_small_disk

MODELS = {
    "gpt": {"model": {"name": "gpt", "n_layers": 3, "n_heads": 2, "d_model": 24}},
    "wide vocabulary": {
        "model": {"name": "gpt", "n_layers": 1, "n_heads": 2, "d_model": 8, "vocabulary_size": 999}
    },
    "llama": {
        "model": {
            "name": "llama", "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_model": 32, "d_ff": 80
        }
    },
    "mlp": {"model": {"name": "mlp", "hidden_sizes": [20, 30]}, "data": {"name": "digits"}},
    "linear": {"model": {"name": "mlp", "hidden_sizes": []}, "data": {"name": "digits"}},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model_that_is_built(spec_of, name):
    from batchscape.models.build import build_model

    spec = spec_of((1, 4, 1), **MODELS[name])
    built = build_model(spec.config, spec.data, spec.precision)
    expected = sum(parameter.numel() for parameter in built.parameters())
    assert count_parameters(spec.config, spec.data) == expected


def test_checkpoints_have_the_size_that_is_said(spec_of, tmp_path, monkeypatch):
    """A checkpoint of the real engine; the warning begins between 3 of them and one byte less."""
    import torch

    from batchscape.engines import build_engine
    from batchscape.train.checkpoint import save_checkpoint

    model = {"name": "gpt", "n_layers": 2, "n_heads": 2, "d_model": 128}
    alone = {"engine__precision": "float32", "launcher__share_beginnings": False}
    spec = spec_of((1, 4, 1), model=model, **alone)
    engine = build_engine(spec, torch.device("cpu"))
    ids = torch.zeros((4, 32), dtype=torch.int64)
    engine.micro_step(ids, ids, 1.0, last=True)
    engine.optimizer_step(spec.stages[0].optimizer, 1.0)
    state = {"rng": [torch.get_rng_state()], **engine.state(), "average": None}
    written = save_checkpoint(tmp_path / "written", 1, state).stat().st_size
    engine.close()
    needed = 3 * 3 * 4 * (count_parameters(spec.config, spec.data) or 0)
    assert needed / 3 == pytest.approx(written, rel=0.1)

    def warning(free, **settings):
        """What is said of two runs where so many bytes are free."""
        monkeypatch.setattr(plan_disk, "free_bytes", lambda _: free)
        one = spec_of((1, 4, 1), model=model, **{**alone, **settings})
        two = [dataclasses.replace(one, run_id=name) for name in "ab"]
        return disk_warning(two, SweepFolder(tmp_path / "sweep"))

    for free, settings, words in (
        (needed, {}, "Checkpoints take "),
        # One branch point stays until nobody needs it.
        (needed * 4 // 3, {"launcher__share_beginnings": True}, "Checkpoints take "),
        # Of each run the state after four samples.
        (needed * 5 // 3, {"checkpoint__keep_at_samples": (4,)}, "Checkpoints take "),
        (2 * needed, {"launcher__concurrent_runs": 2}, "smaller launcher.concurrent_runs"),
    ):
        assert warning(free, **settings) is None
        assert words in warning(free - 1, **settings)
    assert disk_warning([], SweepFolder(tmp_path)) is None


def planned(place, spec):
    return disk_warning([spec], SweepFolder(place / "not" / "there" / "yet"))


def test_what_does_not_fit_is_said_before(spec_of, tmp_path):
    place = tmp_path / "disk"
    spec = spec_of((1, 16, 2), model={"name": "gpt", "n_layers": 2, "n_heads": 2, "d_model": 128})
    text = with_small_disk(place, 1 << 20, planned, place, spec)
    assert "and 1 MiB are free: make space" in text
    assert planned(tmp_path, spec) is None
