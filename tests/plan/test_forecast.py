"""What a plan says that runs and sweep will take."""

import io
import json
from dataclasses import asdict, replace

import pytest
from rich.console import Console, Group

from batchscape.cli import main
from batchscape.compose import compose
from batchscape.config import Cluster, RunConfig
from batchscape.config.cluster import datasheets
from batchscape.cuda_devices import CudaDevice
from batchscape.data.corpus import prepare
from batchscape.errors import ConfigError
from batchscape.geometry import BatchGeometry
from batchscape.plan.build import make_plan
from batchscape.plan.expand import Cell
from batchscape.plan.forecast import PredictedRange, forecast
from batchscape.plan.forecast_text import forecast_text, span
from batchscape.plan.machine import Machine
from batchscape.plan.table import plan_json, plan_table
from batchscape.predictor import predict
from batchscape.record.folder import SweepFolder
from batchscape.system import GIB

MICRO = "batch.micro_batch_size=1"
SMALL = ("data=digits", "model=mlp", "tracker=none", "budget.samples=640", "evaluation.samples=64")


def planned(*arguments):
    grid = compose(arguments, "batchscape plan")
    machine = Machine.of(RunConfig.from_mapping(grid.cells[0].settings).cluster)
    return make_plan(grid, machine, prepare), machine


def foretold(*arguments):
    plan, machine = planned(*arguments)
    return plan, forecast(plan.specs, SweepFolder(plan.sweep_dir), machine)


def shown(totals, cuts):
    text = io.StringIO()
    Console(width=80, file=text).print(Group(*forecast_text(totals, cuts)))
    return text.getvalue()


def test_predictions_of_unequal_budgets_name_them():
    settings = [text for text in SMALL if not text.startswith("budget.")]
    budgets = ("budget.samples=320,640", "batch.global_batch_size=32")
    plan, totals = foretold(*settings, *budgets, "cluster=h100_80g")
    text = io.StringIO()
    Console(width=80, file=text).print(plan_table(plan, totals))
    lines = text.getvalue().partition("Predicted")[2].splitlines()
    assert [line.split()[0] for line in lines if "samples=" in line] == [
        "samples=640",
        "samples=320",
    ]


def test_every_declared_machine_is_planned_for():
    grid = compose([*SMALL, "cluster=h100_80g", "batch.global_batch_size=32"], "batchscape plan")
    for sheet in (None, *datasheets()):
        settings = grid.cells[0].settings | {"cluster": asdict(sheet) if sheet else {}}
        machine = Machine.of(RunConfig.from_mapping(settings).cluster)
        plan = make_plan(replace(grid, cells=[Cell(settings, {})]), machine, prepare)
        (spec,) = plan.specs
        totals = forecast(plan.specs, SweepFolder(plan.sweep_dir), machine)
        run = totals.runs[spec.run_id]
        assert totals.runs_not_known == 0
        assert run.way == ("datasheet" if sheet else "peaks of this CPU")
        assert 0 < run.step_time_s.low < run.step_time_s.value < run.step_time_s.high
        if sheet:
            assert spec.device_type == "cuda"
            has_bfloat16 = sheet.compute_capability >= 8
            assert spec.precision == ("bfloat16" if has_bfloat16 else "float32")


