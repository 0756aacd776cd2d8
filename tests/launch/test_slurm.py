"""What jobs ask for and what they do, without a Slurm: `tests/slurm` has one."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchscape.cli import main
from batchscape.config import Slurm
from batchscape.launch.slurm.order import POOL, JobOrder, job_name, script, shapes
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec

LAUNCHER = {"name": "slurm", "device": "cpu"}
CLUSTER = {"nodes": 2, "devices_per_node": 4}


@pytest.fixture
def on_nodes(spec_of: Callable[..., RunSpec]) -> Callable[..., RunSpec]:
    """Return a run of so many nodes, with four ranks on each."""

    def make(nodes: int, **launcher: Any) -> RunSpec:
        spec = spec_of((4 * nodes, 1, 1), launcher=LAUNCHER | launcher, cluster=CLUSTER)
        (stage,) = spec.stages
        geometry = replace(stage.geometry, nodes=nodes, devices_per_node=4)
        return replace(spec, stages=(replace(stage, geometry=geometry),))

    return make


def options(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    words = [shlex.split(line.removeprefix("#SBATCH ")) for line in lines]
    assert all(len(word) == 1 for word in words), "one option a line"
    pairs = (word[0].partition("=") for word in words)
    return {name: value for name, _, value in pairs}


def script_of(spec: RunSpec, sweep: SweepFolder) -> str:
    assert isinstance(spec.config.launcher, Slurm)
    text = script(sweep, spec, spec.config.launcher)
    subprocess.run(["/bin/bash", "-n"], input=text, text=True, check=True)
    return text


def test_a_pool_job_asks_for_a_node_as_declared(on_nodes, tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path / "a sweep")
    values = options(script_of(on_nodes(1), sweep))
    assert values == {
        "--job-name": job_name(sweep, POOL),
        "--output": f"{tmp_path}/a sweep/slurm/job-%j.txt",
        "--open-mode": "append",
        "--requeue": "",
        "--nodes": "1",
        "--ntasks-per-node": "1",
        "--time": "60",
        "--signal": "B:USR1@120",
        "--cpus-per-task": "4",
    }
    sbatch = {"partition": "p", "account": "a", "mem": "1536M", "gres": "gpu:a100:3"}
    more = {"cpus-per-task": 12, "gpus-per-node": 3, "exclusive": True, "requeue": None}
    spec = on_nodes(1, sbatch=sbatch | more, timeout_min=7, signal_delay_s=30)
    changed = options(script_of(spec, sweep))
    expected = {f"--{name}": value for name, value in sbatch.items()}
    expected |= {"--cpus-per-task": "12", "--gpus-per-node": "3", "--exclusive": ""}
    expected |= {"--time": "7", "--signal": "B:USR1@30"}
    assert changed == {k: v for k, v in values.items() if k != "--requeue"} | expected


def test_a_percent_sign_of_the_folder_is_its_own(on_nodes, tmp_path: Path) -> None:
    values = options(script_of(on_nodes(1), SweepFolder(tmp_path / "50%")))
    assert values["--output"] == f"{tmp_path}/50%%/slurm/job-%j.txt"


@pytest.mark.parametrize(
    ("sbatch", "option"),
    [
        (
            {"job-name": "mine"},
            "launcher sets --job-name of sbatch; got sbatch: {job-name: mine}, use sweep_name",
        ),
        ({"array": "0-9"}, "got sbatch: {array: 0-9}, use launcher.jobs"),
        ({"nodes": None}, "use batch.nodes"),
        ({"time": "1:00"}, "got sbatch: {time: 1:00}, use launcher.timeout_min"),
        ({"signal": "USR2"}, "use launcher.signal_delay_s"),
        ({"comment": "a\n#SBATCH --exclusive"}, "one line of text; got comment: 'a\\n"),
        ({"gres_flags": "x"}, "got sbatch: {gres_flags: x}, use gres-flags"),
        ({"w": "node1"}, "got sbatch: {w: node1}, use partition or mem"),
        ({"--exclusive": True}, "got sbatch: {--exclusive: True}, use exclusive"),
    ],
)
def test_options_that_would_break_the_job_are_refused(
    sbatch: dict[str, Any], option: str, on_nodes: Callable[..., RunSpec]
) -> None:
    with pytest.raises(ValueError, match=re.escape(option)):
        on_nodes(1, sbatch=sbatch)


def test_a_job_over_nodes_has_a_process_on_each(on_nodes, tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path)
    text = script_of(on_nodes(2, sbatch={"gpus-per-node": 8}), sweep)
    values = options(text)
    assert (values["--nodes"], values["--gpus-per-node"]) == ("2", "4"), "one a rank"
    assert "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=4 " in text
    assert "srun" not in script_of(on_nodes(1), sweep)
    text = script_of(
        on_nodes(2, python="apptainer exec i.sif python", setup=["module load x"]), sweep
    )
    assert text.count("apptainer exec i.sif python -m batchscape.launch.slurm.") == 2
    assert text.index("module load x") < text.index("apptainer")


def test_names_of_jobs_are_those_of_one_folder_and_shape(tmp_path: Path) -> None:
    folders = [SweepFolder(tmp_path / name) for name in ("a, b", "ab", "c/ab")]
    names = {job_name(folder, shape) for folder in folders for shape in (POOL, "2x4")}
    assert len(names) == 6
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for name in names)


def test_an_order_is_read_as_it_was_written_and_extended(on_nodes, tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path)
    specs = [replace(on_nodes(nodes), run_id=f"run-{nodes}") for nodes in (1, 2)]
    launcher = replace(specs[0].config.launcher, jobs=3)
    for spec in specs:
        spec.write(sweep.run(spec.run_id).config)
    first = JobOrder(("run-1",), launcher, "batchscape sweep")
    assert first.extended(sweep) == first
    first.write(sweep)
    both = JobOrder(("run-2",), launcher, None).extended(sweep)
    assert both.runs == ("run-1", "run-2")
    both.write(sweep)
    assert JobOrder.read(sweep) == both
    (spec,) = both.specs(sweep, "2x4", pytest.fail)
    assert spec.config.launcher == launcher
    assert replace(spec, config=specs[1].config) == specs[1]
    assert both.specs(sweep, POOL, pytest.fail, without={"run-1"}) == []
    assert {shape: [s.run_id for s in of_shape] for shape, of_shape in shapes(specs).items()} == {
        POOL: ["run-1"],
        "2x4": ["run-2"],
    }


def test_a_cluster_is_planned_for_without_being_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    slurm = ("launcher=slurm", "tracker=none", "batch.global_batch_size=32")
    cpus = ("cluster.nodes=2", "cluster.devices_per_node=4", "launcher.device=cpu")

    def told(verb: str, *settings: str, code: int = 2) -> str:
        assert main([verb, *slurm, *settings]) == code
        printed = capsys.readouterr()
        return printed.out + printed.err

    assert "the devices are those of the cluster" in told("plan")
    assert "or for runs on CPUs cluster.nodes and cluster.devices_per_node" in told(
        "sweep", "cluster.nodes=2"
    )
    wide = (*cpus, "batch.micro_batch_size=1", "batch.data_parallel_size=8")
    assert "batch.nodes=2 would take more" in told("plan", *wide)
    assert "Runs: 1." in told("plan", *wide, "batch.nodes=2", code=0)
    command = ("engine=command", "model=external", "data=external", "budget=optimizer_steps")
    program = (*command, "engine.argv=[python,-c,pass]", "batch.micro_batch_size=1")
    assert "on one node" in told(
        "plan", *cpus, *program, "batch.nodes=2", "batch.data_parallel_size=8"
    )
    assert "launcher=local" in told("probe", *cpus)
    # Where there is no Slurm, that is what is said.
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "is not on the PATH" in told("sweep", *cpus, "batch.micro_batch_size=32")
    assert main(["cancel", str(tmp_path)]) == 2
    assert "has no jobs" in capsys.readouterr().err
