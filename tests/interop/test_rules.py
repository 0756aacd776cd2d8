"""Rules one at a time, on small sets that are made here."""

import json

import pytest
import yaml

from batchscape.interop.check import check_configs

JSON = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 1},
}
YAML = {
    "distributed_type": "DEEPSPEED",
    "num_machines": 1,
    "num_processes": 4,
}
SCRIPT = "train.py --train_batch_size 2 --gradient_accumulation_steps 4"
TRAINER = "run.py --per_device_train_batch_size 2 --gradient_accumulation_steps 4"


def checked(tmp_path, monkeypatch, command, *, ds=None, acc=None):
    monkeypatch.chdir(tmp_path)
    if ds is not None:
        (tmp_path / "ds.json").write_text(json.dumps({**JSON, **ds}))
    if acc is not None:
        (tmp_path / "acc.yaml").write_text(yaml.safe_dump({**YAML, **acc}))
    return check_configs([], command.split())


ACCELERATE = "accelerate launch --config_file acc.yaml"
PLUGIN = {"deepspeed_config": {"deepspeed_config_file": "ds.json"}}
TORCHRUN = "torchrun --nproc_per_node 4"
CASES = {
    "json against script, micro": (
        f"{ACCELERATE} {SCRIPT}",
        {"train_micro_batch_size_per_gpu": 8},
        PLUGIN,
        [("error", "micro-batch", "accelerate takes that of the JSON")],
    ),
    "json against script, accumulation": (
        f"{ACCELERATE} {SCRIPT}",
        {"gradient_accumulation_steps": 8},
        PLUGIN,
        [("error", "accumulation", "accelerate takes that of the JSON")],
    ),
    "json against script, missing": (
        f"{ACCELERATE} {SCRIPT}",
        {"gradient_accumulation_steps": None},
        PLUGIN,
        [("error", "accumulation-missing", "accelerate then takes 1")],
    ),
    "json against a script without accelerate": (
        f"{TORCHRUN} {SCRIPT} --deepspeed_config ds.json".replace("--train_", "--micro_"),
        {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4},
        None,
        [("error", "micro-batch", "DeepSpeed takes that of the JSON")],
    ),
    "the plugin against the Trainer": (
        f"{ACCELERATE} {TRAINER}",
        None,
        {"deepspeed_config": {"gradient_accumulation_steps": 2}},
        [("error", "accumulation", "the Trainer refuses to start")],
    ),
    "clipping that the json does not have": (
        f"{TORCHRUN} {TRAINER} --deepspeed ds.json --max_grad_norm 0.5",
        {},
        None,
        [("error", "clipping", "clips at its default of 1.0")],
    ),
    "precision beside the json": (
        f"{ACCELERATE} {SCRIPT}",
        {"bf16": {"enabled": True}},
        {"mixed_precision": "fp16", **PLUGIN},
        [
            ("error", "fields-of-the-json", "mixed_precision beside"),
        ],
    ),
    "precision of the command beside the json": (
        f"{ACCELERATE} --mixed_precision fp16 {SCRIPT}",
        {},
        {"mixed_precision": "fp16", **PLUGIN},
        [],
    ),
    "fields beside no json": (
        f"{ACCELERATE} {TRAINER} --deepspeed ds.json",
        {},
        {"deepspeed_config": {"zero_stage": 1, "deepspeed_config_file": "none"}},
        [],
    ),
    "precision that the json switches off": (
        f"{TORCHRUN} {TRAINER} --deepspeed ds.json --bf16",
        {"bf16": {"enabled": False}},
        None,
        [("error", "precision", "bf16.enabled is false")],
    ),
    "MULTI_CPU without mpirun": (
        f"{ACCELERATE} {SCRIPT}",
        None,
        {"distributed_type": "MULTI_CPU"},
        [("error", "one-process", "unless mpirun_config is set")],
    ),
    "devices of the command": (
        f"CUDA_VISIBLE_DEVICES=0,1,2,3 {ACCELERATE} --gpu_ids 0,1 {SCRIPT}",
        None,
        {"gpu_ids": "all"},
        [("error", "visible-devices", "starts 4 processes on a machine where gpu_ids names 2")],
    ),
    "devices of the file": (
        f"{ACCELERATE} {SCRIPT}",
        None,
        {"gpu_ids": "0,1,2"},
        [("error", "visible-devices", "starts 4 processes on a machine where gpu_ids names 3")],
    ),
    "all devices": (f"{ACCELERATE} --gpu_ids all {SCRIPT}", None, {"gpu_ids": "0,1"}, []),
    "devices of a file that is not read": (
        f"{TORCHRUN} {SCRIPT}".replace("--train_", "--micro_"),
        None,
        {"gpu_ids": 0},
        [],
    ),
    "no total fits": (
        f"torchrun --nproc_per_node gpu {TRAINER} --deepspeed ds.json",
        {"train_batch_size": 20},
        None,
        [("error", "global-batch", "is no multiple of 2 (command line (script)")],
    ),
    "litgpt below one micro-batch": (
        "litgpt pretrain x --devices 8 --train.global_batch_size 16 --train.micro_batch_size 4",
        None,
        None,
        [("error", "global-batch", "stops at an assertion")],
    ),
    "gradient accumulation in a script of transformers without its Trainer": (
        f"{ACCELERATE} run_clm_no_trainer.py --per_device_train_batch_size 2 "
        "--gradient_accumulation_steps 4",
        None,
        {"deepspeed_config": {"gradient_accumulation_steps": 2}},
        [("error", "accumulation", "the first overrides the second")],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rule(name, tmp_path, monkeypatch):
    command, ds, acc, expected = CASES[name]
    result = checked(tmp_path, monkeypatch, command, ds=ds, acc=acc)
    rules = sorted((finding.severity, finding.rule) for finding in result.findings)
    assert rules == sorted((severity, rule) for severity, rule, _ in expected)
    for _, rule, words in expected:
        assert any(words in finding.message for finding in result.findings if finding.rule == rule)
    assert result.is_consistent == all(severity != "error" for severity, _, _ in expected)


STEPS_OF_THE_FILE = {"deepspeed_config": {"gradient_accumulation_steps": 2}}
WINNERS = {
    # Command, DeepSpeed JSON, accelerate config, and devices x micro-batch x accumulation.
    "processes of the command": (
        f"{ACCELERATE} --num_processes 8 train.py --train_batch_size 2",
        None,
        STEPS_OF_THE_FILE,
        "8 x 2 x 2 = 32",
    ),
    "accumulation of the launcher": (
        f"{ACCELERATE} {SCRIPT}",
        None,
        STEPS_OF_THE_FILE,
        "4 x 2 x 2 = 16",
    ),
    "accumulation of the command before the file": (
        f"{ACCELERATE} --gradient_accumulation_steps 8 {SCRIPT}",
        None,
        STEPS_OF_THE_FILE,
        "4 x 2 x 8 = 64",
    ),
    "accumulation that the launcher cannot pass on": (
        f"{ACCELERATE} --gradient_accumulation_steps 8 {SCRIPT}",
        None,
        {"distributed_type": "MULTI_GPU"},
        "4 x 2 x 4 = 32",
    ),
    "accumulation of the script for auto": (f"{ACCELERATE} {SCRIPT}", {}, PLUGIN, "4 x 2 x 4 = 32"),
    "a json without accumulation": (
        f"{ACCELERATE} {SCRIPT}",
        {"gradient_accumulation_steps": None},
        PLUGIN,
        "4 x 2 x 1 = 8",
    ),
    "nodes of litgpt": (
        "litgpt pretrain x --devices 4 --num_nodes 2 --train.global_batch_size 64 "
        "--train.micro_batch_size 4",
        None,
        None,
        "8 x 4 x 2 = 64 (2 nodes x 4 devices)",
    ),
}


@pytest.mark.parametrize("name", WINNERS)
def test_who_wins(name, tmp_path, monkeypatch):
    command, ds, acc, geometry = WINNERS[name]
    result = checked(tmp_path, monkeypatch, command, ds=ds, acc=acc)
    assert str(result.running.geometry) == geometry
