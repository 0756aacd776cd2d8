"""`batchscape recommend` before anything ran: a recipe from predictions and probes."""

import json
import math
import shlex
import sys
from pathlib import Path

import pytest

from batchscape.cli import main
from batchscape.record.files import read_json, write_json

MODEL = ("model=mlp", "data=digits", "evaluation.every_samples=null", "budget.samples=9600")
CLUSTER = ("cluster=a100_80g", "cluster.devices_per_node=8")


@pytest.fixture
def recommend(tmp_path, monkeypatch, capsys):
    """Return what `recommend --json` prints."""
    monkeypatch.chdir(tmp_path)

    def call(*words, code=0):
        assert main(["recommend", "--json", *words]) == code, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return call


def basis_by_step(answer):
    return {step["name"]: (step["value"], step["basis"]) for step in answer["steps"]}


def test_the_whole_recipe_for_a_declared_machine(recommend):
    rule = ("scaling=sqrt", "scaling.reference_global_batch_size=24", "optimizer=adamw")
    answer = recommend(*MODEL, *CLUSTER, *rule, "batch.global_batch_size=96")
    assert answer["geometry"]["data_parallel_size"] == 8
    assert [cut["micro_batch_size"] for cut in answer["cuts"]] == [1, 2, 3, 4, 6, 12]
    steps = basis_by_step(answer)
    assert steps["micro-batch"] == ("12", "predicted")  # some kB of 80 GiB
    assert steps["devices"] == ("8", "given")
    assert steps["accumulation"] == ("1", "computed")
    reasons = {step["name"]: step["reason"] for step in answer["steps"]}
    base = float(reasons["learning rate"].split()[0])
    value, basis = steps["learning rate"]
    assert math.isclose(float(value), base * math.sqrt(96 / 24), rel_tol=1e-3)
    assert basis == "computed"
    assert steps["step time"][1] == steps["run time"][1] == "predicted"
    config = answer["config"]
    assert config["DeepSpeed JSON"]["train_batch_size"] == 96
    # What is told to launch is for the machine itself.
    command = shlex.split(answer["command"])
    assert not any(word.startswith("cluster") for word in command)
    assert {*MODEL, *rule, "batch.micro_batch_size=12"} <= set(command)


def test_nodes_are_used_and_counted(recommend):
    answer = recommend(*MODEL, *CLUSTER, "cluster.nodes=2", "batch.global_batch_size=96")
    assert (answer["geometry"]["nodes"], answer["geometry"]["devices_per_node"]) == (2, 8)
    assert answer["config"]["torchrun"] == {"nnodes": 2, "nproc_per_node": 8}
    assert answer["command"] is None  # runs are launched on one node


@pytest.mark.parametrize(
    ("batch", "most", "devices", "why"),
    [
        (90, 8, 6, "of 8, which do not divide 90; a global batch of 88 or 96 has none idle"),
        (7, 8, 7, "of 8, which do not divide 7; a global batch of 8 has none idle"),
        (96, 4, 4, "as many as asked, of 8"),
    ],
)
def test_as_many_devices_as_divide_the_global_batch(recommend, batch, most, devices, why):
    settings = (*MODEL, f"budget.samples={96 * batch}", f"batch.global_batch_size={batch}")
    answer = recommend(*settings, *CLUSTER, "--devices", str(most))
    assert answer["geometry"]["data_parallel_size"] == devices
    (reason,) = (step["reason"] for step in answer["steps"] if step["name"] == "devices")
    assert reason == why


def test_devices_are_spread_evenly_over_nodes(recommend):
    settings = (*MODEL, *CLUSTER, "cluster.nodes=2", "batch.global_batch_size=9", "--devices", "9")
    answer = recommend(*settings, "budget.samples=900")
    assert answer["geometry"]["data_parallel_size"] == 3
    (reason,) = (step["reason"] for step in answer["steps"] if step["name"] == "devices")
    assert reason == "of 9, which cannot be spread evenly over nodes"