def test_totals_are_those_of_the_runs():
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
        assert run.device_hours is not None
        trained = run.step_time_s.high * spec.optimizer_steps
        # 64 samples in one batch, before and after, by one rank.
        per_sample = run.step_time_s.high / (32 / spec.geometry.data_parallel_size)
        assert run.run_time_s.high == pytest.approx(trained + 2 * 64 * per_sample)
        of_devices = spec.geometry.data_parallel_size / 3600
        assert run.device_hours.value == pytest.approx(run.run_time_s.value * of_devices)
        assert run.samples_per_s.low == pytest.approx(32 / run.step_time_s.high)
        assert run.tokens_per_s is None, "a vector is no sequence"
        hours += spec.geometry.data_parallel_size * run.run_time_s.high / 3600
        longest = max(longest, run.run_time_s.high)
    assert len(plan.specs) == 12
    assert totals.device_hours.high == pytest.approx(hours)
    assert max(longest, hours * 3600 / 8) <= totals.makespan_s.high * (1 + 1e-9)
    assert totals.makespan_s.high < sum(
        r.run_time_s.high for r in totals.runs.values() if r.run_time_s
    )
    # However wide the ranges, eighty columns have room for each cut in one line.
    cuts = {spec.run_id: str(spec.geometry).partition(" = ")[0] for spec in plan.specs}
    assert "…" not in shown(totals, cuts), "in 80 columns no figure is broken"
    assert set(cuts.values()) <= {line[:17].strip() for line in shown(totals, cuts).splitlines()}


def test_what_is_not_launched_is_in_no_total():
    cuts = ("batch.global_batch_size=8", "batch.micro_batch_size=1,8")
    plan, machine = planned(*SMALL, "cluster=h100_80g", *cuts)
    small, large = (spec.run_id for spec in plan.specs)
    totals = forecast(plan.specs, SweepFolder(plan.sweep_dir), machine, unfit={large})
    assert (totals.runs_left, len(totals.runs)) == (1, 2)
    assert totals.device_hours == totals.runs[small].device_hours


@pytest.mark.parametrize(("skips", "runs_left"), [("true", 0), ("false", 1)])
def test_a_run_that_is_too_big_is_in_no_total_unless_it_is_launched(skips, runs_left):
    tiny = ("device.memory_limit_gib=0.0001", f"launcher.skip_unfit={skips}")
    plan, machine = planned(*SMALL, MICRO, *tiny)
    totals = predict(plan.specs, SweepFolder(plan.sweep_dir), machine)
    assert [run.memory.fits for run in totals.runs.values() if run.memory] == ["does not fit"]
    assert totals.runs_left == runs_left
    (run,) = json.loads(plan_json(plan, machine, totals))["runs"]
    assert run["memory"]["fits"] == "does not fit"
    assert run["planned"] == ("launch" if runs_left else "rejected")
    assert runs_left or "there are 0.0001; launcher.skip_unfit=false launches it" in run["reason"]


def test_geometries_over_nodes_stay_within_them():
    cluster = ("cluster=h100_80g", "cluster.nodes=2", *SMALL, "batch.global_batch_size=32")
    plan, _ = planned(*cluster, "batch.data_parallel_size=16", "batch.nodes=2", MICRO)
    assert plan.specs[0].geometry.devices_per_node == 8
    with pytest.raises(ConfigError, match=r"at most the 8 of a node .* batch.nodes=2 would"):
        planned(*cluster, "batch.data_parallel_size=16", MICRO)
    with pytest.raises(ConfigError, match=r"at most the machine's 2; nodes=4"):
        planned(*cluster, "batch.data_parallel_size=32", "batch.nodes=4", MICRO)
    with pytest.raises(ConfigError, match=r"launcher.device=cpu, but cluster declares H100 SXM"):
        planned(*cluster, "launcher.device=cpu")


def test_a_machine_is_declared_whole_or_not_at_all():
    with pytest.raises(ConfigError, match="needs compute_capability, memory_gib"):
        planned("cluster.device=mine")
    with pytest.raises(ConfigError, match=r"choose a device: a10, .*h100_80g"):
        planned("cluster.nodes=2")
    with pytest.raises(ConfigError, match=r"cluster is one for the whole sweep"):
        planned("cluster=h100_80g,h200")


def test_a_device_that_is_found_has_the_figures_of_its_file(monkeypatch):
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


def test_names_of_drivers_are_of_one_file_each():
    names = ["A100-SXM4-80GB", "A100 80GB PCIe", "H100 80GB HBM3", "H200", "H200 NVL", "L4", "L40S"]
    names += ["GH200 480GB", "GH200 144G HBM3e"]
    for name in names:
        assert sum(sheet.is_called(f"NVIDIA {name}") for sheet in datasheets()) == 1


