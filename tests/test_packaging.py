"""One wheel carries code, configuration, studies and analysis, from any folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "batchscape"
NOT_SOURCE = shutil.ignore_patterns(
    ".*", "*.egg-info", "build", "dist", "outputs", "wandb", "__pycache__", "tests"
)


def run(*command, cwd):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_symlinks_lead_to_the_top_level_folders():
    for name in ("conf", "sweeps", "analysis"):
        assert (PACKAGE / name).is_symlink()
        assert (PACKAGE / name).resolve() == ROOT / name
        assert (ROOT / name / "__init__.py").exists()
    assert not (ROOT / "src" / "hydra_plugins" / "__init__.py").exists(), "a namespace of Hydra's"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the source, so that building leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source") / "batchscape"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=NOT_SOURCE)
    return copy


def wheel_of(source, into):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", into, source, cwd=into)
    (wheel,) = into.glob("*.whl")
    return wheel


def sdist_of(source, into):
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(into)!r})"
    run(sys.executable, "-c", code, cwd=source)
    (archive,) = into.glob("*.tar.gz")
    return archive


def fresh_environment(folder):
    """Make a virtual environment that sees the dependencies of this one, but not its batchscape."""
    venv.create(folder, with_pip=False, symlinks=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    site_packages = Path(sysconfig.get_path("purelib", vars=paths))
    dependencies = sysconfig.get_path("purelib")
    (site_packages / "dependencies.pth").write_text(f"{dependencies}\n")
    return folder / "bin"


def check_installed(installed, folder):
    binaries = fresh_environment(folder / "venv")
    target = installed if isinstance(installed, list) else [installed]
    run(
        *(sys.executable, "-m", "pip", "--python", binaries / "python", "install", "--no-deps"),
        *("--no-index", "--no-build-isolation", "--disable-pip-version-check", "--force-reinstall"),
        *target,
        cwd=folder,
    )
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    plan_text = run(binaries / "batchscape", "plan", "sweeps=fixed_global_batch", cwd=elsewhere)
    assert "Runs: 12. Rejected runs: 6." in plan_text
    code = "import batchscape.analysis as a; print(a.__file__, callable(a.write_report))"
    where, callable_ = run(binaries / "python", "-c", code, cwd=elsewhere).split()
    assert callable_ == "True"
    assert str(ROOT) not in where
    assert not any(elsewhere.iterdir())


@pytest.mark.slow
def test_a_wheel_holds_everything_and_is_that_of_the_sdist(source, tmp_path):
    archive = sdist_of(source, tmp_path)
    direct, unpacked = tmp_path / "direct", tmp_path / "unpacked"
    direct.mkdir()
    unpacked.mkdir()
    wheels = [wheel_of(source, direct), wheel_of(archive, unpacked)]
    names, from_sdist = ({*zipfile.ZipFile(wheel).namelist()} for wheel in wheels)
    assert names == from_sdist
    for folder in ("conf", "sweeps", "analysis"):
        expected = {
            f"batchscape/{folder}/{path.relative_to(ROOT / folder).as_posix()}"
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert expected <= names
    assert {"batchscape/py.typed", "hydra_plugins/batchscape_plugins/grid.py"} <= names
    assert "hydra_plugins/__init__.py" not in names
    assert not any(name.startswith(("tests", "analysis", "conf", "sweeps")) for name in names)
    check_installed(wheels[1], tmp_path)