def test_what_is_told_to_launch_can_be_launched(recommend, capsys):
    answer = recommend(*MODEL, "batch=vary_global", "batch.global_batch_size=96", "--devices", "1")
    verb, *words = shlex.split(answer["command"])[1:]
    assert verb == "run"
    assert main(["plan", "--json", *words]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["micro_batch_size"] == answer["geometry"]["micro_batch_size"]


def test_a_single_cut_that_may_fit_is_not_sure(recommend):
    settings = (*MODEL, "batch.global_batch_size=1", "device.memory_limit_gib=0.05")
    answer = recommend(*settings)
    assert "may fit" in answer["steps"][0]["reason"]
    assert answer["to_try"] == [1]


def test_files_that_agree_are_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = (*MODEL, *CLUSTER, "batch.global_batch_size=96", "--out", "configs")
    assert main(["recommend", *words]) == 0
    text = capsys.readouterr().out
    assert "8 x 12 x 1 = 96" in text
    assert "train_micro_batch_size_per_gpu=12" in text
    names = {"deepspeed.json", "accelerate.yaml", "training_arguments.yaml", "litgpt.yaml"}
    assert names <= {path.name for path in Path("configs").iterdir()}
    assert main(["check-config", "configs/deepspeed.json", "configs/litgpt.yaml"]) == 0


def test_nothing_fits(recommend):
    settings = (*MODEL, "batch.global_batch_size=96", "device.memory_limit_gib=0.00001")
    answer = recommend(*settings, code=1)
    assert answer["geometry"] is None
    assert "not even micro-batch 1 fits" in answer["why_not"]
    assert not any(cut["fits"] for cut in answer["cuts"])


def test_what_is_not_predicted_is_asked_of_a_probe(recommend):
    settings = (*MODEL, "engine.compile=true", "batch.global_batch_size=96")
    answer = recommend(*settings, code=1)
    assert "engine.compile=true" in answer["why_not"]
    assert answer["command"] is None
    assert answer["probe_command"] is None  # of a CPU without a limit
    limited = recommend(*settings, "device.memory_limit_gib=1", code=1)
    assert limited["probe_command"].startswith("batchscape probe")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="holds processes to a limit")
def test_a_probe_finds_the_boundary_and_its_outcome_is_measured(recommend, capsys):
    settings = ("data.sequence_length=64", "device.memory_limit_gib=0.072", "budget.samples=9600")
    settings = (*settings, "model.n_layers=1")
    settings = (*settings, "evaluation.every_samples=null", "batch.global_batch_size=96")
    settings = (*settings, "--devices", "1")
    before = recommend(*settings)
    assert basis_by_step(before)["micro-batch"][1] == "predicted"
    assert before["to_try"]  # the limit is near to what a process takes beside tensors

    def probe():
        assert main([*shlex.split(before["probe_command"])[1:], "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    answer = probe()
    micros = answer["candidates"]
    assert micros == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]
    fits = {attempt["micro_batch_size"]: attempt["fits"] for attempt in answer["tried"]}
    largest = answer["largest"]["micro_batch_size"]
    assert largest * answer["largest"]["gradient_accumulation_steps"] == 96
    assert fits[largest] is True
    assert fits[micros[micros.index(largest) + 1]] is False
    assert all(attempt["taken_gib"] <= 0.072 for attempt in answer["tried"] if attempt["fits"])
    assert answer["predicted_gib"] == sorted(answer["predicted_gib"])

    # The same command knows the outcomes.
    times = {path: path.stat().st_mtime_ns for path in Path("outputs").glob("*/runs/*/status.json")}
    assert len(times) == len(fits)
    assert probe()["largest"] == answer["largest"]
    assert {path: path.stat().st_mtime_ns for path in times} == times

    after = recommend(*settings)
    assert basis_by_step(after)["micro-batch"] == (str(largest), "measured")
    assert after["to_try"] == []
    for launch in Path("outputs").glob("probe*/runs/*/launch.json"):
        write_json(launch, read_json(launch) | {"device_model": "Another CPU"})
    assert basis_by_step(recommend(*settings))["micro-batch"][1] == "predicted"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("batch.global_batch_size=8", "outputs"), "outputs"),
        (("batch.global_batch_size=8", "--deadline", "2h"), "--deadline"),
        (("batch.global_batch_size=8", "--memory-gib=0"), "device.memory_limit_gib"),
        (("batch.global_batch_size=8", "batch.micro_batch_size=4"), "leave that out"),
        (("engine=command", "engine.command=[true]"), "engine"),
        (("batch.global_batch_size=8", "--runs", "nosuch"), "nosuch"),
        (("batch.global_batch_size=8", "--devices", "4096"), "cluster.devices_per_node"),
        (("seed=0,1",), "one combination of settings; given 2"),
        (("outputs", "--out", "configs"), "unrecognized"),
    ],
)
def test_refusals(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recommend", *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