def test_nothing_is_launched_on_a_declared_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *SMALL, "cluster=h100_80g"]) == 2
    assert "declares H100 SXM 80 GB, which can be planned for" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_program_of_others_takes_what_nobody_knows(tmp_path, monkeypatch, capsys):
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


def test_json_holds_all_of_it(tmp_path, monkeypatch, capsys):
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
    assert content["machine"]["devices"] == 8
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_blocks_of_a_large_model_fit_on_64_nodes(capsys):
    """Llama 2 70B (arXiv 2307.09288), an eighth as wide and long, with a tenth of its blocks."""
    ranks, blocks, width, inner, keys, tokens, words = 8 * 64, 8, 1024, 3584, 128, 512, 4000
    lines = (
        *("model=llama_1b", f"model.n_layers={blocks}", f"model.d_model={width}"),
        *(f"model.d_ff={inner}", "model.n_heads=64", "model.n_kv_heads=8"),
        *(f"data.sequence_length={tokens}", f"model.vocabulary_size={words}"),
        *("engine=fsdp", "engine.activation_checkpointing=true"),
        *("cluster=h100_80g", "cluster.nodes=64", "batch.nodes=64", MICRO),
        *(f"batch.data_parallel_size={ranks}", f"batch.global_batch_size={ranks}"),
        *("budget.samples=1024", "evaluation.every_samples=null", "evaluation.samples=32"),
        "optimizer.gradient_clip_norm=null",
    )
    main(["plan", "--json", *lines])
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["planned"], run["memory"]["fits"]) == ("launch", "fits")
    block = 2 * width * (width + keys) + 3 * width * inner + 2 * width
    parameters = blocks * block + 2 * words * width + width
    # Parameter, gradient and two moments. Inputs of all blocks, in float32, come before gradients.
    parts, kept = 16 * parameters / ranks, blocks * 4 * tokens * width
    # One block is gathered and has whole gradients; others are fetched and exchanged beside it.
    peak = GIB * run["memory"]["peak_allocated_gib"]["value"]
    least = max(parts + 4 * block, 3 / 4 * parts + kept + 2 * 4 * block)
    assert least < peak < parts + kept + 6 * 4 * block


def test_geometries_of_a_global_batch(capsys):
    limits = ["--max-devices", "7", "--max-micro", "8", "--max-accumulation", "9"]
    expected = [
        str(BatchGeometry(1, d, m, 224 // (d * m)))
        for d in range(1, 8)
        for m in range(1, 9)
        if 224 % (d * m) == 0 and 224 // (d * m) <= 9
    ]
    assert main(["geometry", "--global", "224", *limits]) == 0
    assert capsys.readouterr().out.splitlines() == expected
    assert main(["geometry", "--global", "224", "--devices", "16", "--json"]) == 0
    # 14 samples a device: by its divisors 1, 2, 7 and 14.
    micros = [one["micro_batch_size"] for one in json.loads(capsys.readouterr().out)]
    assert micros == [1, 2, 7, 14]
    assert main(["geometry", "--global", "224", "--devices", "9"]) == 2
    assert "can take 1, 2, 4, 7, 8, 14, 16, 28" in capsys.readouterr().err


def test_numbers_of_a_plan_have_two_digits_and_no_exponent():
    ranges = {
        (9.97, 8.0, 12.0): "10.0 s (8.0-12)",
        (0.00042, 0.000054, 0.004): "0.00042 (0.000054-0.0040)",
        (1510.3, 1000.0, 2000.0): "1,510 (1,000-2,000)",
    }
    for (value, low, high), text in ranges.items():
        units = {"s": 1.0} if text.endswith("(8.0-12)") else {"": 1.0}
        assert span(PredictedRange(low, high, value), units) == text
