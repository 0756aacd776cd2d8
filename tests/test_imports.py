"""Who may import whom, read from the source: imports inside functions count."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import batchscape

ROOT = Path(batchscape.__file__).parent

# errors, geometry <- config, interop <- record, measure, models, data <- engines, tracking
# <- train, programs <- plan, launch <- doctor <- cli. A part imports from lower layers, and from
# its own one only where it is listed.
LAYERS = (
    {
        *("cuda_devices", "device", "drawing", "errors", "geometry", "libraries", "outgoing"),
        *("scheduler", "step_time", "system", "terminal", "text", "user_code"),
    },
    {"config", "interop", "recorder", "verbs"},
    {"record", "measure", "models", "data", "transformers_callback"},
    {"engines", "tracking"},
    {"programs", "train"},
    {"plan", "launch"},
    {"doctor"},
    {"cli", "compose", "predictor", "probe", "recipe", "search", "__main__"},
)
WITHIN_A_LAYER = {
    ("geometry", "errors"),  # a refusal is an error
    ("cuda_devices", "system"),
    ("device", "cuda_devices"),
    ("user_code", "errors"),
    ("errors", "geometry"),  # for type checking only: an error carries what would work
    ("drawing", "errors"),
    ("scheduler", "errors"),
    ("outgoing", "errors"),  # a setting with a secret is refused
    ("terminal", "outgoing"),
    ("text", "errors"),
    ("user_code", "text"),
    ("data", "record"),  # the identity of data is part of a run's record
    ("models", "record"),
    ("measure", "record"),
    ("launch", "plan"),  # a machine, as the plan saw it
    ("plan", "launch"),  # how long a sweep takes is told by the launcher's own queue
    ("__main__", "cli"),
    ("cli", "compose"),
    ("cli", "predictor"),
    ("cli", "probe"),
    ("cli", "recipe"),
    ("cli", "search"),
    ("recipe", "predictor"),
    ("recipe", "probe"),  # what was tried tells what fits
}
PARTS = sorted(set.union(*LAYERS))


def level(part):
    return next(index for index, layer in enumerate(LAYERS) if part in layer)


def files(part):
    folder = ROOT / part
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [ROOT / f"{part}.py"]


@functools.cache
def imported(path):
    return frozenset(names_in(ast.parse(path.read_text()), path))


def names_in(tree, path):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path}"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_parts(path):
    names = {name.split(".")[1] for name in imported(path) if name.startswith("batchscape.")}
    return names - {"__version__"}


def test_every_module_is_in_a_layer():
    parts = {
        path.stem if path.suffix == ".py" else path.name
        for path in ROOT.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert parts - {"__init__", "conf", "sweeps", "analysis"} == set(PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_imports_point_down(part):
    for path in files(part):
        for other in own_parts(path) - {part}:
            # `analysis` stands beside the layers; only what a user calls asks it.
            below = other in PARTS and level(other) < level(part)
            asks = {(caller, "analysis") for caller in ("cli", "predictor", "recipe")}
            allowed = below or (part, other) in {*WITHIN_A_LAYER, *asks}
            assert allowed, f"{path} imports batchscape.{other}"


def test_analysis_reads_records_and_asks_what_settings_decide():
    for path in files("analysis"):
        below = {
            "config",
            "drawing",
            "record",
            "errors",
            "geometry",
            "outgoing",
            "step_time",
            "terminal",
            "text",
        }
        assert own_parts(path) <= {"analysis", "terminal", *below}, path
        roots = {name.split(".")[0] for name in imported(path)}
        assert not roots & {"torch", "hydra", "omegaconf", "wandb"}, path


def test_only_the_command_line_knows_hydra():
    for part in PARTS:
        for path in files(part):
            roots = {name.split(".")[0] for name in imported(path)}
            if roots & {"hydra", "omegaconf", "hydra_plugins"}:
                assert part in {"cli", "compose"}, path


def modules_after(*steps):
    """Packages in memory after each of some lines of code that one interpreter runs."""
    lines = "\n".join(f"{step}\nprint('MODULES', *sys.modules)" for step in steps)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{lines}"], capture_output=True, text=True, check=True
    )
    loaded = [line.split() for line in done.stdout.splitlines() if line.startswith("MODULES")]
    return [{name for name in names if "." not in name} for names in loaded]


PROGRAM = ["engine=command", "model=external", "data=external", "budget=optimizer_steps"]


def test_the_recorder_help_the_sweeper_and_a_plan_import_nothing_heavy():
    """The first of them runs in other people's scripts, the third in other applications.

    Only where a plan counts the operations of a model does it import torch.
    """
    recorder, helped, sweeper, planned = modules_after(
        "import batchscape.recorder",
        "from batchscape.cli import main\nassert main(['--help']) == 0",
        "import hydra_plugins.batchscape_plugins.grid",
        f"assert main(['plan', *{PROGRAM}, 'engine.argv=[python,-c,pass]']) == 0",
    )
    heavy = {"torch", "numpy", "pandas", "pydantic", "rich", "wandb"}
    assert not recorder & {*heavy, "hydra"}
    (checks,) = modules_after("import batchscape.interop.check, batchscape.interop.write")
    assert not checks & {"torch", "numpy", "pandas", "hydra", "transformers", "accelerate"}
    assert not helped & {*heavy, "hydra"}
    assert "hydra" in sweeper
    assert not sweeper & heavy
    assert "pydantic" in planned
    assert not planned & {"torch", "pandas", "polars", "wandb", "sklearn", "vl_convert", "scipy"}


def test_a_plan_imports_torch_only_to_predict():
    """It rehearses the training, and counts its operations; of a program it does neither."""
    users = {
        path.stem
        for path in files("plan")
        if {name.split(".")[0] for name in imported(path)} & {"torch"}
    }
    assert users == {"memory_trace", "one_rank", "step_time"}
    (predicting,) = modules_after("import batchscape.plan.memory, batchscape.plan.table")
    assert "torch" not in predicting


@pytest.mark.slow
def test_a_worker_imports_no_hydra_and_only_who_mirrors_imports_wandb():
    """And nobody Polars before it reads sweeps."""
    command, worker, mirror, everything = modules_after(
        "import batchscape.cli, batchscape.analysis.numbers",
        "import batchscape.train.worker",
        "import batchscape.launch.launcher, batchscape.tracking.mirror, batchscape.tracking.sync",
        "import batchscape.analysis.public, batchscape.cli, batchscape.recorder",
    )
    assert "torch" in worker
    assert not worker & {"hydra", "omegaconf", "wandb", "vl_convert", "polars"}
    assert "wandb" not in mirror
    assert "pandas" in everything
    assert "polars" not in everything
    assert not command & {"scipy", "pandas"}, "one module of the analysis is not all of it"


def test_what_the_analysis_offers_is_imported_when_it_is_asked_for():
    from batchscape import analysis

    assert set(analysis.__all__) <= set(dir(analysis))
    assert all(getattr(analysis, name) is not None for name in analysis.__all__)
    assert not hasattr(analysis, "nothing")


def test_only_who_mirrors_names_wandb():
    knowing = {path.stem for part in PARTS for path in files(part) if "wandb" in imported(path)}
    assert knowing == {"worker", "run", "report", "workspace"}


@pytest.mark.slow
def test_launching_training_sealing_and_status_do_without_polars(tmp_path):
    folder = str(tmp_path / "sweep")
    run = ["run", f"sweep_dir={folder}", "data=digits", "model=mlp", "tracker=none"]
    run += ["budget.samples=64", "batch.global_batch_size=32"]
    *_, loaded = modules_after(
        f"from batchscape.cli import main\nassert main({run}) == 0",
        f"assert main(['status', {folder!r}]) == 0",
    )
    assert "pandas" in loaded
    assert "polars" not in loaded


def test_polars_is_for_the_reader_of_sweeps_alone():
    modules = {path for part in (*PARTS, "analysis") for path in files(part)}
    users = {path for path in modules if {n.split(".")[0] for n in imported(path)} & {"polars"}}
    assert {str(path.relative_to(ROOT)) for path in users} == {"record/reading.py"}
