"""What a plan says that runs and sweep will take."""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console, Group

from batchscape.cli import main
from batchscape.compose import compose
from batchscape.config import Cluster, RunConfig
from batchscape.config.cluster import datasheets
from batchscape.cuda_devices import CudaDevice
from batchscape.data.corpus import prepare
from batchscape.errors import ConfigError
from batchscape.plan.build import Plan, make_plan
from batchscape.plan.forecast import PredictedRange, SweepForecast, forecast
from batchscape.plan.forecast_text import COUNTS, forecast_text, span
from batchscape.plan.machine import Machine
from batchscape.plan.table import plan_json
from batchscape.predictor import predict
from batchscape.record.folder import SweepFolder
from batchscape.system import GIB
from batchscape.text import DURATIONS

MICRO = "batch.micro_batch_size=1"
BEGIN = datetime(2030, 1, 1, 12, tzinfo=UTC)
SMALL = ("data=digits", "model=mlp", "tracker=none", "budget.samples=640", "evaluation.samples=64")
CONF = Path(__file__).parents[2] / "conf" / "cluster"
FILES = sorted(path.stem for path in CONF.glob("*.yaml"))
LLAMA_70B = (
    *("model=llama_1b", "model.n_layers=80", "model.d_model=8192", "model.d_ff=28672"),
    *("model.n_heads=64", "model.n_kv_heads=8", "data.sequence_length=4096"),
)
"""Sizes of Llama 2 70B: Touvron et al. 2023, arXiv 2307.09288, and its `config.json`."""


def planned(*arguments: str) -> tuple[Plan, Machine]:
    grid = compose(arguments, "batchscape plan")
    assert grid is not None
    machine = Machine.of(RunConfig.from_mapping(grid.cells[0].settings).cluster)
    return make_plan(grid, machine, prepare), machine


def foretold(*arguments: str) -> tuple[Plan, SweepForecast]:
    plan, machine = planned(*arguments)
    return plan, forecast(plan.specs, SweepFolder(plan.sweep_dir), machine)


def shown(totals: SweepForecast, cuts: dict[str, str]) -> str:
    text = io.StringIO()
    Console(width=80, file=text).print(Group(*forecast_text(totals, cuts, BEGIN)))
    return text.getvalue()


@pytest.mark.parametrize("name", FILES)
def test_every_declared_machine_is_planned_for(name: str) -> None:
    plan, totals = foretold(*SMALL, f"cluster={name}", "batch.global_batch_size=32")
    (spec,) = plan.specs
    run = totals.runs[spec.run_id]
    assert totals.runs_unknown == 0
    assert run.way == ("peaks of this CPU" if name == "this_machine" else "datasheet")
    assert run.step_time_s is not None
    assert run.step_time_s.value is not None
    assert 0 < run.step_time_s.low < run.step_time_s.value < run.step_time_s.high
    assert (run.mfu_pct is None) == (name == "this_machine")
    if name != "this_machine":
        assert spec.device_type == "cuda"
        has_bfloat16 = name not in {"t4", "v100_sxm2", "v100_pcie"}
        assert spec.precision == ("bfloat16" if has_bfloat16 else "float32")


def test_totals_are_those_of_the_runs() -> None:
    plan, totals = foretold(
        *SMALL,
        "cluster=h100_80g",
        "batch.global_batch_size=32",
        "batch.micro_batch_size=2,4",
        "batch.data_parallel_size=1,2,8",
        "seed=0,1",
        "launcher.concurrent_runs=8",
    )
    hours, longest = 0.0, 0.0
    for spec in plan.specs:
        run = totals.runs[spec.run_id]
        assert run.step_time_s is not None
        assert run.run_time_s is not None
        assert run.device_hours is not None
        assert run.samples_per_s is not None
        trained = run.step_time_s.high * spec.optimizer_steps
        # 64 samples in one batch, before and after, by one rank.
        per_sample = run.step_time_s.high / (32 / spec.geometry.data_parallel_size)
        assert run.run_time_s.high == pytest.approx(trained + 2 * 64 * per_sample)
        assert run.samples_per_s.low == pytest.approx(32 / run.step_time_s.high)
        assert run.tokens_per_s is None, "a vector is no sequence"
        hours += spec.geometry.data_parallel_size * run.run_time_s.high / 3600
        longest = max(longest, run.run_time_s.high)
    assert len(plan.specs) == 12
    assert totals.device_hours is not None
    assert totals.makespan_s is not None
    assert totals.device_hours.high == pytest.approx(hours)
    assert max(longest, hours * 3600 / 8) <= totals.makespan_s.high * (1 + 1e-9)
    assert totals.makespan_s.high < sum(
        r.run_time_s.high for r in totals.runs.values() if r.run_time_s
    )
    assert totals.ends_at(BEGIN) == (
        BEGIN + timedelta(seconds=totals.makespan_s.low),
        BEGIN + timedelta(seconds=totals.makespan_s.high),
    )
    # However wide the ranges, eighty columns have room for each cut in one line.
    cuts = {spec.run_id: str(spec.geometry).partition(" = ")[0] for spec in plan.specs}
    assert set(cuts.values()) <= {line[:17].strip() for line in shown(totals, cuts).splitlines()}


