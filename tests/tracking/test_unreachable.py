"""A tracker that cannot be reached changes nothing about the training."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from batchscape.cli import main
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.status import RunStatus, Status
from batchscape.record.tables import read_table

SWEEP = [
    "sweep",
    "seed=0",
    "model=gpt_micro",
    "batch.data_parallel_size=2",
    "batch.micro_batch_size=8",
    "launcher.device=cpu",
    "data.sequence_length=16",
    "budget.samples=320",
    "evaluation.every_samples=160",
    "evaluation.samples=16",
    "measure.memory=false",
]
KEY = "0123456789abcdef0123456789abcdef01234567"
MEASURED = {
    "steps": ["optimizer_step", "samples", "loss", "gradient_norm", "learning_rate"],
    "evals": ["optimizer_step", "samples", "eval_loss"],
}


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def run_folders(sweep: Path) -> dict[str, RunFolder]:
    return {folder.path.name: folder for folder in SweepFolder(sweep).run_folders()}


@pytest.mark.slow
def test_training_is_untouched_where_wandb_cannot_be_reached(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    closed_port: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert main([*SWEEP, "tracker=none", "sweep_dir=plain"]) == 0
    capsys.readouterr()

    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed_port}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    assert main([*SWEEP, "tracker=wandb", "tracker.mode=online", "sweep_dir=tracked"]) == 0
    told = capsys.readouterr()
    said = "".join((told.out + told.err).split())
    assert "Weights&Biaseswasnotupdated:1of1runswerewrittenoffline" in said
    assert f"batchscapesync{tmp_path}/tracked" in said
    assert KEY not in said

    plain, tracked = run_folders(Path("plain")), run_folders(Path("tracked"))
    assert len(plain) == 1
    assert set(plain) == set(tracked)
    for name, folder in tracked.items():
        assert RunStatus.read(folder.status).status is Status.COMPLETED
        for table, columns in MEASURED.items():
            rows = read_table(folder, table)[columns]
            assert len(rows) > 2
            assert rows.to_dict("list") == read_table(plain[name], table)[columns].to_dict("list")
    assert len(list(Path("tracked").glob("wandb/offline-run-*/*.wandb"))) == 1
    assert not Path("plain", "wandb").exists()
