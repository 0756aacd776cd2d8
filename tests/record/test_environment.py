from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from batchscape.record.environment import KERNEL_VARIABLES, PACKAGES, THREAD_VARIABLES, environment


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", *identity, *arguments]
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_what_is_told_is_true() -> None:
    recorded = environment(os.environ, 1)
    assert recorded["batchscape"] == metadata.version("batchscape")
    assert recorded["python"] == platform.python_version()
    assert set(recorded["packages"]) >= set(PACKAGES)
    assert recorded["packages"]["torch"] == metadata.version("torch")
    assert recorded["cpu"]["logical_cores"] == psutil.cpu_count()
    assert recorded["memory_gib"] == pytest.approx(psutil.virtual_memory().total / 2**30)
    assert environment(os.environ, 3)["cpu"]["usable_cores"] == 3
    json.dumps(recorded, allow_nan=False)


def test_no_secret_and_no_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789-a-secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    recorded = environment(os.environ, 1)
    assert set(recorded["threads"]) == set(THREAD_VARIABLES)
    assert recorded["threads"]["OMP_NUM_THREADS"] == "1"
    assert recorded["threads"]["OMP_WAIT_POLICY"] is None
    assert set(recorded["kernels"]) == set(KERNEL_VARIABLES)
    text = json.dumps(recorded)
    assert "a-secret" not in text
    assert str(Path.home()) not in text
    assert environment({"OMP_NUM_THREADS": "7"}, 1)["threads"]["OMP_NUM_THREADS"] == "7"


def test_what_decides_kernels_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernels = {"NVIDIA_TF32_OVERRIDE": "0", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert kernels.items() <= environment(kernels, 1)["kernels"].items()
    package = tmp_path / "nvidia_cudnn_cu13-9.20.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: nvidia-cudnn-cu13\nVersion: 9.20.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert environment(os.environ, 1)["packages"]["nvidia-cudnn-cu13"] == "9.20.0"


def test_the_revision_of_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment(os.environ, 1)["git"] == {"revision": None, "dirty": None}
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "one")
    revision = git(tmp_path, "rev-parse", "HEAD")
    # Files that git does not know, such as outputs, are no change of the code.
    (tmp_path / "outputs").write_text("")
    assert environment(os.environ, 1)["git"] == {"revision": revision, "dirty": False}
    (tmp_path / "file").write_text("2")
    assert environment(os.environ, 1)["git"] == {"revision": revision, "dirty": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment(os.environ, 1)["git"] == {"revision": None, "dirty": None}


def test_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, batchscape.record.environment as e; e.environment({}, 1); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "pandas", "numpy", "wandb"} & set(done.stdout.split())