def test_what_is_not_launched_is_in_no_total() -> None:
    """Of four runs two do not fit a limit of 1 MiB: the totals are those of the other two."""
    plan, _ = planned(*SMALL, "batch.global_batch_size=8", "batch.micro_batch_size=1,8", "seed=0,1")
    sweep, machine = SweepFolder(plan.sweep_dir), Machine(2, "two cores")
    unfit = {spec.run_id for spec in plan.specs if spec.geometry.micro_batch_size == 8}
    totals = forecast(plan.specs, sweep, machine, unfit=unfit)
    hours = [figure.device_hours for run, figure in totals.runs.items() if run not in unfit]
    assert totals.runs_left == len(hours) == 2
    assert totals.device_hours is not None
    assert totals.device_hours.high == pytest.approx(sum(figure.high for figure in hours if figure))
    assert len(totals.runs) == 4


@pytest.mark.parametrize(("skips", "runs_left"), [("true", 0), ("false", 1)])
def test_a_run_that_is_too_big_is_in_no_total_unless_it_is_launched(
    skips: str, runs_left: int
) -> None:
    tiny = ("device.memory_limit_gib=0.0001", f"launcher.skip_unfit={skips}")
    plan, machine = planned(*SMALL, MICRO, *tiny)
    totals = predict(plan.specs, SweepFolder(plan.sweep_dir), machine)
    assert [run.memory.fits for run in totals.runs.values() if run.memory] == ["does not fit"]
    assert totals.runs_left == runs_left
    (run,) = json.loads(plan_json(plan, machine, totals, BEGIN))["runs"]
    assert run["memory"]["fits"] == "does not fit"
    assert run["planned"] == ("launch" if runs_left else "rejected")
    assert runs_left or "there are 0.0001; launcher.skip_unfit=false launches it" in run["reason"]


@pytest.mark.parametrize(
    ("low", "high", "units", "text"),
    [
        (0.12, 0.8, DURATIONS, "120-800 ms"),
        (84e-6, 0.0121, DURATIONS, "84 us to 12 ms"),
        (4e-7, 90.0, DURATIONS, "400 ns to 1.5 min"),
        (759.0, 1.5e6, COUNTS, "759 to 1.5 M"),
        (0.5, 2.0, {"": 1.0}, "0.50-2.0"),
    ],
)
def test_the_ends_of_a_range_have_their_units(
    low: float, high: float, units: dict[str, float], text: str
) -> None:
    assert span(PredictedRange(low, high), units) == text


def test_in_80_columns_no_figure_is_broken() -> None:
    plan, totals = foretold(
        "cluster=h100_80g",
        "cluster.nodes=2",
        "batch.nodes=2",
        "batch.data_parallel_size=16",
        "batch.global_batch_size=4096",
        "batch.micro_batch_size=1,4,64,256",
        "budget=optimizer_steps",
        "budget.samples=null",
        "budget.optimizer_steps=100000",
        "evaluation.every_samples=null",
        "seed=0,1,2",
    )
    cuts = {spec.run_id: str(spec.geometry).partition(" = ")[0] for spec in plan.specs}
    estimated = shown(totals, cuts)
    measured = replace(
        totals,
        runs={
            name: replace(
                run,
                way="measured, 12 runs",
                **{
                    field: replace(figure, value=math.sqrt(figure.low * figure.high))
                    for field, figure in vars(run).items()
                    if isinstance(figure, PredictedRange)
                },
            )
            for name, run in totals.runs.items()
        },
    )
    for text in (estimated, shown(measured, cuts)):
        lines = text.splitlines()
        assert max(map(len, lines)) <= 80
        assert "…" not in text
        for cut in set(cuts.values()):
            (line,) = (line for line in lines if cut in line)
            assert line.split(cut)[1].split()[0] == "3", "one line for three seeds"
    assert "datasheet: ranges, nothing was measured" in estimated
    assert "12 runs, " in estimated.replace("\n", " ")
    assert "device-hours" in estimated


