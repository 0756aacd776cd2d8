"""What new users mistype is answered with the rule, the values given, and what would work."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from batchscape.cli import main

SHAPE = "batch.global_batch_size=100 batch.micro_batch_size=8 batch.data_parallel_size=1"
DEEPSPEED = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}

INPUTS = {
    # Verbs and options
    "swep sweeps=fixed_global_batch": ["unknown verb 'swep'", "did you mean sweep"],
    "run batch.micro_batch_size 8": ["batch.micro_batch_size", "key=value"],
    "run --config-dir nowhere": ["nowhere", "not found"],
    "sweep --retry everything": ["--retry", "failed, oom, timeout, all", "'everything'"],
    "report empty --tarjet 2": ["--tarjet", "did you mean --target"],
    "completion fish": ["'completion'", "sweep, run, plan"],
    # Names of studies, groups and settings
    "sweep sweeps=fixed_globl_batch": ["fixed_globl_batch", "did you mean fixed_global_batch"],
    "sweep batch.micro_batch=4": ["batch.micro_batch is no setting", "batch.micro_batch_size"],
    "run optimizer=adm": ["no option adm", "did you mean adamw", "muon, sgd"],
    "run engine=dpp": ["no option dpp", "did you mean ddp", "fsdp"],
    "run launcher=slrm": ["no option slrm", "did you mean slurm", "local"],
    "run schedule=cosin": ["no option cosin", "did you mean cosine"],
    "plan cluster=h1000": ["no option h1000", "did you mean h100_80g"],
    "run budget.epochs=-2": ["budget.epochs is no setting", "budget.samples"],
    "run target_loss=2": ["target_loss is no setting", "did you mean budget.target_loss"],
    "plan cluster=h100": ["no option h100", "did you mean h100_80g, h100_nvl or h100_pcie"],
    "plan model=gpt2": ["no option gpt2", "did you mean gpt2_124m or gpt2_350m?"],
    "plan sweeps=sweeps/cnn.yaml": ["sweeps=cnn", "--config-dir DIR, as DIR/sweeps/cnn.yaml"],
    # Words of other systems
    "run bs=32": ["bs is no setting", "batch.global_batch_size or batch.micro_batch_size?"],
    "run batch_size=32": ["did you mean batch.global_batch_size or batch.micro_batch_size?"],
    "run batch.bs=32": ["batch.bs is no setting", "batch.micro_batch_size"],
    "run lr=0.1": ["lr is no setting", "did you mean optimizer.learning_rate?"],
    "run epochs=3": ["epochs is no setting", "did you mean budget.samples?"],
    "run max_steps=100": ["did you mean budget.optimizer_steps?"],
    "run gpus=8": ["did you mean batch.data_parallel_size?"],
    "run grad_accum=2": ["did you mean batch.gradient_accumulation_steps?"],
    "run seq_len=64": ["did you mean data.sequence_length?"],
    "run warmup_steps=9": ["did you mean schedule.warmup_samples?"],
    "run wd=0.1": ["did you mean optimizer.weight_decay?"],
    # Spaces
    "sweep batch.micro_batch_size=[4, 8]": ["8]: settings", "'batch.micro_batch_size=[4, 8]'"],
    "sweep batch.micro_batch_size=4, 8": ["8: settings", "'batch.micro_batch_size=4, 8'"],
    "run data.path=/my data/x.txt": ["data/x.txt: settings", "'data.path=/my data/x.txt'"],
    # Values, and geometries
    "run batch.micro_batch_size=0": ["batch.micro_batch_size", "greater than or equal to 1", "0"],
    "run batch.micro_batch_size=four": ["batch.micro_batch_size", "integer", "'four'"],
    "run engine.precision=fp8": ["engine.precision", "'bfloat16'", "'fp8'"],
    "run model=gpt_micro model.d_model=33": ["n_heads must divide d_model", "33 % 2"],
    f"run {SHAPE} batch.gradient_accumulation_steps=3": ["100 is not 24", "1 x 8 x 3 = 24"],
    "run batch.nodes=2": ["data_parallel_size must be a multiple of nodes", "2 x 8 x 2 = 32"],
    "run batch.micro_batch_size=4,8": ["for one run", "sweep of 2", "batchscape sweep batch."],
    "sweep seed=range(0,0)": ["seed=range(0,0)", "no value"],
    "sweep search=gp 'optimizer.learning_rate=interval(0.1,0.001)'": [
        "interval(0.1,0.001)",
        "the lower one first",
        "interval(1e-4, 1e-2)",
    ],
    "run data=text data.path=/nowhere/x.txt": ["/nowhere/x.txt", "no text there", ".txt"],
    "probe batch.micro_batch_size=8": ["device.memory_limit_gib", "such as 2"],
    # Geometry alone
    "geometry --global 7 --devices 2": ["--global 7 --devices 2", "1, 7 devices"],
    "geometry --global six": ["--global", "'six'"],
    "configs --devices 3 --micro 5 --global 64 --out made": [
        "must be a multiple",
        "64 / 15",
        "nearest that would work",
    ],
    # Folders
    "report nowhere": ["nowhere does not exist", "'runs' folder"],
    "report empty": ["empty holds no runs", "'runs' folder"],
    "report empty empty": ["several sweeps", "--out DIR"],
    "status nowhere": ["nowhere does not exist", "'runs' folder"],
    "sync nowhere": ["nowhere does not exist", "'runs' folder"],
    "view nowhere": ["nowhere does not exist", "'runs' folder"],
    "recommend empty --deadline soon": ["'soon'", "30m, 2h"],
    "recommend model=gpt_micro --deadline 2h": ["--deadline", "give folders in place of settings"],
    # Tables and files of other systems
    "analyze notes.txt": ["notes.txt", ".csv"],
    "analyze steps.csv --group model": ["--group model", "it has: global_batch_size, steps"],
    "check-config not_json.json": ["not_json.json", "no valid JSON", "line 1"],
    "check-config": ["nothing to check", "--"],
    "check-config ds.json --devices 3": ["64", "multiple", "would work"],
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the inputs name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("three seeds are enough\n")
    (tmp_path / "steps.csv").write_text("global_batch_size,steps\n8,100\n")
    (tmp_path / "not_json.json").write_text("{")
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    return tmp_path


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("line", INPUTS)
def test_the_answer_has_the_rule_the_values_and_what_works(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(line)) != 0
    printed = capsys.readouterr()
    told = " ".join((printed.out + printed.err).split())
    assert "Traceback" not in told
    for part in INPUTS[line]:
        assert part in told


def test_there_are_forty() -> None:
    assert len(INPUTS) >= 40
