"""Files written from one geometry agree with each other and say that geometry."""

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchscape.cli import main
from batchscape.geometry import BatchGeometry
from batchscape.interop.check import check_configs
from batchscape.interop.write import write_configs

COUNTS = st.integers(1, 64)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    parts=st.tuples(st.integers(1, 4), COUNTS, COUNTS, COUNTS),
    precision=st.sampled_from(["float32", "bfloat16"]),
    clip=st.none() | st.floats(0.1, 10),
    zero_stage=st.integers(0, 3),
)
def test_every_file_says_the_geometry(tmp_path, parts, precision, clip, zero_stage):
    geometry = BatchGeometry(*parts)
    nodes, per_node, micro, steps = parts
    paths = write_configs(
        geometry,
        tmp_path,
        precision=precision,
        gradient_clip_norm=clip,
        zero_stage=zero_stage,
    )
    texts = {path.name: path.read_text() for path in paths}
    total = nodes * per_node * micro * steps
    line = f"# global batch {total} = devices {nodes * per_node} x micro-batch {micro} x "
    for name, text in texts.items():
        assert name.endswith(".json") or line + f"accumulation {steps}\n" in text

    content = json.loads(texts["deepspeed.json"])
    assert content["train_batch_size"] == total
    assert content["zero_optimization"]["stage"] == zero_stage
    # One kind of arithmetic: the switch that the Trainer and accelerate know, and no autocast.
    autocast = content.get("torch_autocast", {}).get("enabled", False)
    assert (content.get("bf16"), autocast) == (
        ({"enabled": True}, False) if precision == "bfloat16" else (None, False)
    )
    accelerate = yaml.safe_load(texts["accelerate.yaml"])
    assert accelerate["num_processes"] == nodes * per_node
    assert accelerate["mixed_precision"] == {"float32": "no", "bfloat16": "bf16"}[precision]

    # Together they pass the check, each with the system that reads it.
    trainer = texts["torchrun.sh"].partition("exec ")[2].replace('"$@"', "t.py")
    alone = trainer.partition("t.py")[0] + "t.py"
    launch = (
        f"accelerate launch --config_file {tmp_path}/accelerate_deepspeed.yaml t.py "
        f"--train_batch_size {micro} --gradient_accumulation_steps {steps}"
    )
    for names, command in (
        (["deepspeed.json"], trainer),
        (["deepspeed.json", "training_arguments.yaml"], alone),
        (["litgpt.yaml"], ""),
        ([], launch),
    ):
        files = [tmp_path / name for name in names]
        checked = check_configs(files, command.split())
        assert checked.findings == ()
        running = checked.running.geometry
        assert (running.micro_batch_size, running.gradient_accumulation_steps) == (micro, steps)
        assert running.global_batch_size == total


def test_the_command_writes_and_says_what(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["configs", "--devices", "8", "--micro", "2", "--global", "64", "--out", "c"]) == 0
    output = capsys.readouterr().out
    assert "devices x micro-batch x accumulation = 8 x 2 x 4 = 64" in output
    assert {str(path) for path in Path("c").iterdir()} == set(re.findall(r"c/\S+", output))
    assert main(["check-config", "c/deepspeed.json"]) == 0
    launch = main(
        ["check-config", "c/deepspeed.json", "--", "torchrun", "--nproc_per_node", "8", "t"]
    )
    assert launch == 0
    assert main(["check-config", "c/torchrun.sh"]) == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--devices 8 --micro 3 --global 64 --out c", "nearest that would work"),
        ("--devices 8 --out c", "too few values"),
        ("--devices 0 --micro 1 --accumulation 1 --out c", "int from 1"),
        ("--devices 1 --micro 1 --accumulation 1 --clip -1 --out c", "must be above 0"),
        ("--devices 1 --micro 1 --accumulation 1 --clip nan --out c", "must be above 0"),
        ("--devices 1 --micro 1 --accumulation 1 --out file", "cannot be written to"),
    ],
)
def test_bad_settings_are_refused(argv, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert main(["configs", *argv.split()]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert not Path("c").exists()


def test_the_deepspeed_json_is_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_configs(BatchGeometry(1, 2, 2, 2), Path("made"))
    content = yaml.safe_load((tmp_path / "made" / "accelerate_deepspeed.yaml").read_text())
    json_file = Path(content["deepspeed_config"]["deepspeed_config_file"])
    assert json_file == tmp_path / "made" / "deepspeed.json"