def test_a_cluster_names_no_run_and_no_folder() -> None:
    same = ("batch.global_batch_size=32", "seed=0,1", *SMALL)
    declared, _ = planned(*same, "cluster=a100_80g", "cluster.devices_per_node=2")
    other, _ = planned(*same, "cluster=h200")
    here = Machine(2, "cores", (CudaDevice(0, "NVIDIA A100-SXM4-80GB", (8, 0), "u"),))
    grid = compose(same, "batchscape plan")
    assert grid is not None
    local_plan = make_plan(grid, here, prepare)
    names = [[spec.run_id for spec in plan.specs] for plan in (declared, other, local_plan)]
    assert names[0] == names[1] == names[2]
    assert declared.sweep_dir == other.sweep_dir == local_plan.sweep_dir


def test_geometries_over_nodes_stay_within_them() -> None:
    cluster = ("cluster=h100_80g", "cluster.nodes=2", *SMALL, "batch.global_batch_size=32")
    plan, _ = planned(*cluster, "batch.data_parallel_size=16", "batch.nodes=2", MICRO)
    assert plan.specs[0].geometry.devices_per_node == 8
    with pytest.raises(ConfigError, match=r"at most the 8 of a node .* batch.nodes=2 would"):
        planned(*cluster, "batch.data_parallel_size=16", MICRO)
    with pytest.raises(ConfigError, match=r"at most the machine's 2; nodes=4"):
        planned(*cluster, "batch.data_parallel_size=32", "batch.nodes=4", MICRO)
    with pytest.raises(ConfigError, match=r"launcher.device=cpu, but cluster declares H100 SXM"):
        planned(*cluster, "launcher.device=cpu")


def test_a_machine_is_declared_whole_or_not_at_all() -> None:
    with pytest.raises(ConfigError, match="needs compute_capability, memory_gib"):
        planned("cluster.device=mine")
    with pytest.raises(ConfigError, match=r"choose a device: a10, .*h100_80g"):
        planned("cluster.nodes=2")
    with pytest.raises(ConfigError, match=r"cluster is one for the whole sweep"):
        planned("cluster=h100_80g,h200")


def test_a_device_that_is_found_has_the_figures_of_its_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = CudaDevice(0, "NVIDIA A100-SXM4-40GB", (8, 0), "u", 39.4)
    monkeypatch.setattr(Machine, "detect", lambda: Machine(8, "cores", (device,)))
    (sheet,) = (sheet for sheet in datasheets() if sheet.device == "A100 SXM 40 GB")
    this_machine = Machine.of(Cluster(link_gb_per_s=12.0))
    assert not this_machine.is_declared
    expected = asdict(sheet) | {"link_gb_per_s": 12.0}
    expected |= dict.fromkeys(("device", "devices_per_node", "nodes"))
    assert asdict(this_machine.cluster) == expected
    assert this_machine.is_like("NVIDIA A100-SXM4-40GB")
    assert not this_machine.is_like("NVIDIA A100-SXM4-80GB")


def test_names_of_drivers_are_of_one_file_each() -> None:
    names = ["A100-SXM4-80GB", "A100 80GB PCIe", "H100 80GB HBM3", "H200", "H200 NVL", "L4", "L40S"]
    names += ["GH200 480GB", "GH200 144G HBM3e"]
    for name in names:
        assert sum(sheet.is_called(f"NVIDIA {name}") for sheet in datasheets()) == 1


@pytest.mark.parametrize("verb", ["sweep", "run"])
def test_nothing_is_launched_on_a_declared_machine(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([verb, *SMALL, "cluster=h100_80g"]) == 2
    assert "declares H100 SXM 80 GB, a machine to plan for" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_program_of_others_takes_what_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)")
    command = [
        *("engine=command", "model=external", "data=external", "budget=optimizer_steps"),
        "engine.argv=[python,train.py,'{micro_batch_size}']",
    ]
    assert main(["plan", *command]) == 0
    text = capsys.readouterr().out
    assert "Time not known: only the program knows its model (1 run)" in text
    assert "Time: not known for 1 run." in text


