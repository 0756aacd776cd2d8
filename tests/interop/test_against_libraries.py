"""What is said of the libraries is what they do: their own parsers, launchers and checks."""

import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchscape.geometry import BatchGeometry
from batchscape.interop.check import check_configs
from batchscape.interop.launch import SWITCHES
from batchscape.interop.write import write_configs

pytestmark = [
    pytest.mark.systems,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
HERE = Path(__file__).parent
LAX = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
MAYBE = st.none() | st.sampled_from([1, 2, 3, 4, 8, 18])


@pytest.fixture(scope="module")
def deepspeed_parser(tmp_path_factory):
    """DeepSpeed's own parser; a group of one process, and the world size of a stub."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    config = pytest.importorskip("deepspeed.runtime.config")
    torch = pytest.importorskip("torch")
    store = tmp_path_factory.mktemp("store") / "store"
    deepspeed = importlib.import_module("deepspeed")
    # Or it compiles a kernel for a minute, which only its inference uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1, auto_mpi_discovery=False
    )

    def parse(content, world_size):
        mpu = SimpleNamespace(get_data_parallel_world_size=lambda: world_size)
        return config.DeepSpeedConfig(dict(content), mpu=mpu)

    yield parse
    torch.distributed.destroy_process_group()


@LAX
@given(total=MAYBE, micro=MAYBE, steps=MAYBE, world_size=st.integers(1, 4))
def test_deepspeed_refuses_what_we_refuse(
    deepspeed_parser, tmp_path, total, micro, steps, world_size
):
    numbers = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "zero_optimization": {"stage": 1},
    }
    content = {key: value for key, value in numbers.items() if value is not None}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    checked = check_configs([path], devices=world_size)
    try:
        theirs = deepspeed_parser(content, world_size)
    except AssertionError:
        assert not checked.is_consistent
        return
    assert checked.is_consistent
    ours = checked.running.geometry
    if ours is None:
        # DeepSpeed takes 1 for what one number alone leaves open, and we take nothing.
        assert (total, micro, steps).count(None) == 2
        return
    assert ours.global_batch_size == theirs.train_batch_size
    assert ours.micro_batch_size == theirs.train_micro_batch_size_per_gpu
    assert ours.gradient_accumulation_steps == theirs.gradient_accumulation_steps


AUTO = st.none() | st.just("auto") | st.sampled_from([1, 2, 4, 8, 16, 32])


@settings(LAX, max_examples=50)
@given(
    numbers=st.tuples(AUTO, AUTO, AUTO),
    clipping=st.sampled_from([None, "auto", 1.0, 0.5]),
    bf16=st.sampled_from([None, "auto", True, False]),
    arguments=st.tuples(st.sampled_from([None, 1, 2]), st.sampled_from([None, 1, 4])),
    flag=st.booleans(),
)
def test_the_trainer_refuses_what_we_refuse(tmp_path, numbers, clipping, bf16, arguments, flag):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("deepspeed")
    integration = importlib.import_module("transformers.integrations.deepspeed")

    content = {"zero_optimization": {"stage": 1}}
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    values = {**dict(zip(names, numbers, strict=True)), "gradient_clipping": clipping}
    content.update({key: value for key, value in values.items() if value is not None})
    if bf16 is not None:
        content["bf16"] = {"enabled": bf16}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    options = ["--output_dir", str(tmp_path / "out")]
    for name, value in zip(
        ("per_device_train_batch_size", "gradient_accumulation_steps"), arguments, strict=True
    ):
        options += [] if value is None else [f"--{name}", str(value)]
    options += ["--bf16"] if flag else []
    command = ["torchrun", "--nproc_per_node", "4", "run.py", "--deepspeed", str(path), *options]
    checked = check_configs([], command)
    refused = [finding for finding in checked.findings if "the Trainer refuses" in finding.message]
    total_wrong = [finding for finding in checked.findings if finding.rule == "global-batch"]

    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    (args,) = parser.parse_args_into_dataclasses([*options, "--use_cpu"])
    four_ranks = SimpleNamespace(**{**vars(args), "world_size": 4})
    theirs = integration.HfTrainerDeepSpeedConfig(content)
    theirs.trainer_config_process(four_ranks)
    geometry = checked.running.geometry
    if None in arguments:
        # What is refused is; a default of the Trainer is none of our numbers.
        assert geometry is None
        assert theirs.mismatches or not refused
        return
    assert bool(theirs.mismatches) == bool(refused or total_wrong), theirs.mismatches
    assert geometry.micro_batch_size == args.per_device_train_batch_size
    assert geometry.gradient_accumulation_steps == args.gradient_accumulation_steps


def test_nobody_fills_in_a_batch_that_the_json_does_not_have(deepspeed_parser, tmp_path):
    """The Trainer replaces "auto", and adds no key; DeepSpeed then stops."""
    transformers = pytest.importorskip("transformers")
    integration = importlib.import_module("transformers.integrations.deepspeed")
    path = HERE / "faulty" / "no_batch" / "ds_without_batch.json"
    batch = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2"]
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), *batch])
    theirs = integration.HfTrainerDeepSpeedConfig(json.loads(path.read_text()))
    theirs.trainer_config_process(args)
    with pytest.raises(AssertionError, match="train_micro_batch_size_per_gpu needs to be provided"):
        deepspeed_parser(theirs.config, 1)
    command = ["torchrun", "--nproc_per_node", "2", "run.py", "--deepspeed", str(path), *batch]
    (finding,) = check_configs([], command).findings
    assert finding.rule == "no-batch"
    assert finding.fix == 'add "train_micro_batch_size_per_gpu": 4 to the DeepSpeed JSON'


def test_our_flags_are_those_of_the_launchers():
    accelerate = pytest.importorskip("accelerate.commands.launch").launch_command_parser()
    torchrun = importlib.import_module("torch.distributed.run").get_args_parser()
    for parser, launcher in ((accelerate, "accelerate"), (torchrun, "torchrun")):
        ours = set(SWITCHES[launcher].split())
        theirs = {
            option.lstrip("-").replace("-", "_")
            for action in parser._actions
            if action.nargs == 0
            for option in action.option_strings
        }
        assert theirs <= ours
        # Of the older torch.distributed.launch.
        assert ours - theirs <= {"use_env"}


KINDS = [None, "NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED", "FSDP"]
WAYS = ["", "--cpu", "--multi_gpu", "--use_deepspeed"]


@pytest.mark.parametrize(("kind", "switch"), list(itertools.product(KINDS, WAYS)))
def test_accelerate_starts_as_many_as_we_say(kind, switch, tmp_path, monkeypatch):
    launch = pytest.importorskip("accelerate.commands.launch")
    if kind is None and not switch:
        pytest.skip("depends on the devices of the machine, which we say")
    if switch == "--use_deepspeed" or (kind == "DEEPSPEED" and not switch):
        pytest.importorskip("deepspeed")
    chosen = []
    for name in ("simple_launcher", "multi_gpu_launcher", "deepspeed_launcher"):
        monkeypatch.setattr(launch, name, lambda _, name=name: chosen.append(name))
    monkeypatch.setattr(launch, "default_config_file", str(tmp_path / "none"))
    words = ["--num_processes", "4", *([switch] if switch else [])]
    if kind is not None:
        path = tmp_path / "accelerate.yaml"
        path.write_text(yaml.safe_dump({"distributed_type": kind, "num_processes": 4}))
        words += ["--config_file", str(path)]
    words += ["train.py", "--train_batch_size", "2"]
    launch.launch_command(launch.launch_command_parser().parse_args(words))
    checked = check_configs([], ["accelerate", "launch", *words])
    assert (checked.running.devices.value == 1) == (chosen == ["simple_launcher"]), chosen
    assert checked.is_consistent == (chosen != ["simple_launcher"])


def test_one_process_really_runs(tmp_path):
    """The command of the faulty set, with a script that says its world size."""
    pytest.importorskip("accelerate")
    script = tmp_path / "train.py"
    script.write_text("from accelerate import PartialState\nprint(PartialState().num_processes)\n")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    done = subprocess.run(
        [*command, str(script)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "HF_HOME": str(tmp_path)},
    )
    assert done.stdout.split()[-1] == "1"
    checked = check_configs([], [*command, str(script), "--train_batch_size", "2"])
    assert [finding.rule for finding in checked.findings] == ["one-process"]


@pytest.mark.parametrize("launched", [None, 4])
def test_the_launcher_goes_before_the_script(launched, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    if launched is not None:
        # What `accelerate launch` sets for the script from its file or arguments.
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", str(launched))
    made = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    assert made.gradient_accumulation_steps == (launched or 2)
    command = "accelerate launch --use_deepspeed --num_processes 2"
    command += f" --gradient_accumulation_steps {launched}" if launched else ""
    command += " train.py --train_batch_size 1 --gradient_accumulation_steps 2"
    running = check_configs([], command.split()).running
    assert running.accumulation.value == (launched or 2)


def test_accelerate_refuses_fields_of_the_json(monkeypatch):
    pytest.importorskip("deepspeed")
    plugin = pytest.importorskip("accelerate.utils").DeepSpeedPlugin
    folder = HERE / "faulty" / "fields_of_the_json"
    content = json.loads((folder / "ds.json").read_text())
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "deepspeed_config_file")
    plugin(hf_ds_config=content)
    fields = "deepspeed_config_file,gradient_accumulation_steps,mixed_precision"
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", fields)
    with pytest.raises(ValueError, match="will be ignored"):
        plugin(hf_ds_config=content)


def test_accelerate_takes_one_where_the_json_is_silent():
    pytest.importorskip("deepspeed")
    plugin = pytest.importorskip("accelerate.utils").DeepSpeedPlugin
    content = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    made = plugin(hf_ds_config=content, gradient_accumulation_steps=4)
    assert made.deepspeed_config["gradient_accumulation_steps"] == 1


@pytest.mark.parametrize("parts", [(1, 1, 2, 3), (2, 4, 1, 8)])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_libraries_read_what_we_write(
    parts, precision, tmp_path, deepspeed_parser, monkeypatch
):
    transformers = pytest.importorskip("transformers")
    accelerate = pytest.importorskip("accelerate.commands.config.config_args")
    torchrun = importlib.import_module("torch.distributed.run")
    geometry = BatchGeometry(*parts)
    write_configs(geometry, tmp_path, precision=precision, zero_stage=1)

    content = json.loads((tmp_path / "deepspeed.json").read_text())
    theirs = deepspeed_parser(content, geometry.data_parallel_size)
    assert theirs.train_batch_size == geometry.global_batch_size
    assert theirs.gradient_clipping == 1.0

    for name in ("accelerate.yaml", "accelerate_deepspeed.yaml"):
        read = accelerate.load_config_from_file(str(tmp_path / name))
        assert (read.num_processes, read.num_machines) == (geometry.data_parallel_size, parts[0])

    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    arguments = yaml.safe_load((tmp_path / "training_arguments.yaml").read_text())
    (args,) = parser.parse_dict({**arguments, "output_dir": str(tmp_path / "o"), "use_cpu": True})
    assert args.per_device_train_batch_size == geometry.micro_batch_size
    assert args.gradient_accumulation_steps == geometry.gradient_accumulation_steps
    script = (tmp_path / "torchrun.sh").read_text().partition("exec torchrun ")[2]
    launcher, _, words = script.partition('"$@"')
    words = words.split()
    (args,) = parser.parse_args_into_dataclasses([*words, "--output_dir", "o", "--use_cpu"])
    assert args.gradient_accumulation_steps == geometry.gradient_accumulation_steps
    assert args.bf16 == (precision == "bfloat16")

    monkeypatch.delenv("PET_NPROC_PER_NODE", raising=False)
    launched = torchrun.parse_args([*launcher.split(), "train.py", *words])
    assert launched.training_script == "train.py"
    # torchrun's own default is 1:1, at least and at most.
    assert (
        int(launched.nnodes.split(":")[0]) * int(launched.nproc_per_node)
        == geometry.data_parallel_size
    )
