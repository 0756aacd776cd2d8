"""Real runs for tests: small ones, trained by real processes forked from a warm server."""

from __future__ import annotations

import copy
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before NumPy is imported, for this process and those of tests: several on two cores would mostly
# wait for each other's threads.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import pandas as pd
import pytest
from hydra._internal import defaults_list
from hydra._internal.hydra import Hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hypothesis import settings

from batchscape.config import DataSettings, RunConfig
from batchscape.data.corpus import prepare
from batchscape.geometry import solve
from batchscape.launch import forkserver
from batchscape.launch.child import WORKER, Start
from batchscape.launch.forkserver import Forked
from batchscape.record.files import write_json
from batchscape.record.folder import RunFolder
from batchscape.record.spec import DataIdentity, RunSpec, Stage
from batchscape.record.tables import read_table

# For what several folders of tests share, such as `exact`.
sys.path.append(str(Path(__file__).parent))

import forked_programs
from warm_interpreter import ForkedInterpreter, WarmInterpreter

# Until all tests are collected: imports and items make no garbage worth looking for.
gc.disable()

settings.register_profile("batchscape", deadline=None, max_examples=50)
settings.load_profile("batchscape")

TINY = {"name": "gpt", "n_layers": 2, "n_heads": 2, "d_model": 32}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later collection of garbage, which would visit it all.

    Whoever measures memory collects garbage, and statsmodels does at each correction.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the test that failed first, which often explains the others."""
    statistics = terminalreporter.stats
    failures = [*statistics.get("failed", ()), *statistics.get("error", ())]
    if len(failures) > 1:
        # A file that cannot be imported comes before all tests, and has no time.
        first = min(failures, key=lambda report: getattr(report, "stop", 0))
        terminalreporter.write_line(f"first to fail: {first.nodeid}")


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prepare data where the user's own cache is not touched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp().parent / "cache"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _composed_once() -> Iterator[None]:
    """Spare half of Hydra's work on each command line that is composed in this process.

    It composes everything once only to read `hydra.mode`, which our command lines refuse, parses
    the same files of our packages each time, and for each of them gathers what `${...}` may stand
    for in its list of defaults, where none has any.
    """
    Plugins.instance()  # defines the classes of sources anew
    of_packages = SourcesRegistry.instance().resolve("pkg")
    load, loaded = of_packages.load_config, {}

    def load_once(source: ConfigSource, config_path: str) -> ConfigResult:
        key = source.path, config_path
        if key not in loaded:
            loaded[key] = load(source, config_path)
        return copy.deepcopy(loaded[key])

    interpolation_map = defaults_list._create_interpolation_map

    def interpolation_map_where_used(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
        if any(default.is_interpolation() for default in defaults):
            return interpolation_map(overrides, defaults, self_added)
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hydra, "get_mode", lambda *_, **__: None)
        patch.setattr(defaults_list, "_create_interpolation_map", interpolation_map_where_used)
        patch.setattr(of_packages, "load_config", load_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Neither wait for the devices of other launchers nor keep them waiting."""
    tmp_path_factory.getbasetemp()  # where it always was
    with (
        tempfile.TemporaryDirectory(prefix="bs-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def warm_interpreter() -> Iterator[list[WarmInterpreter]]:
    """Fork the fork servers of sweeps that are launched in this process, see `WarmInterpreter`."""
    warm: list[WarmInterpreter] = []

    def start(*arguments: Any, **options: Any) -> ForkedInterpreter:
        if not warm:
            warm.append(WarmInterpreter())
        return warm[0].start_interpreter(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "start_interpreter", start)
        yield warm
    for interpreter in warm:
        interpreter.close()


@pytest.fixture(scope="session")
def warm_libraries() -> Iterator[WarmInterpreter]:
    """Like `warm_interpreter`, with what programs of others import, see `forked_programs`."""
    warm = forked_programs.warm_libraries()
    yield warm
    warm.close()


@pytest.fixture
def heeded_signals() -> Iterator[None]:
    """Heed what `nohup` and the background of a script have the tests ignore, as children do."""
    usual = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def make_config(**overrides: Any) -> RunConfig:
    """Return a small configuration; `group__name=value` overrides one setting."""
    mapping: dict[str, Any] = {
        "batch": {"global_batch_size": 32, "micro_batch_size": 32},
        "model": dict(TINY),
        "data": {"name": "stdlib", "sequence_length": 32},
        "optimizer": {"name": "adamw", "learning_rate": 3e-3},
        "schedule": {"name": "cosine", "warmup_samples": 80},
        "scaling": {},
        "budget": {"optimizer_steps": 20},
        "evaluation": {"samples": 16, "batch_size": 8},
        "engine": {"name": "ddp", "precision": "float64"},
        "loader": {},
        "checkpoint": {"every_s": None},
        "measure": {"memory": False, "noise_scale_every": None},
        "launcher": {"name": "local", "device": "cpu"},
        "tracker": {"name": "none"},
    }
    for name, value in overrides.items():
        group, _, key = name.partition("__")
        if key:
            mapping[group][key] = value
        else:
            mapping[group] = value
    return RunConfig.from_mapping(mapping)


def make_spec(geometry: tuple[int, int, int] = (1, 32, 1), **overrides: Any) -> RunSpec:
    """Return a run of (data_parallel_size, micro_batch_size, gradient_accumulation_steps)."""
    config = make_config(**overrides)
    ranks, micro, accumulation = geometry
    solved = solve(
        data_parallel_size=ranks, micro_batch_size=micro, gradient_accumulation_steps=accumulation
    )
    steps = config.budget.optimizer_steps
    assert steps is not None
    precision = "float32" if config.engine.precision == "auto" else config.engine.precision
    return RunSpec(
        run_id=f"d{ranks}-m{micro}-a{accumulation}",
        trajectory_id="trajectory",
        sweep_name="test",
        stages=(Stage(steps * solved.global_batch_size, solved, config.optimizer),),
        device_type="cpu",
        precision=precision,
        evaluation_every_samples=config.evaluation.every_samples,
        data=_prepared(config.data),
        config=config,
    )


_PREPARED: dict[str, DataIdentity] = {}


def _prepared(data: DataSettings) -> DataIdentity:
    """Prepare data; what Python and its packages hold is the same for the whole session."""
    if data.name not in {"stdlib", "digits"}:
        return prepare(data)
    key = repr(data)
    if key not in _PREPARED or not Path(_PREPARED[key].folder).is_dir():
        _PREPARED[key] = prepare(data)
    return _PREPARED[key]


class Trainer:
    """Trains specifications with real processes."""

    make_spec = staticmethod(make_spec)

    def __init__(self) -> None:
        self._processes = Forked(WORKER)
        self._with_deepspeed: Forked | None = None

    def _server_of(self, spec: RunSpec) -> Forked:
        """Return the server of a run; that of DeepSpeed has imported it, which takes seconds."""
        if spec.config.engine.name != "deepspeed":
            return self._processes
        if self._with_deepspeed is None:
            self._with_deepspeed = Forked(f"{WORKER} deepspeed_on_cpu")
        return self._with_deepspeed

    def start(
        self, spec: RunSpec, root: Path, attempt: int = 0, entry: str = WORKER, **settings: str
    ) -> RunFolder:
        """Start the ranks of a run; return its folder."""
        folder = RunFolder(root / spec.run_id)
        folder.path.mkdir(parents=True, exist_ok=True)
        spec.write(folder.config)
        rendezvous = folder.path / f"rendezvous-{attempt}"
        world_size = spec.geometry.data_parallel_size
        launch = {
            "attempt": attempt,
            "world_size": world_size,
            "device_type": "cpu",
            "devices": list(range(world_size)),
            "threads_per_rank": 1,
            "concurrent_runs": 1,
            "oversubscribed": False,
            "timing_valid": True,
            "timing_invalid_reason": None,
            "rendezvous": str(rendezvous),
        }
        write_json(folder.launch, launch)
        self._server_of(spec).start(
            Start(
                run_id=spec.run_id,
                run_dir=str(folder.path),
                log=str(folder.log),
                ranks=world_size,
                entry=entry,
                environment=settings,
            )
        )
        return folder

    def wait(self, spec: RunSpec) -> list[int]:
        """Wait for the ranks of a run; return their exit codes."""
        codes: list[int] = []
        deadline = time.monotonic() + 300
        while len(codes) < spec.geometry.data_parallel_size:
            assert time.monotonic() < deadline, "the ranks hang"
            codes += [ended.code for ended in self._server_of(spec).wait(1.0)]
        return codes

    def train(self, spec: RunSpec, root: Path, **options: Any) -> RunFolder:
        """Run to the end; a failure shows the log."""
        folder = self.start(spec, root, **options)
        codes = self.wait(spec)
        assert not any(codes), folder.log.read_text()
        return folder

    def kill(self, spec: RunSpec, number: int = signal.SIGKILL) -> list[int]:
        """Send a signal to all ranks of a run and wait for their end."""
        self._server_of(spec).signal(spec.run_id, number)
        return self.wait(spec)

    def close(self) -> None:
        """End the servers."""
        self._processes.close()
        if self._with_deepspeed is not None:
            self._with_deepspeed.close()


def steps_of(folder: RunFolder) -> pd.DataFrame:
    """Return the optimizer steps of a run."""
    return read_table(folder, "steps")


def outcome_of(folder: RunFolder, rank: int = 0) -> dict[str, Any]:
    """Return how a rank ended."""
    content: dict[str, Any] = json.loads(folder.outcome(rank).read_text())
    return content


@pytest.fixture(scope="session")
def trainer() -> Iterator[Trainer]:
    """A warm way of training real runs."""
    sys.path.insert(0, str(Path(__file__).parent / "faults"))
    running = Trainer()
    yield running
    running.close()
    sys.path.pop(0)


@pytest.fixture
def config_of() -> Callable[..., RunConfig]:
    """`make_config`."""
    return make_config


@pytest.fixture(scope="session")
def spec_of() -> Callable[..., RunSpec]:
    """`make_spec`."""
    return make_spec


@pytest.fixture
def steps() -> Callable[[RunFolder], pd.DataFrame]:
    """`steps_of`."""
    return steps_of


@pytest.fixture
def outcome() -> Callable[..., dict[str, Any]]:
    """`outcome_of`."""
    return outcome_of