def test_json_holds_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [*SMALL, "cluster=a100_80g", "batch.global_batch_size=32", "seed=0,1"]
    assert main(["plan", "--json", *lines, "batch.micro_batch_size=4,5"]) == 0
    content = json.loads(capsys.readouterr().out)
    launched = [run for run in content["runs"] if run["planned"] == "launch"]
    rejected = [run for run in content["runs"] if run["planned"] == "rejected"]
    assert len(launched) == len(rejected) == 2
    assert {run["way"] for run in launched} == {"datasheet"}
    assert all(run["step_time_s"] is None and run["reason"] for run in rejected)
    for run in launched:
        assert run["memory"]["fits"] == "fits"
        assert 0 < run["memory"]["peak_allocated_gib"]["value"] < run["memory"]["room_gib"] == 80
    total = sum(run["device_hours"]["high"] for run in launched)
    assert content["sweep"]["device_hours"]["high"] == pytest.approx(total)
    assert content["sweep"]["runs_left"] == 2
    ends = [datetime.fromisoformat(end) for end in content["sweep"]["ends_at"]]
    assert datetime.fromisoformat(content["sweep"]["begins_at"]) <= ends[0] <= ends[1]
    assert content["machine"]["devices"] == 8
    assert content["machine"]["memory_gib"] == 80
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_blocks_of_70_billion_parameters_fit_on_64_nodes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A quarter of its blocks, as each is rehearsed like the others."""
    ranks, blocks = 8 * 64, 20
    lines = (
        *(
            *LLAMA_70B,
            f"model.n_layers={blocks}",
            "engine=fsdp",
            "engine.activation_checkpointing=true",
        ),
        *("cluster=h100_80g", "cluster.nodes=64", "batch.nodes=64"),
        *(f"batch.data_parallel_size={ranks}", f"batch.global_batch_size={ranks}", MICRO),
        *("budget.samples=1024", "evaluation.every_samples=null", "evaluation.samples=32"),
        # Clipping holds next to nothing, and its rehearsal takes a while.
        "optimizer.gradient_clip_norm=null",
    )
    main(["plan", "--json", *lines])
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["planned"] == "launch"
    assert run["memory"]["fits"] == "fits"
    width, inner, keys, tokens = 8192, 28672, 1024, 4096
    block = 2 * width * (width + keys) + 3 * width * inner + 2 * width
    assert 80 * block + 2 * 32000 * width + width == 68_976_648_192
    parameters = blocks * block + 2 * 32000 * width + width
    # Parameter, gradient and two moments. Inputs of all blocks, in float32, come before gradients.
    parts, kept = 16 * parameters / ranks, blocks * 4 * tokens * width
    # One block is gathered and has whole gradients; others are fetched and exchanged beside it.
    peak = GIB * run["memory"]["peak_allocated_gib"]["value"]
    least = max(parts + 4 * block, 3 / 4 * parts + kept + 2 * 4 * block)
    assert least < peak < parts + kept + 6 * 4 * block


def test_geometries_of_a_global_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["geometry", "--global", "224", "--devices", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # 14 samples a device: by its divisors 1, 2, 7 and 14.
    assert lines == [f"16 x {micro} x {14 // micro} = 224" for micro in (1, 2, 7, 14)]
    limits = ["--max-devices", "7", "--max-micro", "8", "--max-accumulation", "9"]
    assert main(["geometry", "--global", "224", *limits, "--json"]) == 0
    expected = [
        (d, m, 224 // (d * m))
        for d in range(1, 8)
        for m in range(1, 9)
        if 224 % (d * m) == 0 and 224 // (d * m) <= 9
    ]
    names = ("data_parallel_size", "micro_batch_size", "gradient_accumulation_steps")
    content = json.loads(capsys.readouterr().out)
    assert [tuple(one[name] for name in names) for one in content] == expected
    assert main(["geometry", "--global", "224", "--devices", "9"]) == 2
    assert "can take 1, 2, 4, 7, 8, 14, 16, 28" in capsys.readouterr().err
